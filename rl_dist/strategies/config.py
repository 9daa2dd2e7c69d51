"""Options of `rl_dist.strategies.strategy`, and what a precision stands for.

Parameters, optimizer, losses and statistics are fp32 (fp64 where asked for). bf16 and fp16 go
through torch's autocast, fp16 with a loss scale as well: gradients below 6e-8 would vanish in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
)

from rl_dist.errors import UserError
from rl_dist.flags import Field, Text, configuration

# auto: fp32, unless a training has measured before
Precision = Literal["auto", "fp32", "fp64", "tf32", "bf16", "fp16"]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

Mode = Literal["default", "none", "dp", "ddp", "hybrid", "auto"]
HybridForm = Literal["shard", "pipeline"]
Compression = Literal["none", "bf16"]
COMPRESSIONS = {"none": allreduce_hook, "bf16": bf16_compress_hook}


@configuration
class StrategyConfig:
    """How several ranks train one module: StrategyConfig(mode="ddp")."""

    mode: Mode = "default"
    """none: one rank only; dp: one process, several GPUs, see data_parallel.py; ddp; hybrid: see
    sharding.py; default: none on one rank, ddp on several; auto: the fastest one, measured before
    training."""
    backend: Text = ""
    """Of torch's process groups, such as gloo or nccl: ddp reduces gradients in a group of its own
    over all ranks, apart from every other collective; "": in the world's group."""
    device_ids: tuple[int, ...] = ()
    """GPUs of mode dp, the world's device first."""
    batch_axes: tuple[int, ...] = (0,)
    """Where the inputs of forward have their batch, for mode dp: the last counts for all that
    follow, the first for the outputs."""
    bucket_mb: float = Field(0.0, ge=0, le=10000)
    """Of DistributedDataParallel's reductions; 0: one bucket for everything, the quickest for small
    models, where latency is what a reduction costs."""
    static_graph: bool = False
    """The same parameters take part in every step."""
    gradient_as_bucket_view: bool = True
    """Gradients live in the buckets, which saves a copy of them."""
    find_unused_parameters: bool = False
    """Some parameters may take no part in a step; costs a walk over the graph."""
    hybrid_form: HybridForm = "shard"
    """Of mode hybrid; shard: parameters sharded over ranks; pipeline: two stages on pairs."""
    shard_size: int = Field(0, ge=0, le=10**6)
    """Ranks that share one copy of gradients and optimizer state in mode hybrid; 0: those of a
    machine."""
    gradient_compression: Compression = "none"
    """bf16: gradients travel in half the bytes, rounded to 8 bits; ddp only."""
    precision: Precision = "auto"
    """See `rl_dist.strategies.config`; forward passes must be inside `Strategy.autocast`."""
    cudnn_autotune: bool = False
    """cuDNN keeps its fastest algorithms for convolutions; for sizes that stay the same."""

    def __post_init__(self) -> None:
        backends = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
        if self.backend and self.backend not in backends:
            known = ", ".join(backends)
            raise UserError(f"backend must be one of {known}, or empty, got {self.backend!r}")

    @property
    def pipelined(self) -> bool:
        """Ranks train in pairs, one stage each."""
        return self.mode == "hybrid" and self.hybrid_form == "pipeline"


@configuration
class SpeedConfig:
    """Faster ways to the same numbers, up to rounding."""

    fused_adam: bool = True
    """Take Adam's step in one kernel."""


@dataclass(frozen=True)
class Hardware:
    """Ranks and their devices."""

    num_ranks: int
    device_type: str = "cpu"
    num_devices: int = 0  # GPUs of this process, if it is the only one


