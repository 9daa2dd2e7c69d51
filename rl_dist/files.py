"""Open, read and write files of a run directory, whatever lies in their place.

Somebody else may have put a pipe, a device, a giant or a link there: to open or read it could take
for ever, or all memory; to write it could change a file elsewhere.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from rl_dist.errors import UserError, explained, one_line

logger = logging.getLogger(__name__)

SMALL = 64 * 2**20  # bytes, many times what config.json and summary.json can have
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a link",
    stat.S_IFSOCK: "a socket",
}


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
            kind = stat.S_IFMT(path.lstat().st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR):
                what = f"it is {_KINDS.get(kind, 'a device')}, not a file or folder of this run"
                raise OSError(errno.EINVAL, what, str(path))
    return path


def plain_file(path: str, flags: int) -> int:
    """An `opener` for `open`, of plain files only; it never waits.

    Raises:
        OSError: it cannot be opened, or is a pipe, socket, device or directory.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.EINVAL, "it is a pipe or socket, not a file", path) from None
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind == stat.S_IFREG:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'a device')}, not a file", path)


def read_plain(path: str | Path, most: int | None = SMALL) -> bytes:
    """A plain file's content.

    Args:
        most: bytes that it may have; None: half of the free memory, as parsing takes as much again.

    Raises:
        OSError: it cannot be read, is no plain file, or is too large.
    """
    with open(path, "rb", opener=plain_file) as file:
        return read_open(file, most)


def read_open(file: IO[bytes], most: int | None) -> bytes:
    """Like `read_plain`, of an open file, and never more than it has now."""
    size = os.fstat(file.fileno()).st_size
    if most is None:
        from rl_dist.hardware.memory import host_memory  # slow to import, and not always needed

        most = host_memory().available // 2
    if size > most:
        problem = f"it has {size:,} bytes, and at most {most:,} are read here"
        raise OSError(errno.EINVAL, problem, str(file.name))
    return file.read(size)


def read_object(path: Path, **types: type) -> dict[str, Any]:
    """Return the JSON object in a plain file.

    Args:
        types: of entries that it must have.

    Raises:
        UserError: the file holds no such object; one line that names it.
    """
    try:
        found = json.loads(read_plain(path))
        for name, kind in types.items():
            if type(found[name]) is not kind:
                raise TypeError(f"{name} is no {kind.__name__}")
    except OSError as error:
        raise UserError(explained(error)[0]) from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is torn or foreign: {one_line(error)}; move it away") from None
    return found


def leads_to(path: str | Path, file: IO[Any]) -> bool:
    """True if a path still leads to the open file, not deleted or replaced."""
    try:
        return os.path.samestat(Path(path).stat(), os.fstat(file.fileno()))
    except OSError:
        return False


def remove(path: Path) -> None:
    """Remove a file that is no longer needed; a failure is logged once."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log_once(f"{path} cannot be removed and stays: {error.strerror or error}")


@functools.cache
def log_once(line: str) -> None:
    """Log a line from one rank and only once, however often it is called."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning("%s", line)
