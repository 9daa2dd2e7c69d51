"""Short runs and timed reductions in child processes: results, errors, cleanup."""

import psutil
import pytest
from train_runs import RECALL

from rl_dist.errors import UserError
from rl_dist.launch import child
from rl_dist.launch.bench import time_reductions
from rl_dist.launch.child import ChildTimeoutError, measure_short_runs

TINY = [*RECALL, "--threads=1"]


@pytest.fixture(autouse=True)
def nobody_left():
    before = psutil.Process().children()
    yield
    assert psutil.Process().children() == before


@pytest.mark.parametrize("enough_s, fewest", [(100.0, 3), (0.0, 2)])
def test_copies_train_in_parallel_with_their_flags_and_different_episodes(
    enough_s, fewest, monkeypatch
):
    """Each copy measures three iterations, or two if iterations take long."""
    monkeypatch.setattr(child, "ENOUGH_S", enough_s)
    monkeypatch.setattr(child, "ROUNDS_S", 0.0 if enough_s else 10**6)
    runs = measure_short_runs([[*TINY, "--num_episodes=7"], TINY])
    for records in runs.records:
        numbers = [record["iteration"] for record in records]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert numbers[0] > (2 if enough_s else 1) and len(numbers) >= fewest
    assert runs.config["task"]["env"] == "Recall-v0" and runs.config["train"]["num_envs"] == 4
    first, second = ({r["iteration"]: r["loss/value"] for r in copy} for copy in runs.records)
    both = first.keys() & second.keys()
    assert not both or any(first[number] != second[number] for number in both)
    assert 1000 < runs.gradient_bytes < 10**6 and runs.gradient_bytes % 4 == 0


def test_a_slow_start_shortens_neither_the_warm_up_nor_the_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(child, "ENOUGH_S", 4.0)
    monkeypatch.setattr(child, "ROUNDS_S", 0.0)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(4)\n")
    monkeypatch.chdir(tmp_path)  # the copies import modules from here
    (records,) = measure_short_runs([[*TINY, "--env=slow:Recall-v0"]]).records
    assert records[0]["iteration"] > child.WARM_UP and len(records) >= child.ROUNDS


@pytest.mark.parametrize(
    "flags, timeout_s, error, says",
    [
        (["--resume=runs/x"], 600.0, UserError, "--resume"),
        ([], 0.0, ChildTimeoutError, "took too long"),
        (["--hidden_size=0"], 600.0, UserError, "hidden_size"),
    ],
)
def test_a_run_that_refuses_its_flags_or_makes_no_progress_raises_an_error(
    flags, timeout_s, error, says
):
    with pytest.raises(error, match=says):
        measure_short_runs([[*TINY, *flags]], timeout_s=timeout_s)


def test_ranks_that_do_not_end_in_time_are_killed(monkeypatch):
    monkeypatch.setattr("rl_dist.launch.bench.TIMEOUT_S", 2)
    with pytest.raises(ChildTimeoutError, match="did not end within 2 s"):
        time_reductions(2, [4])
