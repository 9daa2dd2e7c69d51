"""Collecting rollouts, and cutting them into sequences."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from agents.advantages import running_sums
from agents.network.minibatches import Minibatch, to_sequences
from agents.network.normalize import Normalizer
from agents.network.sequences import to_device, to_host
from envs.vector.layout import TorchEnv
from rl_dist.errors import UserError
from rl_dist.process_group.clock import section
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World
from rl_dist.strategies.config import weights_cast_once

if TYPE_CHECKING:
    from agents.policy import Policy


@dataclass
class Carry:
    """State of each environment between rollouts; checkpointed, never zeroed."""

    obs: Tensor  # [B, F] as the environment gave it
    history: Tensor  # [B, n-1, F] normalised observations before it (feature_window n), or zeros
    episode_start: Tensor  # [B] bool; obs is the first of its episode
    lstm_state: Tensor  # [B, S, H]
    episode_return: Tensor  # [B] float64, plain rewards so far
    episode_length: Tensor  # [B] int64
    discounted_return: Tensor  # [B] float64, of the rewards the learner sees; scales them

    def tensors(self) -> dict[str, Tensor]:
        """All fields by name, each with leading dimension B."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def rows(self, rows: slice) -> Carry:
        """The carry of some of the environments."""
        return Carry(**{name: tensor[rows] for name, tensor in self.tensors().items()})


def fresh_carry(policy: Policy, obs: Tensor) -> Carry:
    """The carry after all environments were reset to `obs` [B, F]."""
    num_envs = len(obs)
    zeros = torch.zeros(num_envs, dtype=torch.float64, device=obs.device)  # [B]
    state = policy.initial_state(num_envs)  # [B, S, H]
    return Carry(
        obs=obs,
        history=policy.empty_history(num_envs),
        episode_start=torch.ones(num_envs, dtype=torch.bool, device=obs.device),
        lstm_state=state,
        episode_return=zeros,
        episode_length=zeros.long(),
        discounted_return=zeros.clone(),
    )


@dataclass
class OnHost:
    """What the host has to know of a rollout, read at once."""

    episodes: np.ndarray  # [3] how many ended, and the sums of their returns and lengths
    truncated: np.ndarray  # [T, B]
    episode_start: np.ndarray  # [T, B]
    finite: bool  # observations and rewards

    @classmethod
    def joined(cls, groups: list[OnHost]) -> OnHost:
        """Of the groups of a rank's environments."""
        return cls(
            truncated=np.concatenate([one.truncated for one in groups], axis=1),
            episode_start=np.concatenate([one.episode_start for one in groups], axis=1),
            episodes=np.sum([one.episodes for one in groups], axis=0),
            finite=all(one.finite for one in groups),
        )


@dataclass
class Rollout:
    """T steps of B environments; every tensor is [T, B, ...] unless noted."""

    obs: Tensor  # [T, B, F or n*F] normalised, as the policy saw it
    raw_obs: Tensor  # [T, B, F]
    actions: Tensor  # [T, B, A] unclipped, or [T, B] int64
    logprobs: Tensor
    values: Tensor
    rewards: Tensor  # float64, as the environment gave them (not yet scaled)
    episode_start: Tensor  # bool; about the input
    terminated: Tensor  # bool; about the step
    truncated: Tensor  # bool; about the step
    episode_returns: Tensor  # float64, plain return so far, this step included
    episode_lengths: Tensor  # int64
    next_values: Tensor  # V of the true successor
    initial_states: Tensor  # [K, B, S, H] recurrent state before every L-th step
    on_host: OnHost

    @property
    def episode_end(self) -> Tensor:
        """[T, B] bool: the step was the last of its episode."""
        return self.terminated | self.truncated

    def refuse_non_finite(
        self, next_obs: Tensor, env_offset: int, lifetime_step: int, rank: int
    ) -> None:
        """Raise UserError for the first NaN or inf that an environment returned."""
        if self.on_host.finite:
            return
        bad_obs = ~torch.isfinite(torch.cat([self.raw_obs, next_obs[None]])).all(-1)  # [T+1, B]
        bad_rewards = torch.nn.functional.pad(~torch.isfinite(self.rewards), (0, 0, 0, 1))
        bad = bad_obs | bad_rewards  # [T+1, B]
        t, column = bad.nonzero()[0].tolist()
        what = "reward" if bad_rewards[t, column] else "observation"
        where = f"environment {env_offset + column} at its step {lifetime_step + t}"
        raise UserError(f"rank {rank}: NaN or inf in the {what} of {where}", exit_code=1)


