"""Minibatches of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor


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
        picked = {
            name: how(values, 0 if name == "lstm_state" else 1, *which)
            for name, values in vars(self).items()
        }
        return Minibatch(**picked)

    def into_microbatches(self, count: int) -> Iterator[Minibatch]:
        """Yield `count` microbatches of equal size, as views."""
        size = self.obs.shape[1] // count
        for first in range(0, size * count, size):
            yield self.pick(Tensor.narrow, first, size)


def to_sequences(values: Tensor, bptt_steps: int) -> Tensor:
    """Cut [T, B, ...] into [L, K*B, ...]; index k*B + b: part k of environment b."""
    return values.unflatten(0, (-1, bptt_steps)).transpose(0, 1).flatten(1, 2)
