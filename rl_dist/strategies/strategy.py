"""Training of a module on the ranks of a world: one interface for all modes.

    strategy = Strategy(StrategyConfig(mode="ddp"), world)
    module = strategy.wrap(module.to(world.device))
    for part, last in parts:  # one, or several whose gradients add up
        with strategy.accumulating(last):
            strategy.backward(loss_of(module(part)))
    grad_norm, stepped = strategy.step(optimizer, max_grad_norm=0.5)

The gradient is that of the losses' mean over ranks; all ranks step together, or none does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rl_dist.errors import UserError
from rl_dist.process_group.clock import section
from rl_dist.process_group.hosts import devices_differ
from rl_dist.process_group.world import World
from rl_dist.strategies.adam import step_if
from rl_dist.strategies.config import StrategyConfig, check_strategy
from rl_dist.strategies.precision import autocast, autocast_dtype, set_tf32

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rl_dist.strategies.sharded import Shards


class Strategy:
    """One way of training modules on the ranks of a world.

    strategy = Strategy(StrategyConfig(mode="ddp"), world)
    """

    def __init__(self, config: StrategyConfig, world: World) -> None:
        self.config = config
        self.world = world
        device_type = world.device.type
        self.mode = check_strategy(config, world.size, device_type, len(config.device_ids))
        if self.mode == "auto":
            raise UserError("strategy auto must be measured first: see rl_dist.strategies.measure")
        if device_type == "cuda":
            set_tf32(config.precision)
        # scales losses so that fp16 gradients do not vanish
        self.scaler = torch.amp.GradScaler(device_type) if config.precision == "fp16" else None
        # the last step was skipped, and the loss scale may be the only reason
        self.overflowed: Tensor | bool = False
        # set by `wrap`
        self.bare: Any = None
        self.module: nn.Module | None = None  # the wrapped one
        self.parameters: list[nn.Parameter] = []  # for the optimizer: shards in mode hybrid
        self.gradient_bytes = 0
        self.unequal_devices = False
        self.shards: Shards | None = None
        self.mesh: DeviceMesh | None = None  # in mode hybrid

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return a wrapped module, trained by its forward; it must be on world.device.

        Only a loss computed through the returned module's `forward` is reduced; calling the inner
        module directly trains replicas apart without any error.
        """
        if self.config.pipelined:
            raise UserError(
                "hybrid_form pipeline trains the cascaded policy only: use shard, or ddp"
            )
        self._keep(module, [p for p in module.parameters() if p.requires_grad])
        if self.mode == "dp":
            from rl_dist.strategies.replicas import DataParallel

            self.module = DataParallel(module, self.config.device_ids)
        elif self.mode == "ddp":
            from rl_dist.strategies.replicas import with_ddp

            self.module = with_ddp(module, self.gradient_bytes, self.config, self.world)
        elif self.mode == "hybrid":
            from rl_dist.strategies.sharded import Shards  # a second to import

            self.shards = Shards(module, self.config.shard_size, self.world)
            self.parameters = self.shards.parameters
            self.mesh = self.shards.mesh
        assert self.module is not None
        return self.module

    def _keep(self, module: nn.Module, reduced: list[nn.Parameter]) -> None:
        """Remember a module before it is wrapped, and the size of its reduced gradients."""
        self.module = self.bare = module
        self.parameters = reduced
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in reduced)
        self.unequal_devices = devices_differ(self.world)

    @contextmanager
    def accumulating(self, last: bool = True) -> Iterator[None]:
        """Enclose forward and backward of a part of a step; the last one reduces."""
        if self.shards:
            self.shards.accumulate(last)
        keeps_gradients = isinstance(self.module, DistributedDataParallel) and not last
        with self.module.no_sync() if keeps_gradients else nullcontext():  # type: ignore[union-attr,operator]
            yield

    def autocast(self) -> AbstractContextManager[None]:
        """Enclose a forward pass, so that its products have the strategy's precision."""
        return autocast(autocast_dtype(self.config.precision), self.world.device)

    @contextmanager
    def backward_context(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield the scaled loss; its `backward` inside reduces gradients over ranks.

        A loss that is not finite makes the gradient NaN, which all ranks see.
        """
        one = loss.detach() * 0.0 + 1.0  # NaN if the loss is not finite
        with section("backward"), self.world.reduction_context():
            scaled = self.scaler.scale(loss) if self.scaler else loss
            yield scaled * one

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's loss, reduced over ranks."""
        with self.backward_context(loss) as scaled:
            scaled.backward()

    @section("optimizer")
    def step(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float = math.inf
    ) -> tuple[Tensor, Tensor]:
        """Clip the reduced gradient and step, if it is finite: on all ranks, or on none.

        A loss scale that was too large falls, and sets `overflowed`. Returns the norm before
        clipping, and whether the step was taken. With a fused optimizer of torch nobody waits
        for a GPU until that is read.

        Raises:
            UserError: the optimizer steps other parameters than `parameters`.
        """
        self._check_parameters(optimizer)
        if self.scaler:
            self.scaler.unscale_(optimizer)
        if self.shards:
            grad_norm = self.agreed_norm(self.shards.grad_norm())
            self.shards.clip(max_grad_norm, grad_norm)
        else:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            grad_norm = self.agreed_norm(get_total_norm(gradients))
            clip_grads_with_norm_(self.parameters, max_grad_norm, grad_norm)
        stepped = torch.isfinite(grad_norm)  # the reduced norm: all ranks see the same
        step_if(stepped, optimizer)
        if self.shards:
            self.shards.unshard()
        if self.scaler:
            scale = self.scaler.scale(torch.ones_like(grad_norm))
            self.overflowed = ~stepped & (scale > 1.0)
            self.scaler.update()
        return grad_norm, stepped

    def agreed_norm(self, norm: Tensor) -> Tensor:
        """Return the gradient norm of rank 0 if devices differ; all ranks call.

        The reduced gradients are equal to the bit, but different devices add their squares in
        different orders. Without one common norm, ranks would clip by different factors and drift
        apart.
        """
        if self.unequal_devices:
            with self.world.waiting("norm of the gradient"):
                dist.broadcast(norm, src=0)
        return norm

    def _check_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse parameters of an optimizer that are not reduced, or not trained any more."""
        reduced = {id(parameter) for parameter in self.parameters}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in reduced and (self.shards or parameter.grad is not None):
                raise UserError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that was "
                    "not there, or frozen, when the module was wrapped: make the optimizer of "
                    "strategy.parameters, after wrap"
                )

    def share_parameters(self) -> None:
        """Give this rank the parameters that only others train; none, unless overridden."""

    def module_state(self) -> dict[str, Tensor]:
        """Return the whole `state_dict`, the same in every mode; all ranks call."""
        return self.shards.module_state() if self.shards else self.bare.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole `state_dict` of an optimizer of `parameters`; all ranks call."""
        return self.shards.optimizer_state(optimizer) if self.shards else optimizer.state_dict()

    def load(
        self,
        weights: dict[str, Tensor],
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
    ) -> None:
        """Continue from whole states, saved in any mode by any number of ranks."""
        if self.shards:
            self.shards.load(weights, optimizer, optimizer_state)
        else:
            self.bare.load_state_dict(weights)
            optimizer.load_state_dict(optimizer_state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a resumed run: the loss scale of fp16."""
        return {"loss_scaler": self.scaler.state_dict()} if self.scaler else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; nothing of it need be there."""
        if self.scaler and "loss_scaler" in state:
            self.scaler.load_state_dict(state["loss_scaler"])

    def close(self) -> None:
        """Release the module, and the groups of a mesh; the world stays open."""
        if self.mesh is not None:
            from rl_dist.strategies.mesh import close_mesh

            close_mesh(self.mesh)
        self.module = self.bare = self.shards = self.mesh = None
        self.parameters = []
