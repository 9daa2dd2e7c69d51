"""The largest batch that fits in memory, and the fastest, both found by trying.

    def try_step(size):  # forward, backward, optimizer on `size` samples; no collective calls
        optimizer.zero_grad()
        criterion(model(inputs(size)), targets(size)).backward()
        optimizer.step()

    largest_batch_size(try_step, range(8, 65_537, 8))
    fastest_batch_size(try_step, range(8, 65_537, 8)).size

Sizes are of one rank. With a `world` all ranks call together and get the same answer: a size is too
large if it is for one of them, and as fast as the slowest. `try_step` must train a module that is
not wrapped for distributed training, because a rank that runs out of memory inside a collective
call would leave the others waiting. Its steps are real: give it a copy of the model.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch

from rl_dist.machine import clear_gpu_memory, is_out_of_memory
from rl_dist.process_group.collectives import all_gather_json, all_reduce_max
from rl_dist.process_group.world import World

HEADROOM = 0.9  # of the memory at most: a size is taken only if one larger by its inverse fits
TOLERANCE = 0.05  # a smaller batch within this of the fastest is as good
PATIENCE = 2  # doublings without gain before the curve counts as flat
MEASURE_S, MOST_REPEATS = 0.5, 10
LONGEST_STEP_S = 10.0  # no larger sizes are tried once a step takes so long

TryStep = Callable[[int], object]
T = TypeVar("T")


@dataclass(frozen=True)
class BatchPoint:
    """The speed of one batch size."""

    size: int  # samples of one rank
    seconds: float  # of one step on the slowest rank, in the median
    samples_per_s: float  # of all ranks


@dataclass(frozen=True)
class Choice:
    """The batch size that was chosen, and the measurements it was chosen from."""

    point: BatchPoint
    points: tuple[BatchPoint, ...]  # ascending; each fits with head-room
    ended_by: str  # what ended the search: "memory", "flat", "time" or "sizes": there are no more

    @property
    def size(self) -> int:
        """Samples of one rank."""
        return self.point.size


def fits(try_step: TryStep, size: int, world: World | None = None) -> bool:
    """Try whether one step of this size fits in memory on every rank, with head-room."""
    return _attempt(lambda: _seconds(try_step, math.ceil(size / HEADROOM)), world) is not None


def largest_batch_size(try_step: TryStep, sizes: Sequence[int], world: World | None = None) -> int:
    """Find the largest size that fits with head-room: by doubling, then by bisection.

        size = largest_batch_size(lambda size: train_on(make_batch(size)), range(1, 4096))

    Args:
        sizes: what is allowed, ascending; a range will do.

    Returns:
        One of `sizes`; 0: not even the first fits.
    """
    _check_sizes(sizes)
    num_fitting, end = 0, len(sizes)
    for index in _doublings(sizes):
        if not fits(try_step, sizes[index], world):
            end = index
            break
        num_fitting = index + 1
    num_fitting = bisect_left(
        range(end), True, lo=num_fitting, key=lambda index: not fits(try_step, sizes[index], world)
    )
    return sizes[num_fitting - 1] if num_fitting else 0


def fastest_batch_size(
    try_step: TryStep, sizes: Sequence[int], world: World | None = None
) -> Choice:
    """Find the smallest size that is about as fast as any and fits with head-room.

        choice = fastest_batch_size(lambda size: train_on(make_batch(size)), [8, 16, 32, 64, 128])

    Where throughput still grows when memory ends, the largest that fits is measured as well.

    Args:
        sizes: what is allowed, ascending; a range will do.

    Raises:
        MemoryError: not even the first size fits.
        ValueError: sizes that do not ascend, or none.
    """
    _check_sizes(sizes)
    if not sizes:
        raise ValueError("sizes must be at least one to choose from")
    points: list[BatchPoint] = []
    ended_by, last = "sizes", 0
    for index in _doublings(sizes):
        point = _measure(try_step, sizes[index], world)
        if point is None:
            ended_by = "memory"
            largest = largest_batch_size(try_step, sizes[last:index], world)
            if points and largest > points[-1].size:
                point = _measure(try_step, largest, world)
                points += [point] if point else []
            break
        points.append(point)
        last = index
        before = [one.samples_per_s for one in points[:-PATIENCE]]
        recent = [one.samples_per_s for one in points[-PATIENCE:]]
        if point.seconds > LONGEST_STEP_S:
            ended_by = "time"
            break
        if before and max(recent) < (1.0 + TOLERANCE) * max(before):
            ended_by = "flat"
            break
    if not points:
        raise MemoryError(f"not even a batch of {sizes[0]} samples a rank fits in memory")
    enough = (1.0 - TOLERANCE) * max(point.samples_per_s for point in points)
    chosen = next(point for point in points if point.samples_per_s >= enough)
    return Choice(chosen, tuple(points), ended_by)


def _measure(try_step: TryStep, size: int, world: World | None) -> BatchPoint | None:
    """Time steps on all ranks at once; None: one of them cannot hold it with head-room."""
    first = _attempt(lambda: _seconds(try_step, math.ceil(size / HEADROOM)), world)
    if first is None:
        return None
    repeats = min(MOST_REPEATS, 1 + int(MEASURE_S / first))
    seconds = _attempt(
        lambda: statistics.median([_seconds(try_step, size) for _ in range(repeats)]), world
    )
    if seconds is None:
        return None
    ranks = all_gather_json(seconds, world) if world else [seconds]
    return BatchPoint(size, max(ranks), size * len(ranks) / max(ranks))


def _check_sizes(sizes: Sequence[int]) -> None:
    # a range may be too long to walk through
    looked_at = sizes[:2] if isinstance(sizes, range) else sizes
    if any(right <= left for left, right in pairwise([0, *looked_at])):
        raise ValueError("sizes must be whole numbers from 1 on that ascend: sort them")


def _doublings(sizes: Sequence[int]) -> Iterator[int]:
    """Yield the places of the first size, the first at least twice as large ..., and the last."""
    index, last = 0, len(sizes) - 1
    while index < last:
        yield index
        index = min(bisect_left(sizes, 2 * sizes[index], lo=index + 1), last)
    if sizes:
        yield last


def _attempt(call: Callable[[], T], world: World | None) -> T | None:
    """Return a call's result; None, on all ranks, where one of them runs out of memory."""
    result: T | None = None
    try:
        result = call()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # outside of `except`: the error is gone, and with it the tensors that its traceback kept
    if result is None:
        clear_gpu_memory()
    if world is not None:
        world.heartbeat()
        if all_reduce_max(result is None, world):
            return None
    return result


def _seconds(try_step: TryStep, size: int) -> float:
    """Time one step, with all that it left to a GPU."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    started = time.perf_counter()
    try_step(size)
    wait()
    return time.perf_counter() - started
