"""Our programs as children: a training from Python, short runs side by side."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil

from rl_dist.errors import RESULT_FILE, UserError
from rl_dist.process_group.join import ADDRESS_VARIABLES, COPIES
from rl_dist.process_group.process_ends import die_with_parent
from rl_dist.process_group.watchdog import JOB_DIR_VARIABLE
from rl_dist.run_dir import RunDir

SCRIPT = Path(__file__).resolve().parents[2] / "train_distributed.py"
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", JOB_DIR_VARIABLE}
RANK_VARIABLES |= {*ADDRESS_VARIABLES, *COPIES}
POLL_S = 0.1
KILL_PATIENCE_S = 5.0
# Flags of a short run: it neither ends by itself nor saves or evaluates anything.
SHORT_RUN_FLAGS = {
    "total_steps": "1000000000000000",
    "validate_every": "0",
    "checkpoint_every": "1000000000",
    "keep_best": "off",
    "max_restarts": "0",
}
DROPPED_FLAGS = ("run_dir", "num_episodes", "on_event", "seed", "seeds", "profile")
ROUNDS, ROUND_S = 3, 1.0  # a rate is known if rounds of at least a second agree on it
MAX_SPREAD = 1.5  # of the highest rate over the lowest
Record = dict[str, Any]


class ChildError(Exception):
    """A child failed or made no progress; the message is for the user."""


class ChildTimeoutError(ChildError):
    """A child works, but did not end in time."""


def leave_at_signals() -> None:
    """Let SIGINT and SIGTERM leave through all `finally`, which end children."""

    def leave(signum: int, frame: object) -> NoReturn:
        raise SystemExit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, leave)


class Child:
    """A running program of ours."""

    def __init__(
        self,
        arguments: Sequence[object],
        folder: Path,
        name: str = "child",
        *,
        variables: Mapping[str, str] | None = None,
        echo: bool = False,
    ) -> None:
        """Start this Python in a new session, without stdin.

        Args:
            arguments: of the interpreter.
            folder: where the child leaves its stderr and its report.
            variables: of its environment, beside ours without those that make a process a rank.
            echo: it prints where this process prints.
        """
        self._stderr = folder / f"{name}.err"
        self._report = folder / f"{name}.json"
        self._report.write_text("{}")
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in RANK_VARIABLES and "TORCHELASTIC" not in name
        }
        paths = [str(Path.cwd()), str(SCRIPT.parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment[RESULT_FILE] = str(self._report)
        with self._stderr.open("wb") as stderr:
            self.job = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                env=environment | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=None if echo else subprocess.DEVNULL,
                stderr=None if echo else stderr,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )

    def kill(self) -> None:
        """End it and all its ranks by SIGKILL, and wait until they are gone."""
        deadline_s = time.monotonic() + KILL_PATIENCE_S
        with suppress(ProcessLookupError, PermissionError):  # no process is left
            while time.monotonic() < deadline_s:
                os.killpg(self.job.pid, signal.SIGKILL)
                self.job.poll()
                time.sleep(0.01)
        self.job.wait()

    def facts(self) -> dict[str, str]:
        """Return what it reported; see `rl_dist.errors.report_to_caller`."""
        return json.loads(self._report.read_text())

    def error(self) -> ChildError | UserError:
        """Return why it ended: its own error, or the last of what it printed.

        A UserError is a refusal of what it was given, in its own words.
        """
        facts, code = self.facts(), self.job.returncode
        error = facts.get("error", "")
        if code == 2 and error:
            return UserError(error)
        last_lines = self._stderr.read_text(errors="replace").splitlines()[-3:]
        reason = error or "; ".join(last_lines) or "it printed nothing"
        return ChildError(f"a child process ended with code {code}: {reason}")


# ---- a training from Python


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of a training."""

    success: bool
    exit_code: int  # of the script; negative: ended by that signal
    iterations: int  # of the whole run, those before a resume included
    final_losses: dict[str, float] = field(default_factory=dict)  # of the last iteration
    seconds: float
    run_dir: Path | None  # absolute; None: a failed start has none
    error: str  # one line; "": there is none


