"""Proximal policy optimisation: the pure loss, and the update over all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agents.network.minibatches import Minibatch, make_schedule
from agents.network.noise import sequence_orders
from agents.network.sequences import Plan, state_after
from rl_dist.errors import UserError
from rl_dist.flags import Field, configuration
from rl_dist.process_group.clock import StepClock, section
from rl_dist.process_group.collectives import all_reduce_sum
from rl_dist.strategies.config import SpeedConfig, autocast_dtype
from rl_dist.strategies.strategy import Strategy, make_adam
from rl_dist.telemetry import events

if TYPE_CHECKING:
    from agents.policy import Evaluation, Policy

# how `update` reports the fields of LossParts, and the gradient's norm
METRICS = {
    "total": "loss/total",
    "policy": "loss/policy",
    "value": "loss/value",
    "entropy": "loss/entropy",
    "approx_kl": "ppo/approx_kl",
    "clip_fraction": "ppo/clip_fraction",
    "grad_norm": "optim/grad_norm",
}
logger = logging.getLogger(__name__)


@configuration
class PPOConfig:
    """Hyperparameters of PPO; the names are CleanRL's."""

    # Rewards that credit a trade at once need neither a long horizon nor long traces, and a short
    # horizon makes a trade wait for its moment: so StockTrading-v0 was tuned (docs/LOG.md).
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
    """Before every epoch but the first, compute again the states at which sequences begin; off:
    they stay those of the rollout."""
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
    """Skip this many optimizer steps in a row whose loss or gradient is NaN or inf, then stop; 0:
    stop at once."""


def learning_rate(
    config: PPOConfig, iteration: int, remaining: float, factor: float = 1.0
) -> float:
    """The learning rate of an iteration; pure, so that a resumed run goes on exactly.

    Args:
        iteration: counted from 1; with a warm-up of N, number i <= N has i / N of the rate.
        remaining: of the run before this iteration, from 1 to 0; what annealing multiplies by.
        factor: what lr_scaling multiplies by.
    """
    warmup_factor = min(iteration / config.warmup, 1.0) if config.warmup else 1.0
    annealing = max(remaining, 0.0) if config.anneal_lr else 1.0
    return config.learning_rate * factor * warmup_factor * annealing


class LossParts(NamedTuple):
    """Means over a minibatch's steps; `total` is what the gradient is taken of."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


def ppo_loss(
    evaluation: Evaluation,
    logprobs: Tensor,  # [L, N] of the rollout
    values: Tensor,  # [L, N] of the rollout
    advantages: Tensor,  # [L, N]
    returns: Tensor,  # [L, N]
    config: PPOConfig,
) -> LossParts:
    """Clipped surrogate, value loss and entropy bonus, averaged over L * N steps.

    Every rank averages over as many steps, so the mean of gradients over ranks is that of the
    global minibatch. Source: Schulman et al., https://arxiv.org/abs/1707.06347; the KL estimate
    is k3 of http://joschu.net/blog/kl-approx.html.
    """
    # policy: the clipped surrogate
    log_ratio = evaluation.logprobs - logprobs  # [L, N]
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - config.clip_coef, 1.0 + config.clip_coef)
    policy = -torch.minimum(advantages * ratio, advantages * clipped_ratio).mean()

    # value: the squared error, clipped if asked
    errors = (evaluation.values - returns).square()  # [L, N]
    if config.clip_vloss:
        clipped = values + (evaluation.values - values).clamp(-config.clip_coef, config.clip_coef)
        errors = torch.maximum(errors, (clipped - returns).square())
    value = 0.5 * errors.mean()

    # the sum to minimise, and diagnostics
    entropy = evaluation.entropy.mean()
    with torch.no_grad():
        approx_kl = ((ratio - 1.0) - log_ratio).mean()
        clip_fraction = ((ratio - 1.0).abs() > config.clip_coef).to(ratio.dtype).mean()
    total = policy - config.ent_coef * entropy + config.vf_coef * value
    return LossParts(total, policy, value, entropy, approx_kl, clip_fraction)


def rollout_sums(advantages: Tensor, values: Tensor, returns: Tensor) -> dict[str, Tensor]:
    """Sums over one rank's rollout that the next two functions need of all ranks."""
    sums = {"count": torch.tensor(returns.numel(), dtype=torch.float64)}
    errors = returns - values
    named = {"advantages": advantages, "returns": returns, "errors": errors}  # each [T, B]
    for name, samples in named.items():
        wide = samples.double()
        sums |= {name: wide.sum(), f"{name}_square": wide.square().sum()}
    return sums


