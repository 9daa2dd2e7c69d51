"""The strategy to train with, decided by `resolve_strategy` alone.

    found = choose_strategy(StrategyConfig(mode="auto"), Hardware(world.size), measure_one)
    print(found.reason)  # strategy auto takes ddp, 12.3 ms a gradient step (hybrid, 30.1 ms ...

Every rank makes the same calls and comes to the same choice.
"""

from __future__ import annotations

import gc
import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl_dist.errors import UserError
from rl_dist.parallel.config import StrategyConfig, check_precision
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import CollectiveError, World

LADDER = ("hybrid", "ddp", "dp", "none")  # what --fallback steps down
TURNS = 2  # of auto over all candidates
WARM_UP = 2
STEPS = 6
CLEAR_GAIN = 0.05  # a later candidate must be faster by this, to be worth more than the noise
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hardware:
    """Ranks and their devices."""

    num_ranks: int
    device_type: str = "cpu"
    num_devices: int = 0  # GPUs of this process, if it is the only one


@dataclass(frozen=True)
class Measurement:
    """The outcome of trying a mode, the same on all ranks."""

    mode: str
    problem: str = ""  # why it does not work here
    step_s: float = 0.0  # median over gradient steps of the slowest rank's
    peak_bytes: int = 0  # most GPU memory of a rank; 0: not measured, on the CPU

    def __str__(self) -> str:
        if self.problem:
            return f"{self.mode} does not work here ({self.problem})"
        memory = f", {self.peak_bytes / 2**30:.2f} GiB" if self.peak_bytes else ""
        return f"{self.mode}, {1e3 * self.step_s:.3g} ms a gradient step{memory}"


@dataclass(frozen=True)
class ResolvedStrategy:
    """A decision, or what has to be tried before there is one."""

    mode: str  # "": none yet
    reason: str = ""  # in one line; "" where there was nothing to choose
    to_try: tuple[str, ...] = ()


def resolve_strategy(
    config: StrategyConfig,
    hardware: Hardware | None,
    measured: Sequence[Measurement] = (),
    *,
    fallback: bool = False,
) -> ResolvedStrategy:
    """Decide the mode to train with; changes nothing.

    Args:
        hardware: None where ranks are yet to be started, and any number of them can be.
        measured: what was asked for by `to_try` before.
        fallback: take the next mode of LADDER where one does not work.

    Raises:
        UserError: the configuration cannot be on this hardware, or nothing that was tried works.
    """
    mode = check_strategy(config, hardware) if hardware else config.mode
    modes = _candidates(mode, hardware, fallback)
    # one after the other, until one works
    if mode != "auto" or not hardware:
        if len(modes) == 1:
            return ResolvedStrategy(modes[0])
        failed = "; ".join(str(one) for one in measured if one.problem)
        if measured and not measured[-1].problem:
            reason = f"{failed}: fallback to strategy {measured[-1].mode}" if failed else ""
            return ResolvedStrategy(measured[-1].mode, reason)
        if len(measured) == len(modes):
            raise UserError(f"no strategy works: {failed}", exit_code=1 if hardware else 2)
        return ResolvedStrategy("", to_try=(modes[len(measured)],))
    # all of them, in turns
    if len(modes) == 1:
        reason = f"there is no other for {hardware.num_ranks} rank(s) here"
        return ResolvedStrategy(modes[0], f"strategy auto takes {modes[0]}: {reason}")
    if not measured:
        return ResolvedStrategy("", to_try=modes * TURNS)
    return _fastest(modes, measured)


def _candidates(mode: str, hardware: Hardware | None, fallback: bool) -> tuple[str, ...]:
    """The modes that may come of one, in order of preference."""
    here: tuple[str, ...] = LADDER
    if hardware and hardware.num_ranks > 1:
        here = ("ddp", "hybrid")
    elif hardware:
        here = ("none", "dp") if hardware.num_devices > 1 else ("none",)
    if mode == "auto" and hardware:
        return here
    below = LADDER[LADDER.index(mode if mode in LADDER else "ddp") + 1 :] if fallback else ()
    return (mode, *(one for one in below if one in here))


