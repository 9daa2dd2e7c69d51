"""A user's project may have folders with the names of our packages; one command names ours."""

import tomllib

import pytest
from train_runs import BRIEF, MAIN, RECALL, REPO, only_error, run_in

from agents import __version__
from clstm_ppo import COMMANDS

PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
ENV = "import gymnasium\nfrom examples.own_environment import CueEnv\n"
ENV += "gymnasium.register('MyCue-v0', CueEnv, max_episode_steps=20)\n"
HOOKS = "from pathlib import Path\ndef watch(moment):\n    Path(moment.kind).touch()\n"
NOTE_FORK = (
    "import os, sys; os.fork = lambda: os._exit(7 + ('torch' in sys.modules)); "
    "import clstm_ppo; sys.argv = ['clstm-ppo', 'train']; clstm_ppo.main()"
)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Return a project with folders like ours; the colons in its name are those of a time."""
    folder = tmp_path_factory.mktemp("project") / "12:30:05"
    cores = "from own_cores import *\nfrom own_encoders import Signs"
    modules = {"envs/my_env": ENV, "agents/my_core": cores, "rl_dist/hooks": HOOKS}
    for module, text in modules.items():
        path = folder / f"{module}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (folder / "envs/__init__.py").touch()
    return folder


@pytest.fixture(scope="module")
def trained(project):
    """Train on two ranks with workers, with modules from all three folders."""
    flags = ["--env=envs.my_env:MyCue-v0", "--env_workers=1", "--num_gpus=2"]
    flags += ["--core=agents.my_core:Decay", "--encoder=agents.my_core:Signs"]
    flags += ["--callback=rl_dist.hooks:watch"]
    run_in(project, MAIN, "train", *RECALL, *BRIEF, "--policy=own", *flags, "--run_dir=run")
    return project / "run"


def test_ranks_and_workers_import_the_users_modules(trained):
    assert (trained.parent / "iteration").exists()


@pytest.mark.parametrize("command", [["-m", "agents.evaluate"], [MAIN, "evaluate"]])
def test_evaluation_imports_the_users_modules(command, trained):
    assert "mean return" in run_in(trained.parent, *command, "run")[0]


def test_a_policy_with_the_users_core_and_encoder_is_loaded_in_python(trained):
    code = "from agents import load_policy; print(load_policy('run').action_space)"
    assert "Discrete" in run_in(trained.parent, "-c", code)[0]


def test_an_error_names_the_module_of_ours_that_hides_the_users(project):
    (project / "envs/task.py").write_text(ENV)
    errors = run_in(project, MAIN, "train", "--env=envs.task:Walk-v0", code=2)[1]
    assert str(REPO / "envs/task.py") in only_error(errors)


@pytest.mark.parametrize("name", ["envs", "rl_dist"])
def test_an_error_names_the_users_package_that_hides_ours(name, tmp_path):
    place = tmp_path / name / "__init__.py"
    place.parent.mkdir()
    place.touch()
    errors = run_in(tmp_path, "-c", f"import {name}; import agents", code=1)[1]
    assert str(place) in errors.splitlines()[-1]


def test_processes_that_tests_start_find_packages_on_the_python_path(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run_in(REPO, "-c", "import only_here, train_runs")


# ---- the command clstm-ppo


def test_the_command_starts_the_supervisor_before_torch(tmp_path):
    run_in(tmp_path, "-c", NOTE_FORK, code=7)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_the_command_as_the_user_has_started_it(name, tmp_path):
    assert run_in(tmp_path, MAIN, name, "--help")[0].startswith(f"usage: clstm-ppo {name} ")


def test_the_version_is_printed(tmp_path):
    assert run_in(tmp_path, MAIN, "--version")[0].split()[-1] == __version__


def test_a_wheel_has_all_modules():
    modules = {path.stem for path in REPO.glob("*.py")}
    assert {*PYPROJECT["tool"]["setuptools"]["py-modules"]} == modules


def test_a_wheel_has_one_command():
    assert PYPROJECT["project"]["scripts"] == {"clstm-ppo": "clstm_ppo:main"}