def policy_input(
    normalize: Callable[[Tensor], Tensor], history: Tensor, obs: Tensor, dtype: torch.dtype
) -> Tensor:
    """Normalise `obs` [B, F]; a window's n-1 observations come first: [B, n*F]."""
    seen = normalize(obs.to(dtype))
    return torch.cat([history, seen[:, None]], dim=1).flatten(1) if history.shape[1] else seen


def shift_history(history: Tensor, seen: Tensor) -> Tensor:
    """The window [B, n-1, F] after one more observation."""
    return seen.unflatten(1, (history.shape[1] + 1, -1))[:, 1:] if history.shape[1] else history


@section("collect")
def collect(
    policy: Policy,
    normalizer: Normalizer,
    env: TorchEnv,
    carry: Carry,
    noise: Tensor,  # [T, B, A]
    bptt_steps: int,
    on_step: Callable[[], None] = lambda: None,
) -> Rollout:
    """Step all environments T times with the frozen policy; updates `carry` in place.

    An environment of several `groups` steps some of its rows while the policy acts for others.
    """
    groups = env.groups
    with weights_cast_once(policy.low_precision, noise.device):
        if len(groups) > 1:
            return _collect_in_groups(policy, normalizer, env, carry, noise, bptt_steps, on_step)
        acting = _act(policy, normalizer, carry, noise, bptt_steps)
        actions_or_rollout = next(acting)
        for _ in noise:
            with section("environment"):
                answers = env.step(actions_or_rollout)
            on_step()
            actions_or_rollout = acting.send(answers)
        return actions_or_rollout


def _collect_in_groups(
    policy: Policy,
    normalizer: Normalizer,
    env: TorchEnv,
    carry: Carry,
    noise: Tensor,  # [T, B, A]
    bptt_steps: int,
    on_step: Callable[[], None],
) -> Rollout:
    """Collect by groups in turn: the others step while the policy acts for one."""
    carries = [carry.rows(rows) for rows in env.groups]
    acting = [
        _act(policy, normalizer, part, noise[:, rows], bptt_steps)
        for part, rows in zip(carries, env.groups, strict=True)
    ]
    made = []
    for group, one in enumerate(acting):
        made.append(next(one))
        env.send(made[group], group)
    for t in range(len(noise)):
        for group, one in enumerate(acting):
            with section("environment"):
                answers = env.recv(group)
            on_step()
            made[group] = one.send(answers)
            if t + 1 < len(noise):
                env.send(made[group], group)
    for name in carry.tensors():
        setattr(carry, name, torch.cat([getattr(part, name) for part in carries]))
    columns = [field.name for field in fields(Rollout) if field.name != "on_host"]
    joined = {n: torch.cat([getattr(one, n) for one in made], dim=1) for n in columns}
    return Rollout(**joined, on_host=OnHost.joined([one.on_host for one in made]))


