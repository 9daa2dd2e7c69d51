"""Generalised advantage estimation."""

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
    """Advantages and value targets of a rollout.

    Returns:
        advantages [T, B] and returns [T, B] = advantages + values.

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