def check_strategy(config: StrategyConfig, hardware: Hardware) -> str:
    """Return the mode that is meant on this hardware; refuse what cannot work."""
    ranks, device_type, mode = hardware.num_ranks, hardware.device_type, config.mode
    if mode == "default":
        mode = "ddp" if ranks > 1 else "none"
    auto, uses_ddp = mode == "auto", mode == "ddp" or (mode == "auto" and ranks > 1)
    backend, compression = config.backend, config.gradient_compression
    devices = dist.Backend.backend_capability.get(backend, [device_type])
    # does it apply, the problem, the fix
    rules = (
        (mode in ("none", "dp") and ranks > 1,
         f"strategy {mode} works in one process, got {ranks} ranks", "use --strategy ddp"),
        (mode == "dp" and (device_type != "cuda" or hardware.num_devices < 2),
         f"strategy dp needs at least 2 CUDA GPUs, got {hardware.num_devices} on {device_type}",
         "use --strategy none"),
        (config.pipelined and ranks % 2,
         f"hybrid_form pipeline works on pairs of ranks, got {ranks}", "use --strategy ddp"),
        (compression != "none" and not uses_ddp,
         f"gradient_compression {compression} needs strategy ddp, got {mode} on {ranks} rank(s)",
         "use --gradient_compression none"),
        (backend and not uses_ddp,
         f"backend {backend} needs strategy ddp, got {mode}", "leave it empty"),
        (backend and not dist.is_backend_available(backend),
         f"backend {backend} is not part of this torch", "leave it empty"),
        (device_type not in devices,
         f"backend {backend} works on {devices}, not on {device_type}", "leave it empty"),
        (config.precision == "fp16" and mode == "hybrid",
         "precision fp16 does not work with strategy hybrid", "use --precision bf16"),
    )  # fmt: skip
    for applies, problem, fix in rules:
        if applies:
            raise UserError(f"{problem}: {fix}")
    if (mode == "hybrid" and not config.pipelined) or (auto and uses_ddp and config.shard_size):
        resolve_shard_size(config.shard_size, ranks)
    check_precision(config.precision, device_type)
    return mode


def resolve_shard_size(shard_size: int, num_ranks: int) -> int:
    """Return how many ranks share one copy in mode hybrid; 0: those of this machine."""
    if num_ranks == 1:
        raise UserError("strategy hybrid needs several ranks, got 1: use --strategy none")
    size = shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if size == 1 or num_ranks % size:
        fitting = ", ".join(str(n) for n in range(2, num_ranks + 1) if num_ranks % n == 0)
        raise UserError(
            f"shard_size {size} is 1 or does not divide {num_ranks} ranks: use --shard_size "
            f"{fitting}, or --strategy ddp"
        )
    return size


def parameter_dtype(precision: str) -> torch.dtype:
    """Return the type of parameters and of everything outside autocast."""
    return torch.float64 if precision == "fp64" else torch.float32


def autocast_dtype(precision: str) -> torch.dtype | None:
    """Return the type of matrix products, if it is not that of the parameters."""
    return _AUTOCAST.get(precision)


def check_precision(precision: str, device_type: str) -> None:
    """Refuse a precision that the device does not have."""
    if precision == "tf32" and device_type == "cpu":
        raise UserError(
            "precision tf32 is a mode of NVIDIA GPUs and does nothing on a CPU: use fp32"
        )
    if precision in ("tf32", "bf16") and device_type == "cuda" and torch.version.cuda:
        major, minor = torch.cuda.get_device_capability()
        if major < 8:  # tensor cores that have TF32 and bf16
            raise UserError(
                f"precision {precision} needs compute capability 8.0, "
                f"{torch.cuda.get_device_name()} has {major}.{minor}: use fp16"
            )


def set_cuda_math(precision: str, cudnn_autotune: bool) -> None:
    """Round fp32 products to TF32 only if asked for; set cuDNN's autotuner.

    torch allows cuDNN, and so LSTMs, TF32 by default; here fp32 means fp32.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = cudnn_autotune


@contextmanager
def autocast(dtype: torch.dtype | None, device: torch.device) -> Iterator[None]:
    """Compute matrix products inside in `dtype`; None: nothing changes.

    Where oneDNN has no LSTM of that type for a CPU, torch's own takes its place: slow, but right.
    """
    if dtype is None:
        yield
        return
    onednn = torch.backends.mkldnn
    native = device.type == "cpu" and onednn.is_available() and not _onednn_has_lstm(dtype)
    with torch.autocast(device.type, dtype=dtype):
        enabled = onednn.set_flags(_enabled=False)[0] if native else None
        try:
            yield
        finally:
            if native:
                onednn.set_flags(_enabled=enabled)


def weights_cast_once(
    dtype: torch.dtype | None, device: torch.device
) -> AbstractContextManager[object]:
    """Let all `autocast` inside share their casts of weights, which must not change.

    torch keeps casts until the outermost autocast ends; this one is not switched on itself.
    """
    return nullcontext() if dtype is None else torch.autocast(device.type, enabled=False)


@lru_cache
def _onednn_has_lstm(dtype: torch.dtype) -> bool:
    """Try it: torch asks oneDNN for such an LSTM whether the CPU has it or not."""
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", dtype=dtype):
        try:
            torch.nn.LSTM(8, 8)(torch.zeros(2, 2, 8))[0].float().sum().backward()
        except RuntimeError:
            return False
    return True
