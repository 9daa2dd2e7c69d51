"""Run this project's programs in child processes, to train or to measure."""

import functools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_dist.errors import RESULT_FILE, UserError
from rl_dist.files import Record
from rl_dist.process_group.join import RANK_VARIABLES
from rl_dist.process_group.process_ends import die_with_parent, how_it_ended
from rl_dist.run_dir import RunDir

# The script that trains, unless the caller names another one.
SCRIPT = Path(__file__).resolve().parents[2] / "train_distributed.py"
POLL_S = 0.1  # time between two reads of the metrics of short runs
KILL_PATIENCE_S = 5.0  # longest time to kill the processes of a child
# Environment variable that marks a short run. If it is set, the script saves nothing, evaluates
# nothing and trains until it is killed, regardless of its flags.
SHORT_RUN = "RL_DIST_SHORT_RUN"
WARM_UP = 3  # the first WARM_UP iterations are not measured
# To check that the speed is steady, the measured iterations are split into 3 equally long parts
# (rounds). The measurement takes at least 3 iterations and 3 seconds.
ROUNDS = 3
ROUNDS_S = 3.0
# If iterations are slow: this many seconds after all copies have finished their first iteration, 1
# iteration of warm-up and 2 measured iterations are enough. The start of the processes does not
# count: it may take longer than the measurement, and the first iteration on a GPU loads kernels.
ENOUGH_S = 8.0
# The speed is steady if the fastest round is at most this many times as fast as the slowest one.
MAX_SPREAD = 1.5


class ChildError(Exception):
    """Raised if a child process fails or takes too long; the message is for users."""


class ChildTimeoutError(ChildError):
    """Raised if a child process takes too long."""


def leave_at_signals() -> None:
    """Make SIGINT and SIGTERM raise SystemExit, so that each `Child` context kills its child."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, frame: sys.exit(128 + number))


class Child(AbstractContextManager["Child"]):
    """A child process that runs code of this project; killed when the context ends."""

    def __init__(
        self,
        arguments: Sequence[object],
        folder: Path,
        *,
        echo: bool = False,
        short_run: bool = False,
    ) -> None:
        """Start this Python interpreter in a new session, without stdin.

        The child inherits all environment variables except those that make a process a rank.

        Args:
            arguments: arguments of the interpreter.
            folder: directory for the child's stderr, report and temporary files.
            echo: whether the child prints to the stdout and stderr of this process.
            short_run: whether to set SHORT_RUN, because the child is a short run.
        """
        self._stderr = folder / "stderr"
        self._report = folder / "report.json"
        self._report.write_text("{}")
        variables = {
            name: value
            for name, value in os.environ.items()
            if not re.fullmatch(RANK_VARIABLES, name)
        }
        paths = [str(SCRIPT.parent), str(Path.cwd()), variables.get("PYTHONPATH", "")]
        variables |= {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TMPDIR": str(folder),
            RESULT_FILE: str(self._report),
        }
        if short_run:
            variables[SHORT_RUN] = "1"
        with self._stderr.open("wb") as stderr:
            self.job = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=None if echo else subprocess.DEVNULL,
                stderr=None if echo else stderr,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )

    def __exit__(self, *exc_info: object) -> None:
        """Kill all processes of the child's session, and wait until they have ended."""
        deadline_s = time.monotonic() + KILL_PATIENCE_S
        with suppress(ProcessLookupError, PermissionError):  # all processes have ended
            while time.monotonic() < deadline_s:
                os.killpg(self.job.pid, signal.SIGKILL)
                self.job.poll()
                time.sleep(0.01)
        self.job.wait()

    def facts(self) -> dict[str, str]:
        """Return the facts that the child passed to `rl_dist.errors.report_to_caller`."""
        return json.loads(self._report.read_text())

    def error(self) -> ChildError | UserError:
        """Return the error that the child reported, or the last lines of its stderr.

        The error is a UserError if the child rejected its arguments, otherwise a ChildError.
        """
        facts = self.facts()
        code = self.job.returncode
        error = facts.get("error", "")
        if code == 2 and error:
            return UserError(error)
        last_lines = self._stderr.read_text(errors="replace").splitlines()[-3:]
        return ChildError(
            f"a child process ended with code {code}: {error or '; '.join(last_lines)}"
        )


