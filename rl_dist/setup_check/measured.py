"""Verdicts on what was measured, and the command to copy. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_dist.hardware.report import duration, gib
from rl_dist.launch.bench import Reductions
from rl_dist.launch.short_run import describe_rates, is_steady, without
from rl_dist.setup_check.checks import OK, PROBLEM, WARNING, Check

# of the smallest all-reduce on one machine, by device
SLOW_LATENCY_S = {"cpu": 0.01, "cuda": 0.001}
WAITING_SHARE = 0.2
ROLLOUT_SHARE = 0.7
TIGHT = 0.8
SCRIPT = "train_distributed.py"
MOMENTS = {
    "start": "while environments are made",
    "collect": "at the end of a rollout",
    "update": "in the update",
    "statistics": "when statistics are taken",
}


def communication_check(
    backend: str, measured: Reductions | None, error: str, needed: bool
) -> Check:
    """Check that ranks could reduce over a backend (else `error`), and how fast."""
    if measured is None:
        more = "; NCCL_DEBUG=INFO tells more" if backend == "nccl" else ""
        fix = f"see Host and Environment above{more}"
        return Check("Communication", backend, PROBLEM if needed else WARNING, error, fix)
    words = f"{measured.num_ranks} rank(s), {measured.threads} thread(s) each: sums are right"
    if measured.num_ranks > 1:
        times = [f"{gib(size)} {duration(s)}" for size, s in measured.gradients_s.items()]
        words += f"; gradients take {', '.join(times)}"
        if needed and min(measured.gradients_s.values()) > SLOW_LATENCY_S[measured.device_type]:
            fix = "ranks wait for cores: stop other programs, or use fewer ranks"
            return Check("Communication", backend, WARNING, words, fix)
    return Check("Communication", backend, OK, words)


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
    """Check that it fits, and name the largest sizes that would."""
    several = " for each rank" if figures.num_ranks > 1 else ""
    # the tensors
    parts = ", ".join(f"{name} {gib(size)}" for name, size in figures.computed.items() if size)
    peak = sum(figures.computed.values())
    words = f"{gib(peak)} computed{several} ({parts}; largest {MOMENTS[figures.moment]})"
    if figures.measured_peak is not None:
        off = peak / figures.measured_peak - 1.0
        words += f"; a dry run took {gib(figures.measured_peak)} (computed: {off:+.0%}) and counts"
    elif figures.not_measured:
        words += f"; not measured: {figures.not_measured}"
    checks = [Check("Memory", "tensors", OK, words)]
    # with the process, against what is free
    guess = f" (guessed: {gib(figures.process)} for CUDA and its libraries)" if on_gpu else ""
    words = f"at least {gib(figures.needed)} with the process{guess}"
    words += f", {gib(figures.limit)} are free{several}"
    verdict, fix = OK, ""
    if figures.needed > figures.limit:
        envs = figures.largest_num_envs
        smaller = f"--num_envs {envs}" if envs else "a smaller --batch_size"
        verdict, fix = PROBLEM, f"use {smaller}, or a smaller --hidden_size"
    elif figures.needed > TIGHT * figures.limit:
        verdict, fix = WARNING, "tight: long episodes or other programs may need the rest"
    checks.append(Check("Memory", "fits", verdict, words, fix))
    # the largest sizes
    largest = "nothing fits, not even the smallest sizes"
    if figures.largest_num_envs or figures.largest_batch_size:
        largest = f"--num_envs {figures.largest_num_envs} (with this batch), or --batch_size "
        largest += f"{figures.largest_batch_size} (with its default number of environments); "
        largest += "what environments in Python hold comes on top"
    checks.append(Check("Memory", "largest", OK, largest))
    if figures.failure:
        fix = "see Environment and Host"
        checks.append(Check("Memory", "dry run", PROBLEM, figures.failure, fix))
    return checks


@dataclass(frozen=True)
class TimeFigures:
    """From real iterations of one rank's share, all ranks' shares side by side."""

    own_s: float  # of an iteration of the slowest, without reductions
    collect_s: float
    # of all gradient steps of an iteration, from the all-reduce measured; 0 for one rank
    reduction_s: float
    steps_per_iteration: int  # environment steps of all ranks
    steps_per_episode: float | None  # None: no episode ended
    budget: int
    unit: str  # of the budget: "episodes" or "steps"
    iterations_measured: int
    rates: tuple[float, ...]  # steps/s of the slowest rank, by round
    as_asked: bool  # ranks and device are those that the training asks for

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
        """Of the whole training, without its start and its evaluations; None: unknown."""
        if not (self.as_asked and is_steady(self.rates)):
            return None
        if self.unit == "steps":
            return self.budget / self.steps_per_second
        if not self.steps_per_episode:
            return None
        return self.budget * self.steps_per_episode / self.steps_per_second


def time_checks(figures: TimeFigures, on_gpu: bool) -> list[Check]:
    """Report how long training takes, and check what it waits for."""
    # pace
    steps, whole = figures.steps_per_iteration, figures.iteration_s
    pace = f"{figures.steps_per_second:,.0f} steps/s: an iteration of {steps:,} steps takes "
    pace += f"{duration(whole)} ({figures.iterations_measured} measured)"
    checks = [Check("Time", "pace", OK, pace)]
    # the whole training
    if not is_steady(figures.rates):
        words = f"no estimate, two measurements disagreed: {describe_rates(figures.rates)}"
        checks = [Check("Time", "pace", WARNING, words, "check again when nothing else runs")]
    elif not figures.as_asked:
        words = "no time: the pace is of this machine, and other hardware was asked for"
        checks.append(Check("Time", "training", WARNING, words, "see Plan"))
    elif figures.total_s is None:
        words = f"no episode ended in {steps:,} steps, so the time for --num_episodes is unknown"
        fix = "give --total_steps"
        checks.append(Check("Time", "training", WARNING, words, fix))
    else:
        words = f"{duration(figures.total_s)} for {figures.budget:,} {figures.unit}"
        if figures.unit == "episodes":
            words += f", at {figures.steps_per_episode:.0f} steps an episode as now"
        checks.append(Check("Time", "training", OK, words))
    # where it goes
    rollout, waiting = figures.collect_s / whole, figures.reduction_s / whole
    words = f"rollouts {rollout:.0%}, updates {1 - rollout - waiting:.0%}"
    words += f", reducing gradients {waiting:.0%}" if figures.reduction_s else ""
    verdict, fix = OK, ""
    if waiting > WAITING_SHARE:
        verdict, fix = WARNING, "raise --batch_size (fewer reductions), or use fewer ranks"
    elif on_gpu and rollout > ROLLOUT_SHARE:
        fix = "the GPU waits for environments: raise --num_envs, or use --device cpu and compare"
        verdict = WARNING
    return [*checks, Check("Time", "spent on", verdict, words, fix)]


def command_line(
    given: Sequence[str], changes: Mapping[str, str | int], unset: Sequence[str], script: str
) -> str:
    """The training command to copy, with flags changed and variables unset."""
    changed = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    start = ["env", *(word for name in unset for word in ("-u", name))] if unset else []
    return shlex.join([*start, "python", script, *without(given, tuple(changes)), *changed])


def worst(checks: Sequence[Check]) -> str:
    """The gravest verdict of all."""
    return max((check.verdict for check in checks), key=(OK, WARNING, PROBLEM).index, default=OK)