def _act(
    policy: Policy,
    normalizer: Normalizer,
    carry: Carry,
    noise: Tensor,  # [T, B, A]
    bptt_steps: int,
) -> Generator[Any, Any, None]:
    """Yield the actions of each step, be sent what `env.step` returns; yield the Rollout last.

    States are kept for the values of observations that no further step looks at.
    """
    normalize = normalizer.frozen(carry.lstm_state.dtype)
    steps: list[dict[str, Tensor]] = []
    successors: list[tuple[Tensor, ...]] = []  # (obs, history, state) if no episode ended
    initial_states = []
    for t, push in enumerate(policy.pushes(noise)):
        if t % bptt_steps == 0:
            initial_states.append(carry.lstm_state)

        # act, then let the environments answer
        seen = policy_input(normalize, carry.history, carry.obs, carry.lstm_state.dtype)
        with section("policy"):
            actions, actor, values, state = policy.decide(
                seen, carry.lstm_state, carry.episode_start, push
            )
        obs, rewards, terminated, truncated, info = yield actions

        # keep the step, and what its successor's value depends on
        step = {"obs": seen, "raw_obs": carry.obs, "actions": actions, "values": values}
        step |= {"rewards": rewards, "episode_start": carry.episode_start}
        step |= {"terminated": terminated, "truncated": truncated}
        step |= {"actor": actor, "raw_rewards": info.get("raw_rewards", rewards)}
        steps.append(step)
        history = shift_history(carry.history, seen)
        successors.append((info["final_obs"], history, state))

        # carry on; the end of an episode empties its window
        ended = terminated | truncated  # [B]
        carry.obs = obs
        carry.history = history * ~ended[:, None, None] if history.shape[1] else history
        carry.episode_start = ended
        carry.lstm_state = state

    whole = _complete(policy, normalize, carry, steps, successors)
    yield Rollout(**whole, initial_states=torch.stack(initial_states))


