"""Choose the fastest of some settings by trying them, the same on all ranks.

    candidates = [Candidate("fp32", steps_in_fp32), Candidate("bf16", steps_in_bf16)]
    best, results = fastest(candidates, world)

Strategy, precision, batch size and the number of environment workers are chosen like this.
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
HEADROOM = 0.9  # share of the memory: a batch size is taken only if a ninth more fits as well
TOLERANCE = 1.05  # a simpler setting may take this many times as long as the fastest one
PATIENCE = 2  # sizes without gain, after which larger ones are not tried
LONGEST_STEP_S = 10.0  # no larger size is tried once a step takes this long
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A setting, and steps that use it.

    The first `next` of `steps` does what this rank can do alone, and raises where the setting does
    not work or does not fit here. Every later one takes a step, together with the other ranks.
    Closing the iterator frees what it holds.
    """

    name: str
    steps: Callable[[], Iterator[None]]
    samples: float = 1.0  # in a step; times are compared per sample


@dataclass(frozen=True)
class Result:
    """The measurement of a candidate, the same on all ranks."""

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
    """Return the first candidate about as fast as any, and the results of all.

    Each candidate has the memory to itself. Those that work run again in a second turn and keep
    the better time, because other load on the machine only slows. Torch's random numbers continue
    as if nothing had been tried. All ranks call together.

    Args:
        tolerance: a candidate may take this many times as long as the fastest one.
        growing: candidates are ascending sizes; none is tried after one that does not work, takes
            long, or no longer pays.

    Returns:
        None instead of a candidate if none works on all ranks.
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
    """Return True if a size larger than the last one may be faster per sample."""
    last = results[-1]
    if last.problem or last.seconds * samples > LONGEST_STEP_S:
        return False
    seconds = [result.seconds for result in results]
    before, recent = seconds[:-PATIENCE], seconds[-PATIENCE:]
    return not before or TOLERANCE * min(recent) <= min(before)


def measure(candidate: Candidate, world: World) -> Result:
    """Try a candidate on all ranks together and free it.

    The result is the same on all ranks. A step that fails on one rank alone, while others wait for
    it inside, leaves them waiting until the watchdog ends the job.

    Raises:
        CollectiveError: the ranks lost each other, so that nothing can be agreed.
    """
    world.set_phase(f"trial of {candidate.name}")
    steps = candidate.steps()
    seconds: list[float] = []
    problem = ""
    for _ in range(2 + STEPS):  # one alone, the first one together, those that count
        started = time.perf_counter()
        local_problem = ""
        try:
            next(steps)
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
        except CollectiveError:
            raise
        except (RuntimeError, ValueError, MemoryError) as error:  # "out of memory" is the first
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
    """Yield the first size, then the next one at least twice as large, and so on."""
    last = 0
    for size in sizes:
        if size >= 2 * last:
            last = size
            yield size


def fastest_batch_size(
    try_step: Callable[[int], object], sizes: Iterable[int], world: World | None = None
) -> int:
    """Return the smallest batch size that is about as fast as any and fits in memory.

        def try_step(size):  # forward, backward, optimizer on `size` samples; no collective calls
            optimizer.zero_grad()
            criterion(model(inputs(size)), targets(size)).backward()
            optimizer.step()

        size = fastest_batch_size(try_step, range(8, 65_537, 8))

    Sizes are doubled until they do not fit, with a tenth of the memory to spare, or do not pay.
    With a `world` all ranks call together and get the same answer: the poorest and the slowest rank
    count. `try_step` takes real steps, so give it a copy of the model, not wrapped for distributed
    training.

    Args:
        sizes: samples of one rank that are allowed, ascending; a range will do.

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
        raise UserError(f"no batch size works: {results[0]}", exit_code=1)
    return int(best.name)
