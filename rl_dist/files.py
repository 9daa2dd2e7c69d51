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
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from rl_dist.errors import UserError, one_line, unwritable

logger = logging.getLogger(__name__)

SMALL = 64 * 2**20  # bytes, many times the size of any config.json and summary.json
TAIL_BYTES = 2**20  # bytes to read if only the last lines of a file are needed
EVENT_FILES = "events.out.tfevents.*"  # files of TensorBoard
# Folders and files that training writes. Files of checkpoints/ get new names, and W&B makes links
# in wandb/: they are not listed.
FOLDERS = ("checkpoints", "logs", "plots", "profile", "wandb")
FILES = (
    *("*.json", "*.jsonl", EVENT_FILES, "*_run_id", "mlflow.db"),
    *("logs/rank_*.log", "plots/*.png*", "profile/*"),
)
LARGE = 1e18  # no metric is larger
Record = dict[str, Any]


def check_layout(run_dir: Path) -> None:
    """Refuse links, pipes and the like in the places where training writes."""
    for pattern in (*FOLDERS, *FILES):
        kind = "folder" if pattern in FOLDERS else "file"
        for path in run_dir.glob(pattern):
            is_folder = path_to_write(run_dir, path.relative_to(run_dir)).is_dir()
            if is_folder != (kind == "folder"):
                raise UserError(f"{path} must be a {kind}: move it away")


def path_to_write(run_dir: str | Path, name: str | Path) -> Path:
    """Return a path in a run directory that is safe to write.

    Everything that writes into a run directory calls this first. The directory itself may be a
    link; below it only plain files and folders are allowed.

    Raises:
        OSError: a part of the path is a link, pipe, socket or device.
    """
    path = Path(run_dir)
    for part in Path(name).parts:
        path /= part
        with suppress(FileNotFoundError):
            if stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                raise OSError(errno.EINVAL, "it is not a plain file or folder", str(path))
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
        most: its largest size in bytes; None: half of the free memory, because parsing needs the
            same again.

    Raises:
        OSError: it cannot be read, is not a plain file, or is too large.
    """
    if most is None:
        from rl_dist.machine import host_memory  # start-up: 2 s of torch, seldom needed

        most = host_memory().available // 2
    with open(path, "rb", opener=plain_file) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            problem = f"it has {size:,} bytes, and at most {most:,} are read here"
            raise OSError(errno.EINVAL, problem, str(path))
        return file.read(size)  # no more, even if it grows


def read_tail(path: Path) -> bytes:
    """Return the last `TAIL_BYTES` of a plain file; raises OSError."""
    with open(path, "rb", opener=plain_file) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read(TAIL_BYTES)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a plain file.

    Raises:
        OSError: it cannot be read.
        UserError: it holds something else.
    """
    try:
        return dict(json.loads(read_plain(path)))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged or foreign: {one_line(error)}; move it away") from None


def parse_record(line: bytes) -> Record | None:
    """Parse a line of metrics.jsonl; return None if it is not a record.

    "iteration" and "global_step" must be integers. Other values that are not numbers become None,
    in the entries of "ranks", too.
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
    """Return True if the path still names the open file, and no other."""
    try:
        return os.path.samestat(Path(path).stat(), os.fstat(file.fileno()))
    except OSError:
        return False


def replace_file(path: Path, data: bytes, *, sync: bool = False, part: str = "") -> None:
    """Replace a file as a whole, or leave it as it was.

    Args:
        sync: wait until the data is on the disk.
        part: name of the unfinished file, which a killed process leaves behind.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = path.with_name(part or f"{path.name}.tmp")
    try:
        unfinished.unlink(missing_ok=True)  # a leftover of any kind
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
    """Replace a file on the disk as a whole; UserError if it cannot be written."""
    try:
        replace_file(path, text.encode(), sync=True)
    except OSError as error:
        raise unwritable(str(error.filename or path), error) from None


def remove(path: Path) -> None:
    """Remove a file that is no longer needed; log a failure once."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log_once(f"{path} cannot be removed and stays: {error.strerror or error}")


@functools.cache
def log_once(line: str) -> None:
    """Log a warning once, and only on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning("%s", line)
