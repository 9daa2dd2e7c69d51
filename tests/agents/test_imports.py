"""A plain training loads little: the rest is imported when it is asked for."""

import os
import shutil
import subprocess
import sys

import pytest
from train_runs import RECALL, REPO, records

MOST_MODULES = 70
OURS = ("agents", "envs", "rl_dist")
# asked for by flags that a plain training lacks, or by another task
ADVISERS = (
    "agents.pretrain",
    "agents.run.interactive",
    "agents.run.auto",
    "agents.run.choice",
    "envs.trading.",
    "envs.memory_tasks",
    "rl_dist.launch.bench",
    "rl_dist.launch.fallback",
    "rl_dist.launch.child",
    "rl_dist.speedup",
    "rl_dist.supervised",
    "rl_dist.strategies.measure",
    "pandas",
    "talib",
    "torch._dynamo",
)
OF_OTHERS = "rl_dist.checkpoint.trust"  # for an environment that is not of ours
AT_THE_END = "agents.evaluate.final"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder where two ranks have trained on an environment that lies in it."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copy(REPO / "examples/own_environment.py", folder)
    flags = [*RECALL, "--env", "own_environment:Cue-v0", "--num_gpus", "2", "--total_steps", "128"]
    command = [REPO / "train_distributed.py", *flags, "--eval_episodes", "2", "--run_dir", "run"]
    path = [str(REPO), str(REPO / "tests/noting_imports")]
    variables = {"PYTHONPATH": os.pathsep.join(path), "NOTED_IMPORTS": str(folder)}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=folder,
        env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def imported(trained):
    """Names of modules in the order of their import, by process of the training."""
    lists = [each.read_text().split() for each in sorted(trained.glob("[0-9]*"))]
    supervisor = min(lists, key=len)  # the others are forked from it
    return [list(dict.fromkeys(supervisor + each)) for each in lists if each is not supervisor]


def test_an_environment_in_the_current_directory_is_found_by_all_ranks(trained):
    for line in records(trained / "run"):
        assert len(line["ranks"]) == 2
        # of all ranks; an answer of this task is an episode
        assert line["env/right_answers"] == pytest.approx(line["episode/return"])


def test_a_plain_training_loads_at_most_70_modules_of_ours(imported):
    for names in imported:
        until = names.index(AT_THE_END) if AT_THE_END in names else len(names)
        ours = [name for name in names[:until] if name.split(".")[0] in OURS and name != OF_OTHERS]
        assert len(ours) <= MOST_MODULES, f"{len(ours)} modules: {' '.join(sorted(ours))}"


def test_no_adviser_and_no_other_task_is_loaded(imported):
    for names in imported:
        until = names.index(AT_THE_END) if AT_THE_END in names else len(names)
        assert not [name for name in names[:until] if name.startswith((*ADVISERS, "matplotlib"))]
