"""Report whether this machine can train with given flags: will it fit, how long.

Run it as `python check_gpu_setup.py [flags of train_distributed.py]`.
"""

# ruff: noqa: E402  (signals count before the slow imports)
from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn


def _leave(signum: int, frame: Any) -> NoReturn:
    """Leave through all `finally`: what was started is ended, files are removed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(2, f"stopped by {signal.Signals(signum).name}\n".encode())
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

from agents.dry_run.measure import MemoryDryRun, PlannedTraining, gradient_bytes, short_runs
from agents.dry_run.setup_report import (
    SetupReport,
    decide_ranks,
    recommend,
    report_reductions,
    report_time,
)
from agents.run.choice import RUNS, add_run_flags, choose_run
from agents.run.config import SECTIONS, probe_env, with_threads
from agents.sizes import shard_sizes
from envs.vector.faults import EnvironmentFaultError
from rl_dist.errors import UserError, explains_errors, one_line, outlive_readers
from rl_dist.flags import ParsedFlags, parse_flags
from rl_dist.hardware.addresses import check_variables
from rl_dist.hardware.report import read_facts
from rl_dist.launch.short_run import SideBySide, without
from rl_dist.setup_check.checks import PROBLEM, WARNING, Check, Plan, check_facts
from rl_dist.setup_check.measured import memory_checks, worst

OWN_FLAGS = ("json", "strict")
DESCRIPTION = (
    "Check that this machine can train with these flags, if it fits, and how long it takes."
)
EPILOG = """examples:
  python check_gpu_setup.py                                  the main job on this machine
  python check_gpu_setup.py --num_gpus 8 --batch_size 512    another one
  python check_gpu_setup.py --json > setup.json              docs/check_gpu_setup.schema.json
exit codes: 0 it can train (warnings included), 1 it cannot, or --strict and a warning, 2 bad usage,
130 and 143 stopped by INT and TERM"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Our own flags, and the training script's that belong to no component."""
    group = parser.add_argument_group("check")
    for name, what in (
        ("json", "print one JSON object, see docs/check_gpu_setup.schema.json"),
        ("strict", "exit with 1 on a warning, too"),
    ):
        group.add_argument(f"--{name}", action="store_true", help=what)
    add_run_flags(parser)


def examine(
    parsed: ParsedFlags, given: Sequence[str], report: SetupReport
) -> tuple[dict[str, Any], str]:
    """Look at everything; returns facts for JSON, and the command."""
    with ExitStack() as held:
        config, run_dir, _, _ = choose_run(parsed, held)
    config = with_threads(config)
    report.say("this machine")
    task = config.prepare_task()
    facts = read_facts(run_dir or RUNS)
    num_ranks, device_type, decided = decide_ranks(config.launch, facts)

    def make_env(count: int, first: int) -> Any:
        return task.training_env(count, first, device_type)

    sizes = shard_sizes(config.train, 0, num_ranks)
    planned = PlannedTraining(
        config, num_ranks, device_type, sizes, gradient_bytes(config, probe_env(task))
    )
    plan = Plan(  # a checkpoint holds the parameters and Adam's two moments
        num_ranks,
        device_type,
        config.launch.device,
        3 * planned.gradient_bytes,
        config.train.keep_checkpoints + 1,
    )
    report.add("Plan", decided)
    for title, checks in check_facts(facts, plan, os.getpid()).items():
        report.add(title, checks)
    report.say("memory")
    memory_run = MemoryDryRun(planned, make_env, facts)
    if device_type == "cuda":
        memory_run.run()  # alone on the GPU
    facts_json = {"plan": dataclasses.asdict(plan), "facts": dataclasses.asdict(facts)}
    with ExitStack() as held:
        measure(planned, memory_run, held, report)
    return facts_json, recommend(planned, given, facts, report.checks)


def measure(
    planned: PlannedTraining, memory_run: MemoryDryRun, held: ExitStack, report: SetupReport
) -> None:
    """Let ranks reduce, do dry runs and short runs.

    Args:
        held: ends the short runs.
    """
    on_gpu = planned.device_type == "cuda"
    runs: list[SideBySide] = []

    def meanwhile() -> None:
        memory_run.run()
        # no reduction is timed that they could disturb
        if not on_gpu and planned.num_ranks == 1 and memory_run.fits:
            runs.append(held.enter_context(short_runs(planned)))

    reductions = report_reductions(planned, report, meanwhile)
    try:
        shapes, memory = memory_run.result()
    except EnvironmentFaultError:
        raise
    except RuntimeError as error:  # CUDA, where environments are made on a GPU
        problem, fix = one_line(error, named=False), "see Software and GPUs, and nvidia-smi"
        report.add("Memory", [Check("Memory", "tensors", PROBLEM, problem, fix)])
        return
    report.add("Memory", memory_checks(memory, on_gpu))
    report.figures["memory"] = dataclasses.asdict(memory) | {"needed": memory.needed}
    if not memory_run.fits:
        skipped = Check("Time", "pace", WARNING, "not measured: it does not fit", "see Memory")
        report.add("Time", [skipped])
        return
    running = runs[0] if runs else held.enter_context(short_runs(planned))
    report_time(planned, running, reductions, shapes, report)


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Send what is printed inside, by environments and libraries too, to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@explains_errors
def main() -> int:
    """Entry of the command; returns the exit code."""
    parsed = parse_flags(SECTIONS, description=DESCRIPTION, epilog=EPILOG, extra=add_flags)
    report = SetupReport(quiet=parsed.extra.json)
    try:
        if "RANK" in os.environ:
            raise UserError("RANK is set: ranks are started here, start this without torchrun")
        if parsed.extra.resume:
            raise UserError("--resume: give the flags that the run was started with instead")
        if parsed.extra.interactive:
            raise UserError("--interactive asks nothing here: give the flags to be checked")
        check_variables()
        with prints_to_stderr() if parsed.extra.json else nullcontext():
            facts_json, command = examine(parsed, without(sys.argv[1:], OWN_FLAGS), report)
    except EnvironmentFaultError as error:
        print(f"error: {one_line(error, named=False)}", file=sys.stderr)
        return 1
    verdict = worst(report.checks)
    code = int(verdict == PROBLEM or (verdict == WARNING and parsed.extra.strict))
    if parsed.extra.json:
        found = {"version": 4, "verdict": verdict, "exit_code": code, "command": command}
        checks = [dataclasses.asdict(check) for check in report.checks]
        print(json.dumps(found | {"checks": checks} | facts_json | report.figures, indent=2))
        return code
    verdicts = [check.verdict for check in report.checks]
    counts = f"{verdicts.count(PROBLEM)} problem(s), {verdicts.count(WARNING)} warning(s)"
    words = "cannot train like this" if verdict == PROBLEM else "can train"
    print(f"\n{words}: {counts}. The command:\n{command}")
    return code


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
