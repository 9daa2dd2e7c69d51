"""Run our programs as child processes: whole training runs or short measurements."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_dist.errors import RESULT_FILE, UserError
from rl_dist.process_group.join import COPIES, JOB_DIR_VARIABLE
from rl_dist.process_group.process_ends import die_with_parent, how_it_ended
from rl_dist.run_dir import RunDir

SCRIPT = Path(__file__).resolve().parents[2] / "train_distributed.py"
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
RANK_VARIABLES |= {JOB_DIR_VARIABLE, *COPIES}
POLL_S = 0.1
KILL_PATIENCE_S = 5.0
# With these flags a run does not end by itself, saves nothing and evaluates nothing.
SHORT_RUN_FLAGS: dict[str, Any] = {
    "total_steps": 10**15,
    "validate_every": 0,
    "checkpoint_every": 10**9,
    "keep_best": "off",
    "max_restarts": 0,
}
DROPPED_FLAGS = ("run_dir", "num_episodes", "on_event", "seed", "seeds", "profile")
WARM_UP = 3  # number of first iterations that are not measured
# A rate is reliable if it is similar in 3 rounds that together take at least 3 seconds.
ROUNDS, ROUNDS_S = 3, 3.0
MAX_SPREAD = 1.5  # rates are similar up to this ratio of the highest to the lowest rate
Record = dict[str, Any]


class ChildError(Exception):
    """A child failed or made no progress; the message is for the user."""


class ChildTimeoutError(ChildError):
    """A child did not end in time."""


def leave_at_signals() -> None:
    """Make SIGINT and SIGTERM raise SystemExit, so that `finally` ends the children."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, frame: sys.exit(128 + number))


class Child:
    """A child process that runs one of our programs."""

    def __init__(
        self,
        arguments: Sequence[object],
        folder: Path,
        *,
        variables: Mapping[str, str] | None = None,
        echo: bool = False,
    ) -> None:
        """Start this Python interpreter in a new session, without stdin.

        The child inherits all environment variables except those that make a process a rank.

        Args:
            arguments: arguments of the interpreter.
            folder: directory for the child's stderr and report.
            variables: additional environment variables.
            echo: whether the child prints to stdout and stderr of this process.
        """
        self._stderr = folder / "stderr"
        self._report = folder / "report.json"
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
        """Kill the child and all processes of its session, and wait until they ended."""
        deadline_s = time.monotonic() + KILL_PATIENCE_S
        with suppress(ProcessLookupError, PermissionError):  # no process is left
            while time.monotonic() < deadline_s:
                os.killpg(self.job.pid, signal.SIGKILL)
                self.job.poll()
                time.sleep(0.01)
        self.job.wait()

    def facts(self) -> dict[str, str]:
        """Return what the child reported by `rl_dist.errors.report_to_caller`."""
        return json.loads(self._report.read_text())

    def error(self) -> ChildError | UserError:
        """Return the error that the child reported, or the last lines of its stderr.

        The result is a UserError if the child rejected its arguments, and else a ChildError.
        """
        facts, code = self.facts(), self.job.returncode
        error = facts.get("error", "")
        if code == 2 and error:
            return UserError(error)
        last_lines = self._stderr.read_text(errors="replace").splitlines()[-3:]
        reason = error or "; ".join(last_lines)
        return ChildError(f"a child process ended with code {code}: {reason}")


