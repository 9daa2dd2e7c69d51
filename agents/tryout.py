"""Tries a training before it is begun: memory, time, reductions."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymnasium import spaces
from gymnasium.vector import VectorEnv

from agents.memory import MemoryNeed, Shapes, compute_memory, count_parameters, dry_run, largest_sizes
from agents.run import SECTIONS, RunConfig
from agents.sizes import Sizes, TrainConfig, share_out
from agents.trainer import Job, MakeEnv
from rl_dist.all_reduce_bench import BenchFailed, Measured, measure_all_reduce
from rl_dist.calibration import steps_per_episode
from rl_dist.hardware import Facts
from rl_dist.launch import UserError
from rl_dist.measured_checks import MemoryFigures, TimeFigures
from rl_dist.strategy import StrategyConfig
from rl_dist.trial import run_trial
from rl_dist.world import close_world, open_world, threads_per_rank

KIB, MIB, GIB = 2**10, 2**20, 2**30
BENCH_SIZES = (KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
GPU_RESERVE = GIB  # CUDA context, cuDNN and NCCL buffers of a process, not measured
MOST_OF_MEMORY = 0.9  # of what is free now
LONG_WORK = 4e10  # steps of one rank's rollout times bytes of parameters: no dry run beyond, without --full
QUICK_WORK = 1e9  # the same: a dry run is done up to here even where memory is ample
TRIAL_S, FULL_TRIAL_S = 60.0, 600.0
OTHER_DEFAULTS = ("train", "ppo")  # sections whose defaults a task may replace by its own


@dataclass(frozen=True)
class Question:
    """The training that is asked about."""

    config: RunConfig
    num_ranks: int
    device_type: str
    sizes: Sizes  # of the first rank
    gradient_bytes: int  # what every gradient step reduces: as much as there are parameters
    full: bool  # measure longer

    @property
    def gradient_steps(self) -> int:
        """Reductions of an iteration."""
        return self.config.ppo.update_epochs * self.sizes.num_minibatches


def share_config(question: Question) -> TrainConfig:
    """The sizes of one rank, as a training of its own."""
    sizes = question.sizes
    return dataclasses.replace(
        question.config.train,
        num_envs=sizes.num_envs,
        batch_size=sizes.batch_size,
        scaling="strong",
        lr_scaling="none",
    )


def flags_of(config: RunConfig) -> list[str]:
    """Flags that configure a copy alike: all but shared defaults."""
    words = []
    for name, section in SECTIONS.items():
        for item in dataclasses.fields(section):
            value = getattr(getattr(config, name), item.name)
            if value == item.default and name not in OTHER_DEFAULTS:
                continue
            on_off = f"--{'' if value else 'no-'}{item.name}"
            words.append(on_off if isinstance(value, bool) else f"--{item.name}={value}")
    return words


def gradient_bytes(config: RunConfig, env: VectorEnv) -> int:
    """Bytes of the gradient of a policy for this environment."""
    space = env.single_action_space
    num_obs = math.prod(env.single_observation_space.shape or ())
    discrete = isinstance(space, spaces.Discrete)
    num_actions = int(space.n) if isinstance(space, spaces.Discrete) else math.prod(space.shape or ())
    return count_parameters(config.policy, num_obs, num_actions, discrete) * config.launch.dtype.itemsize


def reduce_over(question: Question, backend: str, meanwhile: Callable[[], None]) -> tuple[Measured | None, str]:
    """Let ranks reduce over a backend, or say why they could not.

    `meanwhile` runs while they start.
    """
    device_type = "cuda" if backend == "nccl" else "cpu"
    ranks = question.num_ranks if device_type == question.device_type else 2
    ranks = ranks if device_type == "cuda" else max(2, ranks)
    sizes = sorted({*BENCH_SIZES, question.gradient_bytes})
    repeats = 50 if question.full else 10
    more: dict[str, Any] = {"gradient_bytes": question.gradient_bytes, "meanwhile": meanwhile}
    try:
        return measure_all_reduce(ranks, sizes, device_type, repeats, **more), ""
    except (BenchFailed, UserError) as error:
        return None, str(error)


def memory_limit(question: Question, facts: Facts) -> tuple[int, int]:
    """Bytes that one rank may use, and what its process takes before any tensor."""
    if question.device_type == "cuda":
        free = [gpu.memory_free_bytes or 0 for gpu in facts.gpu.usable[: question.num_ranks]]
        return int(MOST_OF_MEMORY * min(free)), GPU_RESERVE
    return int(MOST_OF_MEMORY * facts.host.memory_available_bytes / question.num_ranks), facts.host.process_bytes


def compute(question: Question, shapes: Shapes, train: TrainConfig) -> MemoryNeed:
    """The memory that one rank needs in a training of other sizes."""
    return compute_memory(
        question.config.policy,
        train,
        share_out(train, 0, question.num_ranks),
        shapes,
        itemsize=question.config.launch.dtype.itemsize,
        device_type=question.device_type,
    )


def look_at_memory(question: Question, shapes: Shapes, facts: Facts) -> MemoryFigures:
    """What is needed, computed, and what is there."""
    limit, process = memory_limit(question, facts)
    need = compute(question, shapes, question.config.train)
    kinds = ("parameters", "gradients", "optimizer", "environment", "rollout", "activations")
    return MemoryFigures(
        computed={kind: getattr(need, kind) for kind in kinds},
        moment=need.moment,
        measured_peak=None,
        not_measured="it does not fit",
        process=process,
        limit=limit,
        num_ranks=question.num_ranks,
        largest_num_envs=0,
        largest_batch_size=0,
    )


def add_largest(question: Question, shapes: Shapes, figures: MemoryFigures) -> MemoryFigures:
    """Add the largest sizes that fit, scaled to what a dry run took."""
    factor = max(1.0, (figures.measured_peak or 0) / sum(figures.computed.values()))
    num_envs, batch_size = largest_sizes(
        question.config.train,
        question.num_ranks,
        lambda other: int(factor * compute(question, shapes, other).peak),
        figures.limit - figures.process,
    )
    return dataclasses.replace(figures, largest_num_envs=num_envs, largest_batch_size=batch_size)


def measure_memory(question: Question, make_env: MakeEnv, figures: MemoryFigures) -> MemoryFigures:
    """Add a dry run of one rank's share, unless it would not fit or take long."""
    if figures.needed > figures.limit:
        return figures
    work = question.sizes.num_envs * question.config.train.num_steps * question.gradient_bytes
    if not question.full and work > LONG_WORK:
        return dataclasses.replace(figures, not_measured="a dry run would take long, --full does it")
    ample = question.device_type == "cpu" and figures.needed < figures.limit / 4
    if not question.full and ample and work > QUICK_WORK:
        share = f"{figures.needed / figures.limit:.0%}"
        return dataclasses.replace(figures, not_measured=f"it needs {share} of what is free, --full does a dry run")
    config = question.config
    job = Job(
        train=share_config(question),
        policy=config.policy,
        ppo=config.ppo,
        make_env=make_env,
        run_dir=Path(),  # the dry run has its own
        dtype=config.launch.dtype,
        strategy=StrategyConfig(precision=config.launch.precision),
        speed=config.speed,
    )
    try:
        world = open_world(question.device_type)
        try:
            peak = dry_run(job, world).peak
        finally:
            close_world(world)
    except (RuntimeError, MemoryError) as error:  # out of memory, or the backend does not start
        return dataclasses.replace(figures, not_measured="", failure=" ".join(str(error).split())[:300])
    return dataclasses.replace(figures, measured_peak=peak, not_measured="")


