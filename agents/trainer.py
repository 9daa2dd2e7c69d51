"""The training loop, and the state that it carries from iteration to iteration."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import torch
from torch import Tensor

from agents.gae import gae
from agents.noise import action_noise
from agents.normalize import Normalizer
from agents.pipeline import make_strategy
from agents.policy import Policy, PolicyConfig, check_weights
from agents.ppo import PPO, NonFiniteGradient, PPOConfig, explained_variance, normalize_advantages, replicated_state
from agents.rollout import Carry, Minibatch, Rollout, collect, episode_metrics, fresh_carry, to_slots
from agents.sizes import Sizes, TrainConfig, share_out
from rl_dist.checkpoint.folder import CHECKPOINT_DIR, MEASURED, Best, latest_checkpoint, save_checkpoint
from rl_dist.checkpoint.seal import CheckpointError
from rl_dist.errors import UserError
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.speed import SpeedConfig, keep_options
from rl_dist.process_group.collectives import agree_max, check_in_sync, gather_dicts, gather_json, sum_over_ranks
from rl_dist.process_group.world import StopFlag, World
from rl_dist.seeding import ENVIRONMENT_STREAM, POLICY_STREAM, stream_seeds
from rl_dist.telemetry.metrics import MetricsWriter, NullWriter
from rl_dist.telemetry.monitor import Monitor
from rl_dist.telemetry.profiler import Profiler
from rl_dist.telemetry.stragglers import Stragglers

if TYPE_CHECKING:
    from agents.pretrain.weights import Pretrained

logger = logging.getLogger(__name__)
MakeEnv = Callable[[int, int], gymnasium.vector.VectorEnv]  # (num_envs, first_global_index)
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
    pretrained: Pretrained | None = None
    explain: Callable[[Mapping[str, float]], str] = lambda seconds: ""  # the bottleneck, out of a profile's seconds
    config: dict[str, Any] | None = None  # nested configuration, stored in checkpoints


class Training:
    """Policy, optimizer, normalisers, environments and counters of one rank."""

    def __init__(self, job: Job, world: World) -> None:
        self.job, self.world = job, world
        self.sizes: Sizes = share_out(job.train, world.rank, world.size)
        self.env = job.make_env(self.sizes.num_envs, self.sizes.first_env)
        self.action_space = self.env.single_action_space
        num_obs = int(self.env.single_observation_space.shape[0])  # type: ignore[index]
        torch.manual_seed(stream_seeds(job.train.seed, POLICY_STREAM, 0, 1)[0])
        self.policy = Policy(job.policy, num_obs, self.action_space).to(world.device, job.dtype)
        if job.pretrained:
            job.pretrained.load_into(self.policy)
        self.obs_normalizer = Normalizer(num_obs, enabled=job.train.normalize_obs).to(world.device)
        self.reward_normalizer = Normalizer(1, enabled=job.train.normalize_rewards, center=False).to(world.device)
        strategy = make_strategy(replace(job.strategy, batch_axes=Policy.BATCH_AXES), world)
        self.ppo = PPO(self.policy, job.ppo, strategy, job.train.grad_accumulation, job.speed)
        self.profiler = Profiler(job.run_dir, world, on=job.train.profile, explain=job.explain)
        self.monitor = Monitor([], 0)  # of this rank's GPU, CPU and memory; the caller may give another
        self.iteration = self.global_step = self.episodes = 0
        self.restarts_told = 0  # of environments, in the metrics so far
        self.carry = self._reset()

    def _reset(self, life: int = 0) -> Carry:
        train, sizes = self.job.train, self.sizes
        seeds = stream_seeds(train.seed, ENVIRONMENT_STREAM, sizes.first_env, sizes.num_envs, life)
        return fresh_carry(self.policy, self.env.reset(seed=seeds)[0])  # type: ignore[arg-type]

    @property
    def progress(self) -> float:
        """Fraction of the run that is done, 0 to 1."""
        train = self.job.train
        done = self.global_step / train.total_steps if train.total_steps else self.episodes / train.num_episodes
        return min(done, 1.0)

    @property
    def env_restarts(self) -> int:
        """How often environments were made anew since the metrics last told of it."""
        return sum(getattr(self.env, "restarts", ())) - self.restarts_told

    def warm_up_normalizers(self) -> None:
        """One initial rollout only fills the normalisers; all environments then reset."""
        if self.job.train.normalize_obs or self.job.train.normalize_rewards:
            rollout = self.collect(lifetime_step=0)
            discounted = self.discounted_returns(rollout)
            self.merge_statistics(rollout, discounted)
            for normalizer in (self.obs_normalizer, self.reward_normalizer):  # once more, around this mean: a large
                normalizer.moments.restart()  # offset would cost digits, others for another number of ranks
            self.merge_statistics(rollout, discounted)
            if self.job.pretrained:
                self.job.pretrained.set_moments(self.obs_normalizer)
            self.carry = self._reset()

    def collect(self, lifetime_step: int) -> Rollout:
        """One rollout of num_steps steps of every environment."""
        self.world.enter("collect")
        train, sizes = self.job.train, self.sizes
        noise = action_noise(
            self.action_space, train.seed, sizes.first_env, sizes.num_envs, lifetime_step, train.num_steps
        ).to(self.world.device, self.job.dtype)
        parts = self.policy, self.obs_normalizer, self.env, self.carry
        rollout = collect(*parts, noise, train.bptt_steps, on_step=self.world.beat)
        rollout.refuse_non_finite(self.carry.obs, sizes.first_env, lifetime_step, self.world.rank)
        return rollout

    def discounted_returns(self, rollout: Rollout) -> Tensor:
        """Running discounted sums of rewards [T, B]; their deviation scales rewards."""
        running, rows = self.carry.discounted_return, []
        for rewards, ended in zip(rollout.rewards, rollout.episode_end, strict=True):
            running = running * self.job.ppo.gamma + rewards
            rows.append(running)
            running = running * ~ended
        self.carry.discounted_return = running
        return torch.stack(rows)

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Advantages, then the PPO epochs; the normalisers are merged only afterwards."""
        self.world.enter("update")
        discounted = self.discounted_returns(rollout)
        rewards = self.reward_normalizer(rollout.rewards[..., None])[..., 0].to(self.job.dtype)
        advantages, returns = gae(
            rewards,
            rollout.values,
            rollout.next_values,
            rollout.episode_end,
            self.job.ppo.gamma,
            self.job.ppo.gae_lambda,
        )
        metrics = {"ppo/explained_variance": explained_variance(rollout.values, returns, self.world)}
        if self.job.ppo.norm_adv:
            advantages = normalize_advantages(advantages, self.world)
        slots = self._slots(rollout, advantages, returns)
        key = (self.job.train.seed, self.iteration)
        sizes = self.sizes
        try:
            metrics |= self.ppo.update(slots, key, sizes.first_env, sizes.num_envs, sizes.num_minibatches)
        except NonFiniteGradient as error:
            raise NonFiniteGradient(f"{error}; {last_checkpoint(self.job.run_dir)}", exit_code=1) from error
        self.merge_statistics(rollout, discounted)
        return metrics

    def _slots(self, rollout: Rollout, advantages: Tensor, returns: Tensor) -> Minibatch:
        def slots(values: Tensor) -> Tensor:
            return to_slots(values, self.job.train.bptt_steps)

        return Minibatch(
            obs=slots(rollout.obs),
            actions=slots(rollout.actions),
            logprobs=slots(rollout.logprobs),
            values=slots(rollout.values),
            advantages=slots(advantages),
            returns=slots(returns),
            episode_start=slots(rollout.episode_start),
            lstm_state=rollout.grid_states.flatten(0, 1),
        )

    def merge_statistics(self, rollout: Rollout, discounted: Tensor) -> None:
        """Merge this rollout's sums, of all ranks, into both normalisers' statistics."""
        obs, rewards = self.obs_normalizer.moments, self.reward_normalizer.moments
        sums = {"obs": obs.sums(rollout.raw_obs), "rewards": rewards.sums(discounted[..., None])}
        reduced = sum_over_ranks(sums, self.world)
        obs.merge(reduced["obs"])
        rewards.merge(reduced["rewards"])

    def replicated(self) -> dict[str, Tensor]:
        """What must be equal on all ranks; all of them must call."""
        return replicated_state(self.ppo, obs_normalizer=self.obs_normalizer, reward_normalizer=self.reward_normalizer)

    def state(self) -> dict[str, Any] | None:
        """The run's whole state on the main process, else None; all ranks must call."""
        carry = gather_dicts(self.carry.tensors(), self.world)
        snapshot = getattr(self.env, "can_snapshot", False)
        environments = gather_dicts(self.env.get_state(), self.world) if snapshot else None  # type: ignore[attr-defined]
        policy = self.ppo.strategy.module_state()
        optimizer = self.ppo.strategy.optimizer_state(self.ppo.optimizer)
        if not self.world.main:
            return None
        return {
            "config": json.dumps(self.job.config or {}),
            "iteration": self.iteration,
            "global_step": self.global_step,
            "episodes": self.episodes,
            "num_obs": self.policy.num_obs,
            "num_actions": self.policy.num_actions,
            "discrete": self.policy.discrete,
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
        self.iteration, self.global_step = state["iteration"], state["global_step"]
        self.episodes = state["episodes"]
        check_weights(self.policy, state["policy"])
        optimizer = self.ppo.optimizer
        self.ppo.strategy.load(state["policy"], optimizer, keep_options(optimizer, state["optimizer"]))
        self.ppo.strategy.load_state_dict(state.get("strategy", {}))  # older checkpoints have none
        self.ppo.bad_in_a_row = state.get("bad_in_a_row", 0)  # older checkpoints do not know it
        self.obs_normalizer.load_state_dict(state["obs_normalizer"])
        self.reward_normalizer.load_state_dict(state["reward_normalizer"])
        self._keep_totals(len(state["carry"]["obs"]))
        mine = slice(self.sizes.first_env, self.sizes.first_env + self.sizes.num_envs)
        if state["environments"] is None:  # episodes restart: other ones than before, the same at every resume
            self.carry = self._reset(life=self.iteration)
            return
        carry = {name: value[mine].to(self.world.device) for name, value in state["carry"].items()}
        self.carry = Carry(**carry)
        try:
            self.env.set_state({name: value[mine] for name, value in state["environments"].items()})  # type: ignore[attr-defined]
        except Exception as error:  # environments are foreign code, and their states may be, too
            told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UserError(f"the environments cannot go on from their saved states: {told}", exit_code=1) from error
        self.restarts_told = sum(getattr(self.env, "restarts", ()))  # those before the checkpoint

    def _keep_totals(self, saved_num_envs: int) -> None:
        """Share out the environments and the batch that the saved run had, if weak scaling made them others."""
        sizes = share_out(self.job.train, self.world.rank, self.world.size, saved_num_envs)
        if sizes != self.sizes:
            self.env.close()
            self.sizes = sizes
            self.env = self.job.make_env(sizes.num_envs, sizes.first_env)


def last_checkpoint(run_dir: Path) -> str:
    """Where a run that stopped can go on, in words."""
    newest = latest_checkpoint(run_dir)
    return f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"


def train(training: Training, writer: MetricsWriter | NullWriter, stop: StopFlag) -> int:
    """Train until the budget ends or a stop is agreed; always leaves a checkpoint.

    Returns:
        The signal number that ended the run, or 0.
    """
    job, world, sizes = training.job, training.world, training.sizes
    if training.iteration == 0:
        training.warm_up_normalizers()
    best = Best(job.train.best_metrics, job.run_dir / CHECKPOINT_DIR, world)
    signal, stragglers = 0, Stragglers()
    while training.progress < 1.0 and not signal:
        world.sync_seconds = world.gradient_seconds = 0.0
        started = time.perf_counter()
        training.iteration += 1
        rate = training.ppo.set_learning_rate(
            training.iteration, 1.0 - training.progress, sizes.learning_rate_factor
        )
        training.profiler.begin(training.iteration)
        rollout = training.collect(lifetime_step=training.iteration * job.train.num_steps)
        collected = time.perf_counter()
        losses = training.update(rollout)
        updated = time.perf_counter()
        timing = {"time/collect_s": collected - started, "time/update_s": updated - collected}
        waited_s = world.sync_seconds + world.gradient_seconds  # in the update: collect waits for nobody
        timing |= {"time/update_own_s": updated - collected - waited_s} | training.ppo.clock.read()
        timing["time/idle_share"] = waited_s / (updated - started)
        metrics = episode_metrics(rollout, timing, training.env_restarts, training.monitor.take(), world)
        training.restarts_told += training.env_restarts
        tell_stragglers(stragglers, metrics)
        training.global_step += sizes.global_num_envs * job.train.num_steps
        training.episodes += metrics["episode/count"]
        signal = agree_max(stop.signum, world)
        elapsed = time.perf_counter() - started
        training.profiler.end(writer.say)
        counters = {"iteration": training.iteration, "global_step": training.global_step}
        metrics = counters | metrics | losses | {
            "episode/total": training.episodes,
            "optim/learning_rate": rate,
            "time/sync_s": world.sync_seconds,
            "time/sps": sizes.global_num_envs * job.train.num_steps / elapsed,
        }
        world.enter("validation and checkpoint")
        finished, every = training.progress >= 1.0, job.train.validate_every
        if job.validate and every and (finished or training.iteration % every == 0):
            metrics |= job.validate(training.policy, training.obs_normalizer)
        check_best_metric(job, metrics)
        improved = best.look(metrics)
        writer.write(metrics, done=training.global_step if job.train.total_steps else training.episodes)
        last = bool(signal) or finished
        if last or improved or training.iteration % job.train.checkpoint_every == 0:
            writer.flush()
            save(training, best, last)
        elif job.train.sync_check_every and training.iteration % job.train.sync_check_every == 0:
            check_in_sync(training.replicated(), world)
    training.profiler.close(writer.say)
    if job.train.keep_best not in ("auto", "off") and best.value is None and not signal and world.main:
        logger.warning("keep_best %s never had a value in this run: there is no best.pt", job.train.keep_best)
    return signal or agree_max(stop.signum, world)  # it may have come while the last iteration was saved


def check_best_metric(job: Job, metrics: dict[str, Any]) -> None:
    """Refuse a `keep_best` that this run does not report, once it is certain.

    Raises:
        UserError: names the metrics there are.
    """
    name = job.train.keep_best
    if name in ("auto", "off") or name in metrics:
        return
    known = [key for key in metrics if key != "ranks"]
    to_come = name.startswith("valid/") and job.validate and not any(key.startswith("valid/") for key in known)
    if not to_come:
        raise UserError(f"keep_best {name} is no metric of this run: name one of {', '.join(sorted(known))}")


def save(training: Training, best: Best, last: bool) -> None:
    """Gather the state of all ranks; the main process writes one checkpoint.

    Raises:
        DesyncError: the ranks differ, so no checkpoint could stand for the run.
        UserError: on all ranks: it cannot be written and training stops, or nothing follows that could go on.
    """
    train, world, run_dir = training.job.train, training.world, training.job.run_dir
    check_in_sync(training.replicated(), world)
    state, problem = training.state(), ""
    if state is not None:
        state[MEASURED] = best.measured
        directory, keep = run_dir / CHECKPOINT_DIR, train.keep_checkpoints
        try:
            save_checkpoint(directory, state, iteration=training.iteration, keep=keep, best=best.improved)
        except CheckpointError as error:
            kept = latest_checkpoint(run_dir)
            fate = f"{kept.name} stays valid, --resume {run_dir} goes on from it" if kept else "there is no earlier one"
            problem = f"{error}; {fate}"
    problem = gather_json(problem, world)[0]  # of the main process; all ranks act on it together
    if not problem:
        best.saved()
    elif last or train.on_save_error == "stop":
        raise UserError(problem, exit_code=1)
    elif world.main:
        logger.warning("%s; training goes on without (--on_save_error continue)", problem)


def tell_stragglers(stragglers: Stragglers, metrics: dict[str, Any]) -> None:
    """Warn of ranks that keep the others waiting."""
    keys = {"collect": "time/collect_s", "update": "time/update_own_s"}
    phases = {phase: [rank[key] for rank in metrics["ranks"]] for phase, key in keys.items()}
    for line in stragglers.observe(phases):
        logger.warning(line)