# ---- whole training runs


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of a training run."""

    success: bool
    exit_code: int  # -n: signal n killed the script
    iterations: int  # number of iterations of the whole run, including those before a resume
    final_losses: dict[str, float]  # losses of the last iteration
    seconds: float
    run_dir: Path | None  # absolute path; None: training did not start
    error: str  # one line; "" after success


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

    After Ctrl-C, the script saves and stops, then this function raises KeyboardInterrupt. A second
    Ctrl-C ends the script immediately.

    Args:
        flags: flags of the script, as on its command line.
        echo: whether the script prints to stdout and stderr of this process.
        script: the training script.
        named: flags by name. True becomes --name, False becomes --no-name, a dict becomes JSON, and
            None is skipped.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rl_dist_result_") as folder:
        child = Child([script, *flags, *as_flags(named)], Path(folder), echo=echo)
        try:
            child.job.wait()
        except KeyboardInterrupt:
            # The child has its own session, so Ctrl-C did not reach it.
            child.job.send_signal(signal.SIGINT)
            child.job.wait()
            raise
        finally:
            child.kill()
        facts = child.facts()
    code = child.job.returncode
    run_dir = Path(facts["run_dir"]).absolute() if "run_dir" in facts else None
    records = RunDir(run_dir).records(last=1) if run_dir else []
    last = records[-1] if records else {}
    return TrainingResult(
        success=code == 0,
        exit_code=code,
        iterations=last.get("iteration", 0),
        final_losses={name: value for name, value in last.items() if name.startswith("loss/")},
        seconds=time.monotonic() - started_s,
        run_dir=run_dir,
        error=(facts.get("error") or how_it_ended(code)) if code else "",
    )


def as_flags(named: Mapping[str, Any]) -> list[str]:
    """Convert keyword arguments to command-line flags; skip those that are None."""
    flags = []
    for name, value in named.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            flags.append(f"--{name}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return flags


# ---- short runs


@dataclass(frozen=True)
class ShortRuns:
    """Measurements of several copies of a training run that ran side by side."""

    records: list[list[Record]]  # for each copy, the metrics of its measured iterations
    config: dict[str, Any]  # settings of the first copy, by section
    gradient_bytes: int


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
    """Train independent copies side by side, and measure while all of them train.

    If each copy has the threads or the GPU of one rank, the copies show how much the ranks of one
    machine slow each other down by sharing cores, caches and memory. Time in which ranks wait for
    each other is not included. All copies are killed at the end, or when the caller dies. Flags for
    run length, run directory, checkpoints and seed are replaced. The first WARM_UP iterations are
    not measured.

    Args:
        flags: flags of the training script, with sizes for one rank.
        copies: number of copies.
        threads: number of threads of each copy; 0: the script decides.
        iterations: number of iterations to measure in the slowest copy.
        num_gpus: value of --num_gpus for each copy; None: as in `flags`.
        device_type: with "cuda", each copy gets its own GPU, unless num_gpus is None.
        timeout_s: longest duration of this call.
        enough_s: after this time, two iterations of each copy are enough, and warm-up iterations
            are measured as well.
        steady: measure for at least ROUNDS_S, so that the rates of rounds can be compared.

    Raises:
        UserError: the script rejects the flags.
        ChildError: a copy failed for another reason.
        ChildTimeoutError: the measurement took longer than `timeout_s`.
    """
    training_flags = _short_run_flags(flags, threads, num_gpus, device_type)
    started_s = time.monotonic()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="short_run_")))
        runs = [RunDir(folder / str(number) / "run") for number in range(copies)]
        children = []
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        gpus = visible.split(",") if visible else list(map(str, range(copies)))
        for number, run in enumerate(runs):
            # With equal seeds, episodes would end in all copies at the same time.
            arguments = [SCRIPT, *training_flags, f"--seed={number + 1}", "--run_dir", run.path]
            on_gpu = device_type == "cuda" and num_gpus is not None
            variables = {"CUDA_VISIBLE_DEVICES": gpus[number]} if on_gpu else {}
            run.path.parent.mkdir()
            children.append(Child(arguments, run.path.parent, variables=variables))
            held.callback(children[-1].kill)

        began_s = math.inf  # time when all copies had finished their warm-up
        warm_up: list[int] = []  # number of iterations of each copy at that time
        while True:
            time.sleep(POLL_S)
            now_s = time.monotonic()
            records = [run.records() for run in runs]
            if now_s - started_s > enough_s and min(map(len, records)) >= 2:
                break
            if not warm_up and min(map(len, records)) >= WARM_UP:
                began_s, warm_up = now_s, [*map(len, records)]
            measured = [r[skip:] for r, skip in zip(records, warm_up, strict=False)]
            if now_s >= began_s + ROUNDS_S * steady and min(map(len, measured)) >= iterations:
                records = measured
                break
            for child in children:
                if child.job.poll() is not None:
                    raise child.error()
            if now_s - started_s > timeout_s:
                raise ChildTimeoutError("a short run took too long: try smaller sizes")
        state = runs[0].state()
        gradient_bytes = state.gradient_bytes if state else 0
        return ShortRuns(records, runs[0].config(), gradient_bytes)


def _short_run_flags(
    flags: Sequence[str], threads: int, num_gpus: int | None, device_type: str
) -> list[str]:
    if without(flags, ["resume"]) != list(flags):
        raise UserError("--resume: short runs start at the beginning; give the flags of the run")
    chosen = SHORT_RUN_FLAGS | ({"threads": threads} if threads else {})
    if num_gpus is not None:
        chosen |= {"num_gpus": num_gpus, "device": device_type, "gpu_ids": ""}
    return [*without(flags, (*DROPPED_FLAGS, *chosen)), *as_flags(chosen)]


def round_rates(records: Sequence[Record]) -> list[float]:
    """Split iterations into equal consecutive rounds; return the steps/s of each."""
    rates = [record["time/sps"] for record in records]
    size = max(1, len(rates) // ROUNDS)
    starts = range(0, min(len(rates), ROUNDS * size), size)
    return [statistics.harmonic_mean(rates[start : start + size]) for start in starts]


def is_steady(rates: Sequence[float]) -> bool:
    """Return True if all rates are similar (see MAX_SPREAD)."""
    return max(rates) <= MAX_SPREAD * min(rates)


def describe_rates(rates: Sequence[float]) -> str:
    """Describe rates that are not steady, for use in a message."""
    listed = ", ".join(f"{rate:,.0f}" for rate in rates)
    return f"{listed} steps/s in equal rounds (they differ by more than {MAX_SPREAD}x)"


def without(flags: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return `flags` without those in `names`, also if spelled --no-name or --a-b."""
    kept: list[str] = []
    keep = True
    for word in flags:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            keep = name not in names and name.removeprefix("no_") not in names
        if keep:
            kept.append(word)
    return kept
