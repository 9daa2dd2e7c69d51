"""Proximal policy optimisation (PPO): the loss, and the update over all ranks."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agents.learner.network.sequences import Pieces, Plan, state_after, to_device
from agents.learner.policy import Evaluation, Policy
from agents.learner.settings import PPOConfig
from rl_dist.errors import UserError
from rl_dist.process_group.clock import StepClock, section
from rl_dist.process_group.collectives import all_reduce_sum
from rl_dist.strategies.adam import EagerAdam
from rl_dist.strategies.strategy import Strategy
from rl_dist.telemetry import events

logger = logging.getLogger(__name__)
LEARNING_RATES = (1e-5, 1e-2)  # bounds of a rate that desired_kl changes, as in rsl_rl
# One plan per microbatch, None for a policy without memory. In a pipeline, the list is empty.
Plans = list[Plan | None]


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

    def select(self, operation: Callable[..., Tensor], *arguments: Any) -> "Minibatch":
        """Apply `operation(field, sequence_axis, *arguments)` to every field."""
        selected = {
            name: operation(values, 0 if name == "lstm_state" else 1, *arguments)
            for name, values in vars(self).items()
        }
        return Minibatch(**selected)

    def into_microbatches(self, count: int) -> "Iterator[Minibatch]":
        """Yield `count` microbatches of equal size, as views of this minibatch."""
        size = self.obs.shape[1] // count
        for first in range(0, size * count, size):
            yield self.select(Tensor.narrow, first, size)


class LossParts(NamedTuple):
    """Losses and diagnostics, averaged over a minibatch; `total` is minimised."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


