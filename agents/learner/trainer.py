"""The training loop, and the training state that checkpoints save."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from agents.learner.advantages import make_batch
from agents.learner.callbacks import UserCallbacks
from agents.learner.network.inputs import Normalizers
from agents.learner.network.noise import action_noise, sequence_orders
from agents.learner.network.seeds import (
    ENVIRONMENT_STREAM,
    POLICY_STREAM,
    stream_seed,
    stream_seeds,
)
from agents.learner.pipeline import PipelinePPO, StageStrategy
from agents.learner.policy import Policy
from agents.learner.ppo import PPO
from agents.learner.recorder import Recorder
from agents.learner.rollout import Carry, Rollout, collect, fresh_carry
from agents.learner.settings import LearnerRun
from agents.learner.sizes import shard_sizes
from envs.vector.layout import TorchEnv
from rl_dist.checkpoint.content import tensors_in
from rl_dist.checkpoint.store import CHECKPOINT_DIR, Best, save_agreed
from rl_dist.errors import UserError, one_line
from rl_dist.process_group.collectives import (
    all_reduce_max,
    all_reduce_sum,
    check_in_sync,
    gather_dicts,
)
from rl_dist.process_group.world import StopFlag, World
from rl_dist.run_dir import SavedCheckpoint
from rl_dist.strategies.adam import keep_options
from rl_dist.strategies.strategy import Strategy
from rl_dist.telemetry.metrics import NullWriter
from rl_dist.telemetry.monitor import Monitor, sources_of
from rl_dist.telemetry.profiler import NullProfiler, Profiler
from rl_dist.telemetry.progress import RecentMeans

logger = logging.getLogger(__name__)
COUNTERS = ("iteration", "global_step", "episodes")  # attributes of Training, saved in checkpoints
MakeEnv = Callable[[int, int], TorchEnv]  # arguments: num_envs, env_offset
Validate = Callable[["Training"], dict[str, float]]  # every rank must call this


class InitialWeights(NamedTuple):
    """Weights and normaliser statistics with which a new run starts."""

    weights: dict[str, Tensor]  # by name in the policy's state_dict
    moments: dict[str, Tensor]  # by name in the state_dict of `Normalizers`
    # prefixes of the names in `weights`; the policy's other weights keep their random values
    parts: tuple[str, ...] = ("",)


class Training:
    """Training state of one rank: policy, optimizer, environments and counters."""

    def __init__(
        self,
        run: LearnerRun,
        make_env: MakeEnv,
        world: World,
        *,
        initial: InitialWeights | None = None,
        saved_num_envs: int = 0,
    ) -> None:
        """Create the state; `saved_num_envs` is from the checkpoint of a resumed run."""
        config = run.config
        train = config.train
        self.run = run
        self.world = world
        self.initial = initial
        self.sizes = shard_sizes(train, world.rank, world.size, saved_num_envs)

        # environments
        self.env = make_env(self.sizes.num_envs, self.sizes.env_offset)
        self.action_space = self.env.single_action_space
        layout = self.env.layout

        # policy and normalisers, identical on every rank
        torch.manual_seed(stream_seed(train.seed, POLICY_STREAM))
        self.policy = Policy(config.policy, layout, self.action_space)
        self.policy.to(world.device, config.launch.dtype)
        if initial:
            self.policy.load_state_dict(initial.weights, strict=False)
        self.normalizers = Normalizers(
            layout, scale_obs=train.normalize_obs, scale_rewards=train.normalize_rewards
        ).to(world.device)
        pipelined = run.strategy.pipelined
        strategy_class = StageStrategy if pipelined else Strategy
        ppo_class = PipelinePPO if pipelined else PPO
        self.ppo = ppo_class(
            self.policy,
            config.ppo,
            strategy_class(run.strategy, world),
            train.grad_accumulation,
            self.sizes.learning_rate_factor,
        )

        # recorder, profiler, counters and monitor
        self.recorder = Recorder(world, self.ppo.clock)
        self.profiler = Profiler(run.directory.path, world) if train.profile else NullProfiler()
        self.iteration = 0
        self.global_step = 0
        self.episodes = 0
        # for all validations so far: number of environment steps, and length of the longest episode
        self.validated = {"steps": 0, "longest": 0}
        self.carry = self._reset()
        self.env.snapshot()  # refuses at the start what no checkpoint can hold
        self.monitor = Monitor(sources_of(world.device), train.monitor_every)

    def _reset(self, resumed_at: int = 0) -> Carry:
        """Reset all environments; for a resumed run, `resumed_at` selects new episodes."""
        seeds = stream_seeds(
            self.run.config.train.seed,
            ENVIRONMENT_STREAM,
            self.sizes.env_offset,
            self.sizes.num_envs,
            resumed_at,
        )
        return fresh_carry(self.policy, self.env.reset(seed=seeds)[0])

    @property
    def counters(self) -> dict[str, int]:
        """Return the values of COUNTERS."""
        return {name: getattr(self, name) for name in COUNTERS}

    @property
    def done(self) -> int:
        """Number of environment steps or episodes so far, in the unit of the budget."""
        return self.global_step if self.run.config.train.total_steps else self.episodes

    @property
    def progress(self) -> float:
        """Completed fraction of the run, 0 to 1."""
        return min(self.done / self.run.config.train.budget[0], 1.0)

    def warm_up_normalizers(self) -> None:
        """Initialise the normalisers from one rollout, then reset all environments."""
        if not (self.run.config.train.normalize_obs or self.run.config.train.normalize_rewards):
            return
        rollout = self.collect()
        # The first pass computes the mean; the second pass sums deviations from the mean. A single
        # pass would lose precision if the mean is large, and its rounding errors would depend on
        # the number of ranks.
        for _ in range(2):
            self.normalizers.restart()
            sums = self.normalizers.sums(rollout.raw_obs, rollout.discounted_returns)
            self.normalizers.merge(all_reduce_sum(sums, self.world))
        if self.initial:
            self.normalizers.load_state_dict(self.initial.moments, strict=False)
        self.carry = self._reset()
        self.env.take_metrics()  # discard the metrics of the warm-up rollout

    def begin_iteration(self) -> None:
        """Start the next iteration and set its learning rate."""
        self.iteration += 1
        self.profiler.begin(self.iteration)
        self.ppo.set_learning_rate(self.iteration, 1.0 - self.progress)

    def collect(self) -> Rollout:
        """Collect num_steps steps of every environment."""
        self.world.set_phase("collect")
        train = self.run.config.train
        noise = action_noise(  # [T, B, A]
            self.action_space,
            train.seed,
            self.sizes.env_offset,
            self.sizes.num_envs,
            self.iteration * train.num_steps,  # first step; the warm-up is iteration 0
            train.num_steps,
            self.world.device,
            self.run.config.policy.noise_color,
        )
        rollout, self.carry = collect(
            self.policy,
            self.normalizers.obs,
            self.env,
            self.carry,
            noise.to(self.run.config.launch.dtype),
            train.bptt_steps,
            self.run.config.ppo.gamma,
            on_step=self.world.heartbeat,
        )
        self.env.check()
        return rollout

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Train on a rollout, then merge its statistics into the normalisers."""
        self.world.set_phase("update")
        config = self.run.config
        order = sequence_orders(
            (config.train.seed, self.iteration),
            config.ppo.update_epochs,
            self.sizes.env_offset,
            self.sizes.num_envs,
            self.sizes.sequences_per_env,
            self.sizes.num_minibatches,
        )
        batch = make_batch(
            rollout, config.train.bptt_steps, self.normalizers, self.world, config.ppo
        )
        losses = self.ppo.update(batch, order, self.iteration)
        self.normalizers.merge(batch.sums)
        return losses

    def end_iteration(self, num_episodes: int) -> dict[str, int]:
        """Add the steps and episodes of all ranks to the counters; return the counters."""
        self.global_step += self.sizes.global_num_envs * self.run.config.train.num_steps
        self.episodes += num_episodes
        return {
            "iteration": self.iteration,
            "global_step": self.global_step,
            "episode/total": self.episodes,
        }

    def checked_state(self) -> dict:
        """Return the state that all ranks share; raise an error if it differs between ranks.

        Every rank must call this.
        """
        strategy = self.ppo.strategy
        state = {
            **self.counters,
            "validated": self.validated,
            "policy": strategy.module_state(),
            "optimizer": strategy.optimizer_state(self.ppo.optimizer),
            "bad_in_a_row": self.ppo.bad_in_a_row,
            "peak_learning_rate": self.ppo.peak_learning_rate,
            "strategy": strategy.state_dict(),
            "normalizers": self.normalizers.state_dict(),
        }
        check_in_sync(tensors_in(state), self.world)
        return state

    def state(self) -> dict | None:
        """Return the complete state on rank 0, None on others; every rank must call this."""
        shared = self.checked_state()
        carry = gather_dicts(vars(self.carry), self.world)
        environments = gather_dicts(self.env.snapshot(), self.world) or None
        if not self.world.is_main_process:
            return None
        return {
            **shared,
            **self.policy.shapes(),
            "config": json.dumps(self.run.config.to_dict()),
            "spaces": self.env.spaces_json,
            "carry": carry,
            "environments": environments,
        }

    def restore(self, state: dict) -> None:
        """Load the state of a checkpoint, which any number of ranks may have saved."""
        # load the state that all ranks share
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.validated |= state.get("validated", {})
        optimizer = keep_options(self.ppo.optimizer, state["optimizer"])
        self.ppo.strategy.load(state["policy"], self.ppo.optimizer, optimizer)
        self.ppo.strategy.load_state_dict(state["strategy"])
        self.ppo.bad_in_a_row = state["bad_in_a_row"]
        self.ppo.peak_learning_rate = state.get("peak_learning_rate", self.ppo.peak_learning_rate)
        self.normalizers.load_state_dict(state["normalizers"])

        # continue the episodes of this rank's environments; without snapshots, start new ones
        if state["environments"] is None or not self.env.can_snapshot:
            self.carry = self._reset(resumed_at=self.iteration)
            return
        first = self.sizes.env_offset
        rows = slice(first, first + self.sizes.num_envs)
        carry = state["carry"].items()
        self.carry = Carry(**{name: value[rows].to(self.world.device) for name, value in carry})
        try:
            self.env.set_state({name: value[rows] for name, value in state["environments"].items()})
        except (AttributeError, LookupError, TypeError) as error:
            raise UserError(
                f"the checkpoint is damaged: cannot restore environments: {one_line(error)}"
            ) from error
        # restarts before the checkpoint are already in earlier records
        self.recorder.restarts_seen = sum(self.env.restarts)


