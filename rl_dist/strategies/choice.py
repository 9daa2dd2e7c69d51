"""The strategy to train with: asked for, or measured.

    found = choose_strategy(config, Hardware(world.size), lambda mode: measure_mode(mode, ...))
    print(found.reason)  # strategy auto takes ddp, 12.3 ms a gradient step (hybrid, 30.1 ms ...

Every rank makes the same calls and comes to the same choice.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl_dist.errors import UserError, one_line
from rl_dist.machine import clear_gpu_memory
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import CollectiveError, World
from rl_dist.strategies.config import StrategyConfig, check_precision

TURNS = 2  # of auto over all candidates
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

    def __str__(self) -> str:
        if self.problem:
            return f"{self.mode} does not work here ({self.problem})"
        return f"{self.mode}, {1e3 * self.step_s:.3g} ms a gradient step"


@dataclass(frozen=True)
class ResolvedStrategy:
    """A decision, the same on all ranks."""

    mode: str
    reason: str = ""  # in one line; "" where there was nothing to choose


def choose_strategy(
    config: StrategyConfig, hardware: Hardware, attempt: Callable[[str], Measurement]
) -> ResolvedStrategy:
    """Decide the mode to train with; `attempt` measures one where that is asked for."""
    mode = check_strategy(config, hardware)
    if mode == "auto":
        return _fastest(_candidates(hardware), attempt)
    return ResolvedStrategy(mode)


def _candidates(hardware: Hardware) -> tuple[str, ...]:
    """Return the modes that auto chooses from, in order of preference."""
    if hardware.num_ranks > 1:
        return "ddp", "hybrid"
    return ("none", "dp") if hardware.num_devices > 1 else ("none",)


def _fastest(modes: tuple[str, ...], attempt: Callable[[str], Measurement]) -> ResolvedStrategy:
    """Take the fastest mode; an earlier one unless a later one is clearly faster."""
    if len(modes) == 1:
        return ResolvedStrategy(modes[0], f"strategy auto takes {modes[0]}: there is no other here")
    # A mode that fails in any turn is left out. Else the better turn counts: other load only slows.
    measured = [attempt(mode) for mode in modes * TURNS]
    turns = [measured[place :: len(modes)] for place in range(len(modes))]
    outcomes = [min(turn, key=lambda one: (not one.problem, one.step_s)) for turn in turns]
    best: Measurement | None = None
    for one in outcomes:
        if not one.problem and (best is None or one.step_s < best.step_s * (1.0 - CLEAR_GAIN)):
            best = one
    if best is None:
        problems = "; ".join(map(str, outcomes))
        raise UserError(f"strategy auto found none that works: {problems}", exit_code=1)
    others = "; ".join(str(one) for one in outcomes if one is not best)
    return ResolvedStrategy(best.mode, f"strategy auto takes {best} ({others})")


def check_strategy(config: StrategyConfig, hardware: Hardware) -> str:
    """Return the mode that a configuration means on this hardware."""
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
    """Return how many ranks share one copy in mode hybrid; 0: this machine's."""
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


def measure_mode(
    mode: str, start: Callable[[str], Iterator[None]], world: World, steps: int = STEPS
) -> Measurement:
    """Try a mode on all ranks together; torch's random generators stay as they were.

    Args:
        start: a generator that sets the mode up as far as one rank can alone, wraps the module
            with the other ranks, goes forward and backward alone, to see that this fits in memory,
            and then takes one gradient step with the other ranks each time. A rank on which a part
            with the others fails alone leaves them waiting, until the watchdog ends the job.
        steps: to be timed; a third as many warm up.
    """
    world.set_phase(f"try of strategy {mode}")
    on_gpu = world.device.type == "cuda"
    parts = start(mode)
    seconds: list[float] = []

    def timed() -> None:
        for _ in range(steps // 3 + steps):
            started_s = time.perf_counter()
            next(parts)
            if on_gpu:
                torch.cuda.synchronize(world.device)
            seconds.append(time.perf_counter() - started_s)

    problem = ""
    with torch.random.fork_rng([world.device] if on_gpu else []):
        for work in (*(lambda: next(parts),) * 3, timed):
            problem = problem or _together(work, world)
    # the next candidate finds the memory of this one
    parts = iter(())
    clear_gpu_memory()
    if problem:
        return Measurement(mode, problem)
    ranks = all_gather_json(seconds[-steps:], world)
    slowest = [max(values) for values in zip(*ranks, strict=True)]
    measurement = Measurement(mode, step_s=statistics.median(slowest))
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
        logger.info("try of a strategy", exc_info=True)
        problem = one_line(error, named=False) or type(error).__name__
    problems = all_gather_json(problem, world)
    failed = [rank for rank, one in enumerate(problems) if one]
    if not failed or world.size == 1:
        return problem
    return f"rank {failed[0]}: {problems[failed[0]]}"
