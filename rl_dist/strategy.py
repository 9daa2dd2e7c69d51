"""How a module is trained on the ranks of a world: one small interface for every way.

    strategy = Strategy(StrategyConfig(mode="ddp"), world)
    module = strategy.wrap(module.to(world.device))
    for part, last in parts:  # one, or several whose gradients add up
        with strategy.accumulating(last):
            strategy.backward(loss_of(module(part)))
    grad_norm, stepped = strategy.step(optimizer, max_grad_norm=0.5)

The mean over ranks of the losses is what is differentiated; all ranks step together, or none does.
"""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from rl_dist.loaders import SharedLoader, shared_loader
from rl_dist.world import UserError, World

MODES = ("default", "none", "ddp")
GRADIENT_BYTES_LOGGED = "gradients of %d bytes"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """How gradients come together.

    Args:
        mode: none (one rank only), ddp, or default: none on one rank, ddp on several.
        bucket_mb: of DistributedDataParallel's reductions; 0: one bucket for everything, the quickest for small
            models, where latency is what a reduction costs.
        static_graph: the same parameters take part in every step.
        gradient_as_bucket_view: gradients live in the buckets, which saves a copy of them.
        find_unused_parameters: some parameters may take no part in a step; costs a walk over the graph.

    Raises:
        UserError: unknown mode, or a size that cannot be.
    """

    mode: str = "default"
    bucket_mb: float = 0.0
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"strategy must be one of {', '.join(MODES)}, got {self.mode!r}")
        if not 0 <= self.bucket_mb <= 10_000:
            raise UserError(f"bucket_mb must be 0..10000, got {self.bucket_mb}: 0 is one bucket")


def resolve_mode(mode: str, num_ranks: int) -> str:
    """What `mode` means on so many ranks.

    Raises:
        UserError: "none" with several ranks.
    """
    if mode == "none" and num_ranks > 1:
        raise UserError(f"strategy none works with one rank only, got {num_ranks}; use ddp, or leave it out")
    if mode == "default":
        return "ddp" if num_ranks > 1 else "none"
    return mode


class Strategy:
    """One way of training modules on the ranks of a world.

    Raises:
        UserError: it cannot work here.
    """

    def __init__(self, config: StrategyConfig, world: World) -> None:
        self.config, self.world = config, world
        self.mode = resolve_mode(config.mode, world.size)
        self.module: nn.Module | None = None  # as wrapped last
        self.parameters: list[nn.Parameter] = []
        self.gradient_bytes = self.steps = self.skipped = 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module whose forward trains it; it must be on the world's device.

        Only a loss computed through the returned module's `forward` is reduced; calling the inner
        module directly trains replicas apart without any error.
        """
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        logger.info(GRADIENT_BYTES_LOGGED, self.gradient_bytes)
        self.module = self._with_ddp(module) if self.mode == "ddp" else module
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        return self.module

    def _with_ddp(self, module: nn.Module) -> nn.Module:
        config, device = self.config, self.world.device
        with self.world.waiting("start of DistributedDataParallel"), warnings.catch_warnings():
            # Newer torch wants another name, which 2.10 does not know.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            wrapped = DistributedDataParallel(
                module,
                device_ids=[device.index] if device.type == "cuda" else None,
                broadcast_buffers=False,  # buffers are merged over ranks by their owner, not overwritten
                gradient_as_bucket_view=config.gradient_as_bucket_view,
                static_graph=config.static_graph,
                find_unused_parameters=config.find_unused_parameters,
                bucket_cap_mb=config.bucket_mb or math.ceil(self.gradient_bytes / 2**20) + 1,
            )
        wrapped.register_comm_hook(self.world, lambda world, bucket: _reduce(world, bucket))  # torch refuses our types
        return wrapped

    @contextmanager
    def accumulating(self, last: bool = True) -> Iterator[None]:
        """Around forward and backward of one part of a step; only the last part's gradients travel."""
        silent = isinstance(self.module, DistributedDataParallel) and not last
        with self.module.no_sync() if silent else nullcontext():  # type: ignore[union-attr, operator]
            yield

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's loss, reduced over ranks.

        A loss that is not finite spoils the gradient, which tells the other ranks.
        """
        one = torch.ones_like(loss)
        with self.world.reducing():
            loss.backward(torch.where(torch.isfinite(loss), one, one * torch.nan))

    def step(self, optimizer: torch.optim.Optimizer, max_grad_norm: float = math.inf) -> tuple[Tensor, bool]:
        """Clip the reduced gradient and step, if it is finite: on all ranks, or on none.

        Returns:
            The norm of the reduced gradient before clipping, and whether the step was taken.
        """
        grad_norm = nn.utils.clip_grad_norm_(self.parameters, max_grad_norm)
        stepped = bool(torch.isfinite(grad_norm))  # the reduced norm: all ranks see the same
        if stepped:
            optimizer.step()
        self.steps += stepped
        self.skipped += not stepped
        return grad_norm, stepped

    def module_state(self) -> dict[str, Tensor]:
        """The whole `state_dict` of the module given to `wrap`; all ranks must call."""
        return self._inner.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole `state_dict` of an optimizer; all ranks must call."""
        return optimizer.state_dict()

    def load(
        self, weights: dict[str, Tensor], optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any]
    ) -> None:
        """Go on from states of `module_state` and `optimizer_state`.

        The mode and the number of ranks that they come from do not matter.
        """
        self._inner.load_state_dict(weights)
        optimizer.load_state_dict(optimizer_state)

    @property
    def _inner(self) -> nn.Module:
        assert self.module is not None, "nothing was wrapped"
        return self.module.module if isinstance(self.module, DistributedDataParallel) else self.module

    def loader(self, loader: DataLoader, *, training: bool = True, seed: int = 0) -> SharedLoader:
        """This rank's share of a DataLoader whose batch size is the total over ranks.

        Training: shuffled if `loader` shuffles, by `seed` and the number given to `set_epoch`; batch k holds the same
        samples on any number of ranks, and the incomplete last one is left out. Evaluation: in order, every sample
        once, without padding. Memory is pinned for CUDA; worker processes persist.

        Raises:
            UserError: the dataset has no length, the loader a sampler of its own, or the batch does not divide.
        """
        return shared_loader(loader, self.world, training=training, seed=seed)

    def synchronize(self) -> None:
        """Wait until every rank's device has done what was asked of it."""
        with self.world.waiting("synchronize"):
            if self.world.size > 1:
                dist.barrier()

    def stats(self) -> dict[str, Any]:
        """What was wrapped and how often it stepped."""
        return {
            "mode": self.mode,
            "ranks": self.world.size,
            "parameters": sum(p.numel() for p in self.parameters),
            "gradient_bytes": self.gradient_bytes,
            "steps": self.steps,
            "skipped_steps": self.skipped,
        }

    def close(self) -> None:
        """Let go of the module; the world stays open."""
        self.module, self.parameters = None, []


def _reduce(world: World, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The mean over all ranks, as without a hook; the world learns when waiting begins."""
    world.gradients_ready()
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: all ranks


def parameter_hash(module: nn.Module) -> str:
    """SHA-256 over the bytes of all parameters in order, wrapped or not."""
    return tensor_hash(*module.parameters())


def tensor_hash(*tensors: torch.Tensor) -> str:
    """SHA-256 over the bytes of tensors, one after the other."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_raw(tensor))
    return digest.hexdigest()


def _raw(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
