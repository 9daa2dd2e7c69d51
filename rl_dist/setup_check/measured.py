"""Verdicts on what was measured, and the command to copy. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_dist.hardware.report import gib
from rl_dist.launch.all_reduce_bench import Measured
from rl_dist.launch.short_run import without
from rl_dist.setup_check.checks import OK, PROBLEM, WARNING, Check

SLOW_LATENCY_S = {"cpu": 0.01, "cuda": 0.001}  # of the smallest all-reduce on one machine, by device
WAITING_SHARE, ROLLOUT_SHARE, TIGHT, FAR_OFF = 0.2, 0.7, 0.8, 0.25
SCRIPT = "train_distributed.py"
MOMENTS = {
    "start": "while environments are made",
    "collect": "at the end of a rollout",
    "update": "in the update",
    "statistics": "when statistics are taken",
}


def seconds(value: float) -> str:
    """A duration in words."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if value >= 1.5 * size or unit == "ms":
            return f"{value / size:.3g} {unit}"
    raise AssertionError(value)


def communication_check(backend: str, measured: Measured | None, error: str, needed: bool) -> Check:
    """Whether ranks could reduce over a backend, and how fast.

    Args:
        measured: None: it failed, with `error`.
        needed: the training will use this backend on several ranks.
    """
    if measured is None:
        cure = (
            "see Host and Environment above; NCCL_DEBUG=INFO tells more"
            if backend == "nccl"
            else "see Host and Environment above"
        )
        return Check("Communication", backend, PROBLEM if needed else WARNING, error, cure)
    smallest, largest = measured.times[0], measured.times[-1]
    rate = largest.size_bytes / largest.median_s / 1e9
    told = f"{measured.num_ranks} ranks, {measured.threads} thread(s) each: sums are right"
    if measured.num_ranks == 1:
        told = "1 rank: it starts, and reduces with itself"
    if measured.ddp is not None:
        step = f"{seconds(measured.ddp.reduction_s)} for its gradient of {gib(measured.ddp.gradient_bytes)}"
        told += f", DDP steps end with equal parameters ({step})"
    if measured.num_ranks > 1:
        told += f"; {gib(smallest.size_bytes)} in {seconds(smallest.median_s)}"
        told += f", {gib(largest.size_bytes)} at {rate:.3g} GB/s"
        if needed and smallest.median_s > SLOW_LATENCY_S[measured.device_type]:
            cure = "ranks wait for cores: stop other programs, or use fewer ranks"
            return Check("Communication", backend, WARNING, told, cure)
    return Check("Communication", backend, OK, told)


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes on one rank."""

    computed: Mapping[str, int]  # by kind; they add up to the peak
    moment: str  # of the peak
    measured_peak: int | None  # by a dry run
    not_measured: str  # why, if so
    process: int  # that a rank takes besides its tensors: Python, torch, on a GPU the CUDA context
    limit: int  # what is free for one rank
    num_ranks: int
    largest_num_envs: int
    largest_batch_size: int
    failure: str = ""  # of the dry run

    @property
    def needed(self) -> int:
        """Of one rank, its process included."""
        return self.process + (self.measured_peak or sum(self.computed.values()))


def memory_checks(figures: MemoryFigures, on_gpu: bool = False) -> list[Check]:
    """Whether it fits, and what would."""
    each = " on each rank" if figures.num_ranks > 1 else ""
    parts = ", ".join(f"{name} {gib(size)}" for name, size in figures.computed.items() if size)
    peak = sum(figures.computed.values())
    told = f"{gib(peak)} computed{each} ({parts}; largest {MOMENTS[figures.moment]})"
    told += "; what cuDNN keeps is a guess" if on_gpu else ""
    if figures.measured_peak is not None:
        off = peak / figures.measured_peak - 1.0
        told += f"; a dry run took {gib(figures.measured_peak)} (computed: {off:+.0%})"
        if abs(off) > FAR_OFF:
            told += ", which is far off, as it mostly is for small jobs: the dry run counts"
    elif figures.not_measured:
        told += f"; not measured: {figures.not_measured}"
    process = f"the process (guessed: {gib(figures.process)} for CUDA and its libraries)" if on_gpu else "the process"
    fits = f"at least {gib(figures.needed)} with {process}"
    fits += f", {gib(figures.limit)} are free{' for each rank' if each else ''}"
    smaller = f"--num_envs {figures.largest_num_envs}" if figures.largest_num_envs else "a smaller --batch_size"
    if figures.needed > figures.limit:
        verdict, cure = PROBLEM, f"use {smaller}, or a smaller --hidden_size"
    elif figures.needed > TIGHT * figures.limit:
        verdict, cure = WARNING, "tight: long episodes or other programs may need the rest"
    else:
        verdict, cure = OK, ""
    largest = f"--num_envs {figures.largest_num_envs} (with this batch), or --batch_size {figures.largest_batch_size}"
    largest += " (with its default number of environments), "
    largest += "computed" if figures.measured_peak is None else "computed, scaled to the dry run"
    largest += "; what environments in Python hold comes on top"
    if not figures.largest_num_envs and not figures.largest_batch_size:
        largest = "nothing fits, not even the smallest sizes"
    tried = [Check("Memory", "dry run", PROBLEM, figures.failure, "see Environment and Host")]
    return [
        Check("Memory", "tensors", OK, told),
        Check("Memory", "fits", verdict, fits, cure),
        Check("Memory", "largest", OK, largest),
        *(tried if figures.failure else []),
    ]


@dataclass(frozen=True)
class TimeFigures:
    """From real iterations of one rank's share, all ranks' shares side by side."""

    own_s: float  # of an iteration of the slowest, without reductions
    collect_s: float
    reduction_s: float  # of all gradient steps of an iteration, from the all-reduce measured; 0 for one rank
    steps_per_iteration: int  # environment steps of all ranks
    steps_per_episode: float | None  # None: no episode ended
    budget: int
    unit: str  # of the budget: "episodes" or "steps"
    iterations_measured: int

    @property
    def iteration_s(self) -> float:
        """A whole iteration."""
        return self.own_s + self.reduction_s

    @property
    def steps_per_second(self) -> float:
        """Of all ranks."""
        return self.steps_per_iteration / self.iteration_s

    @property
    def total_s(self) -> float | None:
        """Of the whole training, without its start and its judging."""
        if self.unit == "steps":
            return self.budget / self.steps_per_second
        return self.budget * self.steps_per_episode / self.steps_per_second if self.steps_per_episode else None


def time_checks(figures: TimeFigures, on_gpu: bool) -> list[Check]:
    """How long training takes, and what it waits for."""
    told = f"{figures.steps_per_second:,.0f} steps/s: an iteration of {figures.steps_per_iteration:,} steps takes "
    told += f"{seconds(figures.iteration_s)} ({figures.iterations_measured} measured)"
    checks = [Check("Time", "pace", OK, told)]
    total = figures.total_s
    if total is None:
        what = f"no episode ended in {figures.steps_per_iteration:,} steps, so nobody can tell for --num_episodes"
        checks.append(Check("Time", "training", WARNING, what, "give --total_steps, or try --full"))
    else:
        length = (
            f", at {figures.steps_per_episode:.0f} steps an episode as now (longer ones take longer)"
            if figures.unit == "episodes"
            else ""
        )
        checks.append(Check("Time", "training", OK, f"{seconds(total)} for {figures.budget:,} {figures.unit}{length}"))
    whole = figures.iteration_s
    rollout, waiting = figures.collect_s / whole, figures.reduction_s / whole
    told = f"rollouts {rollout:.0%}, updates {1 - rollout - waiting:.0%}"
    told += f", reducing gradients {waiting:.0%}" if figures.reduction_s else ""
    if waiting > WAITING_SHARE:
        cure = "raise --batch_size (fewer reductions), or use fewer ranks"
        checks.append(Check("Time", "spent on", WARNING, told, cure))
    elif on_gpu and rollout > ROLLOUT_SHARE:
        cure = "the GPU waits for environments: raise --num_envs, or use --device cpu and compare"
        checks.append(Check("Time", "spent on", WARNING, told, cure))
    else:
        checks.append(Check("Time", "spent on", OK, told))
    return checks


# ---- the command


def command_line(
    given: Sequence[str], changes: Mapping[str, str | int], unset: Sequence[str], script: str = SCRIPT
) -> str:
    """The training command to copy: the flags given, some of them changed.

    Args:
        given: flags of the training script.
        changes: values by name, in place of those given.
        unset: environment variables that must not be set.
        script: the training script, as the current directory reaches it.
    """
    words = [*without(given, tuple(changes))]
    for name, value in changes.items():
        words += [f"--{name}", str(value)]
    start = ["env", *(word for name in unset for word in ("-u", name))] if unset else []
    return shlex.join([*start, "python", script, *words])


def worst(checks: Sequence[Check]) -> str:
    """The gravest verdict of all."""
    verdicts = {check.verdict for check in checks}
    return next((verdict for verdict in (PROBLEM, WARNING) if verdict in verdicts), OK)
