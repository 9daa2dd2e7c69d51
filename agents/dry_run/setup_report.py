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

from agents.dry_run.measure import PlannedTraining, measure_reductions, measure_time
from agents.run.memory import Shapes
from rl_dist.errors import UserError, one_line
from rl_dist.hardware.report import Facts
from rl_dist.launch.bench import Reductions
from rl_dist.launch.config import LaunchConfig, resolve
from rl_dist.launch.short_run import ShortRunError, ShortRunTimeoutError, SideBySide
from rl_dist.setup_check.checks import OK, PROBLEM, WARNING, Check
from rl_dist.setup_check.measured import (
    SCRIPT,
    command_line,
    communication_check,
    time_checks,
)
from rl_dist.strategies.choice import Hardware, check_strategy


@dataclass
class SetupReport:
    """The findings so far; prints each section when it is complete."""

    quiet: bool  # --json: everything at the end
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(
        default_factory=lambda: {"communication": [], "memory": None, "time": None}
    )

    def say(self, text: str) -> None:
        """Print what is done now, if somebody waits at a terminal."""
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
            if check.fix:
                print(f"  {'':<8} {'':<14} -> {check.fix}")
        sys.stdout.flush()


def decide_ranks(launch: LaunchConfig, facts: Facts) -> tuple[int, str, list[Check]]:
    """Return ranks and device as training would choose them, and the checks."""
    try:
        resolved = resolve(launch)
        check = Check("Plan", "ranks", OK, resolved.message)
        return resolved.num_ranks, resolved.device_type, [check]
    except (ValueError, RuntimeError) as error:  # RuntimeError: CUDA does not start
        problem = one_line(error, named=False)
    # the nearest ranks and device
    usable, asked = len(facts.gpu.usable), launch.num_gpus
    ranks, device_type = max(1, asked), "cpu"
    if launch.device != "cpu" and usable and asked != 0:
        ranks, device_type = (usable if asked < 1 else min(asked, usable)), "cuda"
    if problem == facts.host.address_error:
        return ranks, device_type, []  # it is listed under Host
    fix = f"--num_gpus {ranks}"
    if device_type == "cpu":
        fix = "--device cpu, or see Software and GPUs"
    if changes := _by_default(launch):
        with suppress(ValueError, RuntimeError):
            resolved = resolve(launch.by_default())
            ranks, device_type = resolved.num_ranks, resolved.device_type
            fix = " ".join(f"--{name} {value}" for name, value in changes.items())
    return ranks, device_type, [Check("Plan", "ranks", PROBLEM, problem, fix)]


def _by_default(launch: LaunchConfig) -> dict[str, str | int]:
    """Return the flags that turn a launch into one with the default strategy."""
    default = launch.by_default()
    names = ("strategy", "hybrid_form", "shard_size", "gradient_compression")
    values = {name: getattr(default, name) for name in names}
    return {name: value for name, value in values.items() if getattr(launch, name) != value}


def report_reductions(
    planned: PlannedTraining, report: SetupReport, meanwhile: Callable[[], None]
) -> Reductions | None:
    """Let real ranks reduce; return the figures of the backend of training."""
    used, checks = None, []
    for backend in ("nccl", "gloo") if planned.device_type == "cuda" else ("gloo",):
        needed = planned.reduces_over(backend)
        report.say(f"ranks that reduce over {backend}")
        measured, problem = measure_reductions(planned, backend, meanwhile)
        checks.append(communication_check(backend, measured, problem, needed))
        if measured is not None:
            report.figures["communication"].append(dataclasses.asdict(measured))
        used = measured if needed else used
    report.add("Communication", checks)
    return used


def report_time(
    planned: PlannedTraining,
    running: SideBySide,
    reductions: Reductions | None,
    shapes: Shapes,
    report: SetupReport,
) -> None:
    """Add the pace of short runs, from a few iterations."""
    report.say("iterations of this training")
    try:
        figures = measure_time(planned, running, reductions, shapes)
    except ShortRunError as error:
        verdict, fix = PROBLEM, "train with these flags for the whole error"
        if isinstance(error, ShortRunTimeoutError):
            verdict, fix = WARNING, "choose smaller sizes"
        report.add("Time", [Check("Time", "pace", verdict, str(error), fix)])
        return
    report.add("Time", time_checks(figures, planned.device_type == "cuda"))
    derived = ("iteration_s", "steps_per_second", "total_s")
    more = {name: getattr(figures, name) for name in derived}
    report.figures["time"] = dataclasses.asdict(figures) | more


def recommend(
    planned: PlannedTraining, given: Sequence[str], facts: Facts, checks: Sequence[Check]
) -> str:
    """Return the command line to copy; a strategy that cannot be is replaced."""
    launch = planned.config.launch
    changes: dict[str, str | int] = {}
    hardware = Hardware(planned.num_ranks, planned.device_type, len(facts.gpu.usable))
    try:
        check_strategy(launch.strategy_config, hardware)
    except UserError:
        changes = _by_default(launch)
    unset = [c.name for c in checks if c.section == "Environment" and c.verdict != OK]
    if facts.host.address_error:
        unset += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    script = Path(__file__).resolve().parents[2] / SCRIPT
    shown = SCRIPT if script.parent == Path.cwd() else str(script)
    return command_line(given, changes, unset, shown)