def launch_distributed_training(
    flags: Sequence[str] = (), *, echo: bool = True, script: Path = SCRIPT, **named: Any
) -> TrainingResult:
    """Run train_distributed.py to its end, in new processes.

        >>> from rl_dist import launch_distributed_training
        >>> result = launch_distributed_training(num_gpus=2, device="cpu", quick=True)
        >>> if result.success:
        ...     print(result.run_dir, result.iterations, result.final_losses["loss/policy"])
        ... else:
        ...     print(result.exit_code, result.error)

    After Ctrl-C the training saves and stops, then KeyboardInterrupt is raised here. A second
    Ctrl-C ends the training immediately.

    Args:
        flags: flags of the script, as on its command line.
        echo: let the script print to stdout and stderr of this process.
        script: the training script.
        named: flags by name: True is --name, False --no-name, None no flag, a dict becomes JSON.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rl_dist_result_") as folder:
        words = [script, *flags, *as_flags(named)]
        child = Child(words, Path(folder), variables={"PYTHONUNBUFFERED": "1"}, echo=echo)
        try:
            child.job.wait()
        except KeyboardInterrupt:
            # the child has its own session, so Ctrl-C did not reach it
            child.job.send_signal(signal.SIGINT)
            child.job.wait()
            raise
        finally:
            child.kill()
        facts = child.facts()
    code = child.job.returncode
    run_dir = Path(facts["run_dir"]).absolute() if "run_dir" in facts else None
    if run_dir and not run_dir.is_dir():
        run_dir = None
    records = RunDir(run_dir).records(last=1) if run_dir else []
    last = records[-1] if records else {}
    error = f"ended by {signal.Signals(-code).name}" if code < 0 else facts.get("error", "")
    return TrainingResult(
        success=code == 0,
        exit_code=code,
        iterations=last.get("iteration", 0),
        final_losses={name: value for name, value in last.items() if name.startswith("loss/")},
        seconds=time.monotonic() - started_s,
        run_dir=run_dir,
        error=(error or f"ended with code {code} and without a report") if code else "",
    )


def as_flags(named: Mapping[str, Any]) -> list[str]:
    """Turn keyword arguments into words of a command line."""
    words = []
    for name, value in named.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words.append(f"--{name}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return words


# ---- short runs


@dataclass(frozen=True)
class ShortRuns:
    """The measurements of copies while all of them trained."""

    # by copy: its metrics of the iterations that were measured
    records: list[list[Record]]
    config: dict[str, Any]  # of the first copy, by section
    gradient_bytes: int
    copy_bytes: int = 0  # of memory that the first copy alone takes; 0: unknown


def measure_short_runs(
    flags: Sequence[str],
    copies: int = 1,
    threads: int = 0,
    iterations: int = ROUNDS,
    *,
    num_gpus: int | None = 1,
    device_type: str = "cpu",
    timeout_s: float = 600.0,
    enough_s: float = math.inf,
    steady: bool = False,
) -> ShortRuns:
    """Train independent copies side by side and measure them while all of them train.

    As many one-rank trainings as a run would have ranks on this machine, each with a rank's threads
    or GPU, show what ranks cost each other (cores, caches, memory) without waiting for each other.
    All are killed at the end, and when the caller dies. How long they train, where, what they save
    and their seed are chosen here.

    Args:
        flags: of the training script, with the sizes that one rank has.
        threads: of each copy; 0: training chooses.
        iterations: measured of the slowest copy; others may have a few more or less.
        num_gpus: ranks of each copy; None: the ranks and devices that the flags mean.
        device_type: "cuda": each copy has its own GPU.
        timeout_s: for everything.
        enough_s: after which two iterations are enough, the first included.
        steady: measure for ROUNDS seconds at least, and again if the rates of rounds differ;
            without it, three iterations only warm up.

    Raises:
        UserError: the script refuses the flags; its own words.
        ChildError: a copy failed in another way, or time is up (ChildTimeoutError).
    """
    words = _short_run_flags(flags, threads, num_gpus, device_type)
    started_s = time.monotonic()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="short_run_")))
        runs = [RunDir(folder / f"copy_{number}") for number in range(copies)]
        children = []
        for number, run in enumerate(runs):
            # seeds differ, so that the episodes of copies do not end together
            arguments = [SCRIPT, *words, f"--seed={number + 1}", "--run_dir", run.path]
            on_gpu = device_type == "cuda" and num_gpus is not None
            variables = {"CUDA_VISIBLE_DEVICES": _gpu(number)} if on_gpu else {}
            children.append(Child(arguments, folder, run.path.name, variables=variables))
            held.callback(children[-1].kill)
        begun: list[int] = []  # iterations of each copy before the measurement
        began_s = math.inf
        is_second_try = not steady
        while True:
            time.sleep(POLL_S)
            now_s = time.monotonic()
            records = [run.records() for run in runs]
            ended = [len(copy_records) for copy_records in records]
            if not begun and min(ended) >= (1 if steady else 3):
                begun, began_s = ended, now_s
            measured = [r[skip:] for r, skip in zip(records, begun or ended, strict=True)]
            if now_s - started_s > enough_s and min(ended) >= 2:
                measured = records
                break
            waited = not steady or now_s - began_s >= ROUNDS * ROUND_S
            if waited and min(map(len, measured)) >= iterations:
                if is_second_try or is_steady(round_rates(measured[0])):
                    break
                begun, began_s, is_second_try = ended, now_s, True
            for child in children:
                if child.job.poll() is not None:
                    raise child.error()
            if now_s - started_s > timeout_s:
                raise ChildTimeoutError("a short run took too long: try smaller sizes")
        state = runs[0].state()
        config = json.loads((runs[0].path / "config.json").read_text(encoding="utf-8"))
        gradient_bytes = state.gradient_bytes if state else 0
        return ShortRuns(measured, config, gradient_bytes, _own_memory_bytes(children[0]))


def _own_memory_bytes(child: Child) -> int:
    """Return the resident memory of a child's processes that they do not share; 0: unknown."""
    try:
        supervisor = psutil.Process(child.job.pid)
        processes = [supervisor, *supervisor.children(recursive=True)]
        return sum(int(process.memory_full_info().uss) for process in processes)
    except psutil.Error:
        return 0


