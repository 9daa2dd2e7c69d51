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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from agents.memory import Shapes, probe
from agents.run import SECTIONS
from agents.sizes import TrainConfig, share_out
from agents.trainer import MakeEnv
from agents.tryout import (
    TRIAL_S,
    Question,
    add_largest,
    gradient_bytes,
    look_at_memory,
    measure_memory,
    measure_time,
    reduce_over,
)
from envs.faults import EnvironmentFault
from envs.task import GymTask
from envs.trading_task import TradingTask
from rl_dist.all_reduce_bench import Measured
from rl_dist.console import outlive_readers
from rl_dist.flags import ParsedFlags, parse_flags
from rl_dist.hardware import Facts, as_dict, read_facts
from rl_dist.launch import LaunchConfig, UserError, resolve
from rl_dist.measured_checks import (
    SCRIPT,
    MemoryFigures,
    command_line,
    communication_check,
    memory_checks,
    time_checks,
    worst,
)
from rl_dist.monitor import clear_gpu_memory
from rl_dist.rendezvous import check_variables
from rl_dist.setup_checks import (
    OK,
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
from rl_dist.trial import TrialFailed, without
from train_distributed import RUNS, add_run_flags, choose_run

OWN_FLAGS = ("json", "full", "strict")
DESCRIPTION = "Can this machine train with these flags, does it fit, how long does it take? Takes all training flags."
EPILOG = """examples:
  python check_gpu_setup.py                                    the main job on this machine
  python check_gpu_setup.py --num_gpus 8 --batch_size 512      another one
  python check_gpu_setup.py --env CartPole-v1 --full           longer measurements, the dry run always
  python check_gpu_setup.py --json > setup.json                for programs: docs/check_gpu_setup.schema.json
exit codes: 0 it can train (warnings included), 1 it cannot, or --strict and a warning, 2 bad usage,
130 and 143 stopped by INT and TERM"""


@dataclass
class Report:
    """What was found so far; prints each section when it is complete."""

    quiet: bool  # --json: everything at the end
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=lambda: {"communication": [], "memory": None, "time": None})

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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The training script's flags that belong to no component, and our own."""
    add_run_flags(parser)
    group = parser.add_argument_group("check")
    group.add_argument(
        "--json", action="store_true", help="print one JSON object, see docs/check_gpu_setup.schema.json"
    )
    group.add_argument("--full", action="store_true", help="measure longer, and always try the memory out in a dry run")
    group.add_argument("--strict", action="store_true", help="exit with 1 on a warning, too")


def decide_ranks(launch: LaunchConfig, facts: Facts) -> tuple[int, str, list[Check]]:
    """Ranks and device as training would choose them, or what is nearest."""
    try:
        resolved = resolve(launch)
        return resolved.num_ranks, resolved.device_type, [Check("Plan", "ranks", OK, resolved.message)]
    except (ValueError, RuntimeError) as error:  # RuntimeError: CUDA does not start
        told = one_line(error)
    if told == facts.host.address_error:
        return *nearest(launch, facts), []  # told under Host
    if launch.strategy in ("none", "hybrid"):
        with suppress(ValueError, RuntimeError):
            resolved = resolve(dataclasses.replace(launch, strategy="default", shard_size=0, hybrid_form="shard"))
            problem = Check("Plan", "ranks", PROBLEM, told, "--strategy default")
            return resolved.num_ranks, resolved.device_type, [problem]
    ranks, device_type = nearest(launch, facts)
    cure = f"--num_gpus {ranks}" if device_type == "cuda" else "--device cpu, or see Software and GPUs"
    return ranks, device_type, [Check("Plan", "ranks", PROBLEM, told, cure)]


def nearest(launch: LaunchConfig, facts: Facts) -> tuple[int, str]:
    """Ranks and device where what was asked for cannot be."""
    usable, asked = len(facts.gpu.usable), launch.num_gpus
    if launch.device != "cpu" and usable and asked != 0:
        return (usable if asked < 1 else min(asked, usable)), "cuda"
    return max(1, asked), "cpu"


def one_line(error: Exception) -> str:
    """What an error says, for a line of the report."""
    return " ".join(str(error).split())


# ---- the report


def exercise_ranks(question: Question, report: Report, meanwhile: Callable[[], None]) -> Measured | None:
    """Let real ranks reduce; returns figures of the backend of training."""
    used, checks = None, []
    for backend in ("nccl", "gloo") if question.device_type == "cuda" else ("gloo",):
        needed = question.num_ranks > 1 and (backend == "nccl") == (question.device_type == "cuda")
        measured, problem = reduce_over(question, backend, meanwhile)
        checks.append(communication_check(backend, measured, problem, needed))
        if measured is not None:
            report.figures["communication"].append(dataclasses.asdict(measured))
        used = measured if needed else used
    report.add("Communication", checks)
    return used


