"""Ranks that reduce as training does: verified, and timed.

    found = time_reductions(2, [1024, 2**20])
    found.gradients_s[1024]  # 0.0002

The ranks are those of training: started by `rl_dist.launch`, joined by `open_world`, wrapped by
`wrap`. They run in a subprocess of their own, so that a hang or an abort inside NCCL cannot take
the caller along. Before every reduction each rank works for some milliseconds: in a tight loop
reductions find threads awake and caches warm, and look cheaper. The shortest wait among the ranks
is that of the one that came last: it waits for the transfer only.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_dist.launch.child import Child
from rl_dist.process_group.collectives import all_gather_json, all_reduce_max, all_reduce_sum
from rl_dist.process_group.world import World, close_world, open_world
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy

TENSORS = 16  # of a module, a few as a network has them
WORK_S, WARM_UP, REPEATS, LEAST_REPEATS = 0.004, 3, 30, 5
SIZE_BUDGET_S = 0.5  # for the repetitions of one size, once there are LEAST_REPEATS
# An iteration of training, besides its gradients; tests/speedup/test_estimate.py counts them in
# a real one.
SUMS, GATHERS = 2, 1
RECORD = {f"a number of a rank's record, the {i}th": i * 0.12345678901234567 for i in range(14)}
GO, OUT = "go", "measured.json"  # files: GO lets the ranks begin
RUN = """import json, sys
from rl_dist.launch.bench import run_rank
from rl_dist.launch.ranks import launch
asked = json.loads(sys.argv[1])
sys.exit(launch(run_rank, (asked,), asked["num_ranks"]))"""


class BenchError(Exception):
    """The ranks failed or hung; the message is for the user."""


class BenchTimeoutError(BenchError):
    """The ranks did not end in time."""


@dataclass(frozen=True)
class Reductions:
    """Median seconds that the last rank to come waits; every gradient was verified."""

    num_ranks: int
    device_type: str
    backend: str
    threads: int  # of each rank
    gradients_s: dict[int, float]  # by size in bytes
    small_s: float  # all sums and gathers of one iteration


def time_reductions(
    num_ranks: int,
    sizes_bytes: Sequence[int],
    device_type: str = "cpu",
    *,
    timeout_s: float = 180.0,
    meanwhile: Callable[[], None] = lambda: None,
    gpu_ids: Sequence[int] = (),
) -> Reductions:
    """Time reductions of gradients of each size, and small collectives.

    Args:
        sizes_bytes: of float32 gradients.
        timeout_s: for everything, the start of the ranks included, `meanwhile` not.
        meanwhile: called while the ranks start; they do not measure before it has returned.
        gpu_ids: of the ranks; none: rank i takes number i.

    Raises:
        UserError: more ranks than GPUs.
        BenchError: a wrong sum, a rank that died, or no end in time (BenchTimeoutError).
    """
    asked = {
        "num_ranks": num_ranks,
        "sizes_bytes": list(sizes_bytes),
        "device_type": device_type,
        "timeout_s": timeout_s,
        "gpu_ids": list(gpu_ids),
    }
    who = f"an all-reduce over {num_ranks} {device_type} ranks"
    with tempfile.TemporaryDirectory(prefix="all_reduce_") as folder:
        out = Path(folder, OUT)
        words = ["-c", RUN, json.dumps(asked | {"out": str(out)})]
        child = Child(words, Path(folder), variables={"TMPDIR": folder})
        try:
            meanwhile()
            Path(folder, GO).touch()
            code = child.job.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise BenchTimeoutError(f"{who} did not end within {timeout_s:g} s") from None
        finally:
            child.kill()
        if code:
            raise BenchError(f"{who} failed with code {code}: {child.error()}")
        found = json.loads(out.read_text())
    found["gradients_s"] = {int(size): s for size, s in found["gradients_s"].items()}
    return Reductions(**found)


# ---- in the ranks


def run_rank(asked: dict[str, Any]) -> None:
    """Reduce gradients of each size, and what else an iteration reduces."""
    world = open_world(asked["device_type"], max(asked["timeout_s"] / 2, 1.0), asked["gpu_ids"])
    world.set_phase("all-reduce")
    while not Path(asked["out"]).with_name(GO).exists():
        world.heartbeat()
        time.sleep(0.02)
    found = Reductions(
        num_ranks=world.size,
        device_type=world.device.type,
        backend=world.backend,
        threads=torch.get_num_threads(),
        gradients_s={size: _gradient_s(size, world) for size in asked["sizes_bytes"]},
        small_s=_last_comer_s(lambda: _small(world), world),
    )
    if world.is_main_process:
        Path(asked["out"]).write_text(json.dumps(asdict(found)))
    close_world(world)


class Weights(nn.Module):
    """Parameters in a few tensors, whose gradients differ by place."""

    def __init__(self, count: int) -> None:
        super().__init__()
        sizes = [len(part) for part in torch.arange(count).tensor_split(TENSORS) if len(part)]
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, value: Tensor) -> Tensor:
        """Return the loss."""
        sums = [(weight * by_place(weight)).sum() for weight in self.weights]
        return torch.stack(sums).sum() * value


def by_place(weight: Tensor) -> Tensor:
    """1 to 7, over and over: what a weight's gradient is for a value of 1."""
    return torch.arange(len(weight), device=weight.device) % 7 + 1.0


def _gradient_s(num_bytes: int, world: World) -> float:
    """Time one size; of rank i every gradient is i + 1 times that by place."""
    module = Weights(max(1, num_bytes // 4)).to(world.device)
    wrapped = Strategy(StrategyConfig(mode="ddp"), world).wrap(module)
    value = torch.tensor(world.rank + 1.0, device=world.device)

    def reduce() -> None:
        loss = wrapped(value)
        wrapped.zero_grad(set_to_none=True)
        with world.reduction_context():
            loss.backward()

    found_s = _last_comer_s(reduce, world)
    for weight in module.weights:
        mean = by_place(weight) * (world.size + 1) / 2
        if weight.grad is None or not torch.allclose(weight.grad, mean):
            raise RuntimeError(
                f"rank {world.rank}: an all-reduce of {num_bytes} bytes over {world.backend} "
                "gave wrong sums"
            )
    return found_s


def _small(world: World) -> None:
    """The sums and gathers of one iteration."""
    for _ in range(SUMS):
        all_reduce_sum({f"sum {i}": float(i) for i in range(8)}, world)
    for _ in range(GATHERS):
        all_gather_json(RECORD, world)


def _last_comer_s(call: Callable[[], None], world: World) -> float:
    """Median over calls of the shortest wait among the ranks."""
    matrix = torch.full((256, 256), 0.01, device=world.device)

    def wait_s() -> float:
        # some milliseconds of arithmetic; caches then hold something else
        until_s, found = time.perf_counter() + WORK_S, matrix
        while time.perf_counter() < until_s:
            found = (found @ found).tanh()
        world.forget_waits()
        call()
        world.heartbeat()
        return world.sync_seconds + world.gradient_seconds

    for _ in range(WARM_UP):
        started_s = time.perf_counter()
        wait_s()
        slowest_us = int((time.perf_counter() - started_s) * 1e6) + 1
    fitting = int(SIZE_BUDGET_S * 1e6 / all_reduce_max(slowest_us, world))
    waits = [wait_s() for _ in range(min(REPEATS, max(LEAST_REPEATS, fitting)))]
    of_ranks = all_gather_json(waits, world)
    return statistics.median(min(of_call) for of_call in zip(*of_ranks, strict=True))
