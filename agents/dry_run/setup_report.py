"""The report of check_gpu_setup.py: its sections, and the command it ends in."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents.dry_run.measure import TRIAL_S, Question, measure_time, over_backend, reduce_over
from agents.dry_run.memory import Shapes
from agents.sizes import shares_out
from rl_dist.errors import UserError
from rl_dist.hardware.report import Facts
from rl_dist.launch.all_reduce_bench import Measured
from rl_dist.launch.launcher import LaunchConfig, resolve
from rl_dist.launch.short_run import SideBySide, TrialFailed, TrialTooLong
from rl_dist.parallel.data_parallel import check_devices
from rl_dist.setup_check.checks import OK, PROBLEM, WARNING, Check
from rl_dist.setup_check.measured import SCRIPT, MemoryFigures, command_line, communication_check, time_checks


@dataclass
class Report:
    """What was found so far; prints each section when it is complete."""

    quiet: bool  # --json: everything at the end
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=lambda: {"communication": [], "memory": None, "time": None})

    def say(self, text: str) -> None:
        """Tell who waits at a terminal what is done now."""
        if sys.stderr.isatty():
            print(f"checking: {text} ...", file=sys.stderr, flush=True)

    def add(self, title: str, checks: Sequence[Check]) -> None:
        """Add a section."""
        self.checks += checks
        if self.quiet or not checks:
            return
        print(f"\n{title}")
        for check in checks:
            print(f"  {check.verdict:<8} {check.name:<14} {check.measured}")
            if check.cure:
                print(f"  {'':<8} {'':<14} -> {check.cure}")
        sys.stdout.flush()


def one_line(error: Exception) -> str:
    """What an error says, for a line of the report."""
    return " ".join(str(error).split())


def decide_ranks(launch: LaunchConfig, facts: Facts) -> tuple[int, str, list[Check]]:
    """Ranks and device as training would choose them, or what is nearest."""
    try:
        resolved = resolve(launch)
        return resolved.num_ranks, resolved.device_type, [Check("Plan", "ranks", OK, resolved.message)]
    except (ValueError, RuntimeError) as error:  # RuntimeError: CUDA does not start
        told = one_line(error)
    if told == facts.host.address_error:
        return *nearest(launch, facts), []  # told under Host
    changes = _by_default(launch)
    if changes:
        with suppress(ValueError, RuntimeError):
            resolved = resolve(launch.by_default())
            cure = " ".join(f"--{name} {value}" for name, value in changes.items())
            problem = Check("Plan", "ranks", PROBLEM, told, cure)
            return resolved.num_ranks, resolved.device_type, [problem]
    ranks, device_type = nearest(launch, facts)
    cure = f"--num_gpus {ranks}" if device_type == "cuda" else "--device cpu, or see Software and GPUs"
    return ranks, device_type, [Check("Plan", "ranks", PROBLEM, told, cure)]


def _by_default(launch: LaunchConfig) -> dict[str, str | int]:
    """The flags that turn a launch into one with the default strategy."""
    default = launch.by_default()
    names = ("strategy", "hybrid_form", "shard_size", "gradient_compression")
    return {name: getattr(default, name) for name in names if getattr(launch, name) != getattr(default, name)}


def nearest(launch: LaunchConfig, facts: Facts) -> tuple[int, str]:
    """Ranks and device where what was asked for cannot be."""
    usable, asked = len(facts.gpu.usable), launch.num_gpus
    if launch.device != "cpu" and usable and asked != 0:
        return (usable if asked < 1 else min(asked, usable)), "cuda"
    return max(1, asked), "cpu"


def exercise_ranks(question: Question, report: Report, meanwhile: Callable[[], None]) -> Measured | None:
    """Let real ranks reduce; returns figures of the backend of training."""
    used, checks = None, []
    for backend in ("nccl", "gloo") if question.device_type == "cuda" else ("gloo",):
        needed = over_backend(question, backend)
        report.say(f"ranks that reduce over {backend}")
        measured, problem = reduce_over(question, backend, meanwhile)
        checks.append(communication_check(backend, measured, problem, needed))
        if measured is not None:
            report.figures["communication"].append(dataclasses.asdict(measured))
        used = measured if needed else used
    report.add("Communication", checks)
    return used


def look_at_time(
    question: Question, running: SideBySide, reductions: Measured | None, shapes: Shapes, report: Report
) -> None:
    """Measure a few iterations of short runs."""
    report.say("iterations of this training")
    try:
        figures = measure_time(question, running, reductions, shapes)
    except TrialTooLong as error:
        told = str(error) if question.full else f"two iterations did not end within {TRIAL_S:.0f} s"
        cure = "--full waits ten times as long; or choose smaller sizes"
        report.add("Time", [Check("Time", "pace", WARNING, told, cure)])
        return
    except TrialFailed as error:
        cure = "train with these flags for the whole error"
        report.add("Time", [Check("Time", "pace", PROBLEM, str(error), cure)])
        return
    report.add("Time", time_checks(figures, question.device_type == "cuda"))
    derived = {name: getattr(figures, name) for name in ("iteration_s", "steps_per_second", "total_s")}
    report.figures["time"] = dataclasses.asdict(figures) | derived


def recommend(
    question: Question, given: Sequence[str], facts: Facts, memory: MemoryFigures | None, checks: Sequence[Check]
) -> str:
    """The command line to copy: what was asked, made to work as far as flags can."""
    launch = question.config.launch
    changes: dict[str, str | int] = {}
    broken = launch.device == "auto" and launch.num_gpus and any(g.torch_index is not None for g in facts.gpu.gpus)
    if question.device_type == "cpu" and (launch.device == "cuda" or broken):
        changes["device"] = "cpu"
    if question.device_type == "cuda" and launch.num_gpus > question.num_ranks:
        changes["num_gpus"] = question.num_ranks
    cores = facts.host.cores
    if question.device_type == "cpu" and question.num_ranks > cores:
        fitting = [number for number in range(cores, 0, -1) if shares_out(question.config.train, number)]
        changes |= {"num_gpus": fitting[0]} if fitting else {}
    try:
        launch.strategy_config.resolve(question.num_ranks)
        if launch.strategy == "dp":
            check_devices(question.device_type, len(facts.gpu.usable), question.num_ranks)
    except UserError:
        changes |= _by_default(launch)
    if memory and memory.needed > memory.limit and memory.largest_num_envs:
        changes["num_envs"] = memory.largest_num_envs
    elif memory and memory.needed > memory.limit and memory.largest_batch_size:
        changes |= {"num_envs": 0, "batch_size": memory.largest_batch_size}
    unset = [check.name for check in checks if check.section == "Environment" and check.verdict != OK]
    if facts.host.address_error:
        unset += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    script = Path(__file__).resolve().parents[2] / SCRIPT
    return command_line(given, changes, unset, SCRIPT if script.parent == Path.cwd() else str(script))
