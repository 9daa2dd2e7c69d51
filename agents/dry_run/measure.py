"""What a training needs, measured before it begins: memory, time, reductions."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from agents.run.config import RunConfig
from agents.run.memory import (
    MemoryNeed,
    Shapes,
    compute_memory,
    count_parameters,
    dry_run,
    largest_sizes,
    observe_shapes,
)
from agents.sizes import Sizes, TrainConfig, shard_sizes
from agents.trainer import MakeEnv
from envs.vector.layout import TorchEnv
from rl_dist.errors import UserError, one_line
from rl_dist.hardware.memory import clear_gpu_memory
from rl_dist.hardware.report import Facts
from rl_dist.launch.bench import BenchError, Reductions, time_reductions
from rl_dist.launch.config import parse_gpu_ids
from rl_dist.launch.short_run import SideBySide, round_rates
from rl_dist.process_group.world import close_world, open_world, threads_per_rank
from rl_dist.setup_check.measured import MemoryFigures, TimeFigures
from rl_dist.speedup.job_of_run import flags_of
from rl_dist.speedup.rank_cost import steps_per_episode
from rl_dist.strategies.config import StrategyConfig

KIB, MIB, GIB = 2**10, 2**20, 2**30
BENCH_SIZES = (KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
FEW_SIZES = (KIB, MIB)  # where it only matters that ranks can reduce
GPU_RESERVE = GIB  # CUDA context, cuDNN and NCCL buffers of a process, not measured
MOST_OF_MEMORY = 0.9  # of what is free now
# steps of one rank's rollout times bytes of parameters: no dry run beyond
LONG_WORK = 4e10
QUICK_WORK = 1e9  # the same: a dry run is done up to here even where memory is ample
SHORT_RUN_S = 120.0
ENOUGH_S = 12.0  # of short runs, after which two iterations are enough


@dataclass(frozen=True)
class PlannedTraining:
    """The training that is asked about."""

    config: RunConfig
    num_ranks: int
    device_type: str
    sizes: Sizes  # of the first rank
    gradient_bytes: int  # reduced by every gradient step: as much as there are parameters

    @property
    def as_asked(self) -> bool:
        """Return whether as many ranks and the device that were asked for are here."""
        launch = self.config.launch
        return launch.device in ("auto", self.device_type) and launch.num_gpus <= self.num_ranks

    @property
    def gpu_ids(self) -> tuple[int, ...]:
        """Return the GPUs that are asked for; none: the first ones."""
        return parse_gpu_ids(self.config.launch.gpu_ids)

    @property
    def share(self) -> TrainConfig:
        """Return the sizes of one rank, as a training of its own."""
        own = {"num_envs": self.sizes.num_envs, "batch_size": self.sizes.batch_size}
        alone = {"scaling": "strong", "lr_scaling": "none"}
        return dataclasses.replace(self.config.train, **own | alone)  # type: ignore[arg-type]

    def reduces_over(self, backend: str) -> bool:
        """Return whether several ranks will reduce over a backend."""
        return self.num_ranks > 1 and (backend == "nccl") == (self.device_type == "cuda")

    def compute(self, shapes: Shapes, train: TrainConfig) -> MemoryNeed:
        """Compute the memory that one rank needs in a training of other sizes."""
        return compute_memory(
            self.config.policy,
            train,
            shard_sizes(train, 0, self.num_ranks),
            shapes,
            itemsize=self.config.launch.dtype.itemsize,
            device_type=self.device_type,
        )


def gradient_bytes(config: RunConfig, env: TorchEnv) -> int:
    """Return the bytes of the gradient of a policy for this environment."""
    numbers = count_parameters(config.policy, env.layout, env.single_action_space)
    return numbers * config.launch.dtype.itemsize


# ---- reductions


def measure_reductions(
    planned: PlannedTraining, backend: str, meanwhile: Callable[[], None]
) -> tuple[Reductions | None, str]:
    """Let ranks reduce over a backend; return the figures, or None and why not.

    `meanwhile` runs while they start. A backend that the training does not need gets a few
    reductions, to see that it works.
    """
    device_type = "cuda" if backend == "nccl" else "cpu"
    ranks = planned.num_ranks if device_type == planned.device_type else 2
    ranks = ranks if device_type == "cuda" else max(2, ranks)
    needed = planned.reduces_over(backend)
    sizes = sorted({*(BENCH_SIZES if needed else FEW_SIZES), planned.gradient_bytes})
    gpu_ids = planned.gpu_ids if device_type == "cuda" else ()
    try:
        found = time_reductions(ranks, sizes, device_type, meanwhile=meanwhile, gpu_ids=gpu_ids)
        return found, ""
    except (BenchError, UserError) as error:
        return None, str(error)


# ---- memory


class MemoryDryRun:
    """Memory of a training, computed and measured once; `result` may raise."""

    def __init__(self, planned: PlannedTraining, make_env: MakeEnv, facts: Facts) -> None:
        self.result = cache(partial(measure_memory, planned, make_env, facts))

    def run(self) -> None:
        """Measure; errors wait for `result`."""
        with suppress(Exception):
            self.result()

    @property
    def fits(self) -> bool:
        """Return whether it can be measured, and there is enough memory."""
        with suppress(Exception):
            figures = self.result()[1]
            return figures.needed <= figures.limit
        return False


def measure_memory(
    planned: PlannedTraining, make_env: MakeEnv, facts: Facts
) -> tuple[Shapes, MemoryFigures]:
    """Compute one rank's memory, do a dry run of its share, find the largest sizes."""
    shapes = observe_shapes(make_env)
    need = planned.compute(shapes, planned.config.train)
    process = facts.host.process_bytes  # before any tensor
    free = facts.host.memory_available_bytes / planned.num_ranks
    if planned.device_type == "cuda":
        taken = planned.gpu_ids or range(planned.num_ranks)
        usable = [gpu for gpu in facts.gpu.usable if gpu.torch_index in taken]
        process, free = GPU_RESERVE, min(gpu.memory_free_bytes or 0 for gpu in usable)
    limit = int(MOST_OF_MEMORY * free)
    peak, failure = None, ""
    skipped = _why_not_measured(planned, (process + need.peak) / max(limit, 1))
    if not skipped:
        try:
            peak = _measured_peak(planned, make_env)
        except (RuntimeError, MemoryError) as error:  # out of memory, or no start of the backend
            failure = one_line(error, named=False)
    factor = max(1.0, (peak or 0) / need.peak)
    num_envs, batch_size = largest_sizes(
        planned.config.train,
        planned.num_ranks,
        lambda other: int(factor * planned.compute(shapes, other).peak),
        limit - process,
    )
    clear_gpu_memory()  # ranks and short runs need it
    return shapes, MemoryFigures(
        computed=need.parts,
        moment=need.moment,
        measured_peak=peak,
        not_measured=skipped,
        process=process,
        limit=limit,
        num_ranks=planned.num_ranks,
        largest_num_envs=num_envs,
        largest_batch_size=batch_size,
        failure=failure,
    )


