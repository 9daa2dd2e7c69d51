"""The largest batch that fits in memory, and the fastest, both found by trying.

    def try_step(size):  # forward, backward and optimizer on a batch of `size` samples, without collective calls
        optimizer.zero_grad()
        criterion(model(inputs(size)), targets(size)).backward()
        optimizer.step()

    largest_batch_size(try_step, range(8, 65_537, 8))
    fastest_batch_size(try_step, range(8, 65_537, 8)).size

Sizes are of one rank. With a `world` all ranks call together and get the same answer: a size is too large if it is for
one of them, and as fast as the slowest. `try_step` must train a module that is not wrapped for distributed training,
because a rank that runs out of memory inside a collective call would leave the others waiting. Its steps are real
ones: give it a copy of the model, or the weights will have moved.
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

from rl_dist.hardware.out_of_memory import clear_gpu_memory, is_out_of_memory
from rl_dist.process_group.collectives import agree_max, gather_json
from rl_dist.process_group.world import World

HEADROOM = 0.9  # of the memory at most: a size is taken only if one larger by its inverse fits
PRECISION = 0.02  # of the largest size
TOLERANCE = 0.05  # a smaller batch within this of the fastest is as good
PATIENCE = 2  # doublings without gain before the curve counts as flat
MEASURE_S, MOST_REPEATS = 0.5, 10
LONGEST_STEP_S = 10.0
LR_RULES = ("none", "sqrt", "linear")
TryStep = Callable[[int], object]
T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """What one batch size gave."""

    size: int  # samples of one rank
    seconds: float  # of one step on the slowest rank, in the median
    samples_per_s: float  # of all ranks
    memory_bytes: int  # highest use by tensors on the fullest GPU; 0 on CPU, where torch does not count


@dataclass(frozen=True)
class Curve:
    """Throughput by batch size, ascending, and why it ends."""

    points: tuple[Point, ...]
    ended_by: str  # "memory", "flat", "time" or "sizes": there are no more
    too_large: int = 0  # the size that did not fit


def runs(try_step: TryStep, size: int, world: World | None = None) -> bool:
    """Whether one step of this size fits in memory, on every rank."""
    return _attempt(lambda: _seconds(try_step, size), world) is not None


def largest_batch_size(
    try_step: TryStep,
    sizes: Sequence[int],
    world: World | None = None,
    *,
    headroom: float = HEADROOM,
    precision: float = PRECISION,
) -> int:
    """The largest size that fits with head-room: by doubling, then by bisection.

        size = largest_batch_size(lambda size: train_on(make_batch(size)), range(1, 4096))

    Args:
        sizes: what is allowed, ascending; a range will do.
        headroom: a size is taken only if one of size / headroom fits.
        precision: how far below the true largest, as a fraction, is near enough; 0: exactly.

    Returns:
        One of `sizes`, or 0: not even the first fits.

    Raises:
        ValueError: sizes that do not ascend, or a headroom that is none.
    """

    _check_sizes(sizes)
    if not 0.0 < headroom <= 1.0:
        raise ValueError(f"headroom must be a fraction in (0, 1], got {headroom:g}")

    def fits(index: int) -> bool:
        return runs(try_step, math.ceil(sizes[index] / headroom), world)

    low, high, index = -1, len(sizes), 0
    while index < high:
        if not fits(index):
            high = index
            break
        low = index
        index = bisect_left(sizes, 2 * sizes[index], lo=index + 1)
    while high - low > 1:
        near = low >= 0 and high < len(sizes) and sizes[high] <= (1.0 + precision) * sizes[low]
        if near:
            break
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return sizes[low] if low >= 0 else 0


def measure(try_step: TryStep, size: int, world: World | None = None) -> Point | None:
    """Time steps of one size on all ranks at once; None: one of them cannot hold it."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    first = _attempt(lambda: _seconds(try_step, size), world)  # it warms up, too
    if first is None:
        return None
    repeats = min(MOST_REPEATS, 1 + int(MEASURE_S / first))
    seconds = _attempt(lambda: statistics.median([_seconds(try_step, size) for _ in range(repeats)]), world)
    if seconds is None:
        return None
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    ranks = gather_json([seconds, peak], world) if world else [[seconds, peak]]
    slowest = max(rank[0] for rank in ranks)
    return Point(size, slowest, size * len(ranks) / slowest, int(max(rank[1] for rank in ranks)))


def throughput_curve(
    try_step: TryStep, sizes: Sequence[int], world: World | None = None, *, longest_step_s: float = LONGEST_STEP_S
) -> Curve:
    """Samples per second by size, doubling, until more do not pay or do not fit."""
    points: list[Point] = []
    for size in _doublings(sizes):
        point = measure(try_step, size, world)
        if point is None:
            return Curve(tuple(points), "memory", size)
        points.append(point)
        if point.seconds > longest_step_s:
            return Curve(tuple(points), "time")
        before = [one.samples_per_s for one in points[:-PATIENCE]]
        recent = [one.samples_per_s for one in points[-PATIENCE:]]
        if before and max(recent) < (1.0 + TOLERANCE) * max(before):
            return Curve(tuple(points), "flat")
    return Curve(tuple(points), "sizes")


