"""Minibatches of sequences, and the schedule of minibatches in an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agents.network.pieces import Plan, plan_pieces, to_device


@dataclass
class Minibatch:
    """N sequences of L steps each."""

    obs: Tensor  # [L, N, F]
    actions: Tensor  # [L, N, A] or [L, N]
    logprobs: Tensor  # [L, N]
    values: Tensor  # [L, N]
    advantages: Tensor  # [L, N]
    returns: Tensor  # [L, N]
    episode_start: Tensor  # [L, N]
    lstm_state: Tensor  # [N, S, H]

    def pick(self, how: Callable[..., Tensor], *which: Any) -> Minibatch:
        """Apply the selection `how(field, sequence_axis, *which)` to every field."""
        axes = {item.name: int(item.name != "lstm_state") for item in fields(self)}
        picked = {name: how(getattr(self, name), axis, *which) for name, axis in axes.items()}
        return Minibatch(**picked)

    def into_microbatches(self, count: int) -> Iterator[Minibatch]:
        """Yield `count` microbatches of equal size, as views."""
        size = self.obs.shape[1] // count
        for first in range(0, size * count, size):
            yield self.pick(Tensor.narrow, first, size)


def to_sequences(values: Tensor, bptt_steps: int) -> Tensor:
    """Cut [T, B, ...] into [L, K*B, ...]; index k*B + b: part k of environment b."""
    return values.unflatten(0, (-1, bptt_steps)).transpose(0, 1).flatten(1, 2)


def make_schedule(
    starts: np.ndarray,  # [L, K * B] episode starts
    order: np.ndarray,  # [epochs, minibatches, sequences]
    num_microbatches: int,
    device: torch.device,
    call_steps: float | None = None,  # see `plan_pieces`; None: make no plans
    resets_inside: bool = False,
) -> list[list[tuple[Tensor, list[Plan]]]]:
    """For every epoch, list (sequence indices, microbatch plans) of each minibatch.

    All tables are copied to the device in one transfer.
    """
    plans: list[Plan] = []
    if call_steps is not None:
        microbatches = order.reshape(-1, order.shape[2] // num_microbatches)
        plans = [plan_pieces(starts[:, part], call_steps, resets_inside) for part in microbatches]
    index, *tables = to_device([order, *(plan.table for plan in plans)], device)
    moved = (replace(plan, table=table) for plan, table in zip(plans, tables, strict=True))
    return [
        [(sequences, list(islice(moved, num_microbatches))) for sequences in epoch]
        for epoch in index
    ]
