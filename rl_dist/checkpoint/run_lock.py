"""One training at a time in a run directory, and plain files only."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import AbstractContextManager, suppress
from multiprocessing import reduction
from pathlib import Path
from typing import IO, Any

from rl_dist.errors import UserError, unwritable
from rl_dist.files import leads_to, path_to_write, plain_file
from rl_dist.process_group.world import ORPHAN_GRACE_S

PATIENCE_S = ORPHAN_GRACE_S + 5.0  # ranks of a killed launcher may still save
OURS = {  # patterns of the files that training writes, by folder
    "": ("config.json", "metrics.jsonl", "state.json", "summary.json*", "events.out.tfevents.*")
    + ("*_run_id", "mlflow.db"),
    "checkpoints": (),  # its files are written under new names, and read as plain files only
    "logs": ("rank_*.log", "rank_*.jsonl"),
    "plots": ("*.png*",),
    "profile": ("*",),
    "wandb": (),  # W&B makes links in it
}


class RunLock(AbstractContextManager["RunLock"]):
    """The lock on a run directory; its config.json is the locked file.

    One training holds one lock from its choice of a checkpoint to its end: ranks that are started
    get the same open file. It is free once all of them have closed it, or are dead.
    """

    def __init__(self, path: Path, file: IO[bytes], *, made: bool = False) -> None:
        self.path = path
        self.file = file
        self.made = made  # the file, by this lock and not by a run

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to a new process as an inherited descriptor."""
        return _inherited, (self.path, reduction.DupFd(self.file.fileno()))

    def __exit__(self, *exc_info: object) -> None:
        if self.made and leads_to(self.path, self.file) and not self.path.stat().st_size:
            self.path.unlink()  # refused before a configuration was written
        self.close()

    def close(self) -> None:
        """Let this process's share of it go."""
        with suppress(OSError):  # an environment has closed the descriptor
            self.file.close()


def _inherited(path: Path, descriptor: Any) -> RunLock:
    return RunLock(path, os.fdopen(descriptor.detach(), "r+b"))


def hold(path: Path, patience_s: float = PATIENCE_S) -> RunLock:
    """Take the lock on a file, which is made if missing.

    Raises:
        UserError: another process holds it, and went on doing so; or the file cannot be written, or
            something else lies in the place of one of the run's files.
    """
    check_layout(path.parent)
    in_use = f"{path.parent} is in use by another training"
    deadline_s = time.monotonic() + patience_s
    printed = False
    while True:
        if (lock := _try_to_hold(path)) is not None:
            return lock
        if time.monotonic() >= deadline_s:
            raise UserError(f"{in_use}: wait for its end, or stop it")
        if not printed:
            printed = True
            print(f"{in_use}: waiting up to {patience_s:g} s", flush=True)
        time.sleep(0.1)


def hold_new(path: Path) -> RunLock:
    """Take the lock of a run that begins, in a directory that holds none."""
    lock = hold(path, 0.0)
    if path.stat().st_size:  # it has ended since
        lock.close()
        raise UserError(
            f"{path.parent} holds a run already: go on with --resume {path.parent}, or name another"
        )
    return lock


def _try_to_hold(path: Path) -> RunLock | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = not path.exists()
        # NFS locks only what may be written
        file = open(path, "a+b", opener=plain_file)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if leads_to(path, file):  # else it was removed meanwhile
                return RunLock(path, file, made=made)
        except BlockingIOError:
            pass
        file.close()
        return None
    except OSError as error:
        raise unwritable(str(path), error) from None


def check_layout(run_dir: Path) -> None:
    """Refuse what cannot be written, or leads out of the run directory."""
    for name, patterns in OURS.items() if run_dir.is_dir() else ():
        folder = path_to_write(run_dir, name)
        found = (path for pattern in patterns for path in folder.glob(pattern))
        wrong = [path for path in found if path_to_write(folder, path.name).is_dir()]
        if folder.is_file() or wrong:
            what = f"{wrong[0]} is no plain file" if wrong else f"{folder} is no folder"
            raise UserError(f"{what}, as it is in a run directory: move it away")
