"""torch.nn.DataParallel along any axis of each input: one process, several GPUs.

DataParallel cuts every input along one and the same axis. A recurrent module's inputs have their
batch on different ones (steps are [L, N, ...], states [N, S, H]), so here all go in with the batch
first, and are put back inside, on each GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rl_dist.errors import UserError


class DataParallel(nn.DataParallel):
    """torch.nn.DataParallel with a batch axis of each input; see `StrategyConfig`.

    The module's forward takes tensors and returns one, or a (named) tuple of them.
    """

    def __init__(
        self, module: nn.Module, device_ids: Sequence[int], batch_axes: Sequence[int] = (0,)
    ) -> None:
        super().__init__(BatchFirst(module, batch_axes), list(device_ids))
        self.batch_axes = tuple(batch_axes)

    def forward(self, *inputs: Tensor) -> Any:
        """Return the module's outputs for the whole batch."""
        outputs = super().forward(*batch_first(inputs, self.batch_axes))
        return tree_map(lambda value: value.movedim(0, self.batch_axes[0]), outputs)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        """Run the replicas in threads, with autocast's type, which torch forgets."""
        enabled = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda")

        def alike(replica: nn.Module, *parts: Tensor, **options: Any) -> Any:
            with torch.autocast("cuda", dtype, enabled=enabled):
                return replica(*parts, **options)

        alike_replicas = [partial(alike, replica) for replica in replicas]
        return super().parallel_apply(alike_replicas, inputs, kwargs)


class BatchFirst(nn.Module):
    """A module with the batch on axis 0, around one that has it elsewhere."""

    def __init__(self, module: nn.Module, batch_axes: Sequence[int]) -> None:
        super().__init__()
        self.module, self.batch_axes = module, tuple(batch_axes)

    def forward(self, *inputs: Tensor) -> Any:
        """Return the module's outputs, batch first, for inputs with the batch first."""
        axes = _axis_of_each(len(inputs), self.batch_axes)
        moved = (value.movedim(0, axis) for value, axis in zip(inputs, axes, strict=True))
        return tree_map(lambda out: out.movedim(self.batch_axes[0], 0), self.module(*moved))


def batch_first(inputs: Sequence[Tensor], batch_axes: Sequence[int]) -> tuple[Tensor, ...]:
    """Move the batch axes of inputs to the front."""
    axes = _axis_of_each(len(inputs), batch_axes)
    for number, (value, axis) in enumerate(zip(inputs, axes, strict=True)):
        if value.ndim <= axis or value.shape[axis] != inputs[0].shape[axes[0]]:
            raise UserError(
                f"strategy dp: batch_axes names axis {axis} of input {number}, {list(value.shape)}"
                f", and axis {axes[0]} of input 0, {list(inputs[0].shape)}: they must be as long"
            )
    return tuple(value.movedim(axis, 0) for value, axis in zip(inputs, axes, strict=True))


def _axis_of_each(count: int, batch_axes: Sequence[int]) -> list[int]:
    return [batch_axes[min(number, len(batch_axes) - 1)] for number in range(count)]