def train(
    training: Training,
    writer: NullWriter,
    stop: StopFlag,
    callbacks: UserCallbacks,
    validate: Validate | None = None,
    scored_by: str = "",
) -> int:
    """Train until the budget is used up or the run must stop early; then save.

    Args:
        validate: function that computes metrics named valid/...; every rank calls this function.
        scored_by: metric that chooses best.pt if --keep_best is auto.

    Returns the number of the signal that ended the run, or 0.
    """
    world = training.world
    recorder = training.recorder
    config = training.run.config.train
    if training.iteration == 0:
        writer.update_state(phase="warm_up")
        training.warm_up_normalizers()
    best = Best(config.best_metrics(scored_by), training.run.directory.checkpoints, world)
    recent = RecentMeans(training.run.directory.records() if world.is_main_process else ())
    signum = 0  # number of a stop signal that a rank has received; 0: none
    reason = ""  # why a callback or --stop_at stops the run; "": neither does
    while training.progress < 1.0 and not signum and not reason:
        # collect a rollout and learn from it
        recorder.begin()
        training.begin_iteration()
        with recorder.part("collect"):
            rollout = training.collect()
        with recorder.part("update"):
            losses = training.update(rollout)

        # gather the metrics of all ranks
        metrics = recorder.gather(rollout, training.env, training.monitor, stop.signum)
        signum = metrics.pop("signum")
        del rollout  # frees its memory before the next one is collected
        # the three dicts have no key in common
        metrics = training.end_iteration(metrics["episode/count"]) | metrics | losses
        training.profiler.end(writer.say)
        finished = training.progress >= 1.0

        # validate, and write metrics
        world.set_phase("validation")
        if validate and is_due(training, config.validation_interval, finished):
            writer.update_state(phase="validation")
            metrics |= validate(training)
        decisive = recent.decisive(metrics)  # a mean of few episodes decides nothing
        improved = best.update(decisive)
        world.set_phase("loggers")
        writer.write(metrics, done=training.done)

        # stop early, and save
        reason = callbacks.on_iteration(metrics, decisive)
        last = bool(signum or reason) or finished
        is_first = training.iteration == 1
        if improved or is_due(training, config.checkpoint_every, last or is_first):
            path = save(training, best, last, writer)
            if path:
                callbacks.on_checkpoint(metrics, path)
        elif is_due(training, config.sync_check_every):
            training.checked_state()
    if reason:
        writer.say(f"stopped at iteration {training.iteration}: {reason}")
    # A signal that arrives from here on causes no save, so no notice of a save may be printed.
    stop.notice = ""
    # a signal may have arrived during the last save
    return signum or all_reduce_max(stop.signum, world)


