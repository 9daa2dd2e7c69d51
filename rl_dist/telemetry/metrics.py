"""Write the metrics, logs and progress of a training run."""

import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from rl_dist.errors import UserError, one_line, unwritable
from rl_dist.files import Record, log_once, path_to_write, plain_file
from rl_dist.run_dir import RunDir
from rl_dist.telemetry.loggers import GuardedLogger, open_tensorboard
from rl_dist.telemetry.progress import Progress, stalled

logger = logging.getLogger(__name__)
STATE_EVERY_S = 1.0  # shortest time between two updates of state.json by `MetricsWriter.write`
LOG_FORMAT = "%(asctime)s %(levelname)s rank {} %(name)s: %(message)s"


# ---- writers


class NullWriter:
    """Writes nothing; all ranks except the main rank use this writer."""

    def write(self, record: Record, *, done: int) -> None:
        """Write the metrics of one iteration."""

    def say(self, text: str) -> None:
        """Print a line for the user."""

    def update_state(self, **changes: object) -> None:
        """Change fields of state.json; `rl_dist.run_dir.JobState` lists the fields."""

    def flush(self) -> None:
        """Flush everything written so far to disk."""

    def close(self) -> None:
        """Close all files; a second call does nothing."""


class MetricsWriter(NullWriter):
    """Writes the metrics of each iteration to files, loggers and a progress display."""

    def __init__(
        self,
        run: RunDir,
        total: int,
        unit: str,
        *,
        start: int = 0,
        purge_step: int | None = None,
        loggers: Sequence[GuardedLogger] = (),
        advice: str = "",
    ) -> None:
        """Open the files of a run; new lines are appended to metrics.jsonl.

        Args:
            run: directory of the run. If it is deleted or replaced, `write` raises an error.
            total: value of `done` (see `write`) at the end of the run.
            unit: unit of `done`, such as "episodes".
            start: value of `done` at the start; above 0 in a resumed run.
            purge_step: the first `global_step` that this writer will write. TensorBoard hides the
                values that earlier writers wrote for this and later steps.
            loggers: loggers in addition to TensorBoard, see `loggers.open_logger`.
            advice: text that says what to do if the returns of episodes do not rise. It is printed
                in the middle of the run if they have not risen; "": print nothing.
        """
        try:
            self._lines = _LineFile(path_to_write(run.path, run.metrics_path.name))
            self._loggers = [open_tensorboard(run.path, purge_step=purge_step), *loggers]
        except OSError as error:
            raise unwritable(f"run_dir {run.path}", error) from None
        self._progress = Progress(total, unit, start)
        self._advice = advice
        # value of `done` at which to check the returns; infinite after the check
        self._half = total / 2 if start < total / 2 else math.inf
        self._run = run
        self._state_s = -math.inf  # time when `write` last updated state.json
        self._unwritten: Record = {}  # changes not yet in state.json

    def write(self, record: Record, *, done: int) -> None:
        """Write the metrics of one iteration.

        Args:
            record: numbers by name. It must have "iteration" and "global_step", and may have
                "ranks", a list with one mapping per rank. NaN and infinities become null.
            done: progress so far, in the unit that was passed to the writer.

        Raises:
            UserError: the run directory was deleted or replaced.
        """
        plain = without_nan(record)
        if not self._run.is_in_place():
            self._loggers.clear()  # `close` would let them write to a new directory
            problem = "was deleted or replaced during training, so nothing more is saved there"
            raise UserError(f"{self._run.path} {problem}", exit_code=1)
        self._lines.append(json.dumps(plain, allow_nan=False) + "\n")
        for metrics_logger in self._loggers:
            metrics_logger.write(plain, plain["global_step"])
        self._progress.show(plain, done)
        if self._advice and done >= self._half:
            self._half = math.inf
            if problem := stalled(self._run.records()):
                self.say(f"{problem}, {self._advice}")
        self._unwritten = {
            "phase": "training",
            "iteration": plain["iteration"],
            "global_step": plain["global_step"],
            "episodes": plain.get("episode/total", 0),
        }
        now_s = time.monotonic()
        if now_s - self._state_s >= STATE_EVERY_S:
            self.update_state()
            self._state_s = now_s

    def update_state(self, **changes: object) -> None:
        """Write changes to state.json immediately.

        The next call of `write` updates state.json again, even before STATE_EVERY_S have passed.
        """
        self._run.update_state(**self._unwritten | changes)
        self._unwritten = {}
        self._state_s = -math.inf

    def say(self, text: str) -> None:
        """Print a line for the user."""
        print(text, flush=True)

    def flush(self) -> None:
        """Flush everything to disk; call this before saving a checkpoint."""
        self._lines.flush()
        for metrics_logger in self._loggers:
            metrics_logger.flush()

    def close(self) -> None:
        """Close the files and the progress display; a second call does nothing."""
        if self._unwritten:
            self.update_state()
        self._progress.close()
        self._lines.close()
        for metrics_logger in self._loggers:
            metrics_logger.close()


