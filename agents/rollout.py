"""Collecting rollouts and cutting them into minibatches of slots."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from agents.normalize import Normalizer
from rl_dist.errors import UserError
from rl_dist.process_group.collectives import gather_json
from rl_dist.process_group.phases import section
from rl_dist.process_group.world import World
from rl_dist.seeding import SHUFFLE_STREAM

if TYPE_CHECKING:
    from agents.policy import Policy


@dataclass
class Carry:
    """What goes on between rollouts, per environment; checkpointed, never zeroed."""

    obs: Tensor  # [B, F] as the environment gave it
    history: Tensor  # [B, n-1, F] normalised observations before it (feature_window n), zeros before the start
    episode_start: Tensor  # [B] bool; obs is the first of its episode
    lstm_state: Tensor  # [B, S, H]
    episode_return: Tensor  # [B] float64, plain rewards so far
    episode_length: Tensor  # [B] int64
    discounted_return: Tensor  # [B] float64, of the rewards the learner sees; scales them

    def tensors(self) -> dict[str, Tensor]:
        """All fields by name, each with leading dimension B."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def fresh_carry(policy: Policy, obs: Tensor) -> Carry:
    """The carry after all environments were reset to `obs` [B, F]."""
    num_envs = len(obs)
    zeros = torch.zeros(num_envs, dtype=torch.float64, device=obs.device)
    window = max(policy.config.feature_window - 1, 0)
    state = policy.initial_state(num_envs)
    return Carry(
        obs=obs,
        history=state.new_zeros(num_envs, window, policy.num_obs),
        episode_start=torch.ones(num_envs, dtype=torch.bool, device=obs.device),
        lstm_state=state,
        episode_return=zeros,
        episode_length=zeros.long(),
        discounted_return=zeros.clone(),
    )


@dataclass
class Rollout:
    """T steps of B environments; every tensor is [T, B, ...] unless noted."""

    obs: Tensor  # [T, B, F or n*F] normalised, what the policy saw
    raw_obs: Tensor  # [T, B, F]
    actions: Tensor  # [T, B, A] unclipped, or [T, B] int64
    logprobs: Tensor
    values: Tensor
    rewards: Tensor  # float64, as the environment gave them (not yet scaled)
    episode_start: Tensor  # bool; about the input
    terminated: Tensor  # bool; about the step
    truncated: Tensor  # bool; about the step
    next_values: Tensor  # V of the true successor
    grid_states: Tensor  # [K, B, S, H] recurrent state before every L-th step
    episode_returns: Tensor  # float64, plain return so far, this step included
    episode_lengths: Tensor  # int64

    @property
    def episode_end(self) -> Tensor:
        """Whether the step was the last of its episode, [T, B] bool."""
        return self.terminated | self.truncated

    def refuse_non_finite(self, next_obs: Tensor, first_env: int, lifetime_step: int, rank: int) -> None:
        """Name the environment and step of the first NaN or inf an environment returned.

        Raises:
            UserError: there is one.
        """
        bad_obs = ~torch.isfinite(torch.cat([self.raw_obs, next_obs[None]])).all(-1)  # [T+1, B]
        bad_rewards = torch.nn.functional.pad(~torch.isfinite(self.rewards), (0, 0, 0, 1))
        bad = bad_obs | bad_rewards
        if bad.any():
            t, column = (int(index) for index in bad.nonzero()[0])
            what = "reward" if bad_rewards[t, column] else "observation"
            where = f"environment {first_env + column} at its step {lifetime_step + t}"
            raise UserError(f"rank {rank}: NaN or inf in the {what} of {where}", exit_code=1)


def policy_input(normalizer: Normalizer, history: Tensor, obs: Tensor, dtype: torch.dtype) -> Tensor:
    """What the policy sees of `obs` [B, F]: normalised, with a window the last n.

    Returns:
        [B, F]; with a window of n observations [B, n*F], flattened.
    """
    seen = normalizer(obs.to(dtype))
    return torch.cat([history, seen[:, None]], dim=1).flatten(1) if history.shape[1] else seen


