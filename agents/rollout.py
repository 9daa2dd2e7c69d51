"""Collect rollouts: T steps of this rank's environments with a frozen policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from agents.network.inputs import Normalizer
from agents.network.pieces import to_device, to_host
from envs.vector.layout import TorchEnv
from rl_dist.process_group.clock import section
from rl_dist.strategies.precision import weights_cast_once

if TYPE_CHECKING:
    from agents.policy import Policy


@dataclass
class Carry:
    """State of each environment that passes from one rollout to the next.

    Checkpoints contain it. It is never zeroed between rollouts.
    """

    obs: Tensor  # [B, F] as returned by the environment
    history: Tensor  # [B, n-1, F] observations before obs, normalised; zeros before the episode
    episode_start: Tensor  # [B] bool: obs is the first observation of its episode
    lstm_state: Tensor  # [B, S, H]
    episode_return: Tensor  # [B] float64, sum of the episode's raw rewards so far
    episode_length: Tensor  # [B] int64
    discounted_return: Tensor  # [B] float64, discounted sum of training rewards so far

    def tensors(self) -> dict[str, Tensor]:
        """Return all fields by name; each has shape [B, ...]."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def rows(self, rows: slice) -> Carry:
        """Return the carry for a slice of the environments."""
        return Carry(**{name: tensor[rows] for name, tensor in self.tensors().items()})

    def join(self, parts: Sequence[Carry]) -> None:
        """Replace every field by the concatenated fields of all groups' carries."""
        for name in self.tensors():
            setattr(self, name, torch.cat([getattr(part, name) for part in parts]))


def fresh_carry(policy: Policy, obs: Tensor) -> Carry:
    """Create the carry for environments that have just been reset to `obs` [B, F]."""
    num_envs = len(obs)
    zeros = torch.zeros(num_envs, dtype=torch.float64, device=obs.device)  # [B]
    return Carry(
        obs=obs,
        history=policy.empty_history(num_envs),
        episode_start=torch.ones(num_envs, dtype=torch.bool, device=obs.device),
        lstm_state=policy.initial_state(num_envs),
        episode_return=zeros,
        episode_length=zeros.long(),
        discounted_return=zeros.clone(),
    )


@dataclass
class Rollout:
    """T steps of B environments; every tensor is [T, B, ...] unless noted."""

    obs: Tensor  # [T, B, F or n*F] normalised, as the policy saw it
    raw_obs: Tensor  # [T, B, F]
    actions: Tensor  # [T, B, A] unclipped, or [T, B] int64
    logprobs: Tensor
    values: Tensor
    rewards: Tensor  # float64, as returned by the environment, not scaled
    episode_start: Tensor  # bool: obs is the first observation of its episode
    terminated: Tensor  # bool: the step ended its episode
    truncated: Tensor  # bool: the step was the last before its episode was cut off
    discounted_returns: Tensor  # float64, discounted sum of the episode's rewards so far
    next_values: Tensor  # value of the observation after the step, 0 after termination
    initial_states: Tensor  # [K, B, S, H] recurrent state before every L-th step

    # on the host, copied from the device in one transfer; G: number of environment groups
    host_starts: Tensor  # [T, B] a copy of episode_start
    episodes: Tensor  # [3, G] number, total return and total length of ended episodes

    @property
    def episode_end(self) -> Tensor:
        """[T, B] bool: the step was the last of its episode."""
        return self.terminated | self.truncated

    @staticmethod
    def joined(parts: list[Rollout]) -> Rollout:
        """Concatenate the rollouts of all groups of environments."""
        if len(parts) == 1:  # avoid a copy
            return parts[0]
        names = [item.name for item in fields(Rollout)]
        return Rollout(
            **{name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in names}
        )


