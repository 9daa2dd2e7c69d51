"""Define the settings of a strategy, and check that the hardware supports them."""

import os
from typing import Literal

from rl_dist.errors import UserError
from rl_dist.flags import Field, configuration
from rl_dist.strategies.precision import Precision

Mode = Literal["default", "none", "dp", "ddp", "hybrid", "auto"]
HybridForm = Literal["shard", "pipeline"]
Compression = Literal["none", "bf16"]


@configuration
class StrategyConfig:
    """Settings for training one module on several ranks: StrategyConfig(mode="ddp")."""

    mode: Mode = "default"
    """none: one rank only; dp: one process for several GPUs; ddp: DistributedDataParallel; hybrid:
    see hybrid_form; default: none on one rank, ddp on several ranks; auto: time the modes before
    training and use the fastest one."""
    device_ids: tuple[int, ...] = ()
    """GPUs that mode dp uses; the first one must be `world.device`."""
    find_unused_parameters: bool = False
    """Allow steps that do not use all parameters; finding the unused parameters takes time."""
    hybrid_form: HybridForm = "shard"
    """How mode hybrid splits the work; shard: gradients and optimizer state are split over ranks;
    pipeline: each pair of ranks runs two stages, one stage per rank."""
    shard_size: int = Field(0, ge=0, le=10**6)
    """Number of ranks that share one copy of gradients and optimizer state in mode hybrid; 0 means
    all ranks of a machine."""
    gradient_compression: Compression = "none"
    """bf16: halve the bytes sent for gradients, by rounding to 8 significant bits; ddp only."""
    precision: Precision = "auto"
    """Precision of matrix products; run forward passes inside `Strategy.autocast`."""

    @property
    def pipelined(self) -> bool:
        """True if ranks train in pairs and each rank of a pair runs one stage."""
        return self.mode == "hybrid" and self.hybrid_form == "pipeline"


def check_strategy(
    config: StrategyConfig, ranks: int, device_type: str = "cpu", num_devices: int = 0
) -> str:
    """Return the mode after resolving "default"; raise UserError if the mode cannot work.

    Args:
        ranks: number of ranks.
        device_type: "cpu" or "cuda".
        num_devices: number of GPUs for mode dp.
    """
    mode = config.mode
    if mode == "default":
        mode = "ddp" if ranks > 1 else "none"
    # a rule is a tuple: a value that is true if the rule is broken, the problem, how to fix it
    rules = (
        (mode in ("none", "dp") and ranks > 1,
         f"strategy {mode} works in one process, got {ranks} ranks", "use --strategy ddp"),
        (mode == "dp" and (device_type != "cuda" or num_devices < 2),
         f"strategy dp needs at least 2 CUDA GPUs, got {num_devices} with device {device_type}",
         "use --strategy none"),
        (config.pipelined and ranks % 2,
         f"hybrid_form pipeline works on pairs of ranks, got {ranks}", "use --strategy ddp"),
        (config.precision == "fp16" and mode == "hybrid",
         "precision fp16 does not work with strategy hybrid", "use --precision bf16"),
    )  # fmt: skip
    for is_broken, problem, fix in rules:
        if is_broken:
            raise UserError(f"{problem}: {fix}")
    tries_hybrid = mode == "auto" and ranks > 1 and config.shard_size
    if (mode == "hybrid" and not config.pipelined) or tries_hybrid:
        resolve_shard_size(config.shard_size, ranks)
    return mode


def resolve_shard_size(shard_size: int, num_ranks: int) -> int:
    """Return the number of ranks that share one copy of the optimizer state.

    A `shard_size` of 0 means all ranks of this machine.
    """
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