def _fastest(modes: Sequence[str], measured: Sequence[Measurement]) -> ResolvedStrategy:
    """Take the fastest mode; an earlier one unless a later one is clearly faster."""
    # A mode that fails in any turn is left out. Else the better turn counts: other load only slows.
    turns = [[one for one in measured if one.mode == mode] for mode in modes]
    outcomes = [min(turn, key=lambda one: (not one.problem, one.step_s)) for turn in turns]
    best: Measurement | None = None
    for one in outcomes:
        if not one.problem and (best is None or one.step_s < best.step_s * (1.0 - CLEAR_GAIN)):
            best = one
    if best is None:
        problems = "; ".join(map(str, outcomes))
        raise UserError(f"strategy auto found none that works: {problems}", exit_code=1)
    others = "; ".join(str(one) for one in outcomes if one is not best)
    how = f"the better of {TURNS} turns of {STEPS} steps each"
    return ResolvedStrategy(best.mode, f"strategy auto takes {best} ({others}), {how}")


def check_strategy(config: StrategyConfig, hardware: Hardware) -> str:
    """Return the mode that a configuration means on this hardware.

    Raises:
        UserError: it cannot work there, or part of it has no effect; names the fix.
    """
    ranks, device_type, mode = hardware.num_ranks, hardware.device_type, config.mode
    if mode == "default":
        mode = "ddp" if ranks > 1 else "none"
    here = f"{mode} on {ranks} rank(s)"
    auto, uses_ddp = mode == "auto", mode == "ddp" or (mode == "auto" and ranks > 1)
    backend, compression = config.backend, config.gradient_compression
    devices = dist.Backend.backend_capability.get(backend, [device_type])
    # each: does it apply, the problem, the fix
    rules = (
        (mode in ("none", "dp") and ranks > 1,
         f"strategy {mode} works in one process, got {ranks} ranks", "use --strategy ddp"),
        (mode == "dp" and device_type != "cuda",
         "strategy dp needs CUDA GPUs, and there is none here", "use --strategy none"),
        (mode == "dp" and hardware.num_devices < 2,
         f"strategy dp needs at least 2 GPUs, got {hardware.num_devices}", "use --strategy none"),
        (config.pipelined and ranks % 2,
         f"hybrid_form pipeline works on pairs of ranks, got {ranks}", "use --strategy ddp"),
        (auto and ranks == 1 and config.shard_size,
         "shard_size does nothing on one rank", "use --shard_size 0"),
        (compression != "none" and not uses_ddp,
         f"gradient_compression {compression} needs strategy ddp, got {here}",
         "use --gradient_compression none"),
        (backend and not uses_ddp,
         f"backend {backend} needs strategy ddp, got {here}", "leave it empty"),
        (backend and not dist.is_backend_available(backend),
         f"backend {backend} is not part of this torch", "leave it empty"),
        (device_type not in devices,
         f"backend {backend} works on {devices}, not on {device_type}", "leave it empty"),
        (config.precision == "fp16" and mode == "hybrid",
         "precision fp16 does not work with strategy hybrid", "use --precision bf16"),
        (config.cudnn_autotune and device_type != "cuda",
         "cudnn_autotune does nothing without a GPU", "leave it out"),
    )  # fmt: skip
    for applies, problem, fix in rules:
        if applies:
            raise UserError(f"{problem}: {fix}")
    if (mode == "hybrid" and not config.pipelined) or (auto and config.shard_size):
        resolve_shard_size(config.shard_size, ranks)
    check_precision(config.precision, device_type)
    return mode


