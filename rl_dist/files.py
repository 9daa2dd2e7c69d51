"""Read and write plain files of a run directory, and refuse everything else.

Somebody may have put a pipe, a device, a giant file or a link there. Opening or reading it could
take for ever or all memory; writing to it could change a file elsewhere.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from rl_dist.errors import UserError, explained, one_line, unwritable

logger = logging.getLogger(__name__)

SMALL = 64 * 2**20  # bytes, many times the size of any config.json and summary.json
EVENT_FILES = "events.out.tfevents.*"  # TensorBoard's
# Patterns of the files that training writes, by folder. Checkpoints are written under new names,
# and W&B makes links in its folder.
WRITTEN = {
    "": ("*.json", "*.jsonl", EVENT_FILES, "*_run_id", "mlflow.db"),
    "checkpoints": (),
    "logs": ("rank_*.log",),
    "plots": ("*.png*",),
    "profile": ("*",),
    "wandb": (),
}
TAIL_BYTES = 2**20  # read from growing files if only the last lines are needed
LOG_FORMAT = "%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s"
LOGGED = re.compile(
    r"^(?P<time>[-\d]+ \S+) (?P<level>WARNING|ERROR|CRITICAL) rank (?P<rank>\d+) \S+: (?P<text>.*)",
    re.MULTILINE,
)
LARGE = 1e18  # larger numbers are no metrics
Record = dict[str, Any]


def check_layout(run_dir: Path) -> None:
    """Refuse files that cannot be written, or lead out of the run directory."""
    for name, patterns in WRITTEN.items() if run_dir.is_dir() else ():
        folder = path_to_write(run_dir, name)
        if folder.is_file():
            raise UserError(f"{folder} is no folder, as it is in a run directory: move it away")
        for path in (path for pattern in patterns for path in folder.glob(pattern)):
            if path_to_write(folder, path.name).is_dir():
                raise UserError(f"{path} is no file, as it is in a run directory: move it away")


def path_to_write(run_dir: str | Path, name: str) -> Path:
    """Return the path of a file or folder in a run directory, which may be written.

    Everything that writes into a run directory asks here first. The directory itself may be a link;
    in it there are only plain files and folders.

    Raises:
        OSError: a part of the path is a link, pipe, socket or device.
    """
    path = Path(run_dir)
    for part in Path(name).parts:
        path /= part
        with suppress(FileNotFoundError):
            if stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                raise OSError(errno.EINVAL, "it is not a file or folder of this run", str(path))
    return path


def plain_file(path: str, flags: int) -> int:
    """Open plain files only, and never wait: an `opener` for `open`.

    Raises:
        OSError: it cannot be opened, or is a pipe, socket, device or directory.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a plain file", path)


def read_plain(path: str | Path, most: int | None = SMALL) -> bytes:
    """Return the content of a plain file.

    Args:
        most: bytes that it may have; None: half of the free memory, as parsing takes as much again.

    Raises:
        OSError: it cannot be read, is no plain file, or is too large.
    """
    with open(path, "rb", opener=plain_file) as file:
        return read_open(file, most)


def read_open(file: IO[bytes], most: int | None) -> bytes:
    """Like `read_plain`, for an open file, and never more than it has now."""
    size = os.fstat(file.fileno()).st_size
    if most is None:
        from rl_dist.machine import host_memory  # start-up: 2 s of torch, seldom needed

        most = host_memory().available // 2
    if size > most:
        problem = f"it has {size:,} bytes, and at most {most:,} are read here"
        raise OSError(errno.EINVAL, problem, str(file.name))
    return file.read(size)


def read_tail(path: Path, most: int | None) -> bytes:
    """Return the last `most` bytes of a plain file; None: all; raises OSError."""
    if most is None:
        return read_plain(path, None)
    with open(path, "rb", opener=plain_file) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read(most)


def read_messages(logs: Path) -> list[dict[str, str]]:
    """Return warnings and errors of the ranks' logs: time, level, rank, text."""
    text = ""
    for path in logs.glob("rank_*.log"):
        with suppress(OSError):
            text += read_tail(path, TAIL_BYTES).decode(errors="replace")
    messages = [match.groupdict() for match in LOGGED.finditer(text)]
    return sorted(messages, key=lambda message: message["time"])


def read_object(path: Path, **types: type) -> dict[str, Any]:
    """Return the JSON object in a plain file.

    Args:
        types: types of the entries that it must have.

    Raises:
        UserError: the file holds no such object; one line that names it.
    """
    try:
        values = dict(json.loads(read_plain(path)))
        for name, kind in types.items():
            if type(values[name]) is not kind:
                raise TypeError(f"{name} is no {kind.__name__}")
    except OSError as error:
        raise UserError(explained(error)[0]) from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged or foreign: {one_line(error)}; move it away") from None
    return values


def parse_record(line: bytes) -> Record | None:
    """Return a line of metrics.jsonl; None: it is no record.

    "iteration" and "global_step" are integers, other values are numbers or None, and "ranks", if
    there, is a list of such records.
    """
    try:
        values = json.loads(line)
        record = _numbers(values)
        if not all(isinstance(record[name], int) for name in ("iteration", "global_step")):
            return None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    if isinstance(values.get("ranks"), list):
        record["ranks"] = [_numbers(entry) for entry in values["ranks"] if isinstance(entry, dict)]
    return record


def _numbers(values: Mapping[str, Any]) -> Record:
    """Replace every value that is not a number, or too large, by None."""
    return {
        name: value if type(value) in (int, float) and abs(value) < LARGE else None
        for name, value in values.items()
    }


def leads_to(path: str | Path, file: IO[Any]) -> bool:
    """Return True if a path still leads to the open file, not deleted or replaced."""
    try:
        return os.path.samestat(Path(path).stat(), os.fstat(file.fileno()))
    except OSError:
        return False


def overwrite(path: Path, text: str) -> None:
    """Write a file in place, as a lock is on it; a full disk leaves it as it was.

    Raises:
        UserError: it cannot be written.
    """

    def put(data: bytes) -> None:
        with path.open("r+b") as file:
            file.write(data)
            file.truncate()

    before = b""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        before = read_plain(path)
        if text.encode() != before:
            put(text.encode())
    except OSError as error:
        if before:
            with suppress(OSError):
                put(before)
        raise unwritable(str(path), error) from None


def replace_file(path: Path, data: bytes, *, sync: bool = False, part: str = "") -> None:
    """Make a file hold `data`, or leave it as it was; raises OSError.

    Args:
        sync: wait until the disk has it.
        part: name of the file while it is written, which a killed process leaves behind.
    """
    unfinished = path.with_name(part or f"{path.name}.tmp")
    try:
        unfinished.unlink(missing_ok=True)  # whatever it is
        with unfinished.open("xb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError:
        with suppress(OSError):
            unfinished.unlink()
        raise


def write_whole(path: Path, text: str) -> None:
    """Make a file on the disk hold `text`, or raise UserError and leave it as it was."""
    try:
        replace_file(path, text.encode(), sync=True)
    except OSError as error:
        raise unwritable(str(error.filename or path), error) from None


def remove(path: Path) -> None:
    """Remove a file that is no longer needed; a failure is logged once."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log_once(f"{path} cannot be removed and stays: {error.strerror or error}")


@functools.cache
def log_once(line: str) -> None:
    """Log a line from one rank and only once, however often this is called."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning("%s", line)