def policy_input(
    normalize: Callable[[Tensor], Tensor], history: Tensor, obs: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return normalised `obs` [B, F], or with a window [B, n*F]: history, then obs."""
    seen = normalize(obs.to(dtype))
    return torch.cat([history, seen[:, None]], dim=1).flatten(1) if history.shape[1] else seen


def shift_history(history: Tensor, seen: Tensor) -> Tensor:
    """Return the history [B, n-1, F] after a step with policy input `seen`."""
    return seen.unflatten(1, (history.shape[1] + 1, -1))[:, 1:] if history.shape[1] else history


@section("collect")
def collect(
    policy: Policy,
    normalizer: Normalizer,
    env: TorchEnv,
    carry: Carry,
    noise: Tensor,  # [T, B, A]
    bptt_steps: int,
    gamma: float,
    on_step: Callable[[], None] = lambda: None,
) -> Rollout:
    """Step all environments T times with the frozen policy; update `carry` in place.

    Groups of environments alternate: while the policy acts for one group, the others step.
    """
    with weights_cast_once(policy.low_precision, noise.device):
        actors = [
            Actor(policy, normalizer, carry.rows(rows), noise[:, rows]) for rows in env.groups
        ]
        for group, actor in enumerate(actors):
            env.send(actor.act(), group)
        for num_steps in range(1, len(noise) + 1):
            for group, actor in enumerate(actors):
                with section("environment"):
                    answers = env.recv(group)
                on_step()
                actor.observe(*answers)
                if num_steps < len(noise):
                    env.send(actor.act(), group)
        parts = [actor.finish(bptt_steps, gamma) for actor in actors]
    carry.join([actor.carry for actor in actors])
    return Rollout.joined(parts)


class Actor:
    """Chooses actions for one group of environments and records its steps."""

    def __init__(self, policy: Policy, normalizer: Normalizer, carry: Carry, noise: Tensor) -> None:
        self.policy = policy
        self.carry = carry
        self.pushes = policy.pushes(noise)  # [T, B, A] noise to add to the actor's outputs
        self.normalize = normalizer.frozen(carry.lstm_state.dtype)
        self.steps: list[dict[str, Tensor]] = []
        self.states: list[Tensor] = []  # recurrent state before every step
        # (obs, history, state) after every step, not yet reset if the episode ended
        self.successors: list[tuple[Tensor, Tensor, Tensor]] = []

    @section("policy")
    def act(self) -> Tensor:
        """Choose and return the actions for the next step."""
        carry = self.carry
        seen = policy_input(self.normalize, carry.history, carry.obs, carry.lstm_state.dtype)
        push = self.pushes[len(self.states)]
        actions, actor, values, state = self.policy.act(
            seen, carry.lstm_state, carry.episode_start, push
        )
        self.steps.append(
            {
                "obs": seen,
                "raw_obs": carry.obs,
                "actions": actions,
                "actor": actor,  # `finish` replaces these outputs by logprobs
                "values": values,
                "episode_start": carry.episode_start,
            }
        )
        self.states.append(carry.lstm_state)
        carry.lstm_state = state
        return actions

    def observe(
        self,
        obs: Tensor,
        rewards: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        info: dict[str, Any],
    ) -> None:
        """Record the environments' answers; clear the history where an episode ended."""
        carry = self.carry
        step = self.steps[-1]
        step |= {"rewards": rewards, "terminated": terminated, "truncated": truncated}
        step["raw_rewards"] = info.get("raw_rewards", rewards)
        history = shift_history(carry.history, step["obs"])
        self.successors.append((info["final_obs"], history, carry.lstm_state))
        ended = terminated | truncated  # [B]
        carry.obs = obs
        carry.history = history * ~ended[:, None, None] if history.shape[1] else history
        carry.episode_start = ended

    def finish(self, bptt_steps: int, gamma: float) -> Rollout:
        """Return the recorded steps as a rollout; update the episode sums in the carry.

        Log probabilities, sums and next values are each computed in one call for all steps.
        """
        carry = self.carry
        steps = {name: torch.stack([step[name] for step in self.steps]) for name in self.steps[0]}
        steps["rewards"] = steps["rewards"].double()
        steps["logprobs"] = self.policy.logprobs(steps.pop("actor"), steps["actions"])
        ends = steps["terminated"] | steps["truncated"]  # [T, B]

        # compute the return and length of the episode up to every step
        increments = [steps.pop("raw_rewards").double(), torch.ones_like(steps["rewards"])]
        before = torch.stack([carry.episode_return, carry.episode_length.double()])  # [2, B]
        sums, after = running_sums(before, torch.stack(increments, dim=1), ends)  # [T, 2, B]
        carry.episode_return = after[0]
        carry.episode_length = after[1].long()
        steps["discounted_returns"], carry.discounted_return = running_sums(
            carry.discounted_return, steps["rewards"], ends, gamma
        )

        # copy values that the host needs
        totals = [(sums[:, row] * ends).sum() for row in (0, 1)]
        episodes = torch.stack([ends.sum().double(), *totals])[:, None]  # [3, 1]
        on_host = to_host([steps["episode_start"], steps["truncated"], episodes])
        return Rollout(
            **steps,
            next_values=self._next_values(steps, on_host[1]),
            initial_states=torch.stack(self.states[::bptt_steps]),
            host_starts=torch.from_numpy(on_host[0]),
            episodes=torch.from_numpy(on_host[2]),
        )

    @section("policy")
    def _next_values(self, steps: dict[str, Tensor], truncated: np.ndarray) -> Tensor:
        """Return the value of the observation after every step [T, B]; 0 if terminated."""
        # use the value at the next step; it is missing if the episode or the rollout ended
        next_values = torch.empty_like(steps["values"])
        next_values[:-1] = steps["values"][1:]
        missing = truncated.copy()  # [T, B]
        missing[-1] = True

        # for each step, gather the policy inputs for the missing values
        places = [np.flatnonzero(missing), missing.nonzero()[1]]  # in [T * B], and in [B]
        cells, columns = to_device(places, next_values.device)
        columns_by_step = columns.split(missing.sum(1).tolist())
        inputs = [
            [tensor.index_select(0, columns) for tensor in successor]
            for successor, columns in zip(self.successors, columns_by_step, strict=True)
            if len(columns)
        ]
        obs, history, state = (torch.cat(tensors) for tensors in zip(*inputs, strict=True))

        # compute the missing values in one call; discard the new recurrent states
        seen = policy_input(self.normalize, history, obs, state.dtype)
        no_start = torch.zeros(len(seen), dtype=torch.bool, device=seen.device)
        next_values.view(-1).index_copy_(0, cells, self.policy.act(seen, state, no_start)[2])
        return next_values * ~steps["terminated"]


def running_sums(
    start: Tensor,  # [..., B] sums of unfinished episodes, from before the rollout
    increments: Tensor,  # [T, ..., B]
    episode_end: Tensor,  # [T, B] bool
    decay: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Sum the increments of each episode; multiply by `decay` before each addition.

    Returns:
        The sums [T, ..., B] after every step, and `start` [..., B] for the next rollout.
    """
    factors = (~episode_end).to(increments.dtype) * decay  # [T, B]
    sums = [start * decay + increments[0]]
    for increment, factor in zip(increments[1:], factors[:-1], strict=True):
        sums.append(increment + sums[-1] * factor)
    return torch.stack(sums), sums[-1] * ~episode_end[-1]
