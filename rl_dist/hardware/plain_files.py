"""Opens and reads files of a run directory, whatever lies in their place.

Anybody may have put a pipe, a device or a giant there: to open or read it could take for ever, or
all memory.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

SMALL = 64 * 2**20  # bytes, many times what config.json and summary.json can have
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a directory"}


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
