"""Which strategy to train with, found by trying.

The fastest that fits (auto), or the first that works (fallback).

    choice = fastest(candidates(world.size, len(gpu_ids)), start, world)
    print(choice.reason)  # strategy auto takes ddp, 12.3 ms a gradient step: hybrid 30.1 ms; ...

Every rank makes the same calls and comes to the same choice. The random generators of torch are left as they were.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from rl_dist.errors import UserError
from rl_dist.parallel.config import MODES
from rl_dist.process_group.collectives import gather_json
from rl_dist.process_group.world import CollectiveError, World

LADDER = tuple(mode for mode in ("hybrid", "ddp", "dp", "none") if mode in MODES)  # what fallback steps down
WARM_UP, STEPS, TURNS = 2, 6, 2
CLEAR_GAIN = 0.05  # what a later candidate must be faster by, to be worth more than the noise
T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trying:
    """What is done with a candidate, by all ranks together.

    A rank on which `wrap` or `step` fails alone leaves the others waiting; the watchdog then ends the job, and says
    where. What can fail on one rank only belongs in the function that returns this, or in `alone`.
    """

    wrap: Callable[[], None]  # with the other ranks
    alone: Callable[[], None]  # forward and backward of a step without the other ranks: whether it fits
    step: Callable[[], None]  # a gradient step with them


Start = Callable[[str], Trying]  # sets a mode up as far as a rank can alone


@dataclass(frozen=True)
class Tried:
    """What came of a candidate; the same on all ranks."""

    mode: str
    problem: str = ""  # why it does not work here
    step_s: float = 0.0  # median over gradient steps of the slowest rank's
    peak_bytes: int = 0  # most GPU memory of a rank; 0: not measured, on the CPU

    def __str__(self) -> str:
        if self.problem:
            return f"{self.mode} does not work here ({self.problem})"
        memory = f", {self.peak_bytes / 2**30:.2f} GiB" if self.peak_bytes else ""
        return f"{self.mode} {1e3 * self.step_s:.3g} ms a gradient step{memory}"


@dataclass(frozen=True)
class Choice:
    """The mode to train with, and why."""

    mode: str
    reason: str  # in one line


def candidates(num_ranks: int, num_devices: int) -> list[str]:
    """What auto may choose from on so many ranks, the simplest first.

    Args:
        num_devices: GPUs of the one process, if it is one.
    """
    if num_ranks > 1:
        return [mode for mode in ("ddp", "hybrid") if mode in MODES]
    return ["none", "dp"] if num_devices > 1 else ["none"]


def steps_down(mode: str, num_ranks: int, num_devices: int) -> list[str]:
    """A mode, and those below it on the ladder that the same ranks could train with."""
    if mode not in LADDER:
        return [mode]
    below = LADDER[LADDER.index(mode) + 1 :]
    possible = {"ddp"} if num_ranks > 1 else {"none", *(["dp"] if num_devices > 1 else [])}
    return [mode, *(each for each in below if each in possible)]


def fastest(modes: Sequence[str], start: Start, world: World) -> Choice:
    """Measure gradient steps of every mode, in turns; the fastest is taken.

    An earlier one is kept unless a later one is clearly faster.

    Raises:
        UserError: none works.
    """
    if len(modes) == 1:
        return Choice(modes[0], f"strategy auto takes {modes[0]}: there is no other for {world.size} rank(s) here")
    with _generators_kept(world):
        turns = [[_measure(mode, start, world) for mode in modes] for _ in range(TURNS)]
    # What fails in any turn is left out. Of two good ones the better counts: other load only makes steps slower.
    tried = [min(of_mode, key=lambda each: (not each.problem, each.step_s)) for of_mode in zip(*turns, strict=True)]
    best: Tried | None = None
    for each in tried:
        if not each.problem and (best is None or each.step_s < best.step_s * (1.0 - CLEAR_GAIN)):
            best = each
    if best is None:
        raise UserError(f"strategy auto found none that works: {'; '.join(map(str, tried))}", exit_code=1)
    others = "; ".join(str(each) for each in tried if each is not best)
    how = f"the better of {TURNS} turns of {STEPS} steps each"
    return Choice(best.mode, f"strategy auto takes {best} ({others}), {how}")


def first_working(modes: Sequence[str], start: Start, world: World) -> Choice:
    """Set modes up in their order, each with one gradient step, until one works.

    Raises:
        UserError: none does.
    """
    failed: list[str] = []
    with _generators_kept(world):
        for mode in modes:
            tried = _measure(mode, start, world, warm_up=0, steps=1)
            if not tried.problem:
                reason = f"{'; '.join(failed)}: fallback to {mode}" if failed else ""
                return Choice(mode, reason)
            failed.append(str(tried))
    raise UserError(f"no strategy works: {'; '.join(failed)}", exit_code=1)


def _measure(mode: str, start: Start, world: World, warm_up: int = WARM_UP, steps: int = STEPS) -> Tried:
    """Try a mode on all ranks together."""
    world.enter(f"trial of strategy {mode}")
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(world.device)
    try:
        trying, problem = _together(lambda: start(mode), world)
        for part in () if trying is None else (trying.wrap, trying.alone):
            problem = problem or _together(part, world)[1]
        if trying is None or problem:
            return Tried(mode, problem)
        step = trying.step
        seconds, problem = _together(lambda: [_time(step, world) for _ in range(warm_up + steps)][warm_up:], world)
        if seconds is None or problem:
            return Tried(mode, problem)
        own = [torch.cuda.max_memory_allocated(world.device) if on_gpu else 0, *seconds]
        peaks, *slowest = [max(values) for values in zip(*gather_json(own, world), strict=True)]
        tried = Tried(mode, step_s=statistics.median(slowest), peak_bytes=int(peaks))
        logger.info("%s", tried)
        return tried
    finally:
        trying = part = step = None  # type: ignore[assignment]
        _free_memory(world)


def _together(work: Callable[[], T], world: World) -> tuple[T | None, str]:
    """Do something on all ranks; if it fails on one, all are told why.

    Raises:
        CollectiveError: the ranks lost each other, after which nothing can be agreed.
    """
    result, problem = None, ""
    try:
        result = work()
    except CollectiveError:
        raise
    except (RuntimeError, ValueError, MemoryError) as error:  # out of memory is a RuntimeError
        logger.info("strategy trial", exc_info=True)
        problem = " ".join(f"{error}".split())[:300] or type(error).__name__
    problems = gather_json(problem, world)
    failed = [f"rank {rank}: {each}" if world.size > 1 else each for rank, each in enumerate(problems) if each]
    return result, failed[0] if failed else ""


def _time(step: Callable[[], None], world: World) -> float:
    started_s = time.perf_counter()
    step()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - started_s


def _free_memory(world: World) -> None:
    """So that a candidate finds what the one before it used."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def _generators_kept(world: World) -> AbstractContextManager[Any]:
    return torch.random.fork_rng([world.device] if world.device.type == "cuda" else [])
