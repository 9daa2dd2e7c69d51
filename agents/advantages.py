"""Sums along a rollout: generalised advantage estimation, and sums over episodes."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    rewards: Tensor,  # [T, B]
    values: Tensor,  # [T, B]
    next_values: Tensor,  # [T, B] V of the true successor: 0 after termination
    episode_end: Tensor,  # [T, B] bool; the step was the last of its episode
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Advantages [T, B] of a rollout, and returns [T, B] = advantages + values.

    Source: Schulman et al., "High-dimensional continuous control using generalized advantage
    estimation", https://arxiv.org/abs/1506.02438, equation 16.
    """
    deltas = rewards + gamma * next_values - values
    decay = gamma * gae_lambda * (~episode_end).to(deltas.dtype)
    advantages = torch.empty_like(deltas)
    following = torch.zeros_like(deltas[0])
    for t in range(len(deltas) - 1, -1, -1):
        following = torch.addcmul(deltas[t], decay[t], following)
        advantages[t] = following
    return advantages, advantages + values


def running_sums(
    start: Tensor,  # [..., B] sums before the rollout, of the episodes under way
    increments: Tensor,  # [T, ..., B]
    episode_end: Tensor,  # [T, B] bool
    decay: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Sums since the episode's start; every step multiplies what was by `decay`.

    Returns:
        The sums after every step [T, ..., B], and what goes on into the next rollout [..., B].
    """
    factors = (~episode_end).to(increments.dtype) * decay  # [T, B]
    rows = [start * decay + increments[0]]
    exact = decay == 1.0  # products by 0 and 1: one operator rounds as two do
    for increment, factor in zip(increments[1:], factors[:-1], strict=True):
        last = rows[-1]
        rows.append(torch.addcmul(increment, last, factor) if exact else increment + last * factor)
    return torch.stack(rows), rows[-1] * ~episode_end[-1]