def normalize_advantages(
    advantages: Tensor, sums: Mapping[str, Tensor], smallest: float | Tensor = 0.0
) -> Tensor:
    """Advantages [T, B] of mean 0 over the rollouts of all ranks, and of deviation 1.

    smallest: what they are divided by at least; the deviation is below 1 then.
    """
    mean, variance = _moments("advantages", sums)
    deviation = (variance.clamp(min=0.0).sqrt() + 1e-8).clamp(min=smallest)
    return ((advantages.double() - mean) / deviation).to(advantages.dtype)


def explained_variance(sums: Mapping[str, Tensor]) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over ranks; 0 for constant returns."""
    of_returns, of_errors = (_moments(name, sums)[1] for name in ("returns", "errors"))
    return torch.where(of_returns > 0, 1.0 - of_errors / of_returns, 0.0)


def _moments(name: str, sums: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    mean = sums[name] / sums["count"]
    return mean, sums[f"{name}_square"] / sums["count"] - mean.square()


class Tally:
    """What an update counts, on the device: nobody waits for it before the end."""

    def __init__(self, device: torch.device, bad_in_a_row: int) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.losses = zeros(len(LossParts._fields) + 1)  # of LossParts and the gradient's norm
        self.epoch_kl = zeros(2)  # sum of approx_kl, and steps
        # taken, skipped, bad, bad by this rank's loss; bad ones in a row: now, and most
        self.counts = zeros(6)
        self.counts[4] = bad_in_a_row

    @torch.no_grad()
    def add(
        self, parts: LossParts, grad_norm: Tensor, stepped: Tensor, overflowed: Tensor | bool
    ) -> None:
        """Count a gradient step; a skipped one by its number alone."""
        row = torch.stack([part.double() for part in (*parts, grad_norm)])
        row = torch.where(stepped, row, 0.0)
        self.losses += row
        approx_kl = row[LossParts._fields.index("approx_kl")]
        self.epoch_kl += torch.stack([approx_kl, stepped.double()])
        # an overflow is part of the search for a loss scale
        bad = ~stepped if isinstance(overflowed, bool) else ~stepped & ~overflowed
        own = bad & ~torch.isfinite(parts.total)
        self.counts[:4] += torch.stack([stepped, ~stepped, bad, own])
        in_a_row = torch.where(stepped, 0.0, self.counts[4] + bad)
        self.counts[4:] = torch.stack([in_a_row, torch.maximum(in_a_row, self.counts[5])])


class NonFiniteGradientError(UserError):
    """Too many gradients in a row held NaN or inf; the optimizer was not stepped."""


def refreshed_states(
    policy: Policy, sequences: Minibatch, num_envs: int, starts: np.ndarray
) -> Tensor:
    """The states [K * B, S, H] before all sequences, by the policy as it is now.

    Those before the first sequences are older than the rollout and stay. `starts` [L, K * B] are
    their episode starts on the host.
    """
    states = [sequences.lstm_state[:num_envs]]
    for first in range(0, len(sequences.lstm_state) - num_envs, num_envs):
        block = sequences.pick(Tensor.narrow, first, num_envs)
        given = block.obs, states[-1], block.episode_start
        of_block = starts[:, first : first + num_envs]
        states.append(state_after(policy.network, *given, of_block, policy.resets_inside))
    return torch.cat(states)


class PPO:
    """The optimizer and the update of a policy that a strategy trains."""

    def __init__(
        self,
        policy: Policy,
        config: PPOConfig,
        strategy: Strategy,
        grad_accumulation: int = 1,
        speed: SpeedConfig = SpeedConfig(),  # noqa: B008  # frozen
    ) -> None:
        self.policy = policy
        self.config = config
        self.strategy = strategy
        self.world = strategy.world
        self.num_microbatches = grad_accumulation  # of a minibatch
        policy.low_precision = autocast_dtype(strategy.config.precision)
        self.wrapped = strategy.wrap(policy)
        self.bad_in_a_row = 0  # gradient steps skipped since the last good one
        self.reads_steps = self.world.device.type == "cpu"  # a GPU is asked once, after an update
        self.clock = StepClock(self.world.device)
        rate = config.learning_rate
        self.optimizer = make_adam(strategy.parameters, rate, speed.fused_adam)

    def set_learning_rate(self, iteration: int, remaining: float, factor: float = 1.0) -> float:
        """Give the optimizer the rate of `learning_rate`, and return it."""
        rate = learning_rate(self.config, iteration, remaining, factor)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    @section("update")
    def update(
        self,
        sequences: Minibatch,
        key: tuple[int, int],
        env_offset: int,
        num_envs: int,
        num_minibatches: int,
        starts: np.ndarray | None = None,
        report: Mapping[str, Tensor] = {},  # never changed
    ) -> dict[str, float]:
        """Run the epochs over a rollout's sequences; all ranks take the same steps.

        Args:
            sequences: all K * B of this rank's rollout.
            key: (seed, iteration), the source of the shuffling.
            starts: their episode starts on the host, [L, K * B]; None: they are read.
            report: numbers [] to be read and returned with the others.

        Returns:
            Losses and diagnostics: means over all ranks and gradient steps.
        """
        sequences_per_env = sequences.obs.shape[1] // num_envs
        share = (env_offset, num_envs, sequences_per_env, num_minibatches)
        order = sequence_orders(key, self.config.update_epochs, *share)
        device = sequences.obs.device
        starts = sequences.episode_start.cpu().numpy() if starts is None else starts
        calls = (self.policy.call_steps, self.policy.resets_inside) if self._plans_ahead else ()
        schedule = make_schedule(starts, order, self.num_microbatches, device, *calls)
        tally = Tally(device, self.bad_in_a_row)
        self.clock.start()
        for epoch in range(self.config.update_epochs):
            if epoch and self.config.refresh_states:
                self.strategy.end_update()  # a stage of a pipeline knows its own parameters only
                states = refreshed_states(self.policy, sequences, num_envs, starts)
                sequences = replace(sequences, lstm_state=states)

            # one gradient step per minibatch
            tally.epoch_kl.zero_()
            for minibatch, plans in schedule.minibatches(sequences, epoch):
                parts, grad_norm, stepped = self.step(minibatch, plans)
                self.world.heartbeat()
                tally.add(parts, grad_norm, stepped, self.strategy.overflowed)
                if self.reads_steps and not stepped:
                    self._judge(tally.counts.tolist())

            # all ranks stop early together
            if self._exceeds_target_kl(tally.epoch_kl):
                break
            self.clock.mark("")
        self.strategy.end_update()

        return self._outcome(tally, report, key[1], sequences.obs)

    @property
    def _plans_ahead(self) -> bool:
        """Whether the pieces of all minibatches can be planned before the first gradient step."""
        elsewhere = self.strategy.mode == "dp" or self.strategy.scheduled is not None
        return not (self.policy.config.stateless or elsewhere)

    def step(
        self, minibatch: Minibatch, plans: Sequence[Plan] = ()
    ) -> tuple[LossParts, Tensor, Tensor]:
        """One gradient step; the gradient is clipped after its reduction over ranks.

        All ranks skip it together if the loss or the gradient of any of them is not finite. Returns
        losses, norm of the reduced gradient before clipping, and whether the step was taken.
        """
        self.optimizer.zero_grad(set_to_none=True)
        num_waits = len(self.world.gradient_waits)
        parts = self._gradients(minibatch, plans)
        self.clock.waited(self.world.gradient_waits[num_waits:])
        grad_norm, stepped = self.strategy.step(self.optimizer, self.config.max_grad_norm)
        self.clock.mark("optimizer")
        return parts, grad_norm, stepped

    def _gradients(self, minibatch: Minibatch, plans: Sequence[Plan]) -> LossParts:
        """Forward and backward of a minibatch, by microbatches; the losses of this rank."""
        # a pipeline has a schedule of its own for forward and backward of its stages
        if self.strategy.scheduled is not None:
            terms = self.strategy.scheduled(
                minibatch, self.num_microbatches, self._loss_of, len(LossParts._fields)
            )
            self.clock.mark("backward")
            return LossParts(*terms.mean(0))

        # every other strategy reduces the gradients over ranks during the last backward
        losses = []
        for number, microbatch in enumerate(minibatch.into_microbatches(self.num_microbatches), 1):
            with self.strategy.accumulating(last=number == self.num_microbatches):
                losses.append(self._loss(microbatch, *plans[number - 1 : number]))
                self.clock.mark("forward")
                scaled = losses[-1].total / self.num_microbatches
                with self.strategy.backward_context(scaled) as loss:
                    loss.backward()
            self.clock.mark("backward")
        if len(losses) == 1:
            return losses[0]
        return LossParts(*(torch.stack(terms).mean() for terms in zip(*losses, strict=True)))

    @section("forward")
    def _loss(self, minibatch: Minibatch, *plan: Plan) -> LossParts:
        evaluation = self.wrapped(
            minibatch.obs, minibatch.actions, minibatch.lstm_state, minibatch.episode_start, *plan
        )
        return self._loss_of(evaluation, minibatch)

    def _loss_of(self, evaluation: Evaluation, minibatch: Minibatch) -> LossParts:
        return ppo_loss(
            evaluation,
            minibatch.logprobs,
            minibatch.values,
            minibatch.advantages,
            minibatch.returns,
            self.config,
        )

    def _outcome(
        self, tally: Tally, report: Mapping[str, Tensor], iteration: int, obs: Tensor
    ) -> dict[str, float]:
        """Means over ranks and steps, read at once with all else that the host wants to know."""
        sums = {"losses": tally.losses, "steps": tally.counts[0]}
        if self.policy.discrete:  # all ranks have as many steps
            sums["loss/entropy_max"] = self.policy.largest_entropy(obs).mean() / self.world.size
        sums = all_reduce_sum(sums, self.world)
        names = [METRICS[field] for field in (*LossParts._fields, "grad_norm")]
        losses = sums.pop("losses") / sums.pop("steps")
        found = {**dict(zip(names, losses, strict=True)), **sums, **report}
        if self.strategy.scaler:
            one = torch.ones((), device=tally.counts.device)
            found["optim/loss_scale"] = self.strategy.scaler.scale(one)
        wide = [number.double() for number in (*found.values(), *tally.counts)]
        numbers = torch.stack(wide).tolist()
        taken, skipped, bad, own = self._judge(numbers[len(found) :])
        if bad:
            text = f"{bad} gradient step(s) skipped in iteration {iteration}: NaN or inf"
            events.notify("bad_steps", text, iteration=iteration, skipped=bad)
            places = f"loss of this rank: nan or inf in {own}" if own else "not in this rank's loss"
            logger.warning("NaN or inf in loss or gradient: step skipped, %d (%s)", bad, places)
        means = dict(zip(found, numbers, strict=False))
        means |= {"optim/steps": float(taken), "optim/skipped_steps": skipped}
        del means["loss/total"]
        return means

    def _judge(self, counts: list[float]) -> tuple[int, int, int, int]:
        """Stop after too many bad steps in a row; returns the first four of `Tally.counts`."""
        taken, skipped, bad, own, self.bad_in_a_row, worst = map(int, counts)
        if worst > self.config.max_bad_steps:
            raise NonFiniteGradientError(
                f"loss or gradient was NaN or inf in {worst} steps in a row, more than "
                f"--max_bad_steps {self.config.max_bad_steps}: lower --learning_rate",
                exit_code=1,
            )
        return taken, skipped, bad, own

    def _exceeds_target_kl(self, epoch_kl: Tensor) -> bool:
        """Compare the mean KL estimate over ranks and an epoch's steps with `target_kl`."""
        if not self.config.target_kl:
            return False
        total, num_steps = epoch_kl  # no step, no divergence
        reduced = all_reduce_sum({"kl": total / num_steps.clamp(min=1.0)}, self.world)["kl"]
        return float(reduced) / self.world.size > self.config.target_kl
