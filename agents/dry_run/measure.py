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

from agents.dry_run.memory import MemoryNeed, Shapes, compute_memory, count_parameters, dry_run, largest_sizes, probe
from agents.run.config import RunConfig
from agents.sizes import Sizes, TrainConfig, share_out
from agents.trainer import Job, MakeEnv
from rl_dist.errors import UserError
from rl_dist.hardware.out_of_memory import clear_gpu_memory
from rl_dist.hardware.report import Facts
from rl_dist.launch.all_reduce_bench import BenchFailed, Measured, measure_all_reduce
from rl_dist.launch.gpu_ids import parse_gpu_ids
from rl_dist.launch.short_run import SideBySide
from rl_dist.parallel.config import StrategyConfig
from rl_dist.process_group.world import close_world, open_world, threads_per_rank
from rl_dist.setup_check.measured import MemoryFigures, TimeFigures
from rl_dist.speedup.job_of_run import flags_of
from rl_dist.speedup.rank_cost import steps_per_episode

KIB, MIB, GIB = 2**10, 2**20, 2**30
BENCH_SIZES = (KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
FEW_SIZES = (KIB, MIB)  # where it only matters that ranks can reduce
GPU_RESERVE = GIB  # CUDA context, cuDNN and NCCL buffers of a process, not measured
MOST_OF_MEMORY = 0.9  # of what is free now
LONG_WORK = 4e10  # steps of one rank's rollout times bytes of parameters: no dry run beyond, without --full
QUICK_WORK = 1e9  # the same: a dry run is done up to here even where memory is ample
TRIAL_S, FULL_TRIAL_S = 60.0, 600.0


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
    def gpu_ids(self) -> tuple[int, ...]:
        """GPUs that are asked for; none: the first ones."""
        return parse_gpu_ids(self.config.launch.gpu_ids)

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


def gradient_bytes(config: RunConfig, env: VectorEnv) -> int:
    """Bytes of the gradient of a policy for this environment."""
    space = env.single_action_space
    num_obs = math.prod(env.single_observation_space.shape or ())
    discrete = isinstance(space, spaces.Discrete)
    num_actions = int(space.n) if isinstance(space, spaces.Discrete) else math.prod(space.shape or ())
    return count_parameters(config.policy, num_obs, num_actions, discrete) * config.launch.dtype.itemsize


def over_backend(question: Question, backend: str) -> bool:
    """Whether several ranks of this training will reduce over a backend."""
    return question.num_ranks > 1 and (backend == "nccl") == (question.device_type == "cuda")


def reduce_over(question: Question, backend: str, meanwhile: Callable[[], None]) -> tuple[Measured | None, str]:
    """Let ranks reduce over a backend, or say why they could not.

    `meanwhile` runs while they start. What the training does not need is only tried, not timed at length.
    """
    device_type = "cuda" if backend == "nccl" else "cpu"
    ranks = question.num_ranks if device_type == question.device_type else 2
    ranks = ranks if device_type == "cuda" else max(2, ranks)
    needed = over_backend(question, backend) or question.full
    sizes = sorted({*(BENCH_SIZES if needed else FEW_SIZES), question.gradient_bytes})
    repeats = 50 if question.full else 10
    more: dict[str, Any] = {"gradient_bytes": question.gradient_bytes, "meanwhile": meanwhile}
    if device_type == "cuda":
        more["gpu_ids"] = question.gpu_ids
    try:
        return measure_all_reduce(ranks, sizes, device_type, repeats, **more), ""
    except (BenchFailed, UserError) as error:
        return None, str(error)


def memory_limit(question: Question, facts: Facts) -> tuple[int, int]:
    """Bytes that one rank may use, and what its process takes before any tensor."""
    if question.device_type == "cuda":
        taken = question.gpu_ids or range(question.num_ranks)
        free = [gpu.memory_free_bytes or 0 for gpu in facts.gpu.usable if gpu.torch_index in taken]
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
        world = open_world(question.device_type, gpu_ids=question.gpu_ids)
        try:
            peak = dry_run(job, world).peak
        finally:
            close_world(world)
    except (RuntimeError, MemoryError) as error:  # out of memory, or the backend does not start
        return dataclasses.replace(figures, not_measured="", failure=" ".join(str(error).split())[:300])
    return dataclasses.replace(figures, measured_peak=peak, not_measured="")


class Trying:
    """Memory of a training, computed and tried out, once."""

    def __init__(self, question: Question, make_env: MakeEnv, facts: Facts) -> None:
        self._parts = question, make_env, facts
        self._found: tuple[Shapes, MemoryFigures] | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Try it, unless that has been done; errors wait for `result`."""
        if self._found or self._error:
            return
        question, make_env, facts = self._parts
        try:
            shapes = probe(make_env)
            memory = measure_memory(question, make_env, look_at_memory(question, shapes, facts))
            self._found = shapes, add_largest(question, shapes, memory)
            clear_gpu_memory()  # ranks and short runs need it
        except Exception as error:
            self._error = error

    @property
    def fits(self) -> bool:
        """Whether it was tried, and there is enough memory."""
        return self._found is not None and self._found[1].needed <= self._found[1].limit

    def result(self) -> tuple[Shapes, MemoryFigures]:
        """What was found.

        Raises:
            Exception: whatever trying it raised.
        """
        self.run()
        if self._error:
            raise self._error
        assert self._found
        return self._found


def short_runs(question: Question) -> SideBySide:
    """All ranks' shares side by side, to be entered and then measured."""
    # Each copy is one rank, with nobody to share with.
    launch = question.config.launch.by_default()
    share = dataclasses.replace(question.config, train=share_config(question), launch=launch)
    ranks = question.num_ranks
    return SideBySide(flags_of(share.to_dict()), ranks, threads_per_rank(ranks), device_type=question.device_type)


def measure_time(question: Question, running: SideBySide, reductions: Measured | None, shapes: Shapes) -> TimeFigures:
    """The pace of what `short_runs` started, from a few iterations.

    Raises:
        TrialFailed: it failed or took too long.
    """
    config, sizes = question.config, question.sizes
    timeout_s = FULL_TRIAL_S if question.full else TRIAL_S
    if question.full:
        running.measure(1, timeout_s)  # to warm up
    copies = running.measure(5 if question.full else 1, timeout_s)
    per_rank = sizes.num_envs * config.train.num_steps
    own = [statistics.median(per_rank / record["time/sps"] for record in copy) for copy in copies]
    collect = [statistics.median(record["time/collect_s"] for record in copy) for copy in copies]
    slowest = max(range(len(own)), key=own.__getitem__)
    records = [record for copy in copies for record in copy]
    seen = steps_per_episode(records)
    tried = statistics.mean(shapes.episode_lengths) if shapes.episode_lengths else None
    by_steps = config.train.total_steps
    return TimeFigures(
        own_s=own[slowest],
        collect_s=collect[slowest],
        reduction_s=question.gradient_steps * reductions.ddp.reduction_s if reductions and reductions.ddp else 0.0,
        steps_per_iteration=sizes.global_num_envs * config.train.num_steps,
        steps_per_episode=tried if math.isnan(seen) else seen,
        budget=by_steps or config.train.num_episodes,
        unit="steps" if by_steps else "episodes",
        iterations_measured=min(len(copy) for copy in copies),
    )