def _complete(
    policy: Policy,
    normalize: Callable[[Tensor], Tensor],
    carry: Carry,
    steps: list[dict[str, Tensor]],
    successors: list[tuple[Tensor, ...]],
) -> dict[str, Any]:
    """Fields of a rollout; what needs no step by itself is computed for all of them at once."""
    stacked = {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    actor, raw_rewards = stacked.pop("actor"), stacked.pop("raw_rewards")
    stacked["rewards"] = stacked["rewards"].double()
    stacked["logprobs"] = policy.logprobs(actor, stacked["actions"])
    ends = stacked["terminated"] | stacked["truncated"]
    stacked |= _episode_sums(carry, raw_rewards, ends)
    on_host = _read(stacked, ends, carry.obs)
    stacked["next_values"] = _next_values(policy, normalize, successors, stacked, on_host.truncated)
    return {**stacked, "on_host": on_host}


def _read(steps: dict[str, Tensor], episode_end: Tensor, next_obs: Tensor) -> OnHost:
    """What the host needs of steps [T, B, ...] and of what followed them."""
    named = ("episode_returns", "episode_lengths")
    sums = [(steps[name] * episode_end).sum().double() for name in named]
    episodes = torch.stack([episode_end.sum().double(), *sums])  # whole numbers are exact
    checked = (steps["raw_obs"], steps["rewards"], next_obs)
    finite = torch.stack([torch.isfinite(values).all() for values in checked])
    flags = (steps["truncated"], steps["episode_start"])
    episodes_read, truncated, starts, usable = to_host([episodes, *flags, finite])
    return OnHost(episodes_read, truncated, starts, bool(usable.all()))


def _episode_sums(carry: Carry, rewards: Tensor, episode_end: Tensor) -> dict[str, Tensor]:
    """Plain return and length so far after every step, each [T, B]; carried on in `carry`."""
    increments = torch.stack([rewards.double(), torch.ones_like(rewards).double()], dim=1)
    before = torch.stack([carry.episode_return, carry.episode_length.double()])  # [2, B]
    sums, after = running_sums(before, increments, episode_end)
    carry.episode_return, carry.episode_length = after[0], after[1].long()
    return {"episode_returns": sums[:, 0], "episode_lengths": sums[:, 1].long()}


@section("policy")
def _next_values(
    policy: Policy,
    normalize: Callable[[Tensor], Tensor],
    successors: list[tuple[Tensor, ...]],
    steps: dict[str, Tensor],  # each [T, B, ...]
    truncated: np.ndarray,  # [T, B]
) -> Tensor:
    """V of the true successor of every step, [T, B]: zero where the episode terminated."""
    # the next step's value, unless the episode or the rollout ended
    next_values = torch.empty_like(steps["values"])
    next_values[:-1] = steps["values"][1:]
    needs_bootstrap = truncated.copy()
    needs_bootstrap[-1] = True

    # those are evaluated now, all at once; the recurrent states that come out are discarded
    places = [np.flatnonzero(needs_bootstrap), needs_bootstrap.nonzero()[1]]
    cells, columns = to_device(places, next_values.device)
    by_step = columns.split(needs_bootstrap.sum(1).tolist())
    kept = [
        [part.index_select(0, index) for part in step]
        for step, index in zip(successors, by_step, strict=True)
        if len(index)
    ]
    obs, history, state = (torch.cat(parts) for parts in zip(*kept, strict=True))
    seen = policy_input(normalize, history, obs, state.dtype)
    no_start = torch.zeros(len(seen), dtype=torch.bool, device=seen.device)
    bootstrap_values = policy.decide(seen, state, no_start)[2]
    next_values.view(-1).index_copy_(0, cells, bootstrap_values)
    return next_values * ~steps["terminated"]


def cut_rollout(
    rollout: Rollout, advantages: Tensor, returns: Tensor, bptt_steps: int
) -> Minibatch:
    """All K * B sequences of a rollout, its advantages and its returns, each [T, B]."""
    names = ("obs", "actions", "logprobs", "values", "episode_start")
    steps = {name: getattr(rollout, name) for name in names}
    steps |= {"advantages": advantages, "returns": returns}
    return Minibatch(
        lstm_state=rollout.initial_states.flatten(0, 1),
        **{name: to_sequences(values, bptt_steps) for name, values in steps.items()},
    )


def episode_metrics(
    rollout: Rollout,
    timing: dict[str, float],
    env_restarts: int,
    use: dict[str, float | None],
    world: World,
    env_metrics: Mapping[str, tuple[float, int]] = {},  # never changed
    signum: int = 0,
) -> dict[str, Any]:
    """Returns and lengths of ended episodes, overall and by rank, in one gathering.

    Args:
        timing: seconds of this rank's phases.
        use: of this rank's GPU, CPU and memory.
        env_metrics: sum and count of what this rank's environments report of themselves.
        signum: of the stop signal that this rank has got; the largest of all is returned.
    """
    count, return_sum, length_sum = rollout.on_host.episodes.tolist()
    own = {
        "rank": world.rank,
        "episode/count": int(count),
        "return_sum": return_sum,
        "length_sum": int(length_sum),
        "restarts": env_restarts,
        "signum": signum,
        "env_metrics": env_metrics,
        **timing,
        **use,
    }
    ranks = all_gather_json(own, world)
    sums: dict[str, tuple[float, int]] = {}
    for name, (total, number) in (pair for rank in ranks for pair in rank["env_metrics"].items()):
        before = sums.get(name, (0.0, 0))
        sums[name] = (before[0] + total, before[1] + number)
    count = sum(rank["episode/count"] for rank in ranks)
    return_sum = sum(rank["return_sum"] for rank in ranks)
    length_sum = sum(rank.pop("length_sum") for rank in ranks)
    for rank in ranks:
        del rank["env_metrics"]
        own_sum, own_count = rank.pop("return_sum"), rank["episode/count"]
        rank["episode/return"] = own_sum / own_count if own_count else None
    return {
        "episode/return": return_sum / count if count else None,
        "episode/length": length_sum / count if count else None,
        "episode/count": count,
        **{f"env/{name}": total / number for name, (total, number) in sums.items() if number},
        "env/restarts": sum(rank.pop("restarts") for rank in ranks),
        "signum": max(rank.pop("signum") for rank in ranks),
        **{key: max(rank[key] for rank in ranks) for key in timing},
        "ranks": ranks,
    }
