"""Minibatches of sequences, and the schedule of an update over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agents.network.pieces import Plan, plan_pieces, plans_to_device


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
        """Return some sequences: how(field, axis of sequences, *which) of each field."""
        axes = {item.name: 1 for item in fields(self)} | {"lstm_state": 0}
        picked = {name: how(getattr(self, name), axis, *which) for name, axis in axes.items()}
        return Minibatch(**picked)

    def into_microbatches(self, count: int) -> Iterator[Minibatch]:
        """Split into `count` microbatches of equally many sequences: views."""
        size = self.obs.shape[1] // count
        for first in range(0, size * count, size):
            yield self.pick(Tensor.narrow, first, size)


def to_sequences(values: Tensor, bptt_steps: int) -> Tensor:
    """Rearrange [T, B, ...] into [L, K*B, ...]; block k of b is column k * B + b."""
    return values.unflatten(0, (-1, bptt_steps)).transpose(0, 1).flatten(1, 2)


@dataclass
class Schedule:
    """The sequences of an update's minibatches, and the plans of microbatches."""

    order: Tensor  # [epochs, minibatches, sequences]
    plans: list[Plan]  # by epoch, minibatch and microbatch; empty: none are made ahead
    num_microbatches: int

    def minibatches(
        self, sequences: Minibatch, epoch: int
    ) -> Iterator[tuple[Minibatch, list[Plan]]]:
        """Yield an epoch's minibatches of a rollout's sequences, with their plans."""
        first = epoch * self.order.shape[1]
        for number, index in enumerate(self.order[epoch], first):
            begin = number * self.num_microbatches
            plans = self.plans[begin : begin + self.num_microbatches]
            yield sequences.pick(Tensor.index_select, index), plans


def make_schedule(
    starts: np.ndarray,
    order: np.ndarray,
    num_microbatches: int,
    device: torch.device,
    call_steps: float | None = None,
    resets_inside: bool = False,
) -> Schedule:
    """Return the schedule of an update; all its tables reach the device by one copy.

    Args:
        starts: [L, K * B] episode starts.
        order: [epochs, minibatches, sequences] by `agents.network.noise.sequence_orders`.
        call_steps: of `plan_pieces`; None: no plans are made.
        resets_inside: of `plan_pieces`.
    """
    plans: list[Plan] = []
    if call_steps is not None:
        batches = order.reshape(-1, order.shape[2] // num_microbatches)
        plans = plan_pieces(starts, list(batches), call_steps, resets_inside)
    plans, (index,) = plans_to_device(plans, device, order)
    return Schedule(index, plans, num_microbatches)