def look_at_time(question: Question, reductions: Measured | None, shapes: Shapes, report: Report) -> None:
    """Measure a few iterations."""
    try:
        figures = measure_time(question, reductions, shapes)
    except TrialFailed as error:
        slow = "too long" in str(error)
        told = f"two iterations did not end within {TRIAL_S:.0f} s" if slow and not question.full else str(error)
        cure = (
            "--full waits ten times as long; or choose smaller sizes"
            if slow
            else "train with these flags for the whole error"
        )
        report.add("Time", [Check("Time", "pace", WARNING if slow else PROBLEM, told, cure)])
        return
    report.add("Time", time_checks(figures, question.device_type == "cuda"))
    derived = {"steps_per_second": figures.steps_per_second, "total_s": figures.total_s}
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
        fitting = [number for number in range(cores, 0, -1) if divides(question.config.train, number)]
        changes |= {"num_gpus": fitting[0]} if fitting else {}
    try:
        launch.strategy_config.check_ranks(question.num_ranks)
    except UserError:
        changes |= {"strategy": "default"} | ({"shard_size": 0} if launch.shard_size else {})
        changes |= {"hybrid_form": "shard"} if launch.hybrid_form != "shard" else {}
    if memory and memory.needed > memory.limit and memory.largest_num_envs:
        changes["num_envs"] = memory.largest_num_envs
    elif memory and memory.needed > memory.limit and memory.largest_batch_size:
        changes |= {"num_envs": 0, "batch_size": memory.largest_batch_size}
    unset = [check.name for check in checks if check.section == "Environment" and check.verdict != OK]
    if facts.host.address_error:
        unset += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    script = Path(__file__).resolve().with_name(SCRIPT)
    return command_line(given, changes, unset, SCRIPT if script.parent == Path.cwd() else str(script))


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


def small_env(task: TradingTask | GymTask) -> Any:
    """One environment of a task, quickly made."""
    if isinstance(task, TradingTask):
        return task.judging_env(task.markets("train", 1), task.spans.train)
    return task.training_env(1)


def divides(train: TrainConfig, ranks: int) -> bool:
    """Whether these sizes can be shared out over so many ranks."""
    try:
        share_out(train, 0, ranks)
    except UserError:
        return False
    return True


def examine(parsed: ParsedFlags, given: Sequence[str], report: Report) -> tuple[dict[str, Any], str]:
    """Look at everything; returns facts for JSON, and the command.

    Raises:
        ValueError: flags that training would refuse, in its own words.
    """
    with ExitStack() as held:
        config, run_dir, _ = choose_run(parsed, held)
    extra = parsed.extra
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
    tried = Trying(question, make_env, facts)
    if device_type == "cuda":
        tried.run()  # alone on the GPU
    reductions = exercise_ranks(question, report, tried.run)
    told = {"plan": dataclasses.asdict(plan), "facts": as_dict(facts)}
    try:
        shapes, memory = tried.result()
    except EnvironmentFault:
        raise
    except RuntimeError as error:  # CUDA, where environments are made on a GPU
        problem = Check("Memory", "tensors", PROBLEM, one_line(error)[:300], "see Software and GPUs, and nvidia-smi")
        report.add("Memory", [problem])
        return told, recommend(question, given, facts, None, report.checks)
    report.add("Memory", memory_checks(memory, device_type == "cuda"))
    report.figures["memory"] = dataclasses.asdict(memory) | {"needed": memory.needed}
    if memory.needed > memory.limit:
        report.add("Time", [Check("Time", "pace", WARNING, "not measured: it does not fit", "see Memory")])
    else:
        look_at_time(question, reductions, shapes, report)
    return told, recommend(question, given, facts, memory, report.checks)


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


def main() -> int:
    """Entry of the command; returns the exit code."""
    parsed = parse_flags(SECTIONS, description=DESCRIPTION, epilog=EPILOG, extra=add_flags)
    report = Report(quiet=parsed.extra.json)
    try:
        if "RANK" in os.environ:
            raise UserError("RANK is set: check_gpu_setup starts ranks by itself, so start it once, without torchrun")
        if parsed.extra.resume:
            raise UserError(f"--resume {parsed.extra.resume}: give the flags that the run was started with instead")
        check_variables()
        with prints_to_stderr() if parsed.extra.json else nullcontext():
            told, command = examine(parsed, without(sys.argv[1:], OWN_FLAGS), report)
    except (ValueError, EnvironmentFault) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1 if isinstance(error, EnvironmentFault) else getattr(error, "exit_code", 2)
    verdict = worst(report.checks)
    code = int(verdict == PROBLEM or (verdict == WARNING and parsed.extra.strict))
    if parsed.extra.json:
        found = {"version": 1, "verdict": verdict, "exit_code": code, "command": command}
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
