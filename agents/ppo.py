"""Proximal policy optimisation (PPO): the loss, and the update on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agents.network.minibatches import Minibatch, make_schedule
from agents.network.pieces import Plan
from agents.network.sequences import state_after
from rl_dist.errors import UserError
from rl_dist.flags import Field, configuration
from rl_dist.process_group.clock import StepClock, section
from rl_dist.process_group.collectives import all_reduce_sum
from rl_dist.strategies.adam import make_adam
from rl_dist.strategies.precision import autocast_dtype
from rl_dist.strategies.strategy import Strategy
from rl_dist.telemetry import events

if TYPE_CHECKING:
    from agents.policy import Evaluation, Policy

# metric names: the fields of LossParts in order, then the gradient norm
METRICS = (
    "loss/total",
    "loss/policy",
    "loss/value",
    "loss/entropy",
    "ppo/approx_kl",
    "ppo/clip_fraction",
    "optim/grad_norm",
)
logger = logging.getLogger(__name__)


@configuration
class PPOConfig:
    """Hyperparameters of PPO, named as in CleanRL."""

    learning_rate: float = Field(3e-4, ge=0, le=10)
    """Step size of Adam."""
    anneal_lr: bool = True
    """Lower the learning rate linearly to zero over num_episodes or total_steps."""
    warmup: int = Field(0, ge=0, le=10**9)
    """Raise the learning rate linearly from zero over this many iterations; 0: off."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount factor of the rewards, per step."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """lambda of generalised advantage estimation."""
    update_epochs: int = Field(4, ge=1, le=1000)
    """Passes over each rollout."""
    refresh_states: bool = False
    """Before every epoch but the first, compute the initial states of sequences with the present
    policy; off: keep those of the rollout."""
    clip_coef: float = Field(0.2, ge=1e-6, le=10)
    """Clipping of the probability ratio."""
    clip_vloss: bool = False
    """Clip the value loss as well."""
    norm_adv: bool = True
    """Normalise advantages over the whole rollout of all ranks."""
    min_adv_std: float = Field(0.0, ge=0, le=100)
    """Lower bound of norm_adv's divisor, in deviations of returns, so that the noise of a solved
    task is not amplified; 0: off."""
    ent_coef: float = Field(0.0, ge=0, le=10)
    """Weight of the entropy bonus in the loss."""
    vf_coef: float = Field(0.5, ge=0, le=100)
    """Weight of the value loss."""
    max_grad_norm: float = Field(0.5, ge=1e-6, le=1e6)
    """Scale the gradient of all ranks down to this norm."""
    target_kl: float = Field(0.0, ge=0, le=100)
    """End the epochs when the estimated KL divergence exceeds this; 0: off."""
    max_bad_steps: int = Field(10, ge=0, le=10**9)
    """Skip optimizer steps with NaN or inf in loss or gradient; stop the run after an update with
    more than this many in a row."""


def learning_rate(
    config: PPOConfig, iteration: int, remaining: float, factor: float = 1.0
) -> float:
    """Return the learning rate of an iteration.

    Args:
        iteration: counted from 1; in a warm-up of N, the rate is scaled by iteration / N.
        remaining: fraction of the run that remained before this iteration, from 1 to 0.
        factor: multiplier from lr_scaling.
    """
    warmup_factor = min(iteration / config.warmup, 1.0) if config.warmup else 1.0
    annealing = max(remaining, 0.0) if config.anneal_lr else 1.0
    return config.learning_rate * factor * warmup_factor * annealing


class LossParts(NamedTuple):
    """Losses and diagnostics, averaged over a minibatch; `total` is minimised."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


def ppo_loss(evaluation: Evaluation, minibatch: Minibatch, config: PPOConfig) -> LossParts:
    """Return the losses of PPO and diagnostics, averaged over L * N steps.

    Every rank averages over the same number of steps, so the mean of the ranks' gradients equals
    the gradient of the global minibatch. Sources: Schulman et al.,
    https://arxiv.org/abs/1707.06347; for the KL estimate, k3 in
    http://joschu.net/blog/kl-approx.html.
    """
    # policy loss: the clipped surrogate objective
    log_ratio = evaluation.logprobs - minibatch.logprobs  # [L, N]
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - config.clip_coef, 1.0 + config.clip_coef)
    advantages = minibatch.advantages
    policy = -torch.minimum(advantages * ratio, advantages * clipped_ratio).mean()

    # value loss: the squared error, clipped if clip_vloss is set
    errors = (evaluation.values - minibatch.returns).square()  # [L, N]
    if config.clip_vloss:
        change = (evaluation.values - minibatch.values).clamp(-config.clip_coef, config.clip_coef)
        errors = torch.maximum(errors, (minibatch.values + change - minibatch.returns).square())
    value = 0.5 * errors.mean()

    # weighted sum to minimise, and diagnostics
    entropy = evaluation.entropy.mean()
    with torch.no_grad():
        approx_kl = ((ratio - 1.0) - log_ratio).mean()
        clip_fraction = ((ratio - 1.0).abs() > config.clip_coef).to(ratio.dtype).mean()
    total = policy - config.ent_coef * entropy + config.vf_coef * value
    return LossParts(total, policy, value, entropy, approx_kl, clip_fraction)


@dataclass
class Batch:
    """Sequences of this rank's rollout, and the minibatch order of every epoch."""

    sequences: Minibatch  # [L, K * B, ...]
    starts: np.ndarray  # [L, K * B] episode starts, on the host
    order: np.ndarray  # [epochs, minibatches, sequences], see `network.noise.sequence_orders`
    num_envs: int  # B
    explained_variance: Tensor  # [] fraction of the returns' variance that the critic explains
    statistics: dict[str, Tensor]  # sums over all ranks, to update the normalisers