def ppo_loss(evaluation: Evaluation, minibatch: Minibatch, config: PPOConfig) -> LossParts:
    """Return the PPO losses and diagnostics of a minibatch, averaged over its steps.

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

    # total loss to minimise, and diagnostics
    entropy = evaluation.entropy.mean()
    with torch.no_grad():
        approx_kl = ((ratio - 1.0) - log_ratio).mean()
        clip_fraction = ((ratio - 1.0).abs() > config.clip_coef).to(ratio.dtype).mean()
    total = policy - config.ent_coef * entropy + config.vf_coef * value
    return LossParts(total, policy, value, entropy, approx_kl, clip_fraction)


class StepRecord(NamedTuple):
    """Metrics and flags of one gradient step, or their sums over several steps.

    All values are scalars on the device, so that no step waits for the device. A metric has the
    name of its field, with a slash instead of the first underscore.
    """

    loss_policy: Tensor
    loss_value: Tensor
    loss_entropy: Tensor
    ppo_approx_kl: Tensor
    ppo_clip_fraction: Tensor
    optim_grad_norm: Tensor
    bad: Tensor  # flag: the step was skipped because of NaN or inf
    taken: Tensor  # flag: the step was not skipped

    def means(self) -> dict[str, Tensor]:
        """Divide sums by the number of steps taken; return the means by metric name."""
        sums = self._asdict()
        del sums["bad"]
        taken = sums.pop("taken")
        return {name.replace("_", "/", 1): total / taken for name, total in sums.items()}


def stacked(records: list[StepRecord]) -> Tensor:
    """Stack the records of all steps as float64 rows [steps, fields of StepRecord]."""
    values = [value for record in records for value in record]
    return torch.stack(values).double().view(len(records), -1)


def sums_of_taken(steps: Tensor) -> Tensor:
    """Add up the rows of `stacked` for all steps that were taken, in the order of the steps."""
    taken = StepRecord(*steps.unbind(1)).taken[:, None] > 0
    return torch.where(taken, steps, 0.0).cumsum(0)[-1]


def check_bad_steps(bad: list[float], taken: list[float], in_a_row: int, limit: int) -> int:
    """Raise a UserError if more than `limit` steps in a row were bad.

    Args:
        bad, taken: flags (0 or 1) of each gradient step of an update.
        in_a_row: number of bad steps in a row at the start of the update.

    Returns:
        The number of bad steps in a row at the end of the update.
    """
    for is_bad, was_taken in zip(bad, taken, strict=True):
        in_a_row = 0 if was_taken else in_a_row + int(is_bad)
        if in_a_row > limit:
            raise UserError(
                f"loss or gradient was NaN or inf in {in_a_row} steps in a row, more than "
                f"--max_bad_steps {limit}: lower --learning_rate",
                exit_code=1,
            )
    return in_a_row


@dataclass
class Batch:
    """This rank's rollout, divided into K sequences of L steps per environment.

    Sequence k * B + b contains the steps k * L to (k + 1) * L - 1 of environment b.
    """

    steps: dict[str, Tensor]  # [K, L, B, ...] for every field of Minibatch but lstm_state
    initial_states: Tensor  # [K, B, S, H] recurrent state before each sequence
    pieces: Pieces  # the pieces of all sequences
    explained_variance: Tensor  # [] fraction of the returns' variance that the critic explains
    sums: dict[str, Tensor]  # sums over all ranks, for updating the normalisers

    def minibatch(self, sequences: Tensor) -> Minibatch:
        """Return some sequences, given their indices [N]."""
        _, num_steps, num_envs = self.steps["values"].shape
        step = torch.arange(num_steps, device=sequences.device)[:, None]
        # index k * L * B + l * B + b of each step, [L, N]
        rows = (sequences // num_envs * num_steps + step) * num_envs + sequences % num_envs
        fields = {
            name: values.flatten(0, 2).index_select(0, rows.flatten()).unflatten(0, rows.shape)
            for name, values in self.steps.items()
        }
        states = self.initial_states.flatten(0, 1).index_select(0, sequences)
        return Minibatch(lstm_state=states, **fields)


def refreshed_states(policy: Policy, batch: Batch) -> Tensor:
    """Recompute the initial states [K, B, S, H] of all sequences with the policy.

    The first sequence of each environment keeps its recorded initial state, because the steps
    before this sequence belong to the previous rollout.
    """
    policy = policy.cast()
    states = [batch.initial_states[0]]
    for obs, starts in zip(batch.steps["obs"][:-1], batch.steps["episode_start"], strict=False):
        encoded = policy.encode(obs)
        after = state_after(policy.network, encoded, states[-1], starts, policy.resets_inside)
        states.append(after)
    return torch.stack(states)


class PPO:
    """Updates a policy on all ranks, with a strategy such as ddp or hybrid."""

    def __init__(
        self,
        policy: Policy,
        config: PPOConfig,
        strategy: Strategy,
        num_microbatches: int,  # microbatches per minibatch
        learning_rate_factor: float = 1.0,  # set by --lr_scaling
    ) -> None:
        self.policy = policy
        self.config = config
        self.strategy = strategy
        self.world = strategy.world
        self.num_microbatches = num_microbatches
        self.wrapped = strategy.wrap(policy)
        self.bad_in_a_row = 0  # steps with NaN or inf since the last step that was taken
        self.clock = StepClock(self.world.device)
        self.peak_learning_rate = config.learning_rate * learning_rate_factor
        self.schedule = 1.0  # factor of warm-up and annealing
        self.optimizer = EagerAdam(
            strategy.parameters, lr=self.peak_learning_rate, eps=1e-5, fused=True
        )

    def set_learning_rate(self, iteration: int, remaining: float) -> None:
        """Set the learning rate with which an iteration begins.

        Args:
            iteration: counted from 1; in a warm-up of N iterations, the rate is scaled by
                iteration / N.
            remaining: fraction of the run that remained before this iteration, from 1 to 0.
        """
        config = self.config
        warmup_factor = min(iteration / config.warmup, 1.0) if config.warmup else 1.0
        annealing = remaining if config.anneal_lr else 1.0
        self.schedule = warmup_factor * annealing
        self._apply_learning_rate()

    def _apply_learning_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak_learning_rate * self.schedule

    def _adapt_learning_rate(self, kl: float) -> None:
        """Change the learning rate if an epoch's KL divergence is far from desired_kl.

        Source: `PPO.update` of https://github.com/leggedrobotics/rsl_rl adapts the rate after every
        minibatch. `AdaptiveScheduler` of https://github.com/Denys88/rl_games does so after epochs.
        """
        factor = 1.0
        if kl > 2.0 * self.config.desired_kl:
            factor = 1.0 / 1.5
        elif 0.0 < kl < self.config.desired_kl / 2.0:  # it is 0 if no step was taken
            factor = 1.5
        smallest, largest = LEARNING_RATES
        self.peak_learning_rate = min(max(self.peak_learning_rate * factor, smallest), largest)
        self._apply_learning_rate()

    @section("update")
    def update(self, batch: Batch, order: np.ndarray, iteration: int) -> dict[str, float]:
        """Take the gradient steps of all epochs over a batch, jointly with all ranks.

        Args:
            batch: this rank's sequences.
            order: indices [epochs, minibatches, sequences], see `network.noise.sequence_orders`.
            iteration: number of the iteration, for a warning about skipped steps.

        Returns:
            The means of losses and diagnostics over all ranks and gradient steps.
        """
        records: list[StepRecord] = []
        self.clock.start()
        for epoch, minibatches in enumerate(order):
            if epoch and self.config.refresh_states:
                self.strategy.share_parameters()
                batch = replace(batch, initial_states=refreshed_states(self.policy, batch))

            # Plan all network calls of the epoch before its first gradient step. On a CPU, planning
            # between gradient steps would take almost three times as long, probably because the
            # gradient steps displace the planner's code and data from the caches.
            plans = [self.plans(batch.pieces, sequences) for sequences in minibatches]
            self.clock.mark("")  # do not add the time of planning to the next gradient step

            # one gradient step per minibatch
            for sequences, step_plans in zip(minibatches, plans, strict=True):
                minibatch = batch.minibatch(to_device(sequences, self.world.device))
                records.append(self.step(minibatch, step_plans))
                self.world.heartbeat()

            # adapt the rate, and stop early if the KL divergence is too large, on all ranks
            if self._responds_to_kl(records[-len(minibatches) :]):
                break
        self.strategy.share_parameters()
        return self._results(records, batch, iteration)

    def plans(self, pieces: Pieces, sequences: np.ndarray) -> Plans:
        """Plan the network calls of each microbatch of a minibatch with these sequences [N]."""
        parts = np.split(sequences, self.num_microbatches)
        return [self.policy.plan(pieces, part) for part in parts]

    def step(self, minibatch: Minibatch, plans: Plans) -> StepRecord:
        """Take one gradient step; clip the gradient after its reduction over ranks.

        If the loss or the gradient of any rank is not finite, all ranks skip the step. The result
        contains the gradient norm after the reduction and before clipping.
        """
        self.optimizer.zero_grad(set_to_none=True)
        num_waits = len(self.world.gradient_waits)
        parts = self.gradients(minibatch, plans)
        self.clock.waited(self.world.gradient_waits[num_waits:])
        grad_norm, stepped = self.strategy.step(self.optimizer, self.config.max_grad_norm)
        self.clock.mark("optimizer")
        return StepRecord(
            loss_policy=parts.policy.detach(),
            loss_value=parts.value.detach(),
            loss_entropy=parts.entropy.detach(),
            ppo_approx_kl=parts.approx_kl,
            ppo_clip_fraction=parts.clip_fraction,
            optim_grad_norm=grad_norm.detach(),
            # a skipped step is not bad if only the loss scale was too large
            bad=~stepped & ~self.strategy.overflowed,
            taken=stepped,
        )

    def gradients(self, minibatch: Minibatch, plans: Plans) -> LossParts:
        """Run forward and backward passes of all microbatches; return the losses of this rank.

        The last backward pass also reduces the gradients over ranks.
        """
        losses: list[LossParts] = []
        microbatches = minibatch.into_microbatches(self.num_microbatches)
        for microbatch, plan in zip(microbatches, plans, strict=True):
            last = len(losses) == self.num_microbatches - 1
            with self.strategy.accumulating(last):
                with section("forward"):
                    evaluation = self.wrapped(
                        microbatch.obs,
                        microbatch.actions,
                        microbatch.lstm_state,
                        microbatch.episode_start,
                        plan=plan,
                    )
                    losses.append(ppo_loss(evaluation, microbatch, self.config))
                self.clock.mark("forward")
                self.strategy.backward(losses[-1].total / self.num_microbatches)
            self.clock.mark("backward")
        if len(losses) == 1:
            return losses[0]
        return LossParts(*(torch.stack(terms).mean() for terms in zip(*losses, strict=True)))

    def _results(self, records: list[StepRecord], batch: Batch, iteration: int) -> dict[str, float]:
        """Return means over ranks and steps; raise an error after too many bad steps in a row."""
        # average everything over ranks
        steps = stacked(records)
        sums = {"steps": sums_of_taken(steps)}
        if self.policy.discrete:
            entropy = self.policy.largest_entropy(batch.steps["obs"]).mean()
            sums["loss/entropy_max"] = entropy / self.world.size
        sums = all_reduce_sum(sums, self.world)
        means = StepRecord(*sums.pop("steps")).means() | sums
        means["ppo/explained_variance"] = batch.explained_variance
        if self.strategy.scaler.is_enabled():
            # scaling 1 returns the loss scale as a tensor, without waiting for the GPU
            one = torch.ones_like(batch.explained_variance)
            means["optim/loss_scale"] = self.strategy.scaler.scale(one)

        # copy all numbers to the CPU in one transfer
        by_step = StepRecord(*steps.unbind(1))
        packed = [torch.stack([*means.values()]).double(), by_step.bad, by_step.taken]
        numbers = torch.cat(packed).tolist()
        bad = numbers[len(means) : -len(records)]
        taken = numbers[-len(records) :]

        # raise an error after too many bad steps in a row; after fewer bad steps, only warn
        limit = self.config.max_bad_steps
        self.bad_in_a_row = check_bad_steps(bad, taken, self.bad_in_a_row, limit)
        if skipped := int(sum(bad)):
            text = f"{skipped} gradient step(s) skipped in iteration {iteration}: NaN or inf"
            events.notify("bad_steps", text, iteration=iteration, skipped=skipped)
            logger.warning(text)
        return dict(zip(means, numbers, strict=False)) | {
            "optim/learning_rate": self.optimizer.param_groups[0]["lr"],
            "optim/steps": sum(taken),
            "optim/skipped_steps": taken.count(0.0),
        }

    def _responds_to_kl(self, records: list[StepRecord]) -> bool:
        """Adapt the learning rate to an epoch's KL estimate; return True if it exceeds target_kl.

        The estimate is the mean over all ranks and steps of the epoch, so all ranks do the same.
        """
        config = self.config
        if not (config.target_kl or config.desired_kl):
            return False
        sums = StepRecord(*sums_of_taken(stacked(records)))  # if no step was taken, the mean is 0
        kl = sums.ppo_approx_kl / sums.taken.clamp(min=1.0)
        kl_of_all = float(all_reduce_sum({"kl": kl}, self.world)["kl"]) / self.world.size
        if config.desired_kl:
            self._adapt_learning_rate(kl_of_all)
        return 0.0 < config.target_kl < kl_of_all
