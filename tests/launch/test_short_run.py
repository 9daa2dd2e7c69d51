"""Short runs side by side: what they measure, what they refuse, and that none is left behind."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from train_runs import RECALL, REPO, lives, wait_until

from rl_dist.errors import UserError
from rl_dist.launch import short_run
from rl_dist.launch.short_run import ShortRunError, SideBySide, measure_short_runs, without

TINY = RECALL[:-2]  # without --device


@pytest.fixture(scope="module")
def measured():
    return measure_short_runs(
        [*TINY, "--num_episodes", "7"], copies=2, threads=1, iterations=4, warm_up=1
    )


def test_every_copy_gives_consecutive_records_after_its_warm_up(measured):
    assert len(measured.records) == 2
    for records in measured.records:
        numbers = [record["iteration"] for record in records]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert numbers[0] > 2 and len(numbers) >= 4
        assert all(record["time/collect_s"] > 0 and record["time/sps"] > 0 for record in records)


def test_copies_have_their_flags_and_other_episodes(measured):
    config = measured.config
    assert config["task"]["env"] == "Recall-v0" and config["train"]["num_envs"] == 4
    one, other = ({r["iteration"]: r["loss/value"] for r in each} for each in measured.records)
    both = one.keys() & other.keys()
    assert not both or any(one[number] != other[number] for number in both)


def test_the_memory_of_one_copy_and_the_size_of_its_gradient_are_known(measured):
    assert 20 * 2**20 < measured.copy_bytes < psutil.virtual_memory().total
    assert 1000 < measured.gradient_bytes < 10**6 and measured.gradient_bytes % 4 == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        (["--hidden_size", "0"], UserError, "hidden_size must be 1"),
        (["--frobnicate=3"], UserError, "frobnicate"),
    ],
)
def test_bad_flags_are_refused_in_the_scripts_words(flags, error, words):
    with pytest.raises(error, match=words):
        measure_short_runs([*TINY, *flags], copies=1, threads=1, iterations=1)


def test_short_runs_do_not_resume():
    with pytest.raises(UserError, match="--resume"):
        measure_short_runs([*TINY, "--resume", "runs/x"], copies=1, threads=1, iterations=1)


def test_a_run_without_progress_is_given_up_and_two_iterations_are_enough_late():
    with SideBySide(TINY, copies=1, threads=1) as together:
        with pytest.raises(ShortRunError, match="took too long"):
            together.measure(10**6, timeout_s=0.0)
        found = together.measure(10**6, enough_s=0.0)
        started_s = time.monotonic()
        together.measure(1, least_s=1.0)
    assert len(found[0]) >= 2 and time.monotonic() - started_s >= 1.0


@pytest.mark.parametrize("flag", ["--num_episodes 5", "--num-episodes=5", "--no-num_episodes"])
def test_flags_are_left_out_with_their_values(flag):
    kept = ["--a", "1", "--b", "-2"]
    assert without([*kept[:2], *flag.split(), *kept[2:]], ["num_episodes"]) == kept


def test_copies_have_gpus_of_their_own_out_of_those_that_are_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [short_run._gpu(number) for number in range(2)] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa,GPU-bb")
    assert [short_run._gpu(number) for number in range(2)] == ["GPU-aa", "GPU-bb"]


@pytest.mark.slow
def test_copies_die_with_their_caller(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(REPO), "TMPDIR": str(tmp_path)}
    call = f"short_run.measure_short_runs({TINY!r}, 2, 1, 10**6)"
    words = [sys.executable, "-c", f"from rl_dist.launch import short_run; {call}"]
    caller = subprocess.Popen(words, env=environment)
    try:
        wait_until(lambda: len(list(tmp_path.glob("*/copy_*/metrics.jsonl"))) == 2)
        children = psutil.Process(caller.pid).children()
    finally:
        caller.kill()
        caller.wait()
    assert len(children) == 2
    wait_until(lambda: not any(lives(child.pid) for child in children))