class Tally:
    """Running sums of one update, kept on the device so that no step waits for it."""

    def __init__(self, device: torch.device, bad_in_a_row: int) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.losses = zeros(len(METRICS))
        self.epoch_kl = zeros(2)  # in this epoch: sum of approx_kl, number of steps taken
        # numbers of steps: taken, skipped, bad, bad in a row up to now, most bad in a row
        self.counts = zeros(5)
        self.counts[3] = bad_in_a_row

    @torch.no_grad()
    def add(
        self, parts: LossParts, grad_norm: Tensor, stepped: Tensor, overflowed: Tensor | bool
    ) -> None:
        """Count a gradient step, and add its losses unless the step was skipped."""
        row = torch.stack([part.double() for part in (*parts, grad_norm)])
        row = torch.where(stepped, row, 0.0)
        self.losses += row
        approx_kl = row[LossParts._fields.index("approx_kl")]
        self.epoch_kl += torch.stack([approx_kl, stepped.double()])
        # a step that was skipped only because the loss scale was too large is not bad
        bad = ~stepped & ~torch.as_tensor(overflowed)
        self.counts[:3] += torch.stack([stepped, ~stepped, bad])
        in_a_row = torch.where(stepped, 0.0, self.counts[3] + bad)
        self.counts[3:] = torch.stack([in_a_row, torch.maximum(in_a_row, self.counts[4])])


def refreshed_states(policy: Policy, batch: Batch) -> Tensor:
    """Recompute the initial states [K * B, S, H] of all sequences with the policy.

    The first sequence of each environment keeps its state, which comes from earlier rollouts.
    """
    sequences, num_envs = batch.sequences, batch.num_envs
    states = [sequences.lstm_state[:num_envs]]
    for first in range(0, len(sequences.lstm_state) - num_envs, num_envs):
        block = sequences.pick(Tensor.narrow, first, num_envs)
        after = state_after(
            policy.network,
            block.obs,
            states[-1],
            block.episode_start,
            batch.starts[:, first : first + num_envs],
            policy.resets_inside,
        )
        states.append(after)
    return torch.cat(states)


