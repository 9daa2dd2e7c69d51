"""Gradients and optimizer state shared out over groups of ranks (FSDP2).

The module is one unit: its forward may call its parts another number of times on every rank (as
sequences cut at episode starts do), and a unit's collectives follow its forward. Between steps the
parameters are whole, so that the bare module acts, is evaluated and is hashed as everywhere;
gradients and optimizer state never are.

Source: Zhao et al., "PyTorch FSDP", https://arxiv.org/abs/2304.11277; its hybrid sharding.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from rl_dist.process_group.collectives import broadcast_from_rank0
from rl_dist.process_group.world import World
from rl_dist.strategies.config import resolve_shard_size
from rl_dist.strategies.mesh import make_mesh

SHARD = 1  # the axis of the mesh along which parameters are cut; along 0 they are repeated
# Newer torch has another name for it, and warns of the old one.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Outputs of a policy are views of its network's; nobody changes them in place.
warnings.filterwarnings(
    "ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning
)


class Shards:
    """A module whose parameters are sharded in place, those of rank 0 on every rank.

    Neighbouring ranks form a group of `shard_size`; ranks of equal places in their groups hold the
    same shards. The module's class changes, for good.
    """

    def __init__(self, module: nn.Module, shard_size: int, world: World) -> None:
        self.world = world
        shard_size = resolve_shard_size(shard_size, world.size)
        with world.waiting("start of sharding"):
            for tensor in (*module.parameters(), *module.buffers()):
                broadcast_from_rank0(tensor)
            self.mesh = make_mesh(world, (world.size // shard_size, shard_size))
        self.module = module
        self._unit = fully_shard(module, mesh=self.mesh, reshard_after_forward=False)
        # then divides: gloo has no mean
        self._unit.set_force_sum_reduction_for_comms(True)
        reducing: Any = _AnnouncedReduceScatter(world)  # torch keeps the base class to itself
        self._unit.set_custom_reduce_scatter(reducing)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.unshard()

    def unshard(self) -> None:
        """Gather the parameters from their shards; nothing happens if they are whole."""
        with self.world.waiting("gather of parameters"):
            self._unit.unshard()

    def accumulate(self, last: bool) -> None:
        """Let the next backward pass reduce all gradients so far, if it is the last."""
        self._unit.set_requires_gradient_sync(last)
        self._unit.set_reshard_after_backward(last)

    def _gradients(self) -> list[Tensor]:
        grads = [p.grad for p in self.parameters]
        return [grad.to_local() for grad in grads if isinstance(grad, DTensor)]

    def grad_norm(self) -> Tensor:
        """Return the norm of the whole gradient; all ranks call."""
        own = nn.utils.get_total_norm(self._gradients())
        square = own.double().square()
        with self.world.waiting("norm of the gradient"):
            dist.all_reduce(square, group=self.mesh.get_group(SHARD))
        return square.sqrt().to(own.dtype)

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale the sharded gradient of this norm down to `max_norm`."""
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        for shard in self._gradients():
            shard.mul_(factor)

    def module_state(self) -> dict[str, Tensor]:
        """Gather the module's whole `state_dict` on the CPU of every rank."""
        with self.world.waiting("gather of weights"):
            # `state_dict` frees the gathered parameters, so gather them again below
            state = _whole(self.module.state_dict())
        self.unshard()
        return state

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Gather the optimizer's whole `state_dict` on the CPU of every rank."""
        with self.world.waiting("gather of the optimizer's state"):
            return _whole(optimizer.state_dict())

    def load(
        self,
        weights: dict[str, Tensor],
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
    ) -> None:
        """Take this rank's shards of whole states."""
        shards = self.module.state_dict()
        shards = {name: _shard_of(weights[name], shard) for name, shard in shards.items()}
        self.module.load_state_dict(shards)
        states = {
            index: {
                name: _shard_of(value, self.parameters[index]) for name, value in values.items()
            }
            for index, values in optimizer_state["state"].items()
        }
        optimizer.load_state_dict(optimizer_state | {"state": states})
        self.unshard()


class _AnnouncedReduceScatter:
    """A reduction of gradients from which on waiting for other ranks counts."""

    def __init__(self, world: World) -> None:
        self.world = world

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        self.world.gradients_ready()
        return reduce_scatter(output_tensor, input_tensor, **options)


def _whole(state: Any) -> Any:
    """Replace every shard of a nested state by the whole tensor, on the CPU; all ranks call."""
    return tree_map_only(DTensor, lambda tensor: tensor.full_tensor().cpu(), state)


def _shard_of(value: Any, like: Tensor) -> Any:
    """Return this rank's shard of a whole tensor that every rank has; nothing is sent.

    A value of another shape is a count, the same for all shards.
    """
    if not isinstance(like, DTensor) or getattr(value, "shape", None) != like.shape:
        return value
    return distribute_tensor(
        value.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
