"""Our programs as child processes; training from Python."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rl_dist.errors import RESULT_FILE, UserError
from rl_dist.process_group.addresses import ADDRESS_VARIABLES, COPIES
from rl_dist.process_group.process_ends import die_with_parent
from rl_dist.process_group.watchdog import JOB_DIR_VARIABLE
from rl_dist.run_dir import RunDir

SCRIPT = Path(__file__).resolve().parents[2] / "train_distributed.py"
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", JOB_DIR_VARIABLE}
RANK_VARIABLES |= {*ADDRESS_VARIABLES, *COPIES}


def leave_at_signals() -> None:
    """Let SIGINT and SIGTERM leave through all `finally`, which end children."""

    def leave(signum: int, frame: object) -> NoReturn:
        raise SystemExit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, leave)


class Child:
    """A program of ours under way."""

    def __init__(
        self,
        arguments: Sequence[object],
        folder: Path,
        name: str = "child",
        *,
        variables: dict[str, str] | None = None,
        own_session: bool = True,
        echo: bool = False,
    ) -> None:
        """Start this Python in a process group of its own, without stdin.

        Args:
            arguments: of the interpreter.
            folder: of the files in which the child leaves its stderr and its report.
            variables: of its environment, beside ours without those that make a process a rank.
            own_session: Linux shares out cores by session; without it, the child counts as ours.
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
                env=environment | (variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=None if echo else subprocess.DEVNULL,
                stderr=None if echo else stderr,
                start_new_session=own_session,
                process_group=None if own_session else 0,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )

    def kill(self, patience_s: float = 5.0) -> None:
        """End it and all its ranks by SIGKILL, and wait until they are gone."""
        deadline_s = time.monotonic() + patience_s
        with suppress(ProcessLookupError, PermissionError):  # nobody is left
            while time.monotonic() < deadline_s:
                os.killpg(self.job.pid, signal.SIGKILL)
                self.job.poll()
                time.sleep(0.01)
        self.job.wait()

    def facts(self) -> dict[str, str]:
        """Return what it reported; see `rl_dist.errors.report_to_caller`."""
        return json.loads(self._report.read_text())

    def error(self) -> str:
        """Return why it failed: its own error, or the last of what it printed.

        Raises:
            UserError: it refused what it was given; in its own words.
        """
        facts = self.facts()
        error = facts.get("error", "")
        if self.job.returncode == 2 and error:
            raise UserError(error)
        last_lines = self._stderr.read_text(errors="replace").splitlines()[-3:]
        return error or "; ".join(last_lines) or "it printed nothing"


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of a training."""

    success: bool
    exit_code: int  # of the script; negative: ended by that signal
    iterations: int  # of the whole run, those before a resume included
    final_losses: dict[str, float] = field(default_factory=dict)  # of the last iteration
    seconds: float
    run_dir: Path | None  # absolute; None: it never came to have one
    error: str  # one line; "" where there is none


def launch_distributed_training(
    flags: Sequence[str] = (), *, echo: bool = True, script: Path = SCRIPT, **named: Any
) -> TrainingResult:
    """Run train_distributed.py to its end, in processes of its own.

        >>> from rl_dist import launch_distributed_training
        >>> result = launch_distributed_training(num_gpus=2, device="cpu", quick=True)
        >>> if result.success:
        ...     print(result.run_dir, result.iterations, result.final_losses["loss/policy"])
        ... else:
        ...     print(result.exit_code, result.error)

    Ctrl-C lets the training save and stop, and is then raised here; a second one ends it at once.

    Args:
        flags: of the script, as on its command line.
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
            # it is in a session of its own: Ctrl-C has not reached it
            child.job.send_signal(signal.SIGINT)
            child.job.wait()
            raise
        finally:
            child.kill()
        facts = child.facts()
    code = child.job.returncode
    run_dir = Path(facts["run_dir"]).absolute() if "run_dir" in facts else None
    if run_dir and not run_dir.is_dir():  # a failed start leaves none
        run_dir = None
    records = RunDir(run_dir).records(last=1) if run_dir else []
    last = records[-1] if records else {}
    return TrainingResult(
        success=code == 0,
        exit_code=code,
        iterations=last.get("iteration", 0),
        final_losses={name: value for name, value in last.items() if name.startswith("loss/")},
        seconds=time.monotonic() - started_s,
        run_dir=run_dir,
        error=_error(code, facts),
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


def _error(code: int, facts: Mapping[str, str]) -> str:
    if code == 0:
        return ""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return facts.get("error") or f"ended with code {code} without a report"
