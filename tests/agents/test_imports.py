"""A plain training loads little: the rest is imported when it is asked for."""

import os
import subprocess
import sys

import pytest
from train_runs import RECALL, REPO

MOST_MODULES = 70
OURS = ("agents", "envs", "rl_dist")
# asked for by flags that a plain training lacks, or by another task
ADVISERS = (
    "agents.dry_run",
    "agents.pretrain",
    "agents.run.interactive",
    "agents.run.memory",
    "agents.run.resumed",
    "agents.run.saved",
    "agents.pipeline",
    "envs.trading.",
    "envs.memory_tasks",
    "rl_dist.launch.all_reduce_bench",
    "rl_dist.launch.fallback",
    "rl_dist.launch.short_run",
    "rl_dist.speedup",
    "rl_dist.supervised",
    "pandas",
    "talib",
    "torch._dynamo",
)
AT_THE_END = "agents.evaluate.final"


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Names of modules in the order of their import, by process of a training."""
    folder = tmp_path_factory.mktemp("imports")
    path = [str(REPO), str(REPO / "tests/noting_imports")]
    variables = {"PYTHONPATH": os.pathsep.join(path), "NOTED_IMPORTS": str(folder)}
    flags = [*RECALL, "--env", "Acrobot-v1", "--num_gpus", "2", "--total_steps", "128"]
    flags += ["--eval_episodes", "2"]
    command = [sys.executable, REPO / "train_distributed.py", *flags, "--run_dir", folder / "run"]
    environment = os.environ | variables | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    lists = [each.read_text().split() for each in sorted(folder.glob("[0-9]*"))]
    supervisor = min(lists, key=len)  # the others are forked from it
    return [list(dict.fromkeys(supervisor + each)) for each in lists if each is not supervisor]


def test_a_plain_training_loads_at_most_70_modules_of_ours(imported):
    for names in imported:
        until = names.index(AT_THE_END) if AT_THE_END in names else len(names)
        ours = [name for name in names[:until] if name.split(".")[0] in OURS]
        assert len(ours) <= MOST_MODULES, f"{len(ours)} modules: {' '.join(sorted(ours))}"


def test_no_adviser_and_no_other_task_is_loaded(imported):
    for names in imported:
        until = names.index(AT_THE_END) if AT_THE_END in names else len(names)
        assert not [name for name in names[:until] if name.startswith((*ADVISERS, "matplotlib"))]
