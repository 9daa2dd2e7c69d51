"""Ranks that reduce: does it work, is the sum right, how long does it take?

    measured = measure_all_reduce(2, [1024, 2**20])
    measured.times[0].median_s  # 0.0002

The ranks are those of training: started by `rl_dist.launch`, joined by `open_world`, wrapped by
`wrap`. They run in a subprocess of their own, so that a hang or an abort inside NCCL cannot take
the caller along.
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
import torch.distributed as dist
from torch import Tensor, nn

from rl_dist.launch.child_process import Child
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.collectives import (
    all_gather_json,
    all_reduce_max,
    check_in_sync,
    parameter_hash,
)
from rl_dist.process_group.world import World, close_world, open_world

WARM_UP, LEAST_REPEATS = 2, 5
SIZE_BUDGET_S = 0.5  # for the repetitions of one size, once there are LEAST_REPEATS
DDP_STEPS = 8
GO, OUT = "go", "measured.json"  # files: GO lets the ranks begin
RUN = """import json, sys
from {module} import run_rank
from rl_dist.launch.launcher import launch
asked = json.loads(sys.argv[1])
sys.exit(launch(run_rank, (asked,), asked["num_ranks"]))"""


class BenchError(Exception):
    """The ranks failed or hung; the message is for the user."""


class BenchTimeoutError(BenchError):
    """The ranks did not end in time."""


@dataclass(frozen=True)
class SizeTime:
    """Seconds of one all-reduce, from all ranks ready to the last one done."""

    size_bytes: int
    median_s: float
    lower_s: float  # first quartile
    upper_s: float  # third quartile
    repeats: int


@dataclass(frozen=True)
class DdpSteps:
    """Real steps of DistributedDataParallel, whose parameters were right."""

    gradient_bytes: int
    step_s: float  # median of the slowest rank's: forward, backward, reduction, optimizer
    # median of the shortest wait for the mean of the gradients: the wait of the last to come
    reduction_s: float
    parameter_sha256: str


@dataclass(frozen=True)
class Measured:
    """The result of `measure_all_reduce`; every sum was verified."""

    num_ranks: int
    device_type: str
    backend: str
    threads: int  # of each rank
    times: tuple[SizeTime, ...]
    ddp: DdpSteps | None = None


def measure_all_reduce(
    num_ranks: int,
    sizes_bytes: Sequence[int],
    device_type: str = "cpu",
    repeats: int = 30,
    *,
    gradient_bytes: int = 0,
    timeout_s: float = 180.0,
    meanwhile: Callable[[], None] = lambda: None,
    gpu_ids: Sequence[int] = (),
) -> Measured:
    """Time an all-reduce of each size over ranks here, after verifying its sum.

    Args:
        sizes_bytes: multiples of 4 (float32).
        repeats: at most; long ones are repeated less often.
        gradient_bytes: also take DDP steps with a module of this size; 0: no.
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
        "repeats": repeats,
        "gradient_bytes": gradient_bytes,
        "timeout_s": timeout_s,
        "gpu_ids": list(gpu_ids),
    }
    found = run_ranks(asked, timeout_s, meanwhile=meanwhile)
    found["times"] = tuple(SizeTime(**item) for item in found["times"])
    found["ddp"] = found["ddp"] and DdpSteps(**found["ddp"])
    return Measured(**found)


def run_ranks(
    asked: dict[str, Any],
    timeout_s: float,
    module: str = __name__,
    meanwhile: Callable[[], None] = lambda: None,
) -> Any:
    """Let ranks do a module's `run_rank` in a subprocess; return their JSON.

    Args:
        asked: parameters for `run_rank`, with num_ranks and device_type; "out" is added.
    """
    who = f"an all-reduce over {asked['num_ranks']} {asked['device_type']} ranks"
    with tempfile.TemporaryDirectory(prefix="all_reduce_") as folder:
        out = Path(folder, OUT)
        child = Child(
            ["-c", RUN.format(module=module), json.dumps(asked | {"out": str(out)})],
            Path(folder),
            variables={"TMPDIR": folder},
        )
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
        return json.loads(out.read_text())


# ---- in the ranks