class PPO:
    """Updates a policy on all ranks, using a distribution strategy."""

    def __init__(
        self,
        policy: Policy,
        config: PPOConfig,
        strategy: Strategy,
        num_microbatches: int = 1,
    ) -> None:
        self.policy = policy
        self.config = config
        self.strategy = strategy
        self.world = strategy.world
        self.num_microbatches = num_microbatches  # per minibatch
        policy.low_precision = autocast_dtype(strategy.config.precision)
        self.wrapped = strategy.wrap(policy)
        self.iteration = 0
        self.bad_in_a_row = 0  # bad gradient steps since the last step taken
        self.clock = StepClock(self.world.device)
        self.optimizer = make_adam(strategy.parameters, config.learning_rate)

    def begin_iteration(self, iteration: int, remaining: float, factor: float = 1.0) -> None:
        """Set the optimizer's learning rate; see `learning_rate`."""
        self.iteration = iteration
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, iteration, remaining, factor)

    @section("update")
    def update(self, batch: Batch) -> dict[str, float]:
        """Take the gradient steps of all epochs over a batch, together with all ranks.

        Returns losses and diagnostics: means over all ranks and gradient steps.
        """
        sequences = batch.sequences
        schedule = self._schedule(batch)
        tally = Tally(sequences.obs.device, self.bad_in_a_row)
        self.clock.start()
        for epoch in range(self.config.update_epochs):
            if epoch and self.config.refresh_states:
                self.strategy.share_parameters()
                sequences = replace(sequences, lstm_state=refreshed_states(self.policy, batch))

            # one gradient step per minibatch
            tally.epoch_kl.zero_()
            for numbers, plans in schedule[epoch]:
                minibatch = sequences.pick(Tensor.index_select, numbers)
                parts, grad_norm, stepped = self.step(minibatch, plans)
                self.world.heartbeat()
                tally.add(parts, grad_norm, stepped, self.strategy.overflowed)

            # stop early, all ranks together
            if self._exceeds_target_kl(tally.epoch_kl):
                break
            self.clock.mark("")  # the next forward pass must not include this decision
        self.strategy.share_parameters()
        return self._report(tally, batch)

    def _schedule(self, batch: Batch) -> list[list[tuple[Tensor, list[Plan]]]]:
        """Return the minibatches of every epoch, and their plans if plans are possible."""
        # dp and the pipeline split their inputs, but a plan cannot be split
        takes_plans = self.strategy.mode != "dp" and not self.strategy.config.pipelined
        plans_ahead = takes_plans and not self.policy.config.stateless
        return make_schedule(
            batch.starts,
            batch.order,
            self.num_microbatches,
            batch.sequences.obs.device,
            self.policy.call_steps if plans_ahead else None,
            self.policy.resets_inside,
        )

    def step(
        self, minibatch: Minibatch, plans: Sequence[Plan] = ()
    ) -> tuple[LossParts, Tensor, Tensor]:
        """Take one gradient step; clip the gradient after its reduction over ranks.

        If the loss or the gradient of any rank is not finite, all ranks skip the step. Returns the
        losses, the norm of the reduced gradient before clipping, and whether the step was taken.
        """
        self.optimizer.zero_grad(set_to_none=True)
        num_waits = len(self.world.gradient_waits)
        parts = self.gradients(minibatch, plans)
        self.clock.waited(self.world.gradient_waits[num_waits:])
        grad_norm, stepped = self.strategy.step(self.optimizer, self.config.max_grad_norm)
        self.clock.mark("optimizer")
        return parts, grad_norm, stepped

    def gradients(self, minibatch: Minibatch, plans: Sequence[Plan]) -> LossParts:
        """Run forward and backward passes of all microbatches; return the local losses.

        The last backward pass also reduces the gradients over ranks.
        """
        losses = []
        microbatches = minibatch.into_microbatches(self.num_microbatches)
        for number, microbatch in enumerate(microbatches, 1):
            with self.strategy.accumulating(last=number == self.num_microbatches):
                with section("forward"):
                    evaluation = self.wrapped(
                        microbatch.obs,
                        microbatch.actions,
                        microbatch.lstm_state,
                        microbatch.episode_start,
                        *plans[number - 1 : number],
                    )
                    losses.append(ppo_loss(evaluation, microbatch, self.config))
                self.clock.mark("forward")
                scaled = losses[-1].total / self.num_microbatches
                with self.strategy.backward_context(scaled) as loss:
                    loss.backward()
            self.clock.mark("backward")
        if len(losses) == 1:
            return losses[0]
        return LossParts(*(torch.stack(terms).mean() for terms in zip(*losses, strict=True)))

    def _report(self, tally: Tally, batch: Batch) -> dict[str, float]:
        """Return means over ranks and steps, copied from the device in one transfer."""
        # sum everything over ranks
        sums = {"losses": tally.losses, "steps": tally.counts[0]}
        if self.policy.discrete:
            entropy = self.policy.largest_entropy(batch.sequences.obs).mean()
            sums["loss/entropy_max"] = entropy / self.world.size
        sums = all_reduce_sum(sums, self.world)
        losses = sums.pop("losses") / sums.pop("steps")
        means = dict(zip(METRICS, losses, strict=True)) | sums
        means["ppo/explained_variance"] = batch.explained_variance
        if self.strategy.scaler:
            one = torch.ones((), device=tally.counts.device)
            means["optim/loss_scale"] = self.strategy.scaler.scale(one)

        # copy all numbers to the host
        numbers = torch.stack([n.double() for n in (*means.values(), *tally.counts)]).tolist()
        counts = [int(number) for number in numbers[len(means) :]]
        taken, skipped, bad, self.bad_in_a_row, most_in_a_row = counts

        # warn about bad steps, or stop the run
        if most_in_a_row > self.config.max_bad_steps:
            raise UserError(
                f"loss or gradient was NaN or inf in {most_in_a_row} steps in a row, more than "
                f"--max_bad_steps {self.config.max_bad_steps}: lower --learning_rate",
                exit_code=1,
            )
        if bad:
            text = f"{bad} gradient step(s) skipped in iteration {self.iteration}: NaN or inf"
            events.notify("bad_steps", text, iteration=self.iteration, skipped=bad)
            logger.warning(text)
        report = dict(zip(means, numbers, strict=False))
        del report["loss/total"]  # redundant: weighted sum of the other losses
        report["optim/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        return report | {"optim/steps": float(taken), "optim/skipped_steps": skipped}

    def _exceeds_target_kl(self, epoch_kl: Tensor) -> bool:
        """Return True if the mean KL estimate of the epoch, over all ranks, is too high."""
        if not self.config.target_kl:
            return False
        total, num_steps = epoch_kl  # if no step was taken, the mean is 0
        reduced = all_reduce_sum({"kl": total / num_steps.clamp(min=1.0)}, self.world)["kl"]
        return float(reduced) / self.world.size > self.config.target_kl