def shift_history(history: Tensor, seen: Tensor) -> Tensor:
    """The window [B, n-1, F] after one more observation."""
    return seen.unflatten(1, (history.shape[1] + 1, -1))[:, 1:] if history.shape[1] else history


@section("collect")
def collect(
    policy: Policy,
    normalizer: Normalizer,
    env: gymnasium.vector.VectorEnv,
    carry: Carry,
    noise: Tensor,  # [T, B, A]
    bptt_steps: int,
    on_step: Callable[[], None] = lambda: None,
) -> Rollout:
    """Step all environments T times with the frozen policy; updates `carry` in place.

    Every rank takes exactly T steps. Values of truncated episodes' last observations are evaluated
    together after the last step, from the states and observations kept until then.
    """
    dtype = carry.lstm_state.dtype
    steps: list[tuple[Tensor, ...]] = []
    successors: list[tuple[Tensor, Tensor, Tensor]] = []  # (obs, history, state) were the episode going on
    grid_states = []
    for t, step_noise in enumerate(noise):
        if t % bptt_steps == 0:
            grid_states.append(carry.lstm_state)
        seen = policy_input(normalizer, carry.history, carry.obs, dtype)
        with section("policy"):
            actions, logprobs, values, state = policy.act(seen, carry.lstm_state, carry.episode_start, step_noise)
        with section("environment"):
            obs, rewards, terminated, truncated, info = env.step(actions)
        on_step()
        ended = terminated | truncated
        running_return = carry.episode_return + info.get("raw_rewards", rewards)
        running_length = carry.episode_length + 1
        steps.append(
            (seen, carry.obs, actions, logprobs, values, rewards.double(), carry.episode_start, terminated)
            + (truncated, running_return, running_length)
        )
        history = shift_history(carry.history, seen)
        successors.append((info["final_obs"], history, state))
        carry.history = history * ~ended[:, None, None]  # an episode's end empties the window
        carry.obs, carry.episode_start, carry.lstm_state = obs, ended, state
        carry.episode_return, carry.episode_length = running_return * ~ended, running_length * ~ended
    stacked = [torch.stack(column) for column in zip(*steps, strict=True)]
    seen, raw_obs, actions, logprobs, values, rewards, episode_start, terminated, truncated = stacked[:9]
    return Rollout(
        obs=seen,
        raw_obs=raw_obs,
        actions=actions,
        logprobs=logprobs,
        values=values,
        rewards=rewards,
        episode_start=episode_start,
        terminated=terminated,
        truncated=truncated,
        next_values=_successor_values(policy, normalizer, successors, values, terminated, truncated),
        grid_states=torch.stack(grid_states),
        episode_returns=stacked[9],
        episode_lengths=stacked[10],
    )


@section("policy")
def _successor_values(
    policy: Policy,
    normalizer: Normalizer,
    successors: list[tuple[Tensor, Tensor, Tensor]],
    values: Tensor,  # [T, B]
    terminated: Tensor,  # [T, B]
    truncated: Tensor,  # [T, B]
) -> Tensor:
    """V of the true successor of every step, [T, B]; the recurrent states of these peeks are discarded."""
    next_values = torch.empty_like(values)
    next_values[:-1] = values[1:]
    peeks = truncated.clone()
    peeks[-1] = True  # the rollout's own end is a peek too
    times, columns = peeks.nonzero(as_tuple=True)
    rows = columns.split(peeks.sum(1).tolist())
    chosen = [
        [part[index] for part in step] for step, index in zip(successors, rows, strict=True) if len(index)
    ]
    obs, history, state = (torch.cat(parts) for parts in zip(*chosen, strict=True))
    seen = policy_input(normalizer, history, obs, state.dtype)
    going_on = torch.zeros(len(seen), dtype=torch.bool, device=seen.device)
    next_values[times, columns] = policy.act(seen, state, going_on)[2]
    return next_values * ~terminated


@dataclass
class Minibatch:
    """N slots of L steps each."""

    obs: Tensor  # [L, N, F]
    actions: Tensor  # [L, N, A] or [L, N]
    logprobs: Tensor  # [L, N]
    values: Tensor  # [L, N]
    advantages: Tensor  # [L, N]
    returns: Tensor  # [L, N]
    episode_start: Tensor  # [L, N]
    lstm_state: Tensor  # [N, S, H]


