"""Report whether this machine can train with given flags: will it fit, how long.

Run it as `python check_gpu_setup.py [flags of train_distributed.py]`.
"""

# ruff: noqa: E402  (signals count before the slow imports)
from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

LEAVE_AT = (signal.SIGINT, signal.SIGTERM)


def _leave(signum: int, frame: Any) -> NoReturn:
    """Leave through all `finally`: what was started is ended, files are removed."""
    for number in LEAVE_AT:
        signal.signal(number, signal.SIG_IGN)
    os.write(2, f"stopped by {signal.Signals(signum).name}\n".encode())
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    for each in LEAVE_AT:
        signal.signal(each, _leave)

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

from agents.dry_run.measure import Question, Trying, gradient_bytes, short_runs
from agents.dry_run.setup_report import Report, decide_ranks, exercise_ranks, look_at_time, one_line, recommend
from agents.run.choice import RUNS, add_run_flags, choose_run
from agents.run.config import SECTIONS
from agents.sizes import share_out
from envs.task import GymTask
from envs.trading.task import TradingTask
from envs.vector.faults import EnvironmentFault
from rl_dist.config import ParsedFlags, parse_flags
from rl_dist.errors import UserError, explains_errors, outlive_readers
from rl_dist.hardware.addresses import check_variables
from rl_dist.hardware.report import as_dict, read_facts
from rl_dist.launch.short_run import SideBySide, without
from rl_dist.setup_check.checks import (
    PROBLEM,
    WARNING,
    Check,
    Plan,
    environment_checks,
    gpu_checks,
    host_checks,
    link_checks,
    software_checks,
)
from rl_dist.setup_check.measured import MemoryFigures, memory_checks, worst

OWN_FLAGS = ("json", "full", "strict")
DESCRIPTION = "Can this machine train with these flags, does it fit, how long does it take? Takes all training flags."
EPILOG = """examples:
  python check_gpu_setup.py                                    the main job on this machine
  python check_gpu_setup.py --num_gpus 8 --batch_size 512      another one
  python check_gpu_setup.py --env CartPole-v1 --full           longer measurements, the dry run always
  python check_gpu_setup.py --json > setup.json                for programs: docs/check_gpu_setup.schema.json
exit codes: 0 it can train (warnings included), 1 it cannot, or --strict and a warning, 2 bad usage,
130 and 143 stopped by INT and TERM"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Our own flags, and the training script's that belong to no component."""
    group = parser.add_argument_group("check")
    group.add_argument(
        "--json", action="store_true", help="print one JSON object, see docs/check_gpu_setup.schema.json"
    )
    group.add_argument("--full", action="store_true", help="measure longer, and always try the memory out in a dry run")
    group.add_argument("--strict", action="store_true", help="exit with 1 on a warning, too")
    add_run_flags(parser)


def small_env(task: TradingTask | GymTask) -> Any:
    """One environment of a task, quickly made."""
    if isinstance(task, TradingTask):
        return task.judging_env(task.markets("train", 1), task.spans.train)
    return task.training_env(1)


def examine(parsed: ParsedFlags, given: Sequence[str], report: Report) -> tuple[dict[str, Any], str]:
    """Look at everything; returns facts for JSON, and the command.

    Raises:
        ValueError: flags that training would refuse, in its own words.
    """
    with ExitStack() as held:
        config, run_dir, _, _ = choose_run(parsed, held)
    extra = parsed.extra
    report.say("this machine")
    task = config.prepare_task()
    facts = read_facts(run_dir or RUNS)
    num_ranks, device_type, decided = decide_ranks(config.launch, facts)

    def make_env(count: int, first: int) -> Any:
        return task.training_env(count, first, device_type)

    sizes = share_out(config.train, 0, num_ranks)
    question = Question(config, num_ranks, device_type, sizes, gradient_bytes(config, small_env(task)), extra.full)
    plan = Plan(  # a checkpoint holds the parameters and Adam's two moments
        num_ranks, device_type, config.launch.device, 3 * question.gradient_bytes, config.train.keep_checkpoints + 1
    )
    report.add("Plan", decided)
    report.add("Software", software_checks(facts, plan))
    report.add("GPUs", gpu_checks(facts, plan, os.getpid()))
    report.add("Links", link_checks(facts, plan))
    report.add("Host", host_checks(facts, plan))
    report.add("Environment", environment_checks(facts))
    report.say("memory")
    tried = Trying(question, make_env, facts)
    if device_type == "cuda":
        tried.run()  # alone on the GPU
    told = {"plan": dataclasses.asdict(plan), "facts": as_dict(facts)}
    with ExitStack() as held:
        memory = measure(question, tried, held, report)
    return told, recommend(question, given, facts, memory, report.checks)


def measure(question: Question, tried: Trying, held: ExitStack, report: Report) -> MemoryFigures | None:
    """Let ranks reduce, try memory and short runs; None: memory could not be tried.

    Args:
        held: ends the short runs.
    """
    on_gpu = question.device_type == "cuda"
    runs: list[SideBySide] = []

    def meanwhile() -> None:
        tried.run()
        if not on_gpu and question.num_ranks == 1 and tried.fits:  # no reduction is timed that they could disturb
            runs.append(held.enter_context(short_runs(question)))

    reductions = exercise_ranks(question, report, meanwhile)
    try:
        shapes, memory = tried.result()
    except EnvironmentFault:
        raise
    except RuntimeError as error:  # CUDA, where environments are made on a GPU
        problem = Check("Memory", "tensors", PROBLEM, one_line(error)[:300], "see Software and GPUs, and nvidia-smi")
        report.add("Memory", [problem])
        return None
    report.add("Memory", memory_checks(memory, on_gpu))
    report.figures["memory"] = dataclasses.asdict(memory) | {"needed": memory.needed}
    if tried.fits:
        running = runs[0] if runs else held.enter_context(short_runs(question))
        look_at_time(question, running, reductions, shapes, report)
    else:
        report.add("Time", [Check("Time", "pace", WARNING, "not measured: it does not fit", "see Memory")])
    return memory


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """What is printed inside, by environments and libraries too, goes to stderr."""
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
    report = Report(quiet=parsed.extra.json)
    try:
        if "RANK" in os.environ:
            raise UserError("RANK is set: check_gpu_setup starts ranks by itself, so start it once, without torchrun")
        if parsed.extra.resume:
            raise UserError(f"--resume {parsed.extra.resume}: give the flags that the run was started with instead")
        if parsed.extra.interactive:
            raise UserError("--interactive asks nothing here: give the flags that are to be checked")
        check_variables()
        with prints_to_stderr() if parsed.extra.json else nullcontext():
            told, command = examine(parsed, without(sys.argv[1:], OWN_FLAGS), report)
    except EnvironmentFault as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    verdict = worst(report.checks)
    code = int(verdict == PROBLEM or (verdict == WARNING and parsed.extra.strict))
    if parsed.extra.json:
        found = {"version": 2, "verdict": verdict, "exit_code": code, "command": command}
        checks = [dataclasses.asdict(check) for check in report.checks]
        print(json.dumps(found | {"checks": checks} | told | report.figures, indent=2))
        return code
    counts = {kind: sum(check.verdict == kind for check in report.checks) for kind in (PROBLEM, WARNING)}
    words = "cannot train like this" if counts[PROBLEM] else "can train"
    print(f"\n{words}: {counts[PROBLEM]} problem(s), {counts[WARNING]} warning(s). The command:\n{command}")
    return code


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
