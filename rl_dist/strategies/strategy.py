"""Train a module on the ranks of a world: one interface for all modes.

    strategy = Strategy(StrategyConfig(mode="ddp"), world)
    module = strategy.wrap(module.to(world.device))
    for part, last in parts:  # the gradients of all parts of a step add up
        with strategy.accumulating(last):
            strategy.backward(loss_of(module(part)))
    grad_norm, stepped = strategy.step(optimizer, max_grad_norm=0.5)

The gradient is that of the mean of all ranks' losses. All ranks take a step, or none does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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
    """Trains one module in one mode: none, dp, ddp or hybrid.

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
        # scales losses up, so that fp16 gradients do not vanish
        self.scaler = torch.amp.GradScaler(device_type) if config.precision == "fp16" else None
        # True if the last step was skipped, perhaps only because the loss scale was too large
        self.overflowed: Tensor | bool = False
        # set by `wrap`
        self.bare: Any = None  # the module as it was given
        self.module: nn.Module | None = None  # the wrapped module
        self.parameters: list[nn.Parameter] = []  # trained by the optimizer; shards in mode hybrid
        self.gradient_bytes = 0  # reduced in each step
        self.unequal_devices = False  # ranks have different kinds of GPUs or CPUs
        self.shards: Shards | None = None
        self.mesh: DeviceMesh | None = None  # None unless the mode is hybrid

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module in the wrapper of the mode; it must be on world.device.

        Compute losses by the returned module. Gradients of losses that were computed by the inner
        module are not reduced: the ranks drift apart without any error.
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
        """Keep a module and its parameters with reduced gradients, before it is wrapped."""
        self.module = self.bare = module
        self.parameters = reduced
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in reduced)
        self.unequal_devices = devices_differ(self.world)

    @contextmanager
    def accumulating(self, last: bool = True) -> Iterator[None]:
        """Enclose forward and backward of one part of a step; the last part reduces."""
        if self.shards:
            self.shards.accumulate(last)
        if isinstance(self.module, DistributedDataParallel) and not last:
            with self.module.no_sync():
                yield
        else:
            yield

    def autocast(self) -> AbstractContextManager[None]:
        """Compute matrix products inside in the precision of the strategy."""
        return autocast(autocast_dtype(self.config.precision), self.world.device)

    @contextmanager
    def backward_context(self, loss: Tensor) -> Iterator[Tensor]:
        """Yield the loss to call `backward` of, which reduces gradients over ranks.

        A loss that is not finite makes the reduced gradient NaN, so that all ranks notice it.
        """
        factor = loss.detach() * 0.0 + 1.0  # 1, or NaN if the loss is not finite
        with section("backward"), self.world.reduction_context():
            scaled = self.scaler.scale(loss) if self.scaler else loss
            yield scaled * factor

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss, reduced over ranks."""
        with self.backward_context(loss) as scaled:
            scaled.backward()

    @section("optimizer")
    def step(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float = math.inf
    ) -> tuple[Tensor, Tensor]:
        """Clip the reduced gradient and step; skip the step if it is not finite.

        All ranks take the step, or none does. With a fused optimizer of torch, nothing here waits
        for a GPU.

        Returns:
            The norm of the gradient before clipping, and True if the step was taken.

        Raises:
            UserError: the optimizer holds other parameters than `parameters`.
        """
        if self.mode in ("ddp", "hybrid"):
            self._check_parameters(optimizer)

        # the norm, and clipping
        if self.scaler:
            self.scaler.unscale_(optimizer)
        if self.shards:
            grad_norm = self.agreed_norm(self.shards.grad_norm())
            self.shards.clip(max_grad_norm, grad_norm)
        else:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            grad_norm = self.agreed_norm(get_total_norm(gradients))
            clip_grads_with_norm_(self.parameters, max_grad_norm, grad_norm)

        # the step
        stepped = torch.isfinite(grad_norm)  # equal on all ranks, because gradients are reduced
        step_if(stepped, optimizer)
        if self.shards:
            self.shards.unshard()
        if self.scaler:  # a scale that was too large is lowered
            scale = self.scaler.scale(torch.ones_like(grad_norm))
            self.overflowed = ~stepped & (scale > 1.0)
            self.scaler.update()
        return grad_norm, stepped

    def agreed_norm(self, norm: Tensor) -> Tensor:
        """Return the gradient norm of rank 0 if devices differ; all ranks call.

        Reduced gradients are equal to the bit, but different devices add their squares in
        different orders. Without a common norm, ranks would clip by different factors and drift
        apart.
        """
        if self.unequal_devices:
            with self.world.waiting("norm of the gradient"):
                dist.broadcast(norm, src=0)
        return norm

    def _check_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse parameters that are not reduced, or that shards have replaced."""
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
        """Return the module's whole `state_dict`, in every mode; all ranks call."""
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
        """Load whole states that any mode and any number of ranks have saved."""
        if self.shards:
            self.shards.load(weights, optimizer, optimizer_state)
        else:
            self.bare.load_state_dict(weights)
            optimizer.load_state_dict(optimizer_state)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs besides: the loss scale of fp16."""
        return {"loss_scaler": self.scaler.state_dict()} if self.scaler else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`, which may be of another precision."""
        if self.scaler and "loss_scaler" in state:
            self.scaler.load_state_dict(state["loss_scaler"])

    def close(self) -> None:
        """Release the module and close the groups of its mesh; the world stays open."""
        if self.mesh is not None:
            from rl_dist.strategies.mesh import close_mesh

            close_mesh(self.mesh)
        self.module = self.bare = self.shards = self.mesh = None
        self.parameters = []
