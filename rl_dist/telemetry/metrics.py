"""What is written while training: metrics.jsonl, TensorBoard, progress, logs."""

from __future__ import annotations

import json
import logging
import math
import os
import struct
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from rl_dist.errors import UserError, unwritable
from rl_dist.hardware.plain_files import leads_to, plain_file, read_plain
from rl_dist.process_group.world import World
from rl_dist.telemetry.progress import open_progress

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
EVENT_FILES = "events.out.tfevents.*"  # TensorBoard's


class NullWriter:
    """The writer of every rank but the main one: takes everything, writes nothing."""

    def write(self, record: Mapping[str, Any], *, done: int) -> None:
        """Take the metrics of one iteration."""

    def say(self, text: str) -> None:
        """Take a line for the user."""

    def flush(self) -> None:
        """Let nothing written so far be lost when this process dies."""

    def close(self) -> None:
        """Finish; safe to call twice."""


class Board:
    """TensorBoard's record of a folder, until the disk refuses it: that is told once.

    Args:
        purge_step: see `MetricsWriter`.
        suffix: ends the file's name.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str | Path, *, purge_step: int | None = None, suffix: str = "") -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second to import: the main process only

        self._board: Any = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10, filename_suffix=suffix)

    def write(self, record: Mapping[str, Any], step: int) -> None:
        """Add the numbers of a record without NaN and infinities."""
        try:
            for tag, value in _scalars(record) if self._board else ():
                self._board.add_scalar(tag, value, step)
        except OSError as error:
            self._board = None
            logger.warning("TensorBoard's record ends here: %s", error.strerror or error)

    def abandon(self) -> None:
        """Write nothing more: the folder is not ours any longer."""
        self._board = None

    def flush(self) -> None:
        """Put all that was written on disk."""
        if self._board:
            with suppress(OSError):  # reported when it is written to
                self._board.flush()  # it writes in a thread, every 10 s

    def close(self) -> None:
        """Finish the file."""
        if self._board:
            try:
                self._board.close()
            except OSError as error:
                logger.warning("TensorBoard's record is not complete: %s", error.strerror or error)


class MetricsWriter(NullWriter):
    """Writes a record per iteration to file, TensorBoard and the progress display.

    Args:
        run_dir: gets metrics.jsonl (appended to) and TensorBoard's event file.
        total: `done` at the end of the run, None if unknown.
        unit: what `done` counts, e.g. "episodes".
        start: `done` at the start, above 0 on resume.
        purge_step: the first `global_step` still to come. A TensorBoard that is running forgets what it
            has seen from there on, if the run's first writer gave this, too.
        lock: path and open file that lock the directory: nothing is written once it was deleted or replaced.

    Raises:
        UserError: the directory cannot be written.
    """

    def __init__(
        self,
        run_dir: str | Path,
        world: World,
        total: int | None,
        unit: str,
        *,
        start: int = 0,
        purge_step: int | None = None,
        lock: tuple[Path, IO[bytes]] | None = None,
    ) -> None:
        assert world.main, "only the main process writes; use open_writer"
        try:
            Path(run_dir).mkdir(parents=True, exist_ok=True)
            self._lines = _LineFile(Path(run_dir, METRICS_FILE))
            self._board = Board(run_dir, purge_step=purge_step)
        except OSError as error:
            raise unwritable(f"run_dir {run_dir}", error) from None
        self._progress = open_progress(total, unit, start)
        self._lock = lock
        self._closed = False

    def write(self, record: Mapping[str, Any], *, done: int) -> None:
        """Write the metrics of one iteration.

        Args:
            record: numbers by name, with "iteration", "global_step" and optionally "ranks", a list of
                one such mapping per rank. NaN and infinities become null.
            done: progress so far, in the writer's unit.

        Raises:
            UserError: the run directory is no longer there, or another one is.
        """
        plain = _plain(record)
        try:
            if self._lock is not None:
                check_in_place(*self._lock)
            self._lines.write(json.dumps(plain, allow_nan=False))
        except UserError:
            self._board.abandon()
            raise
        self._board.write(plain, plain["global_step"])
        self._progress.show(plain, done)

    def say(self, text: str) -> None:
        """Print a line for the user without tearing the progress bar."""
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def flush(self) -> None:
        """Put all that was written on disk: a checkpoint must not know more."""
        self._lines.flush()
        self._board.flush()

    def close(self) -> None:
        """Finish the files and the progress display; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._progress.close()
        self._lines.close()
        self._board.close()