def is_due(training: Training, every: int, now: bool = False) -> bool:
    """Return True if `now`, or in every `every`-th iteration; never if `every` is 0."""
    return every > 0 and (now or training.iteration % every == 0)


def save(training: Training, best: Best, last: bool, writer: NullWriter) -> Path | None:
    """Gather the state of all ranks and write a checkpoint on rank 0.

    Returns the path, or None if the write failed and training continues without this checkpoint.
    """
    train = training.run.config.train
    world = training.world
    world.set_phase("checkpoint")
    writer.flush()  # metrics.jsonl must include all iterations up to the checkpoint
    writer.update_state(phase="saving")
    state = training.state()
    try:
        path = save_agreed(
            training.run.directory.path,
            state,
            world,
            iteration=training.iteration,
            keep=train.keep_checkpoints,
            measured=best.measured,
            best=best.improved,
        )
    except UserError as error:
        if last or train.on_save_error == "stop":
            raise
        if world.is_main_process:
            logger.warning(
                "%s; training continues without this checkpoint (--on_save_error continue)", error
            )
        return None
    best.saved()
    saved = SavedCheckpoint(path=f"{CHECKPOINT_DIR}/{path.name}", iteration=training.iteration)
    writer.update_state(phase="training", checkpoint=saved)
    return path
