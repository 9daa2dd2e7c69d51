"""What is written while training: metrics.jsonl, TensorBoard, progress, logs."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from rl_dist.errors import UserError, did_you_mean, unwritable
from rl_dist.files import leads_to, log_once, path_to_write, plain_file, read_plain
from rl_dist.process_group.world import World
from rl_dist.telemetry.loggers import Board, Guarded, flat_settings, open_logger
from rl_dist.telemetry.progress import Progress
from rl_dist.telemetry.state_file import open_state, replace_file

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
EVENT_FILES = "events.out.tfevents.*"  # TensorBoard's


class NullWriter:
    """The writer of every rank but the main one: takes everything, writes nothing."""

    def write(self, record: Mapping[str, Any], *, done: int) -> None:
        """Take the metrics of one iteration."""

    def say(self, text: str) -> None:
        """Take a line for the user."""

    def update_state(self, **changes: Any) -> None:
        """Take changes of the run's state, see `rl_dist.telemetry.state_file.JobState`."""

    def flush(self) -> None:
        """Let nothing written so far be lost when this process dies."""

    def close(self) -> None:
        """Finish; safe to call twice."""


class MetricsWriter(NullWriter):
    """Writes a record per iteration to all files and the progress display."""

    def __init__(
        self,
        run_dir: str | Path,
        world: World,
        total: int,
        unit: str,
        *,
        start: int = 0,
        purge_step: int | None = None,
        lock: tuple[Path, IO[bytes]] | None = None,
        loggers: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the files of a run, and append to metrics.jsonl.

        Args:
            total: `done` at the end of the run.
            unit: of `done`, such as "episodes".
            start: `done` at the start, above 0 on resume.
            purge_step: the first `global_step` still to come. TensorBoard hides what an earlier
                writer wrote from there on, if the run's first writer gave this, too.
            lock: path and open file that lock the directory; once it is gone, nothing is written.
            loggers: others to log to beside TensorBoard, see `loggers.LOGGERS`.
            config: the run's settings by section, which loggers show beside its metrics.
        """
        assert world.is_main_process
        settings = flat_settings(config or {})
        try:
            Path(run_dir).mkdir(parents=True, exist_ok=True)
            self._lines = _LineFile(path_to_write(run_dir, METRICS_FILE))
            board = Board(run_dir, purge_step=purge_step)
        except OSError as error:
            raise unwritable(f"run_dir {run_dir}", error) from None
        self._loggers = [Guarded("TensorBoard", board)]
        for name in loggers:
            self._loggers.append(Guarded(name, open_logger(name, Path(run_dir), settings)))
        self._progress = Progress(total, unit, start)
        self._lock = lock
        self._state = open_state(Path(run_dir), lock)

    def write(self, record: Mapping[str, Any], *, done: int) -> None:
        """Write the metrics of one iteration.

        Args:
            record: numbers by name, with "iteration", "global_step" and optionally "ranks", a
                list of one such mapping per rank. NaN and infinities become null.
            done: progress so far, in the writer's unit.

        Raises:
            UserError: the run directory is no longer there, or another one is.
        """
        plain = without_nan(record)
        try:
            if self._lock is not None:
                check_in_place(*self._lock)
            self._lines.write(json.dumps(plain, allow_nan=False))
        except UserError:
            for open_one in self._loggers:
                open_one.logger = None  # it would write into another folder
            raise
        for open_one in self._loggers:
            open_one.write(plain, plain["global_step"])
        self._progress.show(plain, done)
        if self._state:
            self._state.add_record(plain)

    def update_state(self, **changes: Any) -> None:
        """Write changes to state.json."""
        if self._state:
            self._state.update(**changes)

    def say(self, text: str) -> None:
        """Print a line without tearing the progress bar."""
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def flush(self) -> None:
        """Put all that was written on disk: a checkpoint must not know more."""
        self._lines.flush()
        for open_one in self._loggers:
            open_one.flush()

    def close(self) -> None:
        """Finish the files and the progress display; safe to call twice."""
        for part in (self._progress, self._lines, *self._loggers, self._state):
            if part:
                part.close()


def open_writer(
    run_dir: str | Path, world: World, total: int, unit: str, **options: Any
) -> NullWriter:
    """Return a `MetricsWriter` on the main process, a writer of nothing elsewhere."""
    if not world.is_main_process:
        return NullWriter()
    return MetricsWriter(run_dir, world, total, unit, **options)


class _LineFile:
    """Appends whole lines; what a full disk refuses waits in memory until there is room."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, b""
        self._file = open(path, "ab", buffering=0, opener=plain_file)  # noqa: SIM115

    def write(self, line: str) -> None:
        check_in_place(self._path, self._file)
        self._waiting += line.encode() + b"\n"
        self._append()

    def _append(self) -> None:
        """Append what waits, whole or not at all."""
        end = self._file.seek(0, os.SEEK_END)
        left = self._waiting
        try:
            while left:  # a part may fit: the next call then reports the cause
                left = left[self._file.write(left) :]
            self._waiting = b""
        except OSError as error:
            # whether training goes on is for the checkpoints to decide: they need more room
            with suppress(OSError):
                self._file.truncate(end)
            log_once(f"cannot write {self._path}: {error.strerror}; its lines wait in memory")

    def flush(self) -> None:
        self._append()
        with suppress(OSError):  # a full disk: reported by `write`
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file.closed:
            return
        self._append()
        if self._waiting:
            logger.warning("%s lacks its last %d line(s)", self._path, self._waiting.count(b"\n"))
        self._file.close()


def check_in_place(path: Path, file: IO[Any]) -> None:
    """Make sure that a file of the run directory is still the one that was opened.

    Raises:
        UserError: it was deleted or replaced, most likely with the whole directory.
    """
    if not leads_to(path, file):
        what = f"{path} was deleted or replaced during training, or the whole run directory"
        raise UserError(f"{what}: nothing more is saved there", exit_code=1)


def warn_if_absent(flag: str, name: str, seen: Set[str]) -> None:
    """Say once that no environment has given the env/ metric that a flag names."""
    if name.startswith("env/") and name not in seen:
        known = sorted(key for key in seen if key.startswith("env/"))
        fix = did_you_mean(name, known) or f"there is {', '.join(known) or 'none'}"
        log_once(f"{flag} {name}: no environment has given it so far: {fix}")


def truncate_metrics(run_dir: str | Path, iteration: int) -> int:
    """Cut metrics.jsonl after `iteration`, and its torn end.

    Returns:
        Number of lines kept.

    Raises:
        UserError: the disk is full or cannot be written; what is there stays as it was.
    """
    path = Path(run_dir, METRICS_FILE)
    if not path.exists():
        return 0
    try:
        before = read_plain(path, None).decode(errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    kept = ""
    for line in before.splitlines():
        try:
            record = json.loads(line)
            counters = record["iteration"], record["global_step"]
        except (ValueError, LookupError, TypeError, RecursionError):
            counters = None, None
        if [*map(type, counters)] != [int, int]:
            logger.warning("%s: dropped a line that is no record: %.60s", path, line)
        elif counters[0] <= iteration:
            kept += line + "\n"
    if kept != before:
        write_whole(path, kept)
    return kept.count("\n")


def write_whole(path: Path, text: str) -> None:
    """Make a file hold `text`, or leave it as it was."""
    try:
        replace_file(path, text, sync=True)
    except OSError as error:
        raise unwritable(str(error.filename or path), error) from None


# ---- logs

_handlers: list[logging.Handler] = []  # that `setup_logging` has added


class _LogFile(logging.StreamHandler):
    """A log that a full disk cuts short without a traceback for every line."""

    def __init__(self, path: Path, level: int, formatter: logging.Formatter) -> None:
        super().__init__(open(path, "a", encoding="utf-8", opener=plain_file))  # noqa: SIM115
        self.setLevel(level)
        self.setFormatter(formatter)

    def close(self) -> None:
        with suppress(OSError):
            self.stream.close()
        super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging calls it so
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _JsonLine(logging.Formatter):
    """A log record as an object in one line, for `rl_dist.status`."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        text = f"{type(error).__name__}: {error}" if error else record.getMessage()
        found = {"time": self.formatTime(record), "level": record.levelname, "rank": self._rank}
        return json.dumps(found | {"text": " ".join(text.split())})


class _Console(logging.Handler):
    """Warnings for the user, above the progress bar; `launch` prints failures itself, once."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "rl_dist.launch.ranks":
            tqdm.write(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)


def setup_logging(run_dir: str | Path, rank: int) -> None:
    """Log to logs/rank_N.log from INFO up, rank 0 also to the console from WARNING.

    Warnings and errors go to logs/rank_N.jsonl, too. Replaces what an earlier call set up.
    """
    close_logging()
    name = f"logs/rank_{rank}"
    text = logging.Formatter(f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s")
    try:
        path = path_to_write(run_dir, f"{name}.log")
        path.parent.mkdir(parents=True, exist_ok=True)
        _handlers.append(_LogFile(path, logging.INFO, text))
        path = path_to_write(run_dir, f"{name}.jsonl")
        _handlers.append(_LogFile(path, logging.WARNING, _JsonLine(rank)))
    except OSError as error:
        raise unwritable(f"{run_dir}/{name}.log", error) from None
    if rank == 0:
        _handlers.append(_Console(logging.WARNING))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in _handlers:
        root.addHandler(handler)
    logging.captureWarnings(True)
    threading.excepthook = _log_end_of_thread


def _log_end_of_thread(args: threading.ExceptHookArgs) -> None:
    """Log the traceback of a library's or an environment's thread; one line is for the user."""
    if args.exc_value is None or args.exc_type is SystemExit:
        return
    name = args.thread.name if args.thread else "?"
    trace = (args.exc_type, args.exc_value, args.exc_traceback)
    what = f"{args.exc_type.__name__}: {args.exc_value}"
    logger.warning("thread %s ended: %s", name, what, exc_info=trace)


def close_logging() -> None:
    """Undo `setup_logging`."""
    for handler in _handlers:
        logging.getLogger().removeHandler(handler)
        handler.close()
    _handlers.clear()
    logging.captureWarnings(False)
    threading.excepthook = threading.__excepthook__


def without_nan(value: Any) -> Any:
    """Return JSON types: numbers of tensors and numpy; None for NaN and infinities."""
    if isinstance(value, Mapping):
        return {str(key): without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