class _LineFile:
    """Appends whole lines; what a full disk refuses waits in memory until there is room."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting, self._failing = path, b"", False
        self._file = open(path, "ab", buffering=0, opener=plain_file)  # noqa: SIM115

    def write(self, line: str) -> None:
        check_in_place(self._path, self._file)
        self._waiting += line.encode() + b"\n"
        self._try_again()

    def _try_again(self) -> None:
        """Append what waits, whole or not at all."""
        if not self._waiting:
            return
        end = self._file.seek(0, os.SEEK_END)
        try:
            left = self._waiting
            while left:  # a part may fit: the next call then tells the cause
                left = left[self._file.write(left) :]
            self._waiting, self._failing = b"", False
        except OSError as error:  # whether training goes on is for the checkpoints to decide: they need more room
            with suppress(OSError):
                self._file.truncate(end)
            if not self._failing:
                logger.warning("cannot write %s: %s; its lines wait in memory", self._path, error.strerror)
            self._failing = True

    def flush(self) -> None:
        self._try_again()
        with suppress(OSError):  # a full disk: reported by `write`
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._try_again()
        if self._waiting:
            logger.warning("%s lacks its last %d line(s)", self._path, self._waiting.count(b"\n"))
        self._file.close()


def check_in_place(path: Path, file: IO[Any]) -> None:
    """Make sure that a file of the run directory is still the one that was opened.

    Raises:
        UserError: it was deleted or replaced, most likely with the whole directory, which is not ours any longer.
    """
    if not leads_to(path, file):
        told = f"{path} was deleted or replaced during training, or the whole run directory"
        raise UserError(f"{told}: nothing more is saved there", exit_code=1)


class _LogFile(logging.FileHandler):
    """A log that a full disk cuts short without a traceback for every line."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=plain_file)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def open_writer(
    run_dir: str | Path,
    world: World,
    total: int | None,
    unit: str,
    *,
    start: int = 0,
    purge_step: int | None = None,
    lock: tuple[Path, IO[bytes]] | None = None,
) -> NullWriter:
    """A `MetricsWriter` on the main process, a writer of nothing elsewhere."""
    if not world.main:
        return NullWriter()
    return MetricsWriter(run_dir, world, total, unit, start=start, purge_step=purge_step, lock=lock)


