"""Try some settings and choose the fastest; all ranks choose the same.

    candidates = [Candidate("fp32", steps_in_fp32), Candidate("bf16", steps_in_bf16)]
    best, results = fastest(candidates, world)

This chooses strategy, precision, batch size and the number of environment workers.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from rl_dist.errors import UserError, one_line
from rl_dist.machine import clear_gpu_memory
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import CollectiveError, World

STEPS = 4  # timed in each of two turns
HEADROOM = 0.9  # share of the memory that a batch size may take
TOLERANCE = 1.05  # a simpler setting may take this many times as long as the fastest one
PATIENCE = 2  # number of sizes without gain after which no larger size is tried
LONGEST_STEP_S = 10.0  # no larger size is tried once a step takes this long
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A setting, and steps that use it.

    The first `next` of `steps` does what this rank can do alone; it raises if the setting does not
    work or does not fit into memory. Each later `next` takes a step together with the other ranks.
    Closing the iterator frees its memory.
    """

    name: str
    steps: Callable[[], Iterator[None]]
    samples: float = 1.0  # number in a step; times are compared per sample


@dataclass(frozen=True)
class Result:
    """The measured time or the problem of a candidate, the same on all ranks."""

    name: str
    seconds: float = math.inf  # per sample, on the slowest rank
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.problem or f'{1e3 * self.seconds:.3g} ms'}"


def fastest(
    candidates: Iterable[Candidate],
    world: World,
    *,
    tolerance: float = TOLERANCE,
    growing: bool = False,
) -> tuple[Result | None, list[Result]]:
    """Return the first candidate about as fast as the fastest one; all ranks call.

    Each candidate has the memory to itself. Candidates that work run again in a second turn; the
    better time counts, because other load on the machine only slows them down. Torch's random
    numbers continue as if nothing had been tried.

    Args:
        tolerance: a candidate may take this many times as long as the fastest one.
        growing: candidates are ascending sizes; the first one that does not work, takes long, or
            brings no gain ends the trials.

    Returns:
        The result of the chosen candidate, or None if none works on all ranks; and all results.
    """
    phase = world.doing.phase
    results: dict[Candidate, Result] = {}
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        for candidate in candidates:
            results[candidate] = measure(candidate, world)
            if growing and not _pays_to_grow([*results.values()], candidate.samples):
                break
        for candidate, first in results.items():
            if not first.problem:
                turns = first, measure(candidate, world)
                results[candidate] = min(turns, key=lambda turn: (not turn.problem, turn.seconds))
    world.set_phase(phase)
    working = [result for result in results.values() if not result.problem]
    limit = tolerance * min((result.seconds for result in working), default=0.0)
    best = next((result for result in working if result.seconds <= limit), None)
    return best, [*results.values()]


def _pays_to_grow(results: list[Result], samples: float) -> bool:
    """Return True if a size above the last one may be faster per sample."""
    last = results[-1]
    if last.problem or last.seconds * samples > LONGEST_STEP_S:
        return False
    seconds = [result.seconds for result in results]
    before, recent = seconds[:-PATIENCE], seconds[-PATIENCE:]
    return not before or TOLERANCE * min(recent) <= min(before)


def measure(candidate: Candidate, world: World) -> Result:
    """Try a candidate on all ranks together, and free its memory.

    If a step fails on one rank while the others wait for it inside the step, they wait until the
    watchdog ends the job.

    Raises:
        CollectiveError: the ranks lost each other, and cannot agree on a result.
    """
    world.set_phase(f"trial of {candidate.name}")
    steps = candidate.steps()
    seconds: list[float] = []
    problem = ""
    for _ in range(2 + STEPS):  # the step alone, the first one together, then those that count
        started = time.perf_counter()
        local_problem = ""
        try:
            next(steps)
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
        except CollectiveError:
            raise
        # torch raises RuntimeError if memory runs out
        except (RuntimeError, ValueError, MemoryError) as error:
            local_problem = one_line(error, named=False)
            logger.info("trial failed: %s", local_problem)
        seconds.append(time.perf_counter() - started)
        world.heartbeat()
        problems = all_gather_json(local_problem, world)
        problem = next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")
        if problem:
            break
    steps = iter(())  # the next candidate needs the memory of this one
    clear_gpu_memory()
    if problem:
        return Result(candidate.name, problem=problem)
    medians = all_gather_json(statistics.median(seconds[2:]), world)
    result = Result(candidate.name, max(medians) / candidate.samples)
    logger.info("%s", result)
    return result


def doublings(sizes: Iterable[int]) -> Iterator[int]:
    """Yield the first size, then always the next one at least twice as large."""
    last = 0
    for size in sizes:
        if size >= 2 * last:
            last = size
            yield size


def fastest_batch_size(
    try_step: Callable[[int], object], sizes: Iterable[int], world: World | None = None
) -> int:
    """Return the smallest batch size that fits in memory and is about as fast as any.

        def try_step(size):  # forward, backward, optimizer on `size` samples; no collective calls
            optimizer.zero_grad()
            criterion(model(inputs(size)), targets(size)).backward()
            optimizer.step()

        size = fastest_batch_size(try_step, range(8, 65_537, 8))

    Sizes are doubled until one does not fit with a tenth of the memory to spare, or brings no gain.
    With a `world`, all ranks call together and get the same answer; the slowest rank and the rank
    with the least memory decide. `try_step` takes real steps, so give it a copy of the model that
    is not wrapped for distributed training.

    Args:
        try_step: takes a step with a number of samples; no collective calls.
        sizes: allowed numbers of samples of one rank, ascending, such as a range.
        world: the ranks that choose together; None: this process alone.

    Raises:
        UserError: not even the first size works.
    """
    if world is None:
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        world = World(rank=0, local_rank=0, size=1, device=device, backend="gloo")

    def steps(size: int) -> Iterator[None]:
        try_step(math.ceil(size / HEADROOM))
        yield
        while True:
            try_step(size)
            yield

    candidates = (Candidate(str(size), partial(steps, size), size) for size in doublings(sizes))
    best, results = fastest(candidates, world, growing=True)
    if best is None:
        raise UserError(f"not even the smallest batch size works: {results[0]}", exit_code=1)
    return int(best.name)
