"""Shard gradients and optimizer state over groups of ranks (FSDP2).

FSDP splits a module into units and runs collectives in every forward call of a unit, so all ranks
must make the same calls. But ranks with different episodes call the parts of a policy different
numbers of times. Therefore, the whole module is a single unit. Between steps, every rank has all
parameters in full, so acting, evaluating and hashing can use the unwrapped module, as in other
modes. Gradients and optimizer state are always sharded.

Source: Zhao et al., "PyTorch FSDP", https://arxiv.org/abs/2304.11277 (hybrid sharding).
"""

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
from rl_dist.process_group.world import World, make_mesh
from rl_dist.strategies.config import resolve_shard_size

SHARD = 1  # mesh axis along which parameters are split; along axis 0, they are replicated
# Newer torch has renamed reduce_scatter_tensor and warns about the old name.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# A policy's outputs are views of its network's outputs. FSDP2 warns about them, but no code
# changes them in place.
warnings.filterwarnings(
    "ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning
)


class Shards:
    """Shards a module's parameters in place, starting from the values on rank 0.

    Every `shard_size` consecutive ranks form a group. Ranks with the same position in their groups
    hold the same shards. FSDP changes the class of the module, and this cannot be undone.
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
        # gloo cannot compute means, so let FSDP sum the gradients and divide the sums
        self._unit.set_force_sum_reduction_for_comms(True)
        # mypy reports an error, because torch's base class of this object is private
        self._unit.set_custom_reduce_scatter(_AnnouncedReduceScatter(world))  # type: ignore[arg-type]
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.unshard()

    def unshard(self) -> None:
        """Gather all parameters from their shards, unless they are already gathered."""
        with self.world.waiting("gather of parameters"):
            self._unit.unshard()

    def accumulate(self, last: bool) -> None:
        """Prepare a backward pass; only the `last` pass of a step reduces gradients."""
        self._unit.set_requires_gradient_sync(last)
        self._unit.set_reshard_after_backward(last)

    def grad_norm(self) -> Tensor:
        """Return the norm of the whole gradient; every rank must call this."""
        grads = [p.grad.to_local() for p in self.parameters if isinstance(p.grad, DTensor)]
        local_norm = nn.utils.get_total_norm(grads)
        square = local_norm.double().square()
        with self.world.waiting("norm of the gradient"):
            dist.all_reduce(square, group=self.mesh.get_group(SHARD))
        return square.sqrt().to(local_norm.dtype)

    def module_state(self) -> dict[str, Tensor]:
        """Gather the module's whole `state_dict` on the CPU of every rank."""
        with self.world.waiting("gather of weights"):
            # Afterwards, each rank has only its shards, so gather the parameters again below.
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
        """Load unsharded weights and optimizer state; keep only this rank's shards."""
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
    """Reduces and scatters gradients for FSDP.

    Each call first records in `world` that this rank's gradients are ready. `world` measures the
    time after this moment as waiting for other ranks.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        self.world.gradients_ready()
        return reduce_scatter(output_tensor, input_tensor, **options)


def _whole(state: Any) -> Any:
    """Replace sharded tensors with whole CPU tensors; every rank must call this."""
    return tree_map_only(DTensor, lambda tensor: tensor.full_tensor().cpu(), state)


def _shard_of(value: Any, like: Tensor) -> Any:
    """Return this rank's shard of a tensor, split like the sharded tensor `like`.

    Every rank must pass the whole tensor. If the shape of a value differs from the shape of `like`,
    the value is returned unchanged; an example is a step count.
    """
    if not isinstance(like, DTensor) or getattr(value, "shape", None) != like.shape:
        return value
    return distribute_tensor(
        value.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