def equal_parts(minibatch: Minibatch, count: int) -> Iterator[Minibatch]:
    """A minibatch in so many parts of equally many slots: views, one after the other."""
    if count == 1:
        yield minibatch
        return
    size = minibatch.obs.shape[1] // count
    for first in range(0, size * count, size):
        yield Minibatch(
            **{
                item.name: getattr(minibatch, item.name).narrow(0 if item.name == "lstm_state" else 1, first, size)
                for item in fields(Minibatch)
            }
        )


def stratum_size(num_minibatches: int, slots_per_env: int) -> int:
    """How many neighbouring global environments shuffle their slots together.

    See docs/design.md, Sequences and strata.
    """
    return num_minibatches // math.gcd(num_minibatches, slots_per_env)


def slot_order(
    key: tuple[int, int, int],  # (seed, iteration, epoch)
    first_global_env: int,
    num_envs: int,
    slots_per_env: int,
    num_minibatches: int,
) -> np.ndarray:
    """This rank's slots (k * B + b) by minibatch: [num_minibatches, slots].

    Slots are permuted within strata of global environments and every stratum gives each minibatch
    equally many, so the global minibatch is the same however environments are grouped onto ranks.
    """
    size = stratum_size(num_minibatches, slots_per_env)
    assert num_envs % size == 0 and first_global_env % size == 0
    parts = []
    for first in range(0, num_envs, size):
        stratum = (first_global_env + first) // size
        seed, iteration, epoch = key
        generator = np.random.Generator(np.random.PCG64(_entropy(seed, iteration, epoch, stratum)))
        slots = np.arange(size * slots_per_env)
        generator.shuffle(slots)
        columns = (slots % slots_per_env) * num_envs + first + slots // slots_per_env
        parts.append(columns.reshape(num_minibatches, -1))
    return np.concatenate(parts, axis=1)


def _entropy(seed: int, iteration: int, epoch: int, stratum: int) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, SHUFFLE_STREAM, iteration, epoch, stratum])


def to_slots(values: Tensor, bptt_steps: int) -> Tensor:
    """Rearrange [T, B, ...] into slots [L, K*B, ...]; (k, b) is column k * B + b."""
    return values.unflatten(0, (-1, bptt_steps)).transpose(0, 1).flatten(1, 2)


def minibatches(slots: Minibatch, order: np.ndarray) -> Iterator[Minibatch]:
    """An epoch's minibatches, picked out of a rollout's slots by `slot_order`."""
    for columns in order:
        index = torch.from_numpy(columns).to(slots.obs.device)
        yield Minibatch(
            **{
                item.name: getattr(slots, item.name).index_select(0 if item.name == "lstm_state" else 1, index)
                for item in fields(Minibatch)
            }
        )


def episode_metrics(
    rollout: Rollout, timing: dict[str, float], env_restarts: int, use: dict[str, float | None], world: World
) -> dict[str, Any]:
    """Returns and lengths of this rollout's ended episodes, overall and per rank.

    Args:
        timing: seconds of this rank's phases.
        env_restarts: of this rank's environments.
        use: of this rank's GPU, CPU and memory.
    """
    ended = rollout.episode_end
    own = {
        "rank": world.rank,
        "episode/count": int(ended.sum()),
        "return_sum": float((rollout.episode_returns * ended).sum()),
        "length_sum": int((rollout.episode_lengths * ended).sum()),
        "restarts": env_restarts,
        **timing,
        **use,
    }
    ranks = gather_json(own, world)
    count = sum(item["episode/count"] for item in ranks)
    return_sum = sum(item["return_sum"] for item in ranks)
    length_sum = sum(item.pop("length_sum") for item in ranks)
    for item in ranks:
        total = item.pop("return_sum")
        item["episode/return"] = total / item["episode/count"] if item["episode/count"] else None
    return {
        "episode/return": return_sum / count if count else None,
        "episode/length": length_sum / count if count else None,
        "episode/count": count,
        "env/restarts": sum(item.pop("restarts") for item in ranks),
        **{key: max(item[key] for item in ranks) for key in timing},
        "ranks": ranks,
    }