def truncate_metrics(run_dir: str | Path, iteration: int) -> int:
    """Cut metrics.jsonl and the TensorBoard record after `iteration`.

    Torn ends go too. The steps to keep of TensorBoard's record are those of the lines kept.

    Returns:
        Number of lines kept.

    Raises:
        UserError: the disk is full or cannot be written; what is there stays as it was.
    """
    path = Path(run_dir, METRICS_FILE)
    if not path.exists():
        return 0
    kept, global_step = [], 0
    try:
        before = read_plain(path, None).decode(errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    for line in before.splitlines():
        try:
            record = json.loads(line)
            if not all(type(record[name]) is int for name in ("iteration", "global_step")):
                raise TypeError("no numbers")
            if record["iteration"] <= iteration:
                kept.append(line + "\n")
                global_step = record["global_step"]
        except (ValueError, KeyError, TypeError, RecursionError):
            logger.warning("%s: dropped a line that is no record: %.60s", path, line)
    if "".join(kept) != before:
        write_whole(path, "".join(kept))
    if kept or not iteration:  # else the lines were lost, and with them the step
        for events in Path(run_dir).glob(EVENT_FILES):
            try:
                _cut_events(events, global_step)
            except OSError as error:
                raise unwritable(str(events), error) from None
    return len(kept)


def write_whole(path: Path, text: str) -> None:
    """Make a file hold `text`, or leave it as it was.

    Raises:
        UserError: the disk is full or cannot be written.
    """
    part = path.with_name(f"{path.name}.tmp")
    try:
        part.unlink(missing_ok=True)  # whatever it is
        with open(part, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise unwritable(str(error.filename or path), error) from None


def _cut_events(path: Path, global_step: int) -> None:
    """End a TensorBoard file before its first event after `global_step`, or where it is torn.

    The mark that TensorBoard's writer can leave instead (`purge_step`) is not enough: a reader that was not
    running at the time ignores the first such mark of a run and shows both pasts.
    A file holds records: length [8 bytes], checksum [4], event [length], checksum [4]; the first is its version.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event  # slow to import: when a run goes on only

    data, end, num_kept = read_plain(path, None), 0, 0
    while end + 12 < len(data):
        start = end + 12
        stop = start + struct.unpack_from("<Q", data, end)[0]
        try:
            if not start < stop <= len(data) - 4 or Event.FromString(data[start:stop]).step > global_step:
                break
        except DecodeError:
            break
        end, num_kept = stop + 4, num_kept + 1
    if num_kept <= 1:
        path.unlink()
    elif end < len(data):
        os.truncate(path, end)


def setup_logging(run_dir: str | Path, rank: int) -> Path:
    """Log to logs/rank_N.log from INFO up, rank 0 also to the console from WARNING.

    Replaces what an earlier call set up. Python warnings are logged too.

    Raises:
        UserError: the directory cannot be written.
    """
    close_logging()
    path = Path(run_dir, "logs", f"rank_{rank}.log")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers: list[logging.Handler] = [_LogFile(path, encoding="utf-8")]
    except OSError as error:
        raise unwritable(str(path), error) from None
    handlers[0].setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s"))
    if rank == 0:
        handlers.append(_Console(logging.WARNING))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in handlers:
        handler.set_name(f"rl_dist {handler.get_name()}")
        root.addHandler(handler)
    logging.captureWarnings(True)
    threading.excepthook = _log_end_of_thread
    return path


def _log_end_of_thread(args: threading.ExceptHookArgs) -> None:
    """Log the traceback of a library's or an environment's thread; one line is for the user."""
    if args.exc_value is not None and args.exc_type is not SystemExit:
        name, traceback = args.thread.name if args.thread else "?", (args.exc_type, args.exc_value, args.exc_traceback)
        logger.warning("thread %s ended: %s: %s", name, args.exc_type.__name__, args.exc_value, exc_info=traceback)


def close_logging() -> None:
    """Undo `setup_logging`."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if (handler.get_name() or "").startswith("rl_dist "):
            root.removeHandler(handler)
            handler.close()
    logging.captureWarnings(False)
    threading.excepthook = threading.__excepthook__


class _Console(logging.Handler):
    """Warnings for the user, above the progress bar; `launch` prints failures itself, once."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "rl_dist.launch.rank":
            tqdm.write(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)


def _plain(value: Any) -> Any:
    """JSON types only: tensors and numpy scalars as numbers, NaN and infinities as None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _scalars(plain: Mapping[str, Any]) -> list[tuple[str, float]]:
    """TensorBoard's tags and values; rank N's stand below rank_N/."""
    found = []
    for name, value in plain.items():
        if name == "ranks":
            for entry in value:
                found += [(f"rank_{entry['rank']}/{tag}", number) for tag, number in _scalars(entry)]
        elif isinstance(value, int | float) and name not in ("iteration", "global_step", "rank"):
            found.append((name, float(value)))
    return found
