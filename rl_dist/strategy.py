"""How a module is trained on several ranks."""

from __future__ import annotations

import hashlib
import math
import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rl_dist.world import UserError, World

STRATEGIES = ("auto", "none", "ddp")


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
    if strategy == "none" or (strategy == "auto" and world.size == 1):
        return policy_module
    num_bytes = sum(p.numel() * p.element_size() for p in policy_module.parameters())
    with warnings.catch_warnings():  # newer torch wants another name, which 2.10 does not know
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        return DistributedDataParallel(
            policy_module,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            broadcast_buffers=False,  # buffers are merged over ranks by their owner, not overwritten
            gradient_as_bucket_view=True,
            # One bucket, one reduction: the models are small and latency is what a reduction costs.
            bucket_cap_mb=math.ceil(num_bytes / 2**20) + 1,
        )


def parameter_hash(module: nn.Module) -> str:
    """SHA-256 over the bytes of all parameters in order, wrapped or not."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        raw = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy().tobytes())
    return digest.hexdigest()
