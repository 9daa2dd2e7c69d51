"""Batch sizes found by trying: what fits, what is fastest, and that all ranks agree."""

import errno
import math
import weakref
from pathlib import Path

import pytest
import torch
from batch_size_ranks import EXHAUSTED, limited
from train_runs import start

from rl_dist.machine import free_memory_bytes, is_out_of_memory
from rl_dist.strategies import batch_size
from rl_dist.strategies.batch_size import fastest_batch_size, fits, largest_batch_size

SCRIPT = Path(__file__).parents[1] / "limited_memory.py"
OTHERS = [
    RuntimeError("size mismatch"),
    RuntimeError("could not create a primitive descriptor for an LSTM forward propagation"),
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("out of memory"),
]


@pytest.mark.parametrize("error", EXHAUSTED, ids=str)
def test_an_error_for_want_of_memory_makes_a_size_too_large(error):
    step, tried = limited(10, error)
    assert is_out_of_memory(error) and fits(step, 9) and not fits(step, 10) and tried == [10, 12]


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_every_other_error_comes_out(error):
    step, _ = limited(10, error)
    assert not is_out_of_memory(error)
    with pytest.raises(type(error), match=str(error)[-10:]):
        largest_batch_size(step, range(1, 100))


@pytest.mark.parametrize("cap", [0, 1, 7, 9, 64, 1000, 10**6])
@pytest.mark.parametrize("sizes", [range(1, 4097), range(8, 4097, 8), [2, 3, 5, 700]], ids=str)
def test_the_largest_size_leaves_a_tenth_of_the_memory_and_the_next_would_not(
    cap, sizes, monkeypatch
):
    # it walks over all objects, which takes long
    monkeypatch.setattr(batch_size, "clear_gpu_memory", lambda: None)
    step, tried = limited(cap)
    fitting = [size for size in sizes if math.ceil(size / 0.9) <= cap]
    assert largest_batch_size(step, sizes) == (fitting[-1] if fitting else 0)
    assert len(tried) <= 2 * math.log2(4097) + 3


def test_nothing_of_a_failed_step_stays_in_memory():
    kept = []

    def step(size):
        tensor = torch.zeros(size)
        kept.append(weakref.ref(tensor))
        raise MemoryError

    assert not fits(step, 1000)
    assert kept[0]() is None


@pytest.mark.slow  # a process of its own
def test_the_largest_batch_under_a_real_limit_of_memory_really_runs():
    stdout, stderr = start(SCRIPT, "search").communicate(timeout=300)
    assert len(stdout.split()) == 3, stderr
    free, error, largest = stdout.split()
    assert error == "RuntimeError" and 64 < int(largest) < 6_400
    assert 2**26 < int(free) <= 2**27, free
    assert free_memory_bytes(torch.device("cpu")) > 2**27  # what the limit leaves, not the machine


@pytest.fixture
def clock(monkeypatch):
    """A clock that only steps move on."""
    now = [0.0]
    monkeypatch.setattr(batch_size.time, "perf_counter", lambda: now[0])
    return now


def step_of(clock, seconds_of, cap=10**9):
    def step(size):
        if size > cap:
            raise MemoryError
        clock[0] += seconds_of(size)

    return step


def test_the_curve_is_measured_until_larger_batches_do_not_pay(clock):
    step = step_of(clock, lambda size: 1e-3 * max(size, 64))
    choice = fastest_batch_size(step, range(8, 10**6))
    assert (choice.ended_by, choice.size) == ("flat", 64)
    assert [point.size for point in choice.points] == [8, 16, 32, 64, 128, 256]
    paces = [round(point.samples_per_s) for point in choice.points]
    assert paces == [125, 250, 500, 1000, 1000, 1000]


def test_the_fastest_is_the_smallest_within_a_twentieth_of_the_best(clock):
    paces = {8: 90.0, 16: 96.0, 32: 100.0, 64: 99.0}
    step = step_of(clock, lambda size: size / paces.get(size, 1.0))
    assert fastest_batch_size(step, list(paces)).size == 16


def test_where_throughput_still_grows_the_largest_that_fits_is_taken(clock):
    choice = fastest_batch_size(step_of(clock, lambda size: 1.0, cap=1000), range(8, 10**6, 8))
    assert choice.ended_by == "memory" and choice.size == 896
    assert [point.size for point in choice.points] == [8, 16, 32, 64, 128, 256, 512, choice.size]


def test_a_fast_size_without_head_room_is_not_taken(clock):
    choice = fastest_batch_size(step_of(clock, lambda size: 1.0, cap=100), [10, 50, 95])
    assert (choice.size, [point.size for point in choice.points]) == (50, [10, 50])
    with pytest.raises(MemoryError, match="not even a batch of 4 samples a rank"):
        fastest_batch_size(limited(3)[0], range(4, 100))


def test_sizes_whose_steps_take_long_end_the_search(clock):
    choice = fastest_batch_size(step_of(clock, lambda size: 11.0), range(1, 10**6))
    assert (choice.size, choice.ended_by) == (1, "time")


def test_all_ranks_agree_on_what_the_poorest_can_hold_and_the_slowest_can_do(ranks_folder):
    slow, poor = (torch.load(ranks_folder / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert slow["largest"] == poor["largest"] and slow["largest"] == 270
    assert (slow["size"], slow["paces"]) == (poor["size"], poor["paces"]) and slow["size"] == 256
    assert slow["paces"] == pytest.approx([2 * size / 0.02 for size in (16, 64, 256)])


@pytest.mark.parametrize("search", [largest_batch_size, fastest_batch_size])
@pytest.mark.parametrize("sizes", [[0, 1], [64, 32, 16], [8, 8]])
def test_sizes_that_do_not_ascend_are_refused(search, sizes):
    with pytest.raises(ValueError, match="sizes must"):
        search(lambda size: None, sizes)


@pytest.mark.timeout(10)
def test_of_a_long_range_only_what_the_search_needs_is_looked_at():
    assert largest_batch_size(limited(1000)[0], range(1, 10**12)) == 900
    with pytest.raises(ValueError, match="sizes must"):
        largest_batch_size(limited(1000)[0], range(10**12, 0, -1))
    assert largest_batch_size(limited(1000)[0], []) == 0
