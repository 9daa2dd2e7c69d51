"""The private folder of a job of our launcher, where its ranks meet.

The launcher holds the lock of a file in it until it ends, so that the next one knows which folders were left behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rl_dist.hardware.plain_files import leads_to, plain_file

PREFIX, LOCK = "rl_dist_", "lock_of_launcher"


@contextmanager
def job_directory() -> Iterator[str]:
    """A new folder that nobody else may enter; those of killed launchers go."""
    _remove_abandoned()
    with ExitStack() as held:
        while True:
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX))
            lock = held.enter_context(open(Path(folder, LOCK), "wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if leads_to(lock.name, lock):  # else another launcher has just removed it, for it was not locked yet
                break
        yield folder


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if os.lstat(folder).st_uid != os.getuid():
                continue
            with open(folder / LOCK, "rb", opener=plain_file) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if leads_to(lock.name, lock):
                    shutil.rmtree(folder)
        except OSError:  # in use, not ours, or already gone
            continue
