"""Time the reduction of gradients over ranks, and verify its results.

    time_reductions(2, [1024, 2**20])[1024]  # 0.0002

The ranks start, join and reduce as in real training, but in a subprocess, so that the caller
survives a hang or an abort inside NCCL. Before every reduction, each rank computes for some
milliseconds. Without this work, threads would be awake and caches warm, and reductions would be
faster than in training. The time of a reduction is the shortest wait of any rank, because the last
rank to arrive waits only for the transfer.
"""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from rl_dist.errors import report_to_caller
from rl_dist.launch.child import Child, ChildError, ChildTimeoutError
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World, close_world, open_world
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy

WORK_S = 0.004  # each rank computes for this time before every reduction
WARM_UP = 3  # number of reductions that are not timed
REPEATS = 12  # number of timed reductions
TIMEOUT_S = 180.0  # limit for one measurement, including the start of the ranks
# program of the child process, which launches the ranks
RUN = """import json, sys
from rl_dist.launch.bench import run_rank
from rl_dist.launch.ranks import launch
num_ranks, *args = json.loads(sys.argv[1])
sys.exit(launch(run_rank, args, num_ranks))"""


def time_reductions(
    num_ranks: int,
    sizes_bytes: Sequence[int],
    device_type: str = "cpu",
    gpu_ids: Sequence[int] = (),
    backend: str = "auto",
) -> dict[int, float]:
    """Time the reduction of gradients of each size, and verify every sum.

    Args:
        sizes_bytes: sizes of the float32 gradients.
        gpu_ids: GPU of each rank; if empty, rank i uses GPU i.
        backend: "auto", "nccl" or "gloo".

    Returns:
        Size in bytes -> seconds of a reduction after all ranks have arrived (median).

    Raises:
        UserError: there are fewer GPUs than ranks.
        ChildError: a sum was wrong or a rank died.
        ChildTimeoutError: the ranks did not finish within TIMEOUT_S.
    """
    bench = f"an all-reduce over {num_ranks} {device_type} ranks"
    job = num_ranks, device_type, [*gpu_ids], backend, [*sizes_bytes]
    with (
        tempfile.TemporaryDirectory(prefix="all_reduce_") as folder,
        # -P omits the current directory from sys.path: a module there could replace one of ours
        Child(["-P", "-c", RUN, json.dumps(job)], Path(folder)) as child,
    ):
        try:
            code = child.job.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ChildTimeoutError(f"{bench} did not end within {TIMEOUT_S:g} s") from None
        if code:
            error = child.error()
            raise ChildError(f"{bench}: {error}") if isinstance(error, ChildError) else error
        return dict(zip(sizes_bytes, json.loads(child.facts()["seconds"]), strict=True))


# ---- in the ranks


def run_rank(
    device_type: str, gpu_ids: Sequence[int], backend: str, sizes_bytes: Sequence[int]
) -> None:
    """Reduce gradients of each size; the main process reports the times."""
    world = open_world(device_type, TIMEOUT_S / 2, gpu_ids, backend=backend)
    world.set_phase("all-reduce")
    seconds = [_last_arrival_s(num_bytes, world) for num_bytes in sizes_bytes]
    if world.is_main_process:
        report_to_caller(seconds=json.dumps(seconds))
    close_world()


def _last_arrival_s(num_bytes: int, world: World) -> float:
    """Return the median time in seconds of a reduction after all ranks have arrived.

    In each reduction, this time is the shortest wait of any rank, because the last rank to arrive
    waits only for the transfer.
    """
    module = nn.Linear(max(1, num_bytes // 4), 1, bias=False, device=world.device)
    wrapped = Strategy(StrategyConfig(mode="ddp"), world).wrap(module)
    # The loss is the sum of the outputs, so the gradient of the layer's weights equals its input.
    gradient = torch.full_like(module.weight, world.rank + 1.0)
    matrix = torch.full((256, 256), 0.01, device=world.device)
    waits_s = []
    for _ in range(WARM_UP + REPEATS):
        # Compute before each reduction, so that caches are as cold as in training.
        until_s = time.perf_counter() + WORK_S
        product = matrix
        while time.perf_counter() < until_s:
            product = (product @ product).tanh()
        loss = wrapped(gradient).sum()
        wrapped.zero_grad(set_to_none=True)
        world.forget_waits()
        with world.reduction_context():
            loss.backward()
        waits_s.append(world.gradient_seconds)
        world.heartbeat()
    if module.weight.grad is None or (module.weight.grad != (world.size + 1) / 2).any():
        raise RuntimeError(
            f"rank {world.rank}: an all-reduce of {num_bytes} bytes over {world.backend} "
            "returned wrong sums"
        )
    by_rank = all_gather_json(waits_s[WARM_UP:], world)
    return statistics.median(min(call_waits) for call_waits in zip(*by_rank, strict=True))