def resolve_shard_size(shard_size: int, num_ranks: int) -> int:
    """Return how many ranks share one copy in mode hybrid; 0: this machine's.

    Raises:
        UserError: it does not divide the ranks, or there is nothing to share out.
    """
    if num_ranks == 1:
        raise UserError("strategy hybrid needs several ranks, got 1: use --strategy none")
    size = shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    fitting = ", ".join(str(n) for n in range(2, num_ranks + 1) if num_ranks % n == 0)
    if size == 1:
        raise UserError(
            "strategy hybrid in groups of one rank is ddp: "
            f"use --strategy ddp, or --shard_size {fitting}"
        )
    if num_ranks % size:
        raise UserError(
            f"shard_size {size} does not divide {num_ranks} ranks: use --shard_size {fitting}"
        )
    return size


@dataclass(frozen=True)
class Candidate:
    """A mode that is set up, as far as one rank can alone.

    A rank on which `wrap` or `step` fails alone leaves the others waiting, until the watchdog ends
    the job. What can fail on one rank belongs in the function that returns this, or in `alone`.
    """

    wrap: Callable[[], None]  # with the other ranks
    alone: Callable[[], None]  # forward and backward of a step, to see that they fit in memory
    step: Callable[[], None]  # a gradient step with the other ranks


def choose_strategy(
    config: StrategyConfig,
    hardware: Hardware | None,
    attempt: Callable[[str], Measurement],
    *,
    fallback: bool = False,
) -> ResolvedStrategy:
    """Measure until `resolve_strategy` comes to a decision; raises as it does."""
    measured: list[Measurement] = []
    while (found := resolve_strategy(config, hardware, measured, fallback=fallback)).to_try:
        measured += [attempt(mode) for mode in found.to_try]
    return found


def measure_mode(
    mode: str,
    start: Callable[[str], Candidate],
    world: World,
    warm_up: int = WARM_UP,
    steps: int = STEPS,
) -> Measurement:
    """Try a mode on all ranks together; torch's random generators stay as they were."""
    world.set_phase(f"trial of strategy {mode}")
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(world.device)
    tried: list[Candidate] = []
    seconds: list[float] = []

    def timed() -> None:
        for _ in range(warm_up + steps):
            started_s = time.perf_counter()
            tried[0].step()
            if on_gpu:
                torch.cuda.synchronize(world.device)
            seconds.append(time.perf_counter() - started_s)

    stages = (
        lambda: tried.append(start(mode)),
        lambda: tried[0].wrap(),
        lambda: tried[0].alone(),
        timed,
    )
    problem = ""
    with torch.random.fork_rng([world.device] if on_gpu else []):
        for stage in stages:
            problem = problem or _together(stage, world)
    peak_bytes = torch.cuda.max_memory_allocated(world.device) if on_gpu else 0
    # the next candidate finds the memory of this one
    tried.clear()
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    if problem:
        return Measurement(mode, problem)
    ranks = all_gather_json([peak_bytes, *seconds[warm_up:]], world)
    peak_bytes, *slowest = [max(values) for values in zip(*ranks, strict=True)]
    measurement = Measurement(mode, step_s=statistics.median(slowest), peak_bytes=peak_bytes)
    logger.info("%s", measurement)
    return measurement


def _together(work: Callable[[], None], world: World) -> str:
    """Do something on all ranks; return why it failed on one of them, the same on all.

    Raises:
        CollectiveError: the ranks lost each other, after which nothing can be agreed.
    """
    problem = ""
    try:
        work()
    except CollectiveError:
        raise
    except (RuntimeError, ValueError, MemoryError) as error:  # out of memory is a RuntimeError
        logger.info("strategy trial", exc_info=True)
        problem = " ".join(f"{error}".split())[:300] or type(error).__name__
    problems = all_gather_json(problem, world)
    failed = [rank for rank, one in enumerate(problems) if one]
    if not failed or world.size == 1:
        return problem
    return f"rank {failed[0]}: {problems[failed[0]]}"