def run_rank(asked: dict[str, Any]) -> None:
    """Reduce every size, and take DDP steps if asked."""
    world = open_world(asked["device_type"], max(asked["timeout_s"] / 2, 1.0), asked["gpu_ids"])
    world.set_phase("all-reduce")
    while not Path(asked["out"]).with_name(GO).exists():
        world.heartbeat()
        time.sleep(0.02)
    measured = Measured(
        num_ranks=world.size,
        device_type=world.device.type,
        backend=world.backend,
        threads=torch.get_num_threads(),
        times=tuple(_time_size(size, asked["repeats"], world) for size in asked["sizes_bytes"]),
        ddp=_ddp_steps(asked["gradient_bytes"], world) if asked["gradient_bytes"] else None,
    )
    if world.is_main_process:
        Path(asked["out"]).write_text(json.dumps(asdict(measured)))
    close_world(world)


def _time_size(size_bytes: int, repeats: int, world: World) -> SizeTime:
    """Verify and time one size; all ranks repeat it equally often."""
    # small whole numbers that differ by place: sums of these are exact
    pattern = torch.arange(7.0, device=world.device).repeat(size_bytes // 28 + 1)[: size_bytes // 4]
    values = pattern + world.rank
    buffer = torch.empty_like(values)
    warm_s = [_time_once(buffer, values, world) for _ in range(WARM_UP)]
    slowest_us = all_reduce_max(int(warm_s[-1] * 1e6), world) + 1
    repeats = min(repeats, max(LEAST_REPEATS, int(SIZE_BUDGET_S * 1e6 / slowest_us)))
    own = [_time_once(buffer, values, world) for _ in range(repeats)]
    wrong = int((buffer != pattern * world.size + sum(range(world.size))).sum())
    if wrong:
        raise RuntimeError(
            f"rank {world.rank}: {wrong} of {buffer.numel()} sums of an all-reduce over "
            f"{world.backend} are wrong"
        )
    slowest = [max(of_ranks) for of_ranks in zip(*all_gather_json(own, world), strict=True)]
    quartiles = slowest * 3
    if repeats > 1:
        quartiles = statistics.quantiles(slowest, n=4, method="inclusive")
    lower, median, upper = quartiles
    return SizeTime(size_bytes, median, lower, upper, repeats)


def _time_once(buffer: Tensor, values: Tensor, world: World) -> float:
    buffer.copy_(values)
    all_reduce_max(0, world)  # all are here
    world.synchronize()
    started_s = time.perf_counter()
    dist.all_reduce(buffer)
    world.synchronize()
    elapsed_s = time.perf_counter() - started_s
    world.heartbeat()
    return elapsed_s


class Weights(nn.Module):
    """Parameters in a few tensors; the gradient of each is the input."""

    def __init__(self, count: int, tensors: int = 1) -> None:
        super().__init__()
        sizes = [len(part) for part in torch.arange(count).tensor_split(tensors) if len(part)]
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, value: Tensor) -> Tensor:
        """Return the loss."""
        return torch.stack([(weight * value).sum() for weight in self.weights]).sum()


def _ddp_steps(gradient_bytes: int, world: World) -> DdpSteps:
    """Take steps whose result is known: each subtracts the mean of the ranks' gradients, 1..N."""
    module = Weights(gradient_bytes // 4).to(world.device)
    wrapped = Strategy(StrategyConfig(mode="ddp"), world).wrap(module)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    steps, waits = [], []
    for _ in range(DDP_STEPS):
        all_reduce_max(0, world)
        world.gradient_seconds = 0.0
        world.synchronize()
        started_s = time.perf_counter()
        loss = wrapped(torch.tensor(world.rank + 1.0, device=world.device))
        optimizer.zero_grad(set_to_none=True)
        with world.reducing():
            loss.backward()
        optimizer.step()
        world.synchronize()
        steps.append(time.perf_counter() - started_s)
        waits.append(world.gradient_seconds)
    check_in_sync(dict(module.named_parameters()), world)
    expected = -DDP_STEPS * (world.size + 1) / 2
    weight = module.weights[0]
    if not torch.allclose(weight, torch.full_like(weight, expected), rtol=1e-6):
        raise RuntimeError(
            f"rank {world.rank}: DDP made parameters of {weight[0].item():g}, {expected:g} is right"
        )
    of_ranks = all_gather_json([steps, waits], world)
    slowest = [max(each) for each in zip(*(rank[0] for rank in of_ranks), strict=True)]
    shortest = [min(each) for each in zip(*(rank[1] for rank in of_ranks), strict=True)]
    return DdpSteps(
        gradient_bytes,
        step_s=statistics.median(slowest),
        reduction_s=statistics.median(shortest),
        parameter_sha256=parameter_hash(module),
    )
