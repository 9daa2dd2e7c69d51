"""Train a module on all ranks of a world, with one interface for all modes.

    strategy = Strategy(StrategyConfig(mode="ddp"), world)
    module = strategy.wrap(module.to(world.device))
    for part, last in parts:  # parts of one step, whose gradients are summed
        with strategy.accumulating(last):
            strategy.backward(loss_of(module(part)))
    grad_norm, stepped = strategy.step(optimizer, max_grad_norm=0.5)

The optimizer uses the gradient of the mean loss over all ranks. Either all ranks take a step or
none of them does.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rl_dist.errors import UserError
from rl_dist.process_group.clock import section
from rl_dist.process_group.collectives import devices_differ
from rl_dist.process_group.world import World, destroy_group
from rl_dist.strategies.adam import step_if
from rl_dist.strategies.config import StrategyConfig, check_strategy
from rl_dist.strategies.precision import low_precision, set_tf32
from rl_dist.strategies.replicas import DataParallel, with_ddp

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
            raise UserError("strategy auto works only in train_distributed.py: set another mode")
        if device_type == "cuda":
            set_tf32(config.precision)
        # The scaler multiplies losses by a large factor, so that fp16 gradients do not become zero.
        # With other precisions, the scaler is disabled.
        self.scaler = torch.amp.GradScaler(device_type, enabled=config.precision == "fp16")
        # True if the last step was skipped, possibly only because the loss scale was too large
        self.overflowed = torch.tensor(False)
        # The attributes below are set by `wrap`.
        self.bare: Any = None  # the module before it is wrapped
        self.casts_itself = False  # True if the module has an attribute `low_precision`
        self.module: Any = None  # the wrapped module
        # the parameters that the optimizer trains; in mode hybrid, only this rank's shards
        self.parameters: list[nn.Parameter] = []
        self.gradient_bytes = 0  # size of the gradients that are reduced in each step
        self.unequal_devices = False  # True if ranks have different GPU or CPU models
        self.shards: Shards | None = None
        self.mesh: DeviceMesh | None = None  # only in mode hybrid

    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap a module, which must be on world.device, for the strategy's mode.

        Compute losses with the returned module. If you use the original module, gradients are not
        reduced, and the weights of the ranks drift apart without any error.
        """
        if self.config.pipelined:
            raise UserError(
                "hybrid_form pipeline trains only the cascaded policy: use shard or ddp"
            )
        self._keep(module, [p for p in module.parameters() if p.requires_grad])
        if self.mode == "dp":
            self.module = DataParallel(module, self.config.device_ids)
        elif self.mode == "ddp":
            self.module = with_ddp(module, self.gradient_bytes, self.config, self.world)
        elif self.mode == "hybrid":
            from rl_dist.strategies.sharded import Shards  # the import takes a second

            self.shards = Shards(module, self.config.shard_size, self.world)
            self.parameters = self.shards.parameters
            self.mesh = self.shards.mesh
        return self.module  # type: ignore[no-any-return]

    def _keep(self, module: nn.Module, reduced: list[nn.Parameter]) -> None:
        """Store a module that is not wrapped yet, and facts about it.

        Args:
            reduced: parameters whose gradients are reduced over ranks.
        """
        self.module = self.bare = module
        self.casts_itself = hasattr(module, "low_precision")
        if self.casts_itself:
            self.bare.low_precision = low_precision(self.config.precision)
        self.parameters = reduced
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in reduced)
        self.unequal_devices = devices_differ(self.world)

    def accumulating(self, last: bool = True) -> AbstractContextManager[None]:
        """Enclose the forward and backward pass of one part of a step.

        The last part reduces the summed gradients over ranks.
        """
        if self.shards:
            self.shards.accumulate(last)
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        return nullcontext()

    def autocast(self) -> AbstractContextManager[None]:
        """Use the strategy's precision for matrix products inside the `with` block.

        If the module has an attribute `low_precision`, `wrap` sets it to a type or None, the module
        casts its weights and inputs to this type itself, and this method changes nothing.

        Raises:
            UserError: the module has an LSTM or GRU of torch, and autocast cannot run it: on GPUs,
                bf16 would become fp16 without a loss scale; on CPUs, oneDNN may raise an error.
        """
        dtype = low_precision(self.config.precision)
        if dtype is None or self.casts_itself:
            return nullcontext()
        device_type = self.world.device.type
        recurrent = any(isinstance(module, nn.RNNBase) for module in self.bare.modules())
        if recurrent and (device_type == "cpu" or dtype == torch.bfloat16):
            raise UserError(
                f"torch's autocast does not compute LSTMs and GRUs in {self.config.precision} on "
                f"{device_type}: use precision fp32, or cast weights and inputs in the module, as "
                "agents/pretrain.py does"
            )
        return torch.autocast(device_type, dtype)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss to the `grad` attributes of the parameters.

        In the last part of a step, also reduce the summed gradients over ranks. If the loss is NaN
        or infinite on one rank, the reduced gradient is NaN on all ranks, so all ranks skip the
        step.
        """
        factor = loss.detach() * 0.0 + 1.0  # 1, or NaN if the loss is not finite
        with section("backward"), self.world.reduction_context():
            (self.scaler.scale(loss) * factor).backward()

    @section("optimizer")
    def step(
        self, optimizer: torch.optim.Optimizer, max_grad_norm: float = math.inf
    ) -> tuple[Tensor, Tensor]:
        """Clip the mean gradient over all ranks; take a step if the gradient is finite.

        Either all ranks take the step or none of them does. With torch's fused optimizers, this
        method never waits for a GPU.

        Returns:
            The norm of the gradient before clipping, and True if the step was taken.

        Raises:
            UserError: the optimizer holds parameters that are not in `parameters`.
        """
        optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if self.mode in ("ddp", "hybrid") and not optimized <= {*self.parameters}:
            raise UserError(
                "the optimizer holds parameters that were missing or frozen when the module was "
                "wrapped: create the optimizer from strategy.parameters, after `wrap`"
            )

        # compute the norm and clip the gradient
        self.scaler.unscale_(optimizer)
        if self.shards:
            grad_norm = self.shards.grad_norm()
        else:
            grad_norm = get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        grad_norm = self.agreed_norm(grad_norm)
        clip_grads_with_norm_(self.parameters, max_grad_norm, grad_norm)

        # take the step, or skip it
        stepped = torch.isfinite(grad_norm)  # equal on all ranks, because gradients are reduced
        step_if(stepped, optimizer)
        if self.shards:
            self.shards.unshard()
        if self.scaler.is_enabled():  # lower the loss scale if it was too large
            scale = self.scaler.scale(torch.ones_like(grad_norm))
            self.overflowed = ~stepped & (scale > 1.0)
            self.scaler.update()
        return grad_norm, stepped

    def agreed_norm(self, norm: Tensor) -> Tensor:
        """Return rank 0's gradient norm if the ranks' devices differ, otherwise `norm`.

        Every rank must call this. The reduced gradient is bitwise equal on all ranks, but its norm
        is rounded differently on different device models. If the ranks did not agree on one norm,
        they would clip by different factors, and their weights would drift apart.
        """
        if self.unequal_devices:
            with self.world.waiting("norm of the gradient"):
                dist.broadcast(norm, src=0)
        return norm

    def share_parameters(self) -> None:
        """Receive parameters that only other ranks train.

        In this class, the method does nothing, because every rank trains all parameters. A subclass
        may override the method.
        """

    def module_state(self) -> dict[str, Tensor]:
        """Return the module's whole `state_dict` in any mode; every rank must call this."""
        return self.shards.module_state() if self.shards else self.bare.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole `state_dict` of an optimizer that trains `parameters`.

        Every rank must call this.
        """
        return self.shards.optimizer_state(optimizer) if self.shards else optimizer.state_dict()

    def load(
        self,
        weights: dict[str, Tensor],
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
    ) -> None:
        """Load unsharded states that were saved in any mode, on any number of ranks."""
        if self.shards:
            self.shards.load(weights, optimizer, optimizer_state)
        else:
            self.bare.load_state_dict(weights)
            optimizer.load_state_dict(optimizer_state)

    def state_dict(self) -> dict[str, Any]:
        """Return the strategy's own state for a checkpoint: the loss scale of fp16."""
        return {"loss_scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`; only with precision fp16, it has a loss scale."""
        if state.get("loss_scaler"):
            self.scaler.load_state_dict(state["loss_scaler"])

    def close(self) -> None:
        """Release the module and close the process groups of its mesh, but not the world."""
        if self.mesh is not None and dist.is_initialized():
            for group in self.mesh.get_all_groups():
                destroy_group(group)
        self.module = self.bare = self.shards = self.mesh = None
        self.parameters = []