class _LineFile:
    """Appends whole lines to a file.

    If the disk is full, new lines wait in memory until there is space.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = b""
        self._file = open(path, "ab", buffering=0, opener=plain_file)  # noqa: SIM115

    def append(self, lines: str = "") -> None:
        """Append the waiting lines and the new `lines`; after an error, all of these lines wait."""
        self._waiting += lines.encode()
        end = self._file.seek(0, os.SEEK_END)
        remaining = self._waiting
        try:
            while remaining:  # a disk that is almost full may accept only some of the bytes
                remaining = remaining[self._file.write(remaining) :]
            self._waiting = b""
        except OSError as error:
            # Do not stop training: only a checkpoint that cannot be saved is a reason for that.
            with suppress(OSError):
                self._file.truncate(end)
            log_once(f"cannot write {self._path}: {error.strerror}; new lines wait in memory")

    def flush(self) -> None:
        self.append()
        with suppress(OSError):  # `append` has already reported a full disk
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self.append()
            self._file.close()


def without_nan(value: Any) -> Any:
    """Convert torch and numpy numbers to JSON types, and NaN and infinity to None."""
    return to_jsonable_python(value, inf_nan_mode="null", fallback=lambda number: number.item())


# ---- logs

_handlers: list[logging.Handler] = []  # handlers that `setup_logging` added
_levels: list[int] = []  # the level of the root logger before `setup_logging`, if it was called


class _Console(logging.Handler):
    """Prints warnings and errors on stderr, except errors that `launch` itself prints."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "rl_dist.launch.ranks":
            print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)


def setup_logging(run_dir: str | Path, rank: int) -> None:
    """Log INFO and above to logs/rank_N.log; rank 0 also prints warnings.

    Handlers from an earlier call are removed.
    """
    close_logging()
    name = f"logs/rank_{rank}.log"
    try:
        path = path_to_write(run_dir, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        file_handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise unwritable(f"{run_dir}/{name}", error) from None
    file_handler.setFormatter(logging.Formatter(LOG_FORMAT.format(rank)))
    _handlers.append(file_handler)
    if rank == 0:
        _handlers.append(_Console(logging.WARNING))
    root = logging.getLogger()
    _levels.append(root.level)
    root.setLevel(logging.INFO)
    for handler in _handlers:
        root.addHandler(handler)
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # print no traceback if a line is lost because the disk is full
    threading.excepthook = _log_end_of_thread


def _log_end_of_thread(args: threading.ExceptHookArgs) -> None:
    """Log one line if a thread fails, for example TensorBoard's thread on a full disk."""
    if args.exc_value and args.thread:
        logger.warning("thread %s ended: %s", args.thread.name, one_line(args.exc_value))


def close_logging() -> None:
    """Undo `setup_logging`."""
    while _levels:
        logging.getLogger().setLevel(_levels.pop())
    for handler in _handlers:
        logging.getLogger().removeHandler(handler)
        with suppress(OSError):
            handler.close()
    _handlers.clear()
    logging.captureWarnings(False)
    logging.raiseExceptions = True
    threading.excepthook = threading.__excepthook__
