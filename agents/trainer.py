"""The training loop, and the state that it carries from iteration to iteration."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agents.advantages import gae, running_sums
from agents.network.minibatches import to_sequences
from agents.network.noise import action_noise
from agents.network.normalize import Normalizer, observation_normalizer
from agents.network.seeds import ENVIRONMENT_STREAM, POLICY_STREAM, stream_seeds
from agents.policy import Policy, PolicyConfig, check_weights
from agents.ppo import (
    PPO,
    NonFiniteGradientError,
    PPOConfig,
    explained_variance,
    normalize_advantages,
    rollout_sums,
)
from agents.rollout import (
    Carry,
    Rollout,
    collect,
    cut_rollout,
    episode_metrics,
    fresh_carry,
)
from agents.sizes import Sizes, TrainConfig, shard_sizes
from envs.vector.layout import TorchEnv
from rl_dist.checkpoint.store import CHECKPOINT_DIR, Best, last_checkpoint, save_agreed
from rl_dist.errors import UserError
from rl_dist.process_group.clock import NullProfiler, Stragglers
from rl_dist.process_group.collectives import (
    all_reduce_max,
    all_reduce_sum,
    check_in_sync,
    gather_dicts,
)
from rl_dist.process_group.world import StopFlag, World
from rl_dist.run_dir import SavedCheckpoint
from rl_dist.strategies.config import SpeedConfig, StrategyConfig
from rl_dist.strategies.strategy import Strategy, keep_options
from rl_dist.telemetry.metrics import MetricsWriter, NullWriter, warn_if_absent
from rl_dist.telemetry.monitor import Monitor

if TYPE_CHECKING:
    from agents.run.callbacks import Watch
    from agents.run.saved import InitialWeights

logger = logging.getLogger(__name__)
MakeEnv = Callable[[int, int], TorchEnv]  # (num_envs, env_offset)
Validate = Callable[[Policy, Normalizer], dict[str, float]]  # called by all ranks together


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that defines a training run besides the world it runs in."""

    train: TrainConfig
    policy: PolicyConfig
    ppo: PPOConfig
    make_env: MakeEnv
    run_dir: Path
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    dtype: torch.dtype = torch.float32
    validate: Validate | None = None
    watch: Watch | None = None  # callbacks, and when to stop early
    pretrained: InitialWeights | None = None
    explain: Callable[[Mapping[str, float]], str] = lambda seconds: ""  # names the bottleneck
    config: dict[str, Any] | None = None  # nested configuration, stored in checkpoints


def make_strategy(config: StrategyConfig, world: World) -> Strategy:
    """Return the strategy that is asked for, the pipeline of the cascade included."""
    if not config.pipelined:
        return Strategy(config, world)
    from agents.network.pipeline import PipelineStrategy

    return PipelineStrategy(config, world)


