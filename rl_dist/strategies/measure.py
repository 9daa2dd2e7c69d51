"""Time several settings and choose the fastest; all ranks make the same choice.

    candidates = [Candidate("fp32", steps_in_fp32), Candidate("bf16", steps_in_bf16)]
    best, results = fastest(candidates, world)

Training uses this module to choose its strategy, precision, batch size and number of environment
workers.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from rl_dist.errors import UserError, one_line
from rl_dist.machine import clear_gpu_memory
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import CollectiveError, World

STEPS = 8  # number of timed steps for each candidate
USABLE_SHARE = 0.9  # a batch may use at most this fraction of the memory
# The first setting whose time is at most TOLERANCE times the shortest time is chosen, because later
# settings need more memory or cores, or are less precise.
TOLERANCE = 1.1
PATIENCE = 2  # try no larger sizes after this many sizes in a row were not faster
LONGEST_STEP_S = 10.0  # try no larger sizes after a step took longer than this
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A setting to try, and a function that returns an iterator over training steps.

    The first `next` runs the part of a step that this rank can do alone. It raises an error if the
    setting does not work or needs too much memory. Each later `next` runs a step together with the
    other ranks. Closing the iterator frees its memory.
    """

    name: str
    steps: Callable[[], Iterator[None]]
    samples: float = 1.0  # number of samples in a step; candidates are compared by time per sample


@dataclass(frozen=True)
class Result:
    """The measured time of a candidate, or the reason why it failed; equal on all ranks."""

    name: str
    seconds: float = math.inf  # time per sample on the slowest rank
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.problem or f'{1e3 * self.seconds:.3g} ms'}"


def fastest(
    candidates: Iterable[Candidate], world: World, *, growing: bool = False
) -> tuple[Result | None, list[Result]]:
    """Return the first candidate that is about as fast as the fastest candidate.

    Every rank must call this. Candidates run one after another, so each one can use all of the
    memory. Afterwards, the state of torch's random generators is restored.

    Args:
        growing: True if the candidates are sizes in ascending order. This function then stops at
            the first size that fails or takes too long, or when PATIENCE sizes in a row are not
            faster.

    Returns:
        The result of the chosen candidate, or None if no candidate works on all ranks; and the
        results of all candidates.
    """
    phase = world.doing.phase
    results: list[Result] = []
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        for candidate in candidates:
            results.append(measure(candidate, world))
            if growing and not _pays_to_grow(results, candidate.samples):
                break
    world.set_phase(phase)
    working = [result for result in results if not result.problem]
    limit = TOLERANCE * min((result.seconds for result in working), default=0.0)
    best = next((result for result in working if result.seconds <= limit), None)
    return best, results


def _pays_to_grow(results: list[Result], samples: float) -> bool:
    """Return True if larger sizes than the last one may need less time per sample."""
    last = results[-1]
    if last.problem or last.seconds * samples > LONGEST_STEP_S:
        return False
    seconds = [result.seconds for result in results]
    earlier = seconds[:-PATIENCE]
    recent = seconds[-PATIENCE:]
    return not earlier or TOLERANCE * min(recent) <= min(earlier)


def measure(candidate: Candidate, world: World) -> Result:
    """Time a candidate on all ranks together, then free its memory.

    If a step fails on one rank while the other ranks wait for this rank, the other ranks wait until
    the watchdog ends the job.

    Raises:
        CollectiveError: the ranks lost their connection, so they cannot agree on a result.
    """
    world.set_phase(f"trial of {candidate.name}")
    steps = candidate.steps()
    seconds: list[float] = []
    problem = ""
    # first a step on this rank alone; then 1 untimed and STEPS timed steps with all ranks
    for _ in range(2 + STEPS):
        started = time.perf_counter()
        local_problem = ""
        try:
            next(steps)
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
        except CollectiveError:
            raise
        # torch raises a RuntimeError if there is not enough memory
        except (RuntimeError, ValueError, MemoryError) as error:
            local_problem = one_line(error, named=False)
            logger.info("trial failed: %s", local_problem)
        seconds.append(time.perf_counter() - started)
        world.heartbeat()
        problems = all_gather_json(local_problem, world)
        problem = next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text), "")
        if problem:
            break
    steps = iter(())  # close the iterator: the next candidate needs its memory
    clear_gpu_memory()
    if problem:
        return Result(candidate.name, problem=problem)
    # use the shortest step: other programs on the machine can only make steps longer
    shortest_s = all_gather_json(min(seconds[2:]), world)
    result = Result(candidate.name, max(shortest_s) / candidate.samples)
    logger.info("%s", result)
    return result


def doublings(sizes: Iterable[int]) -> Iterator[int]:
    """Yield the first size, then each size that is at least twice the last yielded size."""
    last = 0
    for size in sizes:
        if size >= 2 * last:
            last = size
            yield size


def fastest_batch_size(
    try_step: Callable[[int], object], sizes: Iterable[int], world: World | None = None
) -> int:
    """Return the smallest batch size whose speed is about the highest.

        def try_step(size):  # forward, backward, optimizer on `size` samples; no collective calls
            optimizer.zero_grad()
            criterion(model(inputs(size)), targets(size)).backward()
            optimizer.step()

        size = fastest_batch_size(try_step, range(8, 65_537, 8))

    This function doubles the size until a batch would leave less than a tenth of the memory free,
    or until larger batches are no faster. With a `world`, every rank must call this function. All
    ranks get the same result: the slowest rank determines the time of a size, and a batch must fit
    into the memory of every rank. `try_step` changes the model, so give it a copy of the model that
    is not wrapped for distributed training.

    Args:
        try_step: takes one training step with the given number of samples, without collective
            calls.
        sizes: allowed batch sizes of one rank in ascending order, such as a range.
        world: the ranks that choose a common size; None: choose for this process only.

    Raises:
        UserError: even the first size does not work.
    """
    if world is None:
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        world = World(0, 0, 1, device, "gloo", 1)

    def steps(size: int) -> Iterator[None]:
        # a batch of this size shows that enough memory would remain free
        try_step(math.ceil(size / USABLE_SHARE))
        yield
        while True:
            try_step(size)
            yield

    candidates = (Candidate(str(size), partial(steps, size), size) for size in doublings(sizes))
    best, results = fastest(candidates, world, growing=True)
    if best is None:
        raise UserError(f"not even the smallest batch size works: {results[0]}", exit_code=1)
    return int(best.name)
