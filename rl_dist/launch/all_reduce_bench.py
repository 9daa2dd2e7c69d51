"""Ranks that reduce: does it work, is the sum right, how long does it take?

    measured = measure_all_reduce(2, [1024, 2**20])
    measured.seconds  # {1024: 0.0002, 1048576: 0.0011}

The ranks are those of training: started by `rl_dist.launch`, joined by `open_world`, wrapped by `wrap`. They run
in a subprocess of their own, so that this may be called from anywhere, and so that nothing they do (a hang, an abort
inside NCCL) can take the caller along.
"""

from __future__ import annotations

import json
import re
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

from rl_dist.errors import UserError
from rl_dist.launch.child_process import errors_of, kill_group, start
from rl_dist.launch.launcher import launch
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.collectives import agree_max, check_in_sync, gather_json
from rl_dist.process_group.hashes import parameter_hash
from rl_dist.process_group.world import World, close_world, open_world

WARM_UP, LEAST_REPEATS = 2, 5
SIZE_BUDGET_S = 0.5  # for the repetitions of one size, once there are LEAST_REPEATS
DDP_STEPS = 8
GO = "go"  # the file that lets the ranks begin
RUN = "import sys; from {0} import run_rank; from {1} import run; sys.exit(run(run_rank, sys.argv[1]))"


class BenchFailed(Exception):
    """The ranks failed or hung; the message is for the user."""


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
    reduction_s: float  # median of the shortest wait for the mean of the gradients: the wait of the last to come
    parameter_sha256: str


@dataclass(frozen=True)
class Measured:
    """What `measure_all_reduce` found; every sum was verified."""

    num_ranks: int
    device_type: str
    backend: str
    threads: int  # of each rank
    times: tuple[SizeTime, ...]
    ddp: DdpSteps | None = None

    @property
    def seconds(self) -> dict[int, float]:
        """Median seconds by size in bytes."""
        return {item.size_bytes: item.median_s for item in self.times}


def measure_all_reduce(
    num_ranks: int,
    sizes_bytes: Sequence[int],
    device_type: str = "cpu",
    repeats: int = 30,
    threads: int = 0,
    *,
    gradient_bytes: int = 0,
    timeout_s: float = 180.0,
    meanwhile: Callable[[], None] | None = None,
    gpu_ids: Sequence[int] = (),
) -> Measured:
    """Time an all-reduce of each size over ranks here, after verifying its sum.

    Args:
        num_ranks: processes to start; with device_type "cuda" one GPU each.
        sizes_bytes: multiples of 4 (float32).
        repeats: at most; long ones are repeated less often.
        threads: of each rank; 0: as many as training would use.
        gradient_bytes: also take DDP steps with a module of this size and compare the parameters; 0: no.
        timeout_s: for everything, the start of the ranks included, `meanwhile` not.
        meanwhile: called while the ranks start; they do not measure before it has returned.
        gpu_ids: of the ranks; none: rank i takes number i.

    Raises:
        UserError: impossible arguments, or more ranks than GPUs.
        BenchFailed: a wrong sum, a rank that died, or no end in time.
    """
    wrong = [size for size in (*sizes_bytes, gradient_bytes) if size < 0 or size % 4]
    if wrong or num_ranks < 1 or repeats < 1:
        raise UserError(f"num_ranks {num_ranks} and repeats {repeats} must be at least 1, sizes multiples of 4 {wrong}")
    gpus = torch.cuda.device_count() if device_type == "cuda" else num_ranks
    if num_ranks > gpus:
        raise UserError(f"device cuda: {num_ranks} ranks need a GPU each, but torch sees {gpus}")
    with tempfile.TemporaryDirectory(prefix="all_reduce_") as folder:
        asked = {
            "num_ranks": num_ranks,
            "sizes_bytes": list(sizes_bytes),
            "device_type": device_type,
            "repeats": repeats,
            "threads": threads,
            "gradient_bytes": gradient_bytes,
            "timeout_s": timeout_s,
            "gpu_ids": list(gpu_ids),
            "out": f"{folder}/measured.json",
        }
        run_to_end(asked, folder, timeout_s, meanwhile=meanwhile)
        return _read(json.loads(Path(folder, "measured.json").read_text()))