# ---- whole training runs


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of a training run."""

    success: bool
    exit_code: int  # -n means that signal n killed the script
    iterations: int  # iterations of the whole run, including iterations before a resume
    final_losses: dict[str, float]  # losses of the last iteration
    seconds: float
    run_dir: Path | None  # absolute path; None if training did not start
    error: str  # one line; "" after success


def launch_distributed_training(
    flags: Sequence[str] = (), *, echo: bool = True, script: Path = SCRIPT, **named: Any
) -> TrainingResult:
    """Run train_distributed.py in new processes and wait until it ends.

        >>> from rl_dist import launch_distributed_training
        >>> result = launch_distributed_training(num_gpus=2, device="cpu", quick=True)
        >>> if result.success:
        ...     print(result.run_dir, result.iterations, result.final_losses["loss/policy"])
        ... else:
        ...     print(result.exit_code, result.error)

    After Ctrl-C, the script saves a checkpoint and stops; then this function raises
    KeyboardInterrupt. A second Ctrl-C ends the script immediately.

    Args:
        flags: flags of the script, as on its command line.
        echo: whether the script prints to the stdout and stderr of this process.
        script: the training script.
        named: further flags, by name. True and False are passed as true and false, a dict as JSON;
            flags with the value None are omitted.
    """
    started_s = time.monotonic()
    arguments = [script, *flags, *as_flags(named)]
    with (
        tempfile.TemporaryDirectory(prefix="rl_dist_result_") as folder,
        Child(arguments, Path(folder), echo=echo) as child,
    ):
        try:
            child.job.wait()
        except KeyboardInterrupt:
            # The child has its own session, so Ctrl-C did not reach it.
            child.job.send_signal(signal.SIGINT)
            child.job.wait()
            raise
        facts = child.facts()
    code = child.job.returncode
    run_dir = Path(facts["run_dir"]) if "run_dir" in facts else None
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


def as_flags(named: Mapping[str, object]) -> list[str]:
    """Convert keyword arguments to command-line flags; omit flags that are None."""
    flags = []
    for name, value in named.items():
        if isinstance(value, bool | Mapping):
            value = json.dumps(value)
        elif isinstance(value, list | tuple):  # such as stop_at=("valid/return", 475)
            value = " ".join(map(str, value))
        if value is not None:
            flags.append(f"--{name}={value}")
    return flags


# ---- short runs


@dataclass(frozen=True)
class ShortRuns:
    """Measurements of several copies of a run that trained at the same time."""

    records: list[list[Record]]  # for each copy, the metrics of its measured iterations
    config: dict[str, Any]  # settings of the first copy, by section
    gradient_bytes: int


def measure_short_runs(copies: Sequence[Sequence[str]], timeout_s: float = 600.0) -> ShortRuns:
    """Train independent copies of a run at the same time, and return their metrics.

    If each copy has the resources of one rank (one GPU or a number of threads), the metrics show
    how much the ranks of one machine slow each other down by sharing cores, caches and memory.
    Unlike ranks, the copies never wait for each other. All copies are killed at the end, or when
    the caller dies.

    This function overrides the flags for run directory and seed, and makes each copy a short run
    (see SHORT_RUN). It measures at least ROUNDS iterations of each copy, or only 2 if the
    iterations are very slow; during the measurement, all copies train.

    Args:
        copies: flags of the training script for each copy.
        timeout_s: longest duration of this call, including the start of the copies.

    Raises:
        UserError: the script rejects the flags.
        ChildError: a copy failed for another reason.
        ChildTimeoutError: the measurement took longer than `timeout_s`.
    """
    if any(flag.startswith("--resume") for flags in copies for flag in flags):
        raise UserError("--resume does not work for short runs; pass the flags of the run instead")
    started_s = time.monotonic()
    with ExitStack() as exit_stack:
        folder = Path(exit_stack.enter_context(tempfile.TemporaryDirectory(prefix="short_run_")))
        runs = []
        children = []
        for number, flags in enumerate(copies, 1):
            run = RunDir(folder / str(number) / "run")
            run.path.parent.mkdir()
            # With equal seeds, the episodes of all copies would end at the same time.
            arguments = [SCRIPT, *flags, f"--seed={number}", f"--run_dir={run.path}"]
            child = Child(arguments, run.path.parent, short_run=True)
            children.append(exit_stack.enter_context(child))
            runs.append(run)

        begun_s = started_s  # last time when a copy had not yet finished its first iteration
        warm_s = math.inf  # time when all copies had finished their warm-up
        warm_up: list[int] = []  # iterations that each copy had finished at time `warm_s`
        while True:
            time.sleep(POLL_S)
            now_s = time.monotonic()
            records = [run.records() for run in runs]
            if not all(records):
                begun_s = now_s
            is_late = now_s - begun_s > ENOUGH_S
            if not warm_up and (is_late or min(map(len, records)) >= WARM_UP):
                warm_s = now_s
                warm_up = [*map(len, records)]
            measured = [copy[skip:] for copy, skip in zip(records, warm_up, strict=False)]
            fewest = min(map(len, measured), default=0)
            if (fewest >= ROUNDS and now_s >= warm_s + ROUNDS_S) or (is_late and fewest >= 2):
                state = runs[0].state()
                gradient_bytes = state.gradient_bytes if state else 0
                return ShortRuns(measured, runs[0].config(), gradient_bytes)
            for child in children:
                if child.job.poll() is not None:
                    raise child.error()
            if now_s - started_s > timeout_s:
                raise ChildTimeoutError("a short run took too long: try smaller sizes")


def round_rates(records: Sequence[Record]) -> list[float]:
    """Split iterations into up to ROUNDS equally long parts; return the steps/s of each part."""
    rates = [record["time/sps"] for record in records]
    size = max(1, len(rates) // ROUNDS)
    starts = range(0, min(len(rates), ROUNDS * size), size)
    return [statistics.harmonic_mean(rates[start : start + size]) for start in starts]


def unsteady(rates: Sequence[float]) -> str:
    """Describe speeds that differ too much (see MAX_SPREAD), or return ""."""
    if max(rates) <= MAX_SPREAD * min(rates):
        return ""
    listed = ", ".join(f"{rate:,.0f}" for rate in rates)
    return f"{listed} steps/s in consecutive parts of the run (more than {MAX_SPREAD}x apart)"
