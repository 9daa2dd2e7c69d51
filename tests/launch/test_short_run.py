"""Short runs and reductions in child processes: results, refusals, cleanup."""

import psutil
import pytest
from train_runs import RECALL

from rl_dist.errors import UserError
from rl_dist.launch import child
from rl_dist.launch.bench import time_reductions
from rl_dist.launch.child import ChildError, ChildTimeoutError, measure_short_runs, without

TINY = RECALL[:-2]  # without --device cpu


@pytest.fixture(autouse=True)
def nobody_left():
    before = psutil.Process().children()
    yield
    assert psutil.Process().children() == before


def test_copies_train_side_by_side_with_their_flags_and_other_episodes():
    runs = measure_short_runs([*TINY, "--num_episodes", "7"], copies=2, threads=1, iterations=4)
    for records in runs.records:
        numbers = [record["iteration"] for record in records]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert numbers[0] > 2 and len(numbers) >= 4
    assert runs.config["task"]["env"] == "Recall-v0" and runs.config["train"]["num_envs"] == 4
    first, second = ({r["iteration"]: r["loss/value"] for r in copy} for copy in runs.records)
    both = first.keys() & second.keys()
    assert not both or any(first[number] != second[number] for number in both)
    assert 1000 < runs.gradient_bytes < 10**6 and runs.gradient_bytes % 4 == 0


@pytest.mark.parametrize(
    ("flags", "options", "error", "says"),
    [
        (["--resume", "runs/x"], {}, UserError, "--resume"),
        ([], {"timeout_s": 0.0}, ChildTimeoutError, "took too long"),
        (["--hidden_size", "0"], {}, UserError, "hidden_size"),
    ],
)
def test_a_run_that_refuses_its_flags_or_makes_no_progress_is_given_up(flags, options, error, says):
    with pytest.raises(error, match=says):
        measure_short_runs([*TINY, *flags], threads=1, **options)


def test_two_iterations_are_enough_late():
    assert len(measure_short_runs(TINY, iterations=10**6, enough_s=0.0).records[0]) > 1


@pytest.mark.parametrize("flag", ["--num_episodes 5", "--num-episodes=5", "--no-num_episodes"])
def test_flags_are_left_out_with_their_values(flag):
    kept = ["--a", "1", "--b", "-2"]
    assert without([*kept[:2], *flag.split(), *kept[2:]], ["num_episodes"]) == kept


@pytest.mark.parametrize(("visible", "gpus"), [("", ["0", "1"]), ("GPU-a,GPU-b", None)])
def test_each_copy_has_one_of_the_visible_gpus(visible, gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    taken = []

    class Failing(child.Child):
        def __init__(self, arguments, folder, variables):
            taken.append(variables["CUDA_VISIBLE_DEVICES"])
            super().__init__(["-c", "1 / 0"], folder)

    monkeypatch.setattr(child, "Child", Failing)
    with pytest.raises(ChildError, match="ZeroDivisionError"):
        measure_short_runs(TINY, copies=2, device_type="cuda")
    assert taken == (gpus or visible.split(","))


@pytest.mark.slow  # tests/setup_check/ checks it by default
def test_every_size_is_timed_on_two_ranks():
    seconds = time_reductions(2, [4, 1024, 2**20])
    assert list(seconds) == [4, 1024, 2**20] and all(1e-6 < s < 5.0 for s in seconds.values())


@pytest.mark.slow
def test_a_failure_of_the_backend_is_reported_with_its_message(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    with pytest.raises(ChildError, match="code 1: .*RuntimeError.*no_such_interface"):
        time_reductions(2, [4])


def test_ranks_that_do_not_end_in_time_are_killed():
    with pytest.raises(ChildTimeoutError, match="did not end within 2 s"):
        time_reductions(2, [4], timeout_s=2)
