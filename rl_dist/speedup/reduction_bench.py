"""The cost of the collectives of training, once all ranks are there.

The ranks are those of training and reduce as it does: gradients through the hook of
DistributedDataParallel with the announcement before it, sums and gathers through the process
group's collectives. Between two of them every rank works for some milliseconds, as in training:
reductions in a tight loop find threads awake and caches warm, and look cheaper. The shortest wait
among the ranks is that of the one that came last: it waits for the transfer only.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_dist.launch.all_reduce_bench import Weights, run_ranks
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.collectives import all_gather_json, all_reduce_max, all_reduce_sum
from rl_dist.process_group.world import World, close_world, open_world

TENSORS = 16  # tensors of a module, a few as a network has them
WORK_S, WARM_UP, REPEATS = 0.004, 3, 30
# An iteration of training, besides its gradients; tests/speedup/test_calibration.py counts them in
# a real one.
SUMS = 4
GATHERS = 1
AGREEMENTS = 1
RECORD = {f"a number of a rank's record, the {i}th": i * 0.12345678901234567 for i in range(14)}


@dataclass(frozen=True)
class Reductions:
    """Median seconds that the last rank to come waits."""

    gradients_s: dict[int, float]  # by size in bytes
    small_s: float  # all sums, gathers and agreements of one iteration


def measure_reductions(
    ranks: int,
    gradient_bytes: list[int],
    device_type: str = "cpu",
    threads: int = 1,
    timeout_s: float = 180.0,
) -> Reductions:
    """Measure with ranks of this machine; raises as `run_ranks` does."""
    asked = {
        "num_ranks": ranks,
        "gradient_bytes": gradient_bytes,
        "device_type": device_type,
        "threads": threads,
    }
    found = run_ranks(asked, timeout_s, __name__)
    gradients_s = {int(size): seconds for size, seconds in found["gradients"].items()}
    return Reductions(gradients_s, found["small"])


# ---- in the ranks


def run_rank(asked: dict[str, Any]) -> None:
    """Reduce gradients of each size, and what else an iteration reduces."""
    world = open_world(asked["device_type"], 60.0)
    torch.set_num_threads(asked["threads"])
    world.set_phase("reductions")
    gradients = {size: _gradient_s(size, world) for size in asked["gradient_bytes"]}
    small_s = _last_comer_s(lambda: _small(world), world)
    if world.is_main_process:
        Path(asked["out"]).write_text(json.dumps({"gradients": gradients, "small": small_s}))
    close_world(world)


def _gradient_s(num_bytes: int, world: World) -> float:
    module = Weights(num_bytes // 4, TENSORS).to(world.device)
    wrapped = Strategy(StrategyConfig(mode="ddp"), world).wrap(module)
    value = torch.ones((), device=world.device)

    def reduce() -> None:
        loss = wrapped(value)
        wrapped.zero_grad(set_to_none=True)
        with world.reducing():
            loss.backward()

    return _last_comer_s(reduce, world)


def _small(world: World) -> None:
    """The sums, gathers and agreements of one iteration."""
    for _ in range(SUMS):
        all_reduce_sum({f"sum {i}": float(i) for i in range(8)}, world)
    for _ in range(GATHERS):
        all_gather_json(RECORD, world)
    for _ in range(AGREEMENTS):
        all_reduce_max(0, world)


def _last_comer_s(call: Callable[[], None], world: World) -> float:
    """Median over calls of the shortest wait among the ranks."""
    waits = []
    matrix = torch.full((256, 256), 0.01, device=world.device)
    for _ in range(WARM_UP + REPEATS):
        # some milliseconds of arithmetic; caches then hold something else
        until_s = time.perf_counter() + WORK_S
        while time.perf_counter() < until_s:
            matrix = (matrix @ matrix).tanh()
        world.sync_seconds = world.gradient_seconds = 0.0
        call()
        waits.append(world.sync_seconds + world.gradient_seconds)
        world.heartbeat()
    of_ranks = all_gather_json(waits[WARM_UP:], world)
    return statistics.median(min(wait) for wait in zip(*of_ranks, strict=True))