class Training:
    """Policy, optimizer, normalisers, environments and counters of one rank."""

    def __init__(self, job: Job, world: World) -> None:
        train = job.train
        self.job = job
        self.world = world
        self.sizes: Sizes = shard_sizes(train, world.rank, world.size)
        self.metrics_seen: set[str] = set()

        # environments
        self.env = job.make_env(self.sizes.num_envs, self.sizes.env_offset)
        self.action_space = self.env.single_action_space
        layout = self.env.layout

        # policy and normalisers, the same on every rank
        torch.manual_seed(stream_seeds(train.seed, POLICY_STREAM, 0, 1)[0])
        self.policy = Policy(job.policy, layout, self.action_space).to(world.device, job.dtype)
        self.policy.try_cores()
        if job.pretrained:
            job.pretrained.load_into(self.policy)
        self.obs_normalizer = observation_normalizer(layout, train.normalize_obs)
        self.reward_normalizer = Normalizer(1, enabled=train.normalize_rewards, center=False)
        for normalizer in (self.obs_normalizer, self.reward_normalizer):
            normalizer.to(world.device)
        strategy = make_strategy(replace(job.strategy, batch_axes=Policy.BATCH_AXES), world)
        self.ppo = PPO(self.policy, job.ppo, strategy, train.grad_accumulation, job.speed)

        # observers and counters
        self.profiler: Any = NullProfiler()
        if train.profile:
            from rl_dist.telemetry.profiler import Profiler

            self.profiler = Profiler(job.run_dir, world, job.explain)
        self.monitor = Monitor({}, 0)  # the caller may give one of this rank's GPU, CPU and memory
        self.iteration = self.global_step = self.episodes = 0
        self.restarts_reported = 0  # of environments
        self.carry = self._reset()

    def _reset(self, resumed_at: int = 0) -> Carry:
        """Begin new episodes everywhere; other ones in a run resumed at an iteration."""
        train, sizes = self.job.train, self.sizes
        first, count = sizes.env_offset, sizes.num_envs
        seeds = stream_seeds(train.seed, ENVIRONMENT_STREAM, first, count, resumed_at)
        return fresh_carry(self.policy, self.env.reset(seed=seeds)[0])

    @property
    def progress(self) -> float:
        """Fraction of the run that is done, 0 to 1."""
        train = self.job.train
        if train.total_steps:
            return min(self.global_step / train.total_steps, 1.0)
        return min(self.episodes / train.num_episodes, 1.0)

    @property
    def env_restarts(self) -> int:
        """Number of restarts of environments since the last one in the metrics."""
        return sum(self.env.restarts) - self.restarts_reported

    def warm_up_normalizers(self) -> None:
        """Fill the normalisers by one initial rollout; all environments then reset."""
        if self.job.train.normalize_obs or self.job.train.normalize_rewards:
            rollout = self.collect(lifetime_step=0)
            discounted = self.discounted_returns(rollout)
            # twice, the second time around the mean: a large offset would cost digits, others for
            # another number of ranks
            for _ in range(2):
                for normalizer in (self.obs_normalizer, self.reward_normalizer):
                    normalizer.moments.restart()
                sums = self.statistics(rollout, discounted)
                self.merge_statistics(all_reduce_sum(sums, self.world))
            if self.job.pretrained:
                self.job.pretrained.set_moments(self.obs_normalizer, self.reward_normalizer)
            self.carry = self._reset()
            self.env.take_metrics()  # of steps that do not count

    def collect(self, lifetime_step: int) -> Rollout:
        """One rollout of num_steps steps of every environment."""
        self.world.set_phase("collect")
        train, sizes = self.job.train, self.sizes
        share = (sizes.env_offset, sizes.num_envs)
        when = (lifetime_step, train.num_steps)
        how = (self.world.device, self.job.policy.noise_color)
        noise = action_noise(self.action_space, train.seed, *share, *when, *how).to(self.job.dtype)
        rollout = collect(
            self.policy,
            self.obs_normalizer,
            self.env,
            self.carry,
            noise,  # [T, B, A]
            train.bptt_steps,
            on_step=self.world.heartbeat,
        )
        rollout.refuse_non_finite(self.carry.obs, sizes.env_offset, lifetime_step, self.world.rank)
        return rollout

    def discounted_returns(self, rollout: Rollout) -> Tensor:
        """Running discounted sums of rewards [T, B]; their deviation scales rewards."""
        sums, self.carry.discounted_return = running_sums(
            self.carry.discounted_return, rollout.rewards, rollout.episode_end, self.job.ppo.gamma
        )
        return sums

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Advantages, then the PPO epochs; the normalisers are merged only afterwards."""
        self.world.set_phase("update")
        train, ppo, sizes = self.job.train, self.job.ppo, self.sizes
        # advantages [T, B], from scaled rewards
        discounted = self.discounted_returns(rollout)
        rewards = self.reward_normalizer(rollout.rewards[..., None])[..., 0].to(self.job.dtype)
        values, next_values = rollout.values, rollout.next_values
        ends = rollout.episode_end
        advantages, returns = gae(rewards, values, next_values, ends, ppo.gamma, ppo.gae_lambda)
        sums = self.statistics(rollout, discounted) | rollout_sums(advantages, values, returns)
        sums = all_reduce_sum(sums, self.world)
        explained = explained_variance(sums)
        if ppo.norm_adv:
            smallest = ppo.min_adv_std * self.return_deviation()
            advantages = normalize_advantages(advantages, sums, smallest)

        # epochs over minibatches of sequences
        sequences = cut_rollout(rollout, advantages, returns, train.bptt_steps)
        starts = to_sequences(torch.from_numpy(rollout.on_host.episode_start), train.bptt_steps)
        key = (train.seed, self.iteration)
        share = (sizes.env_offset, sizes.num_envs, sizes.num_minibatches)
        report = {"ppo/explained_variance": explained}
        try:
            metrics = self.ppo.update(sequences, key, *share, starts.numpy(), report)
        except NonFiniteGradientError as error:
            message = f"{error}; {last_checkpoint(self.job.run_dir)}"
            raise NonFiniteGradientError(message, exit_code=1) from error
        self.merge_statistics(sums)
        return metrics

    def return_deviation(self) -> Tensor | float:
        """Deviation of discounted returns, in units of the rewards that are learned from."""
        if self.job.train.normalize_rewards:
            return 1.0
        moments = self.reward_normalizer.moments
        return torch.where(moments.count > 0, moments.variance[0].sqrt(), 0.0)  # 0: none seen yet

    def statistics(self, rollout: Rollout, discounted: Tensor) -> dict[str, Tensor]:
        """This rank's sums for both normalisers' statistics."""
        obs, rewards = self.obs_normalizer.moments, self.reward_normalizer.moments
        sums = {"seen obs": obs.sums(rollout.raw_obs)}
        return sums | {"discounted rewards": rewards.sums(discounted[..., None])}

    def merge_statistics(self, sums: Mapping[str, Tensor]) -> None:
        """Merge a rollout's sums, of all ranks, into both normalisers' statistics."""
        self.obs_normalizer.moments.merge(sums["seen obs"])
        self.reward_normalizer.moments.merge(sums["discounted rewards"])

    def replicated(self) -> dict[str, Tensor]:
        """Tensors that must be equal on all ranks, by name; all ranks must call."""
        named = dict(self.policy.named_parameters())
        found: dict[str, Tensor] = {**named}
        optimizer = self.ppo.strategy.optimizer_state(self.ppo.optimizer)["state"]
        for index, name in enumerate(named):
            for key, value in optimizer.get(index, {}).items():
                if isinstance(value, Tensor):
                    found[f"optimizer {key} of {name}"] = value
        if self.ppo.strategy.scaler:
            found["loss scale"] = torch.tensor(self.ppo.strategy.scaler.get_scale())
        for owner in ("obs_normalizer", "reward_normalizer"):
            for name, buffer in getattr(self, owner).moments.named_buffers():
                found[f"{owner} {name}"] = buffer
        return found

    def state(self) -> dict[str, Any] | None:
        """The run's whole state on the main process, else None; all ranks must call."""
        carry = gather_dicts(self.carry.tensors(), self.world)
        snapshot = self.env.can_snapshot
        environments = gather_dicts(self.env.get_state(), self.world) if snapshot else None
        policy = self.ppo.strategy.module_state()
        optimizer = self.ppo.strategy.optimizer_state(self.ppo.optimizer)
        if not self.world.is_main_process:
            return None
        return {
            "config": json.dumps(self.job.config or {}),
            "iteration": self.iteration,
            "global_step": self.global_step,
            "episodes": self.episodes,
            **self.policy.shapes(),
            "spaces": self.env.spaces_json,  # of the environment itself
            "policy": policy,
            "optimizer": optimizer,
            "bad_in_a_row": self.ppo.bad_in_a_row,
            "strategy": self.ppo.strategy.state_dict(),
            "obs_normalizer": self.obs_normalizer.state_dict(),
            "reward_normalizer": self.reward_normalizer.state_dict(),
            "carry": carry,
            "environments": environments,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state, whatever number of ranks made it."""
        # what all ranks hold alike
        self.iteration = state["iteration"]
        self.global_step = state["global_step"]
        self.episodes = state["episodes"]
        check_weights(self.policy, state["policy"])
        saved = keep_options(self.ppo.optimizer, state["optimizer"])
        self.ppo.strategy.load(state["policy"], self.ppo.optimizer, saved)
        self.ppo.strategy.load_state_dict(state["strategy"])
        self.ppo.bad_in_a_row = state["bad_in_a_row"]
        self.obs_normalizer.load_state_dict(state["obs_normalizer"])
        self.reward_normalizer.load_state_dict(state["reward_normalizer"])

        # this rank's environments; with weak scaling the run may have begun with other totals
        num_saved = len(state["carry"]["obs"])
        sizes = shard_sizes(self.job.train, self.world.rank, self.world.size, num_saved)
        if sizes != self.sizes:
            self.env.close()
            self.sizes = sizes
            self.env = self.job.make_env(sizes.num_envs, sizes.env_offset)
        # other episodes than before, the same at every resume
        if state["environments"] is None or not self.env.can_snapshot:
            self.carry = self._reset(resumed_at=self.iteration)
            return
        own = slice(sizes.env_offset, sizes.env_offset + sizes.num_envs)
        carry = {name: value[own].to(self.world.device) for name, value in state["carry"].items()}
        self.carry = Carry(**carry)
        try:
            self.env.set_state({name: value[own] for name, value in state["environments"].items()})
        except Exception as error:  # environments are foreign code, and their states may be, too
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            message = f"the environments cannot go on from their saved states: {reason}"
            raise UserError(message, exit_code=1) from error
        self.restarts_reported = sum(self.env.restarts)


def train(training: Training, writer: NullWriter, stop: StopFlag) -> int:
    """Train until the budget ends or a stop is agreed; always leaves a checkpoint.

    Returns the number of the signal that ended the run, or 0.
    """
    job, world, config = training.job, training.world, training.job.train
    steps_per_iteration = training.sizes.global_num_envs * config.num_steps
    if training.iteration == 0:
        writer.update_state(phase="warm_up")
        training.warm_up_normalizers()
    best = Best(config.best_metrics, job.run_dir / CHECKPOINT_DIR, world)
    stragglers = Stragglers()
    signal, stopped = 0, ""  # stopped: why it ended early
    while training.progress < 1.0 and not signal and not stopped:
        # collect a rollout and learn from it
        world.forget_waits()
        started = time.perf_counter()
        training.iteration += 1
        rate = training.ppo.set_learning_rate(
            training.iteration, 1.0 - training.progress, training.sizes.learning_rate_factor
        )
        training.profiler.begin(training.iteration)
        rollout = training.collect(lifetime_step=training.iteration * config.num_steps)
        collected = time.perf_counter()
        losses = training.update(rollout)
        updated = time.perf_counter()

        # measure: the update waits for other ranks, collect for nobody
        collect_s, update_s = collected - started, updated - collected
        waited_s = world.sync_seconds + world.gradient_seconds
        timing = {"time/collect_s": collect_s, "time/update_s": update_s}
        timing |= {"time/update_own_s": update_s - waited_s} | training.ppo.clock.read()
        timing["time/idle_share"] = waited_s / (updated - started)
        use = training.monitor.take()
        own = training.env.take_metrics()
        restarts = training.env_restarts
        metrics = episode_metrics(rollout, timing, restarts, use, world, own, stop.signum)
        training.restarts_reported += restarts
        for line in stragglers.observe(metrics["ranks"]):
            logger.warning(line)

        # count; all ranks stop at a signal to any of them
        training.global_step += steps_per_iteration
        training.episodes += metrics["episode/count"]
        signal = metrics.pop("signum")
        elapsed = time.perf_counter() - started
        training.profiler.end(writer.say)
        counters = {"iteration": training.iteration, "global_step": training.global_step}
        metrics = counters | metrics | losses
        metrics |= {"episode/total": training.episodes, "optim/learning_rate": rate}
        metrics |= {"time/sync_s": world.sync_seconds, "time/sps": steps_per_iteration / elapsed}

        # validate, write, save
        world.set_phase("validation")
        finished = training.progress >= 1.0
        if job.validate and is_due(training, config.validate_every, finished):
            writer.update_state(phase="validation")
            metrics |= job.validate(training.policy, training.obs_normalizer)
        warn_of_absent(training, metrics)
        improved = best.update(metrics)
        world.set_phase("loggers")
        done = training.global_step if config.total_steps else training.episodes
        writer.write(metrics, done=done)
        stopped = job.watch(training, metrics) if job.watch else ""
        last = bool(signal or stopped) or finished
        if improved or is_due(training, config.checkpoint_every, last):
            path = save(training, best, last, writer)
            if path and job.watch:
                job.watch.saved(training, metrics, path)
        elif is_due(training, config.sync_check_every):
            check_in_sync(training.replicated(), world)
    training.profiler.close(writer.say)
    if stopped:
        writer.say(f"stopped at iteration {training.iteration}: {stopped}")
    no_best = best.names and best.value is None and config.keep_best != "auto"
    if no_best and not signal and world.is_main_process:
        name = config.keep_best
        logger.warning("keep_best %s never had a value in this run: there is no best.pt", name)
    stop.notice = ""
    return signal or all_reduce_max(stop.signum, world)  # it may have come during the last save


def warn_of_absent(training: Training, metrics: Mapping[str, Any]) -> None:
    """From the first validation on, name env/ metrics of flags that were never there."""
    job, seen = training.job, training.metrics_seen
    seen |= metrics.keys()
    if not job.validate or any(key.startswith("valid/") for key in metrics):
        for flag, name in job.train.named_metrics.items():
            warn_if_absent(flag, name, seen)


def is_due(training: Training, every: int, now: bool = False) -> bool:
    """True at every so many iterations, and where `now`; never where `every` is 0."""
    return every > 0 and (now or training.iteration % every == 0)


def save(
    training: Training, best: Best, last: bool, writer: MetricsWriter | NullWriter
) -> Path | None:
    """Gather the state of all ranks; the main process writes one checkpoint.

    Returns its path, or None if it could not be written and training continues without it.
    """
    train, world, run_dir = training.job.train, training.world, training.job.run_dir
    world.set_phase("checkpoint")
    writer.flush()
    writer.update_state(phase="saving")
    check_in_sync(training.replicated(), world)
    path, problem = save_agreed(
        run_dir,
        training.state(),
        world,
        iteration=training.iteration,
        keep=train.keep_checkpoints,
        measured=best.measured,
        best=best.improved,
    )
    if not problem:
        best.saved()
        saved = SavedCheckpoint(path=f"{CHECKPOINT_DIR}/{path.name}", iteration=training.iteration)
        writer.update_state(phase="training", checkpoint=saved)
        return path
    if last or train.on_save_error == "stop":
        raise UserError(problem, exit_code=1)
    if world.is_main_process:
        logger.warning("%s; training goes on without (--on_save_error continue)", problem)
    return None
