"""Short runs side by side: what they measure, what they refuse, and that none is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rl_dist.errors import UserError
from rl_dist.launch import short_run as trial_module
from rl_dist.launch.short_run import TrialFailed, run_trial, without

REPO = Path(__file__).parents[2]
TINY = ["--env", "Recall-v0", "--num_envs", "4", "--num_steps", "16", "--bptt_steps", "8", "--batch_size", "4"]
TINY += ["--hidden_size", "8"]


@pytest.fixture(scope="module")
def trial():
    return run_trial([*TINY, "--num_episodes", "7"], copies=2, threads=1, iterations=4, warm_up=1)


def test_every_copy_gives_consecutive_records_after_its_warm_up(trial):
    assert len(trial.records) == 2
    assert max(map(len, trial.records)) >= 4
    for records in trial.records:
        numbers = [record["iteration"] for record in records]
        assert numbers and numbers[0] > 2
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert all(record["time/collect_s"] > 0 and record["time/sps"] > 0 for record in records)


def test_copies_have_their_flags_and_other_episodes(trial):
    assert trial.config["task"]["env"] == "Recall-v0" and trial.config["train"]["num_envs"] == 4
    one, other = ({r["iteration"]: r["loss/value"] for r in records} for records in trial.records)
    both = one.keys() & other.keys()
    assert not both or any(one[number] != other[number] for number in both)


def test_the_memory_of_one_copy_is_measured(trial):
    assert 20 * 2**20 < trial.copy_bytes < psutil.virtual_memory().total


@pytest.mark.slow
def test_bad_flags_are_told_in_the_scripts_words():
    with pytest.raises(UserError, match="hidden_size must be 1"):
        run_trial([*TINY, "--hidden_size", "0"], copies=1, threads=1, iterations=1)


def test_short_runs_do_not_resume():
    with pytest.raises(UserError, match="short runs begin anew"):
        run_trial([*TINY, "--resume", "runs/x"], copies=1, threads=1, iterations=1)


def test_a_run_without_progress_is_given_up():
    with pytest.raises(TrialFailed, match="took too long"):
        run_trial(TINY, copies=1, threads=1, iterations=10**6, timeout_s=1.0)


@pytest.mark.parametrize("spelling", [["--num_episodes", "5"], ["--num-episodes=5"], ["--no-num_episodes"]])
def test_flags_are_left_out_with_their_values(spelling):
    assert without(["--a", "1", *spelling, "--b", "-2"], ["num_episodes"]) == ["--a", "1", "--b", "-2"]


def test_copies_have_gpus_of_their_own_out_of_those_that_are_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [trial_module._gpu(number) for number in range(2)] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb")
    assert [trial_module._gpu(number) for number in range(2)] == ["GPU-aa", "GPU-bb"]


TRAINING = f"from rl_dist.launch.short_run import run_trial; run_trial({TINY!r}, 2, 1, 10**6)"
HALTED = f"""
import time
from rl_dist.launch.short_run import SideBySide
with SideBySide({TINY!r}, 2, 1) as copies:
    copies.measure(1)
    copies.halt()
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [TRAINING, HALTED], ids=["training", "halted"])
def test_copies_die_with_their_caller(code, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(REPO), "TMPDIR": str(tmp_path)}
    caller = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        children = []
        deadline_s = time.monotonic() + 120
        while len(children) < 2 or not ready(children, tmp_path, halted=code is HALTED):
            children = psutil.Process(caller.pid).children()
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        caller.send_signal(signal.SIGKILL)
        gone, alive = psutil.wait_procs(children, timeout=60)
        assert len(gone) == 2 and not alive
    finally:
        caller.kill()
        caller.wait()


def ready(children, folder, halted):
    if halted:
        return all(child.status() == psutil.STATUS_STOPPED for child in children)
    return len(list(folder.glob("*/copy_*/metrics.jsonl"))) == 2