def measure_time(question: Question, reductions: Measured | None, shapes: Shapes) -> TimeFigures:
    """Train one rank's share for a few iterations, all ranks' shares side by side.

    Raises:
        TrialFailed: it failed or took too long.
    """
    config, sizes = question.config, question.sizes
    share = dataclasses.replace(config, train=share_config(question))
    trial = run_trial(
        flags_of(share),
        question.num_ranks,
        threads_per_rank(question.num_ranks),
        5 if question.full else 1,
        warm_up=2 if question.full else 0,
        device_type=question.device_type,
        timeout_s=FULL_TRIAL_S if question.full else TRIAL_S,
    )
    per_rank = sizes.num_envs * config.train.num_steps
    own = [statistics.median(per_rank / record["time/sps"] for record in copy) for copy in trial.records]
    collect = [statistics.median(record["time/collect_s"] for record in copy) for copy in trial.records]
    slowest = max(range(len(own)), key=own.__getitem__)
    records = [record for copy in trial.records for record in copy]
    seen = steps_per_episode(records)
    tried = statistics.mean(shapes.episode_lengths) if shapes.episode_lengths else None
    by_steps = config.train.total_steps
    return TimeFigures(
        iteration_s=own[slowest],
        collect_s=collect[slowest],
        reduction_s=question.gradient_steps * reductions.ddp.reduction_s if reductions and reductions.ddp else 0.0,
        steps_per_iteration=sizes.global_num_envs * config.train.num_steps,
        steps_per_episode=tried if math.isnan(seen) else seen,
        budget=by_steps or config.train.num_episodes,
        unit="steps" if by_steps else "episodes",
        iterations_measured=min(len(copy) for copy in trial.records),
    )
