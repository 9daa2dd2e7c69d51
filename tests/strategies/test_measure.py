"""Trial steps find the fastest setting that fits in memory; ranks agree on it."""

import weakref
from pathlib import Path

import pytest
import torch
from train_runs import start

from rl_dist.errors import UserError
from rl_dist.machine import free_memory_bytes, is_out_of_memory
from rl_dist.strategies import measure
from rl_dist.strategies.measure import Candidate, fastest, fastest_batch_size

SCRIPT = Path(__file__).parents[1] / "limited_memory.py"


@pytest.mark.parametrize(
    "error, exhausted",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("could not create a primitive descriptor for an LSTM"), False),
    ],
)
def test_out_of_memory_errors_are_recognised(error, exhausted):
    assert is_out_of_memory(error) == exhausted


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock; return a list with one number, the time on the new clock."""
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(
    "seconds_of, cap, sizes, chosen, largest_tried",
    [
        # Sizes above 64 do not increase the throughput.
        (lambda size: 1e-3 * max(size, 64), 10**9, range(8, 10**12), 64, 285),
        # 16 is the smallest size that is at most 10 % slower than the fastest size.
        (lambda size: {8: 0.12, 16: 0.19, 32: 0.37}.get(size, 1.0), 10**9, [8, 16, 32], 16, 36),
        # Larger sizes would leave less than a tenth of the memory free.
        (lambda size: 1.0, 1000, range(8, 10**6, 8), 512, 1138),
        # Even the smallest batches take so long that no larger ones are tried.
        (lambda size: 11.0, 10**9, range(1, 10**6), 1, 2),
    ],
)
def test_the_chosen_batch_size_is_the_smallest_that_is_nearly_the_fastest(
    seconds_of, cap, sizes, chosen, largest_tried, clock
):
    tried = []

    def step(size):
        tried.append(size)
        if size > cap:
            raise torch.OutOfMemoryError("CUDA out of memory")
        clock[0] += seconds_of(size)

    assert fastest_batch_size(step, sizes) == chosen
    assert max(tried) == largest_tried
    with pytest.raises(UserError, match="out of memory"):
        fastest_batch_size(step, [2 * 10**9])


@pytest.mark.parametrize(
    "ddp, hybrid, chosen",
    [
        (0.05, 0.001, "hybrid"),
        (0.1, 0.095, "ddp"),  # about equal: the first candidate wins
        (1.0, -1.0, "ddp"),  # hybrid fails
        (-1.0, -1.0, None),
    ],
)
def test_candidates_do_not_share_memory_and_a_later_one_must_be_clearly_faster(
    ddp, hybrid, chosen, clock, world
):
    alive = []
    seconds_of = {"ddp": ddp, "hybrid": hybrid}

    def steps(name):
        assert not any(reference() is not None for reference in alive)
        tensor = torch.rand(1000)
        alive.append(weakref.ref(tensor))
        for number in range(tensor.numel()):
            yield
            if seconds_of[name] < 0:
                raise MemoryError("no memory")
            # All steps except one are slow, as on a machine with other work.
            clock[0] += seconds_of[name] if number == 5 else 9.0

    best, results = fastest([Candidate(n, lambda n=n: steps(n)) for n in seconds_of], world)
    assert (best and best.name) == chosen
    assert [bool(result.problem) for result in results] == [ddp < 0, hybrid < 0]


def test_two_ranks_agree_on_the_choice(ranks):
    one, other = ranks
    assert one == other and one["chosen"] == "ddp"
    assert one["ddp"]["problem"] == "" and one["ddp"]["seconds"] > 0


def test_the_rank_on_which_a_candidate_fails_is_named(ranks):
    one, _ = ranks
    assert "rank 1: CUDA out of memory" in one["ddp, full"]["problem"]
    assert one["broken"]["problem"].startswith("rank 0: shard_size 3")


def test_a_candidate_is_as_slow_as_on_its_slowest_rank(ranks):
    for rank in ranks:
        assert rank["slow on rank 0"]["seconds"] >= 0.08


def test_a_size_fits_on_the_rank_with_less_memory(ranks):
    for rank in ranks:
        assert rank["size"] == 256  # rank 1 has memory for 300 samples


@pytest.mark.slow  # starts another process
def test_the_batch_size_found_under_a_real_memory_limit_runs():
    stdout, stderr = start(SCRIPT, "search").communicate(timeout=300)
    assert len(stdout.split()) == 3, stderr
    free, error, largest = stdout.split()
    assert error == "RuntimeError" and 64 < int(largest) < 6_400
    assert 2**26 < int(free) <= 2**27, free
    # The limit does not apply to this process.
    assert free_memory_bytes(torch.device("cpu")) > 2**27
