"""One training at a time in a run directory."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO

from rl_dist.world import ORPHAN_GRACE_S, UserError, unwritable

PATIENCE_S = ORPHAN_GRACE_S + 5.0  # ranks of a killed launcher may still save


def hold(path: Path, patience_s: float = PATIENCE_S) -> IO[bytes]:
    """Take the lock that a file stands for.

    It is free again once the file is closed, or the process dead.

    Raises:
        UserError: another process holds it, and went on doing so; or the file cannot be written.
    """
    try:
        file = open(path, "r+b")  # noqa: SIM115  # NFS locks only what may be written
    except OSError as error:
        raise unwritable(str(path), error) from None
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                file.close()
                raise UserError(f"{path.parent} is in use by another training: wait for its end, or stop it") from None
            time.sleep(0.1)
