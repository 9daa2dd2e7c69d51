"""Compute the advantages and returns of a rollout; build a batch for the update."""

from collections.abc import Mapping

import torch
from torch import Tensor

from agents.learner.network.cores import scan
from agents.learner.network.inputs import Normalizers
from agents.learner.network.sequences import cut_sequences
from agents.learner.ppo import Batch
from agents.learner.rollout import Rollout
from agents.learner.settings import PPOConfig
from rl_dist.process_group.collectives import all_reduce_sum
from rl_dist.process_group.world import World


def make_batch(
    rollout: Rollout,
    bptt_steps: int,
    normalizers: Normalizers,
    world: World,
    config: PPOConfig,
) -> Batch:
    """Compute the advantages and returns of a rollout, and cut the rollout into sequences.

    Every rank must call this, because one all-reduce adds up the sums of all ranks, which are
    needed to normalise advantages, observations and rewards.
    """
    # compute advantages and returns [T, B] from scaled rewards
    values = rollout.values
    rewards = normalizers.rewards(rollout.rewards[..., None])[..., 0].to(values.dtype)
    advantages, returns = gae(
        rewards, values, rollout.next_values, rollout.episode_end, config.gamma, config.gae_lambda
    )
    sums = normalizers.sums(rollout.raw_obs, rollout.discounted_returns)
    sums = all_reduce_sum(sums | rollout_sums(advantages, values, returns), world)
    if config.norm_adv:
        min_divisor = config.min_adv_std * normalizers.return_deviation()
        advantages = normalize_advantages(advantages, sums, min_divisor)

    # cut the rollout into sequences of bptt_steps
    names = ("obs", "actions", "logprobs", "values", "episode_start")
    steps = {name: getattr(rollout, name) for name in names}
    steps |= {"advantages": advantages, "returns": returns}
    cut = (-1, bptt_steps)  # [T, ...] becomes [K, L, ...]
    starts = rollout.cpu_starts.unflatten(0, cut).transpose(0, 1).flatten(1)  # [L, K * B]
    return Batch(
        steps={name: tensor.unflatten(0, cut) for name, tensor in steps.items()},
        initial_states=rollout.initial_states,
        pieces=cut_sequences(starts.numpy()),
        explained_variance=explained_variance(sums),
        sums=sums,
    )


def gae(
    rewards: Tensor,  # [T, B]
    values: Tensor,  # [T, B]
    next_values: Tensor,  # [T, B] value of the observation after the step, 0 after termination
    episode_end: Tensor,  # [T, B] bool: the step was the last of its episode
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Return the advantages [T, B] and the returns [T, B] = advantages + values.

    Source: Schulman et al., "High-dimensional continuous control using generalized advantage
    estimation", https://arxiv.org/abs/1506.02438, equation 16.
    """
    deltas = rewards + gamma * next_values - values
    decay = gamma * gae_lambda * (~episode_end).to(deltas.dtype)
    # the advantage of a step adds the decayed advantage of the next step, so time runs backwards
    after_last = torch.zeros_like(deltas[0])
    advantages = scan(decay.flip(0), deltas.flip(0), after_last).flip(0)
    return advantages, advantages + values


def rollout_sums(advantages: Tensor, values: Tensor, returns: Tensor) -> dict[str, Tensor]:
    """Return this rank's sums of advantages, of returns and of the critic's errors.

    Each result is a tensor [3]: the number of steps, the sum, and the sum of squares. When the
    sums of all ranks have been added, `normalize_advantages` and `explained_variance` use them.
    """
    sums = {}
    samples = {"advantages": advantages, "returns": returns, "errors": returns - values}
    for name, tensor in samples.items():  # [T, B]
        numbers = tensor.double()
        count = numbers.new_full((), numbers.numel())
        sums[name] = torch.stack([count, numbers.sum(), numbers.square().sum()])
    return sums


def normalize_advantages(
    advantages: Tensor, sums: Mapping[str, Tensor], min_divisor: float | Tensor
) -> Tensor:
    """Normalise advantages [T, B] to mean 0 and standard deviation 1 over all ranks.

    If `min_divisor` exceeds the standard deviation of the advantages, the result has a standard
    deviation below 1.
    """
    mean, variance = _moments(sums["advantages"])
    deviation = (variance.clamp(min=0.0).sqrt() + 1e-8).clamp(min=min_divisor)
    return ((advantages.double() - mean) / deviation).to(advantages.dtype)


def explained_variance(sums: Mapping[str, Tensor]) -> Tensor:
    """Return 1 - Var(returns - values) / Var(returns); 0 for constant returns."""
    variance = _moments(sums["returns"])[1]
    errors = _moments(sums["errors"])[1]
    return torch.where(variance > 0, 1.0 - errors / variance, 0.0)


def _moments(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance from the count, the sum and the sum of squares."""
    count, total, squares = sums
    mean = total / count
    return mean, squares / count - mean.square()
