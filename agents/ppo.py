"""Proximal policy optimisation on slots: pure loss, and update over all ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from agents.policy import Evaluation, Policy, evaluation_of
from agents.rollout import Minibatch, equal_parts, minibatches, slot_order
from rl_dist.config import flag
from rl_dist.errors import UserError
from rl_dist.parallel.precision import autocast_dtype
from rl_dist.parallel.speed import SpeedConfig, compiled, make_adam
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.collectives import sum_over_ranks
from rl_dist.process_group.phases import section
from rl_dist.process_group.world import World
from rl_dist.telemetry import events
from rl_dist.telemetry.step_clock import StepClock

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Hyperparameters of PPO; the names are CleanRL's."""

    learning_rate: float = flag(3e-4, "Adam's learning rate (StockTrading-v0: 1e-3)")
    anneal_lr: bool = flag(True, "lower the learning rate linearly to zero over num_episodes or total_steps")
    warmup: int = flag(0, "raise the learning rate linearly to its value over the first ones; 0 = off", "iterations")
    gamma: float = flag(0.99, "discount (StockTrading-v0: 0.8)", "per step")
    gae_lambda: float = flag(0.95, "lambda of generalised advantage estimation (StockTrading-v0: 0.5)")
    update_epochs: int = flag(4, "passes over each rollout", "epochs")
    clip_coef: float = flag(0.2, "clipping of the probability ratio")
    clip_vloss: bool = flag(False, "clip the value loss as well")
    norm_adv: bool = flag(True, "normalise advantages over the whole rollout of all ranks")
    ent_coef: float = flag(0.0, "weight of the entropy bonus")
    vf_coef: float = flag(0.5, "weight of the value loss")
    max_grad_norm: float = flag(0.5, "clip the reduced gradient to this norm")
    target_kl: float = flag(0.0, "stop the epochs when the KL estimate over all ranks exceeds this; 0 = off")
    max_bad_steps: int = flag(
        10, "skip this many steps in a row whose loss or gradient is NaN or inf, then stop; 0 = stop at once", "steps"
    )

    def __post_init__(self) -> None:
        for name, low, high in (
            ("learning_rate", 0.0, 10.0),
            ("warmup", 0, 10**9),
            ("gamma", 0.0, 1.0),
            ("gae_lambda", 0.0, 1.0),
            ("update_epochs", 1, 1000),
            ("clip_coef", 1e-6, 10.0),
            ("ent_coef", 0.0, 10.0),
            ("vf_coef", 0.0, 100.0),
            ("max_grad_norm", 1e-6, 1e6),
            ("target_kl", 0.0, 100.0),
            ("max_bad_steps", 0, 10**9),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must be {low:g}..{high:g}, got {value:g}")


def learning_rate(config: PPOConfig, iteration: int, remaining: float, factor: float = 1.0) -> float:
    """The learning rate of an iteration; pure, so that a resumed run goes on exactly.

    Args:
        iteration: counted from 1; with a warm-up of N, number i <= N has i / N of the rate.
        remaining: of the run before this iteration, from 1 to 0; what annealing multiplies by.
        factor: what lr_scaling multiplies by.
    """
    warmth = min(iteration / config.warmup, 1.0) if config.warmup else 1.0
    return config.learning_rate * factor * warmth * (max(remaining, 0.0) if config.anneal_lr else 1.0)


class LossParts(NamedTuple):
    """Sums over the minibatch's steps; `total` is what the gradient is taken of."""

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

    Every rank averages over the same fixed number of steps, so the mean over ranks that
    DistributedDataParallel takes of the gradients is the mean over the global minibatch.

    Source: Schulman et al., https://arxiv.org/abs/1707.06347; the KL estimate is k3 of
    http://joschu.net/blog/kl-approx.html.
    """
    log_ratio = evaluation.logprobs - logprobs
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1.0 - config.clip_coef, 1.0 + config.clip_coef)
    policy = -torch.minimum(advantages * ratio, advantages * clipped_ratio).mean()
    errors = (evaluation.values - returns).square()
    if config.clip_vloss:
        clipped = values + (evaluation.values - values).clamp(-config.clip_coef, config.clip_coef)
        errors = torch.maximum(errors, (clipped - returns).square())
    value = 0.5 * errors.mean()
    entropy = evaluation.entropy.mean()
    with torch.no_grad():
        approx_kl = ((ratio - 1.0) - log_ratio).mean()
        clip_fraction = ((ratio - 1.0).abs() > config.clip_coef).to(ratio.dtype).mean()
    total = policy - config.ent_coef * entropy + config.vf_coef * value
    return LossParts(total, policy, value, entropy, approx_kl, clip_fraction)


def normalize_advantages(advantages: Tensor, world: World) -> Tensor:
    """Advantages [T, B] of mean 0 and deviation 1 over the rollouts of all ranks."""
    wide = advantages.double()
    sums = sum_over_ranks({"count": float(wide.numel()), "sum": wide.sum(), "square": wide.square().sum()}, world)
    mean = sums["sum"] / sums["count"]
    variance = (sums["square"] / sums["count"] - mean.square()).clamp(min=0.0)
    return ((wide - mean) / (variance.sqrt() + 1e-8)).to(advantages.dtype)


def explained_variance(values: Tensor, returns: Tensor, world: World) -> float:
    """1 - Var(returns - values) / Var(returns) over ranks; 0 for constant returns."""
    targets, errors = returns.double(), (returns - values).double()
    sums = {"count": float(targets.numel())}
    for name, quantity in (("targets", targets), ("errors", errors)):
        sums |= {name: quantity.sum(), f"{name}_square": quantity.square().sum()}  # type: ignore[dict-item]
    total = {name: float(value) for name, value in sum_over_ranks(sums, world).items()}  # type: ignore[arg-type]

    def variance(name: str) -> float:
        return total[f"{name}_square"] / total["count"] - (total[name] / total["count"]) ** 2

    return 1.0 - variance("errors") / variance("targets") if variance("targets") > 0 else 0.0


def replicated_state(ppo: PPO, **normalizers: nn.Module) -> dict[str, Tensor]:
    """What all ranks hold alike; all of them must call."""
    found: dict[str, Tensor] = dict(ppo.policy.named_parameters())
    states = ppo.strategy.optimizer_state(ppo.optimizer)["state"]
    for index, name in enumerate(list(found)):
        values = states.get(index, {})
        found |= {f"optimizer {key} of {name}": value for key, value in values.items() if isinstance(value, Tensor)}
    if ppo.strategy.scaler:
        found["loss scale"] = torch.tensor(ppo.strategy.scaler.get_scale())
    for owner, normalizer in normalizers.items():
        found |= {f"{owner} {name.rpartition('.')[2]}": buffer for name, buffer in normalizer.named_buffers()}
    return found


class NonFiniteGradient(UserError):
    """Too many gradients in a row held NaN or inf; the optimizer was not stepped."""


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
        self.policy, self.config, self.strategy, self.world = policy, config, strategy, strategy.world
        self.num_parts = grad_accumulation  # of a minibatch
        policy.low_precision = autocast_dtype(strategy.config.precision)
        self.wrapped = strategy.wrap(policy)
        self.bad_in_a_row = 0  # gradient steps skipped since the last good one
        self.clock = StepClock(self.world.device)
        self.optimizer = make_adam(strategy.parameters, config.learning_rate, self.world.device, speed.fused_adam)
        self.compiled_loss = compiled(ppo_loss) if speed.compile else None
        if speed.compile:  # functions of tensors: replicas bring their own parameters
            policy.evaluation = compiled(evaluation_of)

    def set_learning_rate(self, iteration: int, remaining: float, factor: float = 1.0) -> float:
        """Give the optimizer the rate of `learning_rate`, and return it."""
        rate = learning_rate(self.config, iteration, remaining, factor)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    @section("update")
    def update(
        self, slots: Minibatch, key: tuple[int, int], first_env: int, num_envs: int, num_minibatches: int
    ) -> dict[str, float]:
        """Run the epochs over a rollout's slots; all ranks take the same steps.

        Args:
            slots: all K * B slots of this rank's rollout.
            key: (seed, iteration), the source of the shuffling.

        Returns:
            Losses and diagnostics: means over all ranks and gradient steps.
        """
        totals = torch.zeros(len(LossParts._fields) + 1, dtype=torch.float64, device=slots.obs.device)
        slots_per_env = slots.obs.shape[1] // num_envs
        num_steps = num_skipped = num_bad = 0
        self.clock.start()
        for epoch in range(self.config.update_epochs):
            order = slot_order((*key, epoch), first_env, num_envs, slots_per_env, num_minibatches)
            epoch_kl = torch.zeros((), dtype=torch.float64, device=slots.obs.device)
            steps_before = num_steps
            for minibatch in minibatches(slots, order):
                parts, grad_norm, stepped = self.step(minibatch)
                self.world.beat()
                if not stepped:
                    num_skipped += 1
                    num_bad += not self.strategy.overflowed
                    continue
                totals += torch.stack([part.detach().double() for part in (*parts, grad_norm)])
                epoch_kl += parts.approx_kl
                num_steps += 1
            epoch_steps = num_steps - steps_before  # the same on all ranks
            if self.config.target_kl and epoch_steps and self._exceeds_target_kl(epoch_kl / epoch_steps):
                break
            self.clock.mark("")
        self.strategy.end_update()
        if num_bad:
            text = f"{num_bad} gradient step(s) skipped in iteration {key[1]}: NaN or inf"
            events.notify("bad_steps", text, iteration=key[1], skipped=num_bad)
        reduced = sum_over_ranks({"totals": totals, "steps": float(num_steps)}, self.world)
        _, policy, value, entropy, kl, clipped, norm = (reduced["totals"] / reduced["steps"]).tolist()
        return {
            "loss/policy": policy,
            "loss/value": value,
            "loss/entropy": entropy,
            "ppo/approx_kl": kl,
            "ppo/clip_fraction": clipped,
            "optim/grad_norm": norm,
            "optim/steps": float(num_steps),
            "optim/skipped_steps": num_skipped,
            **({"optim/loss_scale": self.strategy.scaler.get_scale()} if self.strategy.scaler else {}),
        }

    def step(self, minibatch: Minibatch) -> tuple[LossParts, Tensor, bool]:
        """One gradient step; the gradient is clipped after its reduction over ranks.

        All ranks skip it together if the loss or the gradient of any of them is not finite.

        Returns:
            Losses, norm of the reduced gradient before clipping, and whether the step was taken.
        """
        self.optimizer.zero_grad(set_to_none=True)
        waited_s = self.world.gradient_seconds
        parts = self._gradients(minibatch)
        self.clock.waited(self.world.gradient_seconds - waited_s)
        grad_norm, stepped = self.strategy.step(self.optimizer, self.config.max_grad_norm)
        self.clock.mark("optimizer")
        if not self.strategy.overflowed:  # else it is part of the search for a loss scale
            self._count_bad(stepped, parts.total)
        return parts, grad_norm, stepped

    def _gradients(self, minibatch: Minibatch) -> LossParts:
        """Forward and backward of a minibatch, part by part; the losses of this rank."""
        if self.strategy.scheduled is not None:  # stages of a pipeline, each with a part of forward and backward
            terms = self.strategy.scheduled(minibatch, self.num_parts, self._loss_of, len(LossParts._fields))
            self.clock.mark("backward")
            return LossParts(*terms.mean(0))
        losses = []
        for number, part in enumerate(equal_parts(minibatch, self.num_parts), 1):
            with self.strategy.accumulating(last=number == self.num_parts):
                losses.append(self._loss(part))
                self.clock.mark("forward")
                with self.strategy.reducing(losses[-1].total / self.num_parts) as loss:
                    loss.backward()
            self.clock.mark("backward")
        return LossParts(*(torch.stack(terms).mean() for terms in zip(*losses, strict=True)))

    @section("forward")
    def _loss(self, minibatch: Minibatch) -> LossParts:
        evaluation = self.wrapped(minibatch.obs, minibatch.actions, minibatch.lstm_state, minibatch.episode_start)
        return self._loss_of(evaluation, minibatch)

    def _loss_of(self, evaluation: Evaluation, minibatch: Minibatch) -> LossParts:
        return (self.compiled_loss or ppo_loss)(
            evaluation,
            minibatch.logprobs,
            minibatch.values,
            minibatch.advantages,
            minibatch.returns,
            self.config,
        )

    def _count_bad(self, stepped: bool, loss: Tensor) -> None:
        self.bad_in_a_row = 0 if stepped else self.bad_in_a_row + 1
        if stepped:
            return
        logger.warning("NaN or inf in loss or gradient (loss of this rank: %g): step skipped", loss.item())
        if self.bad_in_a_row > self.config.max_bad_steps:
            raise NonFiniteGradient(
                f"loss or gradient was NaN or inf in {self.bad_in_a_row} steps in a row, more than --max_bad_steps "
                f"{self.config.max_bad_steps}: lower --learning_rate",
                exit_code=1,
            )

    def _exceeds_target_kl(self, epoch_kl: Tensor) -> bool:
        reduced = sum_over_ranks({"kl": epoch_kl}, self.world)["kl"]
        return float(reduced) / self.world.size > self.config.target_kl