def run_to_end(
    asked: dict[str, Any],
    folder: str,
    timeout_s: float,
    module: str = __name__,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """Let ranks do a module's `run_rank` with `asked`, in a subprocess; wait."""
    errors = Path(folder, "stderr")
    with errors.open("wb") as stderr:
        job = start(
            ["-c", RUN.format(module, __name__), json.dumps(asked)],
            path=Path(__file__).resolve().parents[2],
            variables={"TMPDIR": folder},
            stdout=stderr,
            stderr=stderr,
        )
    try:
        if meanwhile is not None:
            meanwhile()
        Path(folder, GO).touch()
        code: int | None = job.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        kill_group(job)
    if code == 0:
        return
    lines = [line.strip() for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    told = errors_of(lines)
    if code == 2 and told:
        raise UserError(told[-1])
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]  # more than "see the traceback"
    said = "".join(f": {line}" for line in (raised or told or lines)[-1:])
    what = f"did not end within {timeout_s:g} s" if code is None else f"failed with code {code}"
    raise BenchFailed(f"an all-reduce over {asked['num_ranks']} {asked['device_type']} ranks {what}{said}")


def _read(found: dict[str, Any]) -> Measured:
    found["times"] = tuple(SizeTime(**item) for item in found["times"])
    found["ddp"] = found["ddp"] and DdpSteps(**found["ddp"])
    return Measured(**found)


# ---- in the subprocess


def run(rank_main: Callable[[dict[str, Any]], None], asked: str) -> int:
    """Start ranks, as asked in JSON; returns the exit code."""
    parameters = json.loads(asked)
    return launch(rank_main, (parameters,), parameters["num_ranks"])


def run_rank(asked: dict[str, Any]) -> None:
    """What every rank does."""
    world = open_world(asked["device_type"], max(asked["timeout_s"] / 2, 1.0), asked["gpu_ids"])
    if asked["threads"]:
        torch.set_num_threads(asked["threads"])
    world.enter("all-reduce")
    go = Path(asked["out"]).with_name(GO)
    while not go.exists():
        world.beat()
        time.sleep(0.02)
    times = [_time_size(size, asked["repeats"], world) for size in asked["sizes_bytes"]]
    ddp = _ddp_steps(asked["gradient_bytes"], world) if asked["gradient_bytes"] else None
    measured = Measured(
        num_ranks=world.size,
        device_type=world.device.type,
        backend=world.backend,
        threads=torch.get_num_threads(),
        times=tuple(times),
        ddp=ddp,
    )
    if world.main:
        Path(asked["out"]).write_text(json.dumps(asdict(measured)))
    close_world(world)


def _time_size(size_bytes: int, repeats: int, world: World) -> SizeTime:
    """Verify and time one size; all ranks repeat it equally often."""
    values = _pattern(size_bytes // 4, world).add_(world.rank)  # sums of these are exact
    buffer = torch.empty_like(values)
    warm_s = 0.0
    for _ in range(WARM_UP):
        warm_s = _time_once(buffer, values, world)
    slowest_us = agree_max(int(warm_s * 1e6), world) + 1
    repeats = min(repeats, max(LEAST_REPEATS, int(SIZE_BUDGET_S * 1e6 / slowest_us)))
    own = [_time_once(buffer, values, world) for _ in range(repeats)]
    _verify(buffer, world)
    slowest = [max(of_ranks) for of_ranks in zip(*gather_json(own, world), strict=True)]
    lower, median, upper = statistics.quantiles(slowest, n=4, method="inclusive") if repeats > 1 else slowest * 3
    return SizeTime(size_bytes, median, lower, upper, repeats)


def _pattern(count: int, world: World) -> Tensor:
    """Small whole numbers that differ by place."""
    return torch.arange(7.0, device=world.device).repeat(count // 7 + 1)[:count]


def _time_once(buffer: Tensor, values: Tensor, world: World) -> float:
    buffer.copy_(values)
    agree_max(0, world)  # all are here
    _finish_queued(world)
    started_s = time.perf_counter()
    dist.all_reduce(buffer)
    _finish_queued(world)
    elapsed_s = time.perf_counter() - started_s
    world.beat()
    return elapsed_s


def _finish_queued(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _verify(buffer: Tensor, world: World) -> None:
    ranks = world.size
    expected = _pattern(buffer.numel(), world).mul_(ranks).add_(ranks * (ranks - 1) // 2)
    wrong = int((buffer != expected).sum())
    if wrong:
        raise RuntimeError(
            f"rank {world.rank}: {wrong} of {buffer.numel()} sums of an all-reduce over {world.backend} are wrong"
        )


class Weights(nn.Module):
    """Parameters in a few tensors; the gradient of each is the input."""

    def __init__(self, count: int, parts: int = 1) -> None:
        super().__init__()
        sizes = [len(part) for part in torch.arange(count).tensor_split(parts) if len(part)]
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, value: Tensor) -> Tensor:
        """The loss."""
        return torch.stack([(weight * value).sum() for weight in self.weights]).sum()


def _ddp_steps(gradient_bytes: int, world: World) -> DdpSteps:
    """Take steps whose result is known: every step subtracts the mean of the ranks' gradients, 1..N."""
    module = Weights(gradient_bytes // 4).to(world.device)
    wrapped = Strategy(StrategyConfig(mode="ddp"), world).wrap(module)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    steps, waits = [], []
    for _ in range(DDP_STEPS):
        agree_max(0, world)
        world.gradient_seconds = 0.0
        _finish_queued(world)
        started_s = time.perf_counter()
        loss = wrapped(torch.tensor(world.rank + 1.0, device=world.device))
        optimizer.zero_grad(set_to_none=True)
        with world.reducing():
            loss.backward()
        optimizer.step()
        _finish_queued(world)
        steps.append(time.perf_counter() - started_s)
        waits.append(world.gradient_seconds)
    check_in_sync(dict(module.named_parameters()), world)
    expected = -DDP_STEPS * (world.size + 1) / 2
    weight = module.weights[0]
    if not torch.allclose(weight, torch.full_like(weight, expected), rtol=1e-6):
        got = weight.flatten()[0].item()
        raise RuntimeError(f"rank {world.rank}: DDP made parameters of {got:g}, {expected:g} is right")
    step_s = statistics.median(max(of_ranks) for of_ranks in zip(*gather_json(steps, world), strict=True))
    reduction_s = statistics.median(min(of_ranks) for of_ranks in zip(*gather_json(waits, world), strict=True))
    return DdpSteps(gradient_bytes, step_s, reduction_s, parameter_hash(module))
