"""How gradients come together, as a configuration of `rl_dist.parallel.strategy`."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook

from rl_dist.errors import UserError
from rl_dist.parallel.precision import PRECISIONS, check_precision

MODES = ("default", "none", "dp", "ddp", "hybrid", "auto")
HYBRID_FORMS = ("shard", "pipeline")
COMPRESSIONS = {"none": allreduce_hook, "bf16": bf16_compress_hook}


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """How gradients come together: StrategyConfig(mode="ddp").

    Args:
        mode: none (one rank only), dp (one process, several GPUs, see data_parallel.py), ddp, hybrid (see
            sharding.py), or default: none on one rank, ddp on several. auto stands for the one that
            choice.py finds.
        backend: of torch's process groups, such as gloo or nccl: gradients are reduced in a group of its own over all
            ranks, apart from every other collective (ddp only); "": in the world's group.
        device_ids: GPUs of mode dp, the world's device first.
        batch_axes: where the inputs of forward have their batch, for mode dp; the last counts for all that follow,
            the first for the outputs.
        bucket_mb: of DistributedDataParallel's reductions; 0: one bucket for everything, the quickest for small
            models, where latency is what a reduction costs.
        static_graph: the same parameters take part in every step.
        gradient_as_bucket_view: gradients live in the buckets, which saves a copy of them.
        find_unused_parameters: some parameters may take no part in a step; costs a walk over the graph.
        hybrid_form: of mode hybrid. shard: parameters sharded over ranks; pipeline: two stages on pairs of ranks.
        shard_size: ranks that share one copy of gradients and optimizer state in mode hybrid; 0: those of a machine.
        gradient_compression: none, or bf16: gradients travel as bf16, half the bytes, rounded to 8 bits (ddp only).
        precision: see `rl_dist.parallel.precision`; forward passes must be inside `Strategy.autocast`.
        cudnn_autotune: cuDNN tries its algorithms for convolutions and keeps the fastest; for sizes that stay the same.

    Raises:
        UserError: unknown mode or backend, or a size that cannot be.
    """

    mode: str = "default"
    backend: str = ""
    device_ids: tuple[int, ...] = ()
    batch_axes: tuple[int, ...] = (0,)
    bucket_mb: float = 0.0
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool = False
    hybrid_form: str = "shard"
    shard_size: int = 0
    gradient_compression: str = "none"
    precision: str = "auto"
    cudnn_autotune: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"strategy must be one of {', '.join(MODES)}, got {self.mode!r}")
        backends = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
        if self.backend and self.backend not in backends:
            raise UserError(f"backend must be one of {', '.join(backends)}, or empty, got {self.backend!r}")
        if self.gradient_compression not in COMPRESSIONS:
            known = ", ".join(COMPRESSIONS)
            raise UserError(f"gradient_compression must be one of {known}, got {self.gradient_compression!r}")
        if self.precision not in PRECISIONS:
            raise UserError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if not 0 <= self.bucket_mb <= 10_000:
            raise UserError(f"bucket_mb must be 0..10000, got {self.bucket_mb}: 0 is one bucket")
        if self.shard_size < 0:
            raise UserError(f"shard_size must be at least 0, got {self.shard_size}: 0 is all ranks of a machine")
        if self.hybrid_form not in HYBRID_FORMS:
            raise UserError(f"hybrid_form must be one of {', '.join(HYBRID_FORMS)}, got {self.hybrid_form!r}")

    @property
    def pipelined(self) -> bool:
        """Whether ranks train in pairs, one stage each."""
        return self.mode == "hybrid" and self.hybrid_form == "pipeline"

    def resolve(self, num_ranks: int) -> str:
        """The mode on so many ranks: what default means there.

        Raises:
            UserError: it cannot be on this number of ranks; names the cure.
        """
        if self.mode == "dp" and num_ranks > 1:
            raise UserError(f"strategy dp works in one process, got {num_ranks} ranks; use ddp, or leave it out")
        if self.mode == "none" and num_ranks > 1:
            raise UserError(f"strategy none works with one rank only, got {num_ranks}; use ddp, or leave it out")
        if self.pipelined and num_ranks % 2:
            raise UserError(
                f"hybrid_form pipeline works on pairs of ranks, got {num_ranks}; use an even number, or --strategy ddp"
            )
        if self.mode == "auto" and num_ranks == 1 and self.shard_size:
            raise UserError(f"shard_size {self.shard_size} does nothing on one rank: use --shard_size 0")
        if (self.mode == "hybrid" and not self.pipelined) or (self.mode == "auto" and self.shard_size):
            resolve_shard_size(self.shard_size, num_ranks)
        mode = ("ddp" if num_ranks > 1 else "none") if self.mode == "default" else self.mode
        alone = " on one rank" if mode == "auto" else ""
        has_ddp = mode == "ddp" or (mode == "auto" and num_ranks > 1)
        if self.gradient_compression != "none" and not has_ddp:
            raise UserError(
                f"gradient_compression {self.gradient_compression} works with strategy ddp, not {mode}{alone}: "
                "use --gradient_compression none"
            )
        if self.backend and not has_ddp:
            what = f"backend {self.backend} reduces gradients of strategy ddp, not of {mode}{alone}"
            raise UserError(f"{what}: leave it empty")
        if self.precision == "fp16" and mode == "hybrid":
            raise UserError("precision fp16 scales losses, which strategy hybrid cannot: use bf16, or --strategy ddp")
        return mode

    def check_device(self, device_type: str) -> None:
        """Refuse what has no effect on such a device, or cannot work there.

        Raises:
            UserError: a precision, cudnn_autotune or a backend; names the cure.
        """
        check_precision(self.precision, device_type)
        if self.cudnn_autotune and device_type != "cuda":
            raise UserError("cudnn_autotune does nothing without a GPU: use --no-cudnn_autotune, or leave it out")
        if self.backend and not dist.is_backend_available(self.backend):
            raise UserError(f"backend {self.backend} is not part of this torch: leave it empty")
        devices = dist.Backend.backend_capability.get(self.backend, [device_type])
        if device_type not in devices:
            raise UserError(
                f"backend {self.backend} reduces on {' and '.join(devices)}, not on {device_type}: leave it empty"
            )


def resolve_shard_size(shard_size: int, num_ranks: int) -> int:
    """How many ranks share one copy in mode hybrid; 0 takes those of this machine.

    Raises:
        UserError: it does not divide the ranks, or there is nothing to share out.
    """
    if num_ranks == 1:
        raise UserError("strategy hybrid shares out over several ranks, got 1; start more, or use --strategy none")
    size = shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    fitting = ", ".join(str(n) for n in range(2, num_ranks + 1) if num_ranks % n == 0)
    if size == 1:
        why = "shard_size 1" if shard_size else "one rank on this machine"
        raise UserError(f"strategy hybrid with {why} is ddp: use --strategy ddp, or --shard_size {fitting}")
    if num_ranks % size:
        raise UserError(f"shard_size {size} does not divide {num_ranks} ranks; use --shard_size {fitting}")
    return size
