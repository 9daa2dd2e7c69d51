"""Read and write regular files in a run directory, and refuse everything else.

A run directory may contain a pipe, a device, a huge file or a link that someone else put there. To
open or read such a file could take forever or use all memory; to write to a link could change a
file elsewhere. In the function names of this module, "plain" means "regular file".
"""

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

SMALL = 64 * 2**20  # largest size of a small file; config.json and summary.json are far smaller
TAIL_BYTES = 2**20  # bytes to read when only the last lines of a file are needed
# Folders and files that training writes. Files in checkpoints/ are not listed, because they are
# written under a temporary name and then renamed. Files in wandb/ are not listed either, because
# W&B itself creates links there.
FOLDERS = ("checkpoints", "logs", "plots", "profile", "wandb")
FILES = (
    "*.json",
    "*.jsonl",
    "events.out.tfevents.*",
    "*_run_id",
    "mlflow.db",
    "logs/rank_*.log",
    "plots/*.png*",
    "profile/*",
)
LARGE = 1e18  # metric values above this become None
Record = dict[str, Any]


def check_layout(run_dir: Path) -> None:
    """Refuse a run directory that has a link or a special file where training writes.

    A file in place of a folder, or a folder in place of a file, is refused, too.
    """
    for pattern in (*FOLDERS, *FILES):
        for path in run_dir.glob(pattern):
            is_folder = path_to_write(run_dir, path.relative_to(run_dir)).is_dir()
            if is_folder != (pattern in FOLDERS):
                raise UserError(
                    f"{path} is a file instead of a folder, or a folder instead of a file: move it"
                )


def absolute(path: str | Path) -> Path:
    """Return an absolute path: it stays valid if an environment changes the directory."""
    return Path(path).expanduser().absolute()


def path_to_write(run_dir: str | Path, name: str | Path) -> Path:
    """Return a path in a run directory after checking that it is safe to write.

    The directory itself may be a link; below it, only regular files and folders are allowed.

    Raises:
        OSError: a part of the path is a link, pipe, socket or device.
    """
    path = Path(run_dir)
    for part in Path(name).parts:
        path /= part
        with suppress(FileNotFoundError):
            if stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                raise OSError(errno.EINVAL, "it is neither a regular file nor a folder", str(path))
    return path


def plain_file(path: str, flags: int) -> int:
    """Open a regular file without blocking; pass this function to `open` as `opener`.

    Raises:
        OSError: the path cannot be opened, or is a pipe, socket, device or directory.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", path)


def read_plain(path: str | Path, most: int | None = SMALL) -> bytes:
    """Return the content of a regular file.

    Args:
        most: largest allowed size in bytes. None allows half of the free memory, because
            parsing the content needs the other half.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is too large.
    """
    if most is None:
        from rl_dist.machine import host_memory  # import late: this loads torch (2 s)

        most = host_memory().available // 2
    with open(path, "rb", opener=plain_file) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            problem = f"the file has {size:,} bytes, but the limit is {most:,} bytes"
            raise OSError(errno.EINVAL, problem, str(path))
        return file.read(size)  # if the file is growing, do not read more


def read_tail(path: Path) -> bytes:
    """Return the last `TAIL_BYTES` of a regular file, or raise an OSError."""
    with open(path, "rb", opener=plain_file) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read(TAIL_BYTES)


def read_object(path: Path) -> Record:
    """Return the JSON object in a regular file.

    Raises:
        OSError: the file cannot be read.
        UserError: the file does not contain a JSON object.
    """
    try:
        return dict(json.loads(read_plain(path)))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged, or not a file of this project: {one_line(error)}; move it away"
        ) from None


def parse_record(line: bytes) -> Record | None:
    """Parse a line of metrics.jsonl; return None if it is not a record.

    A record must have integers as "iteration" and "global_step". Any other value that is not a
    number becomes None, also inside the entries of "ranks".
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
    """Return a copy in which a value is None if it is not a number or is too large."""
    return {
        name: value if type(value) in (int, float) and abs(value) < LARGE else None
        for name, value in values.items()
    }


def leads_to(path: str | Path, file: IO[Any]) -> bool:
    """Return True if the path still refers to the open file."""
    try:
        return os.path.samestat(Path(path).stat(), os.fstat(file.fileno()))
    except OSError:
        return False


def replace_file(path: Path, data: bytes, *, sync: bool = False, part: str = "") -> None:
    """Replace a file completely, or leave it unchanged if there is an error.

    Args:
        sync: wait until the data is on the disk.
        part: name of the temporary file; by default, the file's name with .tmp added. If the
            process is killed, the temporary file remains.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = path.with_name(part or f"{path.name}.tmp")
    try:
        unfinished.unlink(missing_ok=True)  # a killed process may have left this file
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
    """Replace a text file completely, and wait until it is on the disk.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        replace_file(path, text.encode(), sync=True)
    except OSError as error:
        raise unwritable(str(error.filename or path), error) from None


def remove(path: Path) -> None:
    """Remove a file; if that fails, log one warning and continue."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log_once(f"{path} could not be removed: {error.strerror or error}")


def is_first() -> bool:
    """Return True if RANK is 0 or not set: this process may then write and print."""
    return os.environ.get("RANK", "0") == "0"


@functools.cache
def log_once(line: str) -> None:
    """Log a warning, but only on rank 0 and only once for each text."""
    if is_first():
        logger.warning("%s", line)