def fastest(points: Sequence[Point], tolerance: float = TOLERANCE) -> Point:
    """The smallest size whose throughput is within `tolerance` of the best."""
    best = max(point.samples_per_s for point in points)
    return next(point for point in points if point.samples_per_s >= (1.0 - tolerance) * best)


@dataclass(frozen=True)
class Choice:
    """The batch size that was chosen, and what it was chosen from."""

    point: Point
    points: tuple[Point, ...]  # ascending; what did not fit with head-room is not among them
    ended_by: str  # as in Curve

    @property
    def size(self) -> int:
        """Samples of one rank."""
        return self.point.size


def fastest_batch_size(
    try_step: TryStep, sizes: Sequence[int], world: World | None = None, *, longest_step_s: float = LONGEST_STEP_S
) -> Choice:
    """The smallest size that is about as fast as any and fits with head-room.

        choice = fastest_batch_size(lambda size: train_on(make_batch(size)), [8, 16, 32, 64, 128])

    Where throughput still grows when memory ends, the largest that fits is measured as well.

    Args:
        sizes: what is allowed, ascending; a range will do.
        longest_step_s: no larger sizes are tried once a step takes so long.

    Raises:
        MemoryError: not even the first size fits.
        ValueError: sizes that do not ascend, or none.
    """
    _check_sizes(sizes)
    if not sizes:
        raise ValueError("sizes must be at least one to choose from")
    curve = throughput_curve(try_step, sizes, world, longest_step_s=longest_step_s)
    points = list(curve.points)
    if points:
        chosen = fastest(points)
        proven = chosen is not points[-1]  # one of at least twice the size has run
        if proven or (not curve.too_large and runs(try_step, math.ceil(chosen.size / HEADROOM), world)):
            return Choice(chosen, tuple(points), curve.ended_by)
    end = bisect_left(sizes, curve.too_large) if curve.too_large else bisect_left(sizes, points[-1].size + 1)
    largest = largest_batch_size(try_step, sizes[:end], world)
    points = [point for point in points if point.size <= largest]
    if largest and (not points or points[-1].size < largest):
        last = measure(try_step, largest, world)
        points += [last] if last else []
    if not points:
        raise MemoryError(f"not even a batch of {sizes[0]} samples a rank fits in memory")
    return Choice(fastest(points), tuple(points), "memory")


def effective_batch_size(size: int, num_ranks: int = 1, grad_accumulation: int = 1) -> int:
    """Samples of one optimizer step, given the batch of one rank."""
    return size * num_ranks * grad_accumulation


def learning_rate_factor(growth: float, rule: str) -> float:
    """What the learning rate is multiplied by when the effective batch grows.

    Args:
        growth: new effective batch by the one that the learning rate was chosen for.
        rule: none, sqrt (for Adam and its kin) or linear (for SGD).

    Source: linear: Goyal et al., https://arxiv.org/abs/1706.02677; square root: Malladi et al.,
    https://arxiv.org/abs/2205.10287. Both hold while gradients are noisy, not for any batch however large.
    """
    return {"none": 1.0, "sqrt": math.sqrt(growth), "linear": float(growth)}[rule]


def _check_sizes(sizes: Sequence[int]) -> None:
    """The search halves intervals: it would be wrong on sizes in another order, without a word."""
    if sizes and sizes[0] < 1:
        raise ValueError(f"sizes must be whole numbers from 1 on, got {sizes[0]}")
    looked_at = sizes[:2] if isinstance(sizes, range) else sizes  # a range may be too long to walk through
    if any(right <= left for left, right in pairwise(looked_at)):
        raise ValueError("sizes must ascend: sort them")


def _doublings(sizes: Sequence[int]) -> Iterator[int]:
    """The first size, the first at least twice as large, and so on; the last one, too."""
    index = 0
    while index < len(sizes):
        yield sizes[index]
        following = bisect_left(sizes, 2 * sizes[index], lo=index + 1)
        index = len(sizes) - 1 if following == len(sizes) and index < len(sizes) - 1 else following


def _attempt(call: Callable[[], T], world: World | None) -> T | None:
    """What a call returns; None, on all ranks, where one of them runs out of memory."""
    result: T | None = None
    try:
        result = call()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    failed = result is None
    if failed:  # outside of `except`: the error is gone, and with it the tensors that its traceback kept
        clear_gpu_memory()
    if world is not None:
        world.beat()
        failed = bool(agree_max(failed, world))
    return None if failed else result


def _seconds(try_step: TryStep, size: int) -> float:
    """How long one step takes, with all that it left to a GPU."""
    _synchronize()
    started = time.perf_counter()
    try_step(size)
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