def _why_not_measured(planned: PlannedTraining, share: float) -> str:
    """Return why there is no dry run of what takes this share of the limit; "": there is one."""
    if share > 1.0:
        return "it does not fit"
    work = planned.sizes.num_envs * planned.config.train.num_steps * planned.gradient_bytes
    ample = planned.device_type == "cpu" and share < 0.25
    if work > (QUICK_WORK if ample else LONG_WORK):
        return "a dry run would take long"
    return ""


def _measured_peak(planned: PlannedTraining, make_env: MakeEnv) -> int:
    """Do a dry run of one rank's share; return the peak bytes of tensors."""
    job = dataclasses.replace(
        planned.config.job(make_env, Path()),  # the dry run has a directory of its own
        train=planned.share,
        strategy=StrategyConfig(precision=planned.config.launch.precision),
    )
    world = open_world(
        planned.device_type, gpu_ids=planned.gpu_ids, threads=planned.config.launch.threads
    )
    try:
        return dry_run(job, world)
    finally:
        close_world(world)


# ---- time


def short_runs(planned: PlannedTraining) -> SideBySide:
    """Return all ranks' shares side by side, to be entered and then measured."""
    launch = planned.config.launch.by_default()
    share = dataclasses.replace(planned.config, train=planned.share, launch=launch)
    ranks = planned.num_ranks
    threads = launch.threads or threads_per_rank(ranks)
    return SideBySide(flags_of(share.to_dict()), ranks, threads, device_type=planned.device_type)


def measure_time(
    planned: PlannedTraining, running: SideBySide, reductions: Reductions | None, shapes: Shapes
) -> TimeFigures:
    """Return the pace of the `short_runs`, from a few iterations."""
    train, sizes = planned.config.train, planned.sizes
    copies = running.measure_rounds(timeout_s=SHORT_RUN_S, enough_s=ENOUGH_S)
    per_rank = sizes.num_envs * train.num_steps
    own = [statistics.median(per_rank / record["time/sps"] for record in copy) for copy in copies]
    slowest = copies[own.index(max(own))]
    seen = steps_per_episode([record for copy in copies for record in copy])
    sampled = shapes.episode_length if math.isfinite(shapes.episode_length) else None
    reduction_s = reductions.gradients_s[planned.gradient_bytes] if reductions else 0.0
    return TimeFigures(
        own_s=max(own),
        collect_s=statistics.median(record["time/collect_s"] for record in slowest),
        reduction_s=planned.config.ppo.update_epochs * sizes.num_minibatches * reduction_s,
        steps_per_iteration=sizes.global_num_envs * train.num_steps,
        steps_per_episode=sampled if math.isnan(seen) else seen,
        budget=train.total_steps or train.num_episodes,
        unit="steps" if train.total_steps else "episodes",
        iterations_measured=min(map(len, copies)),
        rates=tuple(round_rates(slowest)),
        as_asked=planned.as_asked,
    )
