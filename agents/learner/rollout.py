"""Collect rollouts: T steps of this rank's environments with a frozen policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from agents.learner.network.cores import scan
from agents.learner.network.inputs import Normalizer
from agents.learner.network.sequences import to_device
from agents.learner.policy import Policy, PolicyStep
from envs.vector.layout import StepResult, TorchEnv
from rl_dist.process_group.clock import section

# The host reads the truncations of this many steps together, because a read waits for all GPU work.
STEPS_PER_READ = {"cpu": 1, "cuda": 8}


@dataclass
class Carry:
    """Per-environment state that is carried over from one rollout to the next.

    Checkpoints contain this state. No field is zeroed between rollouts.
    """

    obs: Tensor  # [B, F] as returned by the environment
    history: Tensor  # [B, n-1, F] normalised earlier observations; zeros before the episode's start
    episode_start: Tensor  # [B] bool: obs is the first observation of its episode
    lstm_state: Tensor  # [B, S, H]
    episode_return: Tensor  # [B] float64, sum of the episode's raw rewards so far
    episode_length: Tensor  # [B] int64
    discounted_return: Tensor  # [B] float64, discounted sum of the episode's rewards so far

    def rows(self, rows: slice) -> "Carry":
        """Return the carry of the environments in a slice."""
        return Carry(**{name: tensor[rows] for name, tensor in vars(self).items()})


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
    raw_obs: Tensor  # [T, B, F]; the same tensor as `obs` if nothing was normalised
    actions: Tensor  # [T, B, A] unclipped, or [T, B] int64
    logprobs: Tensor
    values: Tensor
    rewards: Tensor  # float64, as returned by the environment, not scaled
    episode_start: Tensor  # bool: obs is the first observation of its episode
    terminated: Tensor  # bool: the episode ended with the step
    truncated: Tensor  # bool: the episode was cut off after the step
    discounted_returns: Tensor  # float64, discounted sum of the episode's rewards so far
    next_values: Tensor  # value of the observation after the step; 0 if terminated
    initial_states: Tensor  # [K, B, S, H] recurrent state before every L-th step

    cpu_starts: Tensor  # a copy of episode_start on the CPU
    episodes: Tensor  # [3, G] per group: number, total return and total length of ended episodes

    @property
    def episode_end(self) -> Tensor:
        """[T, B] bool: the step was the last of its episode."""
        return self.terminated | self.truncated


class Step(NamedTuple):
    """One step of B environments; every tensor is [B, ...]."""

    obs: Tensor  # normalised, as the policy saw it
    raw_obs: Tensor
    episode_start: Tensor
    actions: Tensor
    actor_outputs: Tensor
    values: Tensor
    rewards: Tensor  # for training
    raw_rewards: Tensor  # for the metrics
    terminated: Tensor
    truncated: Tensor


Part = TypeVar("Part", Carry, Rollout)


def joined(parts: Sequence[Part], dim: int) -> Part:
    """Join the carries or rollouts of all groups of environments, field by field."""
    if len(parts) == 1:  # avoid a copy
        return parts[0]
    columns = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
    return type(parts[0])(**once(partial(torch.cat, dim=dim), columns))


def once(merge: Callable[..., Tensor], columns: dict[str, Any]) -> dict[str, Tensor]:
    """Merge the tensors of each column; columns that hold the same tensors share the result.

    Each column is removed before the next one is merged, so that its memory is free again.
    """
    keys = {name: tuple(map(id, tensors)) for name, tensors in columns.items()}
    merged: dict[tuple[int, ...], Tensor] = {}
    for name, key in keys.items():
        tensors = columns.pop(name)
        if key not in merged:
            merged[key] = merge(tensors)
    return {name: merged[key] for name, key in keys.items()}


def policy_input(normalize: Callable[[Tensor], Tensor], history: Tensor, obs: Tensor) -> Tensor:
    """Return normalised `obs` [B, F]; with a window, put `history` first: [B, n*F].

    Float64 observations are normalised in float64, because rounding them to float32 before the mean
    is subtracted would lose digits. Bytes are pixels: they are neither normalised nor converted.
    """
    if obs.dtype == torch.uint8 and not history.shape[1]:
        return obs
    wider_type = torch.promote_types(obs.dtype, history.dtype)
    newest = normalize(obs.to(wider_type)).to(history.dtype)
    return torch.cat([history, newest[:, None]], dim=1).flatten(1) if history.shape[1] else newest


def shift_history(history: Tensor, inputs: Tensor) -> Tensor:
    """Return the next history [B, n-1, F] after a step with the policy inputs [B, n*F]."""
    return inputs.unflatten(1, (history.shape[1] + 1, -1))[:, 1:] if history.shape[1] else history


def episode_sums(
    before: Carry, raw_rewards: Tensor, rewards: Tensor, ended: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """Add up raw rewards, steps and discounted rewards since the start of each episode.

    Args:
        before: carry that contains the three sums at the start of the rollout.
        raw_rewards, rewards: [T, B] float64.
        ended: [T, B] bool; True if the step ends an episode.

    Returns:
        The sums after every step, [3, T, B], and the sums at the start of the next rollout, [3, B].
        The latter are 0 where the last step ended an episode.
    """
    increments = torch.stack([raw_rewards, torch.ones_like(rewards), rewards], 1)  # [T, 3, B]
    before_first = torch.stack(
        [before.episode_return, before.episode_length.double(), before.discounted_return]
    )
    decay = increments.new_tensor([1.0, 1.0, gamma])[:, None]
    # a step continues the sums of the step before it, unless that step ended an episode
    continues = torch.cat([torch.ones_like(ended[:1]), ~ended[:-1]])[:, None]  # [T, 1, B]
    sums = scan(continues * decay, increments, before_first)
    return sums.transpose(0, 1), sums[-1] * ~ended[-1]


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
) -> tuple[Rollout, Carry]:
    """Step all environments T times with the frozen policy; return the rollout and the next carry.

    Groups of environments take turns: while the policy acts for one group, the others step.
    """
    num_steps = len(noise)
    policy = policy.cast()
    # each group of environments has an actor, with the group's rows of the carry and the noise
    actors = [
        Actor(policy, normalizer, carry.rows(rows), noise[:, rows], bptt_steps)
        for rows in env.groups
    ]
    for group, actor in enumerate(actors):
        env.send(actor.act(), group)

    # receive the answers of a group, then send the actions for its next step
    for t in range(num_steps):
        for group, actor in enumerate(actors):
            with section("environment"):
                answers = env.recv(group)
            on_step()
            actor.observe(answers)
            if t < num_steps - 1:
                env.send(actor.act(), group)

    # join the groups
    results = [actor.finish(gamma) for actor in actors]
    rollouts, carries = zip(*results, strict=True)
    return joined(rollouts, dim=1), joined(carries, dim=0)


class Actor:
    """Chooses actions for one group of environments and records its steps."""

    inputs: Tensor  # inputs of the policy in the current step
    chosen: PolicyStep  # results of the policy in the current step

    def __init__(
        self,
        policy: Policy,
        normalizer: Normalizer,
        carry: Carry,
        noise: Tensor,
        bptt_steps: int,
    ) -> None:
        self.policy = policy
        self.carry = carry
        self.scaled_noise = policy.scale_noise(noise)  # [T, B, A]
        dtype = torch.promote_types(carry.obs.dtype, carry.lstm_state.dtype)
        self.normalize = normalizer.frozen(dtype)
        self.bptt_steps = bptt_steps
        self.steps: list[Step] = []
        self.initial_states: list[Tensor] = []  # recurrent state before every L-th step
        # (obs, history, state) after each of the newest steps, before the end of an episode resets
        # them. The rows that are not needed are forgotten soon, because they need much memory.
        self.successors: list[tuple[Tensor, Tensor, Tensor]] = []
        # (index t * B + b of the step, obs, history, state) for the rows that are needed
        self.needed: list[tuple[Tensor, ...]] = []

    @section("policy")
    def act(self) -> Tensor:
        """Choose and return the actions for the next step."""
        carry = self.carry
        self.inputs = policy_input(self.normalize, carry.history, carry.obs)
        # the number of recorded steps is the index of this step
        noise = self.scaled_noise[len(self.steps)]
        self.chosen = self.policy.act(self.inputs, carry.lstm_state, carry.episode_start, noise)
        return self.chosen.actions

    def observe(self, answers: StepResult) -> None:
        """Record the step that `act` began, and update the carry with its results."""
        carry = self.carry
        chosen = self.chosen
        obs, rewards, terminated, truncated, info = answers
        step = Step(
            obs=self.inputs,
            raw_obs=carry.obs,
            episode_start=carry.episode_start,
            actions=chosen.actions,
            actor_outputs=chosen.actor_outputs,
            values=chosen.values,
            rewards=rewards,
            raw_rewards=info.get("raw_rewards", rewards),
            terminated=terminated,
            truncated=truncated,
        )
        if len(self.steps) % self.bptt_steps == 0:
            self.initial_states.append(carry.lstm_state)
        if len(self.successors) == STEPS_PER_READ[obs.device.type]:
            self._keep_successors()
        self.steps.append(step)
        history = shift_history(carry.history, self.inputs)
        self.successors.append((info["final_obs"], history, chosen.state))
        ended = terminated | truncated  # [B]
        carry.obs = obs
        carry.history = history * ~ended[:, None, None] if history.shape[1] else history
        carry.episode_start = ended
        carry.lstm_state = chosen.state

    def _keep_successors(self, at_end: bool = False) -> None:
        """Keep the newest successors after truncations, and all after the last step of a rollout.

        Their values cannot be taken from the next step.
        """
        newest = self.steps[-len(self.successors) :]
        needed = torch.stack([step.truncated for step in newest]).cpu().numpy()  # [steps, B]
        needed[-1] |= at_end
        if needed.any():
            cells = to_device(np.flatnonzero(needed), self.inputs.device)
            rows = [
                (torch.cat(tensors) if len(newest) > 1 else tensors[0]).index_select(0, cells)
                for tensors in zip(*self.successors, strict=True)
            ]
            first = (len(self.steps) - len(newest)) * needed.shape[1]
            self.needed.append((cells + first, *rows))
        self.successors.clear()

    def finish(self, gamma: float) -> tuple[Rollout, Carry]:
        """Return the recorded steps as a rollout, and the carry of the next rollout.

        Log probabilities and next values are each computed in one call for all steps.
        """
        self._keep_successors(at_end=True)
        columns = dict(zip(Step._fields, zip(*self.steps, strict=True), strict=True))
        self.steps.clear()
        steps = Step(**once(torch.stack, columns))  # each [T, B, ...]
        logprobs = self.policy.logprobs(steps.actor_outputs, steps.actions)
        ended = steps.terminated | steps.truncated  # [T, B]
        rewards = steps.rewards.double()
        raw_rewards = steps.raw_rewards.double()
        sums, next_sums = episode_sums(self.carry, raw_rewards, rewards, ended, gamma)
        returns, lengths, discounted_returns = sums  # each [T, B]
        totals = [ended.sum(), (returns * ended).sum(), (lengths * ended).sum()]
        rollout = Rollout(
            obs=steps.obs,
            raw_obs=steps.raw_obs,
            actions=steps.actions,
            logprobs=logprobs,
            values=steps.values,
            rewards=rewards,
            episode_start=steps.episode_start,
            terminated=steps.terminated,
            truncated=steps.truncated,
            discounted_returns=discounted_returns,
            next_values=self._next_values(steps),
            initial_states=torch.stack(self.initial_states),
            cpu_starts=steps.episode_start.cpu(),
            episodes=torch.stack(totals)[:, None],
        )
        carry = replace(
            self.carry,
            episode_return=next_sums[0],
            episode_length=next_sums[1].long(),
            discounted_return=next_sums[2],
        )
        return rollout, carry

    @section("policy")
    def _next_values(self, steps: Step) -> Tensor:
        """Return values [T, B] of the observations after each step; 0 if terminated.

        Most observations after a step are those of the next step, whose values are known. The
        others are computed in one call.
        """
        cells, obs, history, state = map(torch.cat, zip(*self.needed, strict=True))
        policy_inputs = policy_input(self.normalize, history, obs)
        no_start = torch.zeros_like(cells, dtype=torch.bool)
        # discard the new recurrent states
        values = self.policy.act(policy_inputs, state, no_start).values
        next_values = steps.values.roll(-1, 0)  # the last row is replaced
        next_values.view(-1).index_copy_(0, cells, values)
        return next_values * ~steps.terminated
