"""A plain training run loads, and the GPU tests need, only the modules that they use."""

import os
import shutil
import subprocess
import sys

import pytest
from train_runs import RECALL, REPO, python_path, records

# Modules that a plain run does not need: they serve other flags or other tasks.
NOT_LOADED = (
    "agents.export",
    "agents.pretrain",
    "envs.trading.task",
    "envs.memory_tasks",
    "rl_dist.speedup",
    "rl_dist.supervised",
    "matplotlib",
    "pandas",
    "talib",
    "torch._dynamo",
)
# packages of the test extra that are not in the extra gpu-test
TEST_PACKAGES = [
    "filelock", "jsonschema", "kubeflow_trainer_api", "onnx", "onnxruntime", "onnxscript", "optuna",
    "sb3_contrib", "xdist", "yaml",
]  # fmt: skip
AT_THE_END = "agents.evaluate.command"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train on two ranks in a folder that holds the environment; return the folder."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copy(REPO / "examples/own_environment.py", folder)
    flags = [*RECALL, "--env", "own_environment:Cue-v0", "--num_gpus", "2", "--total_steps", "128"]
    flags += ["--stop_at", "env/right_answers", "0"]
    command = [REPO / "train_distributed.py", *flags, "--eval_episodes", "2", "--run_dir", "run"]
    path = python_path(REPO, REPO / "tests/noting_imports")
    variables = {"PYTHONPATH": path, "NOTED_IMPORTS": str(folder)}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=folder,
        env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_an_environment_in_the_current_directory_is_found_by_all_ranks(trained):
    # The flag --stop_at ended the run after one iteration.
    (line,) = records(trained / "run")
    assert len(line["ranks"]) == 2
    # Both metrics are means over all ranks. They are equal: an episode has exactly one answer.
    assert line["env/right_answers"] == pytest.approx(line["episode/return"])


def test_the_gpu_tests_need_no_test_packages_except_pytest_and_pytest_timeout(tmp_path):
    code = f"import sys\nsys.modules.update(dict.fromkeys({TEST_PACKAGES}))\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    flags = f"-p pytest_timeout --collect-only --quiet --junitxml={tmp_path}/report.xml"
    variables = {"PYTHONPATH": python_path(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        ["make", "test-gpu", f"VENV={sys.prefix}", f"ARGS={flags}"],
        capture_output=True, text=True, cwd=REPO,
        env=os.environ | variables | {"PIP_NO_INDEX": "1"},
    )  # fmt: skip
    assert "test_training_on_a_gpu_equals" in done.stdout, done


def test_a_plain_training_loads_no_module_that_it_does_not_need(trained):
    # each process wrote a list of its imports
    lists = [path.read_text().split() for path in trained.glob("[0-9]*")]
    assert len(lists) == 4
    for names in lists:
        until = names.index(AT_THE_END) if AT_THE_END in names else len(names)
        assert [name for name in names[:until] if name.startswith(NOT_LOADED)] == []
