"""How a module is trained on several ranks."""

from __future__ import annotations

import hashlib
import logging
import math
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from rl_dist.world import UserError, World

STRATEGIES = ("auto", "none", "ddp")
GRADIENT_BYTES_LOGGED = "gradients of %d bytes"
logger = logging.getLogger(__name__)


def wrap(policy_module: nn.Module, world: World, strategy: str = "auto") -> nn.Module:
    """Wrap a module so that backward through forward averages gradients over ranks.

    Only a loss computed through the returned module's `forward` is reduced; calling the inner
    module directly trains replicas apart without any error.

    Args:
        strategy: "none" (one rank only), "ddp", or "auto": ddp on several ranks, else none.

    Raises:
        UserError: unknown strategy, or "none" with several ranks.
    """
    if strategy not in STRATEGIES:
        raise UserError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if strategy == "none" and world.size > 1:
        raise UserError(f"strategy none works with one rank only, got {world.size}; use ddp or auto")
    num_bytes = sum(p.numel() * p.element_size() for p in policy_module.parameters())
    logger.info(GRADIENT_BYTES_LOGGED, num_bytes)
    if strategy == "none" or (strategy == "auto" and world.size == 1):
        return policy_module
    with world.waiting("start of DistributedDataParallel"), warnings.catch_warnings():
        # Newer torch wants another name, which 2.10 does not know.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        wrapped = DistributedDataParallel(
            policy_module,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            broadcast_buffers=False,  # buffers are merged over ranks by their owner, not overwritten
            gradient_as_bucket_view=True,
            # One bucket, one reduction: the models are small and latency is what a reduction costs.
            bucket_cap_mb=math.ceil(num_bytes / 2**20) + 1,
        )
    wrapped.register_comm_hook(world, lambda world, bucket: _reduce(world, bucket))  # torch refuses our annotations
    return wrapped


def _reduce(world: World, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean over all ranks, as without a hook; the world learns when waiting begins."""
    world.gradients_ready()
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: all ranks


def parameter_hash(module: nn.Module) -> str:
    """SHA-256 over the bytes of all parameters in order, wrapped or not."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(_raw(parameter))
    return digest.hexdigest()


def parameter_hashes(module: nn.Module) -> dict[str, str]:
    """SHA-256 of each parameter by name."""
    return {name: hashlib.sha256(_raw(parameter)).hexdigest() for name, parameter in module.named_parameters()}


def _raw(parameter: torch.Tensor) -> bytes:
    return parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
