"""The training command as a function: start, wait, tell what came of it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rl_dist.launch.child_process import SCRIPT, errors_of, kill_group, start
from rl_dist.telemetry.metrics import METRICS_FILE
from rl_dist.telemetry.rank_logs import tail

_RUN_DIR = re.compile(r"run directory: (.+?)(?:, going on from .*)?\n")  # as the script announces it
KEPT_LINES = 50  # of what the script says


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What came of a training."""

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
        >>> result = launch_distributed_training(num_gpus=2, device="cpu", quick=True, anneal_lr=False)
        >>> if result.success:
        ...     print(result.run_dir, result.iterations, result.final_losses["loss/policy"])
        ... else:
        ...     print(result.exit_code, result.error)

    Ctrl-C lets the training save and stop, and is then raised here; a second one ends it at once.

    Args:
        flags: of the script, as on its command line.
        echo: pass on what the script says.
        script: the training script.
        named: flags by name: True is --name, False --no-name, None leaves the flag out, a dict becomes JSON.
    """
    started_s = time.monotonic()
    job = start(
        [script, *flags, *as_flags(named)],
        variables={"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert job.stdout and job.stderr
    out, err = _Listener(job.stdout, sys.stdout if echo else None), _Listener(job.stderr, sys.stderr if echo else None)
    try:
        _wait(job)
    finally:
        kill_group(job)
        out.close()
        err.close()
    run_dir = Path(out.run_dir).absolute() if out.run_dir and Path(out.run_dir).is_dir() else None
    last = _last_record(run_dir)
    return TrainingResult(
        success=job.returncode == 0,
        exit_code=job.returncode,
        iterations=last.get("iteration", 0),
        final_losses={name: value for name, value in last.items() if name.startswith("loss/")},
        seconds=time.monotonic() - started_s,
        run_dir=run_dir,
        error=_error(job.returncode, list(out.lines), list(err.lines)),
    )


def as_flags(named: Mapping[str, Any]) -> list[str]:
    """Keyword arguments as words of a command line."""
    words = []
    for name, value in named.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words.append(f"--{name}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return words


def _wait(job: subprocess.Popen[str]) -> None:
    try:
        job.wait()
    except KeyboardInterrupt:
        job.send_signal(signal.SIGINT)  # it is in a session of its own: Ctrl-C has not reached it
        job.wait()
        raise


class _Listener:
    """Reads a stream to its end in a thread, keeps the last lines, passes all of them on."""

    def __init__(self, stream: IO[str], echo: IO[str] | None) -> None:
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.run_dir = ""
        self._stream, self._echo = stream, echo
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for line in self._stream:
            self.lines.append(line)
            if found := _RUN_DIR.fullmatch(line):
                self.run_dir = self.run_dir or found[1]
            if self._echo is not None:
                try:
                    self._echo.write(line)
                    self._echo.flush()
                except (OSError, ValueError):  # nobody reads it any more: the training goes on
                    self._echo = None

    def close(self) -> None:
        self._thread.join()
        self._stream.close()


def _last_record(run_dir: Path | None) -> dict[str, Any]:
    for line in reversed(tail(run_dir / METRICS_FILE).splitlines() if run_dir else []):
        try:
            record = json.loads(line)
        except ValueError:  # torn
            continue
        if isinstance(record, dict):
            return record
    return {}


def _error(code: int, out: Sequence[str], err: Sequence[str]) -> str:
    """Why it did not succeed, in a line."""
    if code == 0:
        return ""
    stopped = [line.strip() for line in out if line.startswith("stopped by ")]
    said = [line.strip() for line in err if line.strip()]
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return (errors_of(err) or stopped or said or [f"ended with code {code} without a word"])[-1]