def _short_run_flags(
    flags: Sequence[str], threads: int, num_gpus: int | None, device_type: str
) -> list[str]:
    if without(flags, ["resume"]) != list(flags):
        raise UserError("--resume: short runs start at the beginning; give the flags of the run")
    dropped, chosen = [*DROPPED_FLAGS], dict(SHORT_RUN_FLAGS)
    if num_gpus is not None:
        dropped.append("gpu_ids")
        chosen |= {"num_gpus": str(num_gpus), "device": device_type}
    if threads:
        chosen["threads"] = str(threads)
    return [*without(flags, (*dropped, *chosen)), *(f"--{k}={v}" for k, v in chosen.items())]


def round_rates(records: Sequence[Record]) -> list[float]:
    """Return the steps/s of consecutive rounds, all of the same number of iterations."""
    rates = [record["time/sps"] for record in records]
    size = max(1, len(rates) // ROUNDS)
    starts = range(0, min(len(rates), ROUNDS * size), size)
    return [statistics.harmonic_mean(rates[start : start + size]) for start in starts]


def is_steady(rates: Sequence[float]) -> bool:
    """Return True if rounds agree on a rate."""
    return max(rates) <= MAX_SPREAD * min(rates)


def describe_rates(rates: Sequence[float]) -> str:
    """Return the rates of rounds that disagree, for a message."""
    listed = ", ".join(f"{rate:,.0f}" for rate in rates)
    return f"{listed} steps/s in rounds of the same work (more than {MAX_SPREAD}x apart)"


def without(flags: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the flags without those of these names, however spelled."""
    kept: list[str] = []
    keep = True
    for word in flags:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            keep = name not in names and name.removeprefix("no_") not in names
        if keep:
            kept.append(word)
    return kept


def _gpu(number: int) -> str:
    """Return the name of this process's GPU `number`, as another process must call it."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return visible[number] if number < len(visible) else str(number)
