"""Read, write and lock the files in a run directory.

config.json is overwritten in place, because a run holds its lock on this file. state.json and
summary.json are replaced completely, so that no reader sees a half-written file; only on a full
disk, state.json is overwritten in place. `rl_dist.telemetry.metrics` appends to metrics.jsonl.

A file may be incomplete, or another program may have written it. Readers skip its invalid lines, or
refuse the file with a one-line error.
"""

import fcntl
import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing import reduction
from pathlib import Path
from typing import IO, Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError

from rl_dist.errors import UserError, one_line, unwritable
from rl_dist.files import (
    Record,
    absolute,
    check_layout,
    leads_to,
    parse_record,
    path_to_write,
    plain_file,
    read_object,
    read_plain,
    read_tail,
    replace_file,
    write_whole,
)

STATE_FILE = "state.json"
CHECKPOINT_DIR = "checkpoints"
BEST_FILE = "best.pt"
PATIENCE_S = 25.0  # longest wait for the lock; ranks may still save after a kill of their launcher
LONGEST_ERROR = 2000  # longest error in state.json, in characters
WORKING = ("dry_run", "warm_up", "training", "validation", "saving", "evaluation")
ENDED = ("done", "stopped", "failed")
PHASES = ("starting", "restarting", *WORKING, *ENDED)

# The command `status` prints the values in state.json, which may come from someone else. The types
# below refuse control characters and numbers that are too large.
Count = Annotated[int, Field(ge=0, lt=10**18)]
Real = Annotated[float, Field(ge=0, lt=1e18)]
Text = Annotated[str, Field(pattern=r"^[^\p{C}]*$")]
Phase = Literal[PHASES]  # type: ignore[valid-type]


class RankEntry(BaseModel):
    """A rank and its process."""

    rank: Count
    pid: Count
    host: Text
    device: Text


class SavedCheckpoint(BaseModel):
    """The last checkpoint that a run has saved."""

    path: Text  # relative to the run directory
    iteration: Count


class RunExit(BaseModel):
    """The exit code, signal and error with which a run ended."""

    code: Count
    signal: Text | None = None  # for example SIGTERM
    error: Text = ""  # one line


class JobState(BaseModel):
    """The content of state.json, which the main rank or the launcher writes."""

    version: Literal[1] = 1
    launcher_pid: Count = 0
    host: Text = ""  # host name of the launcher's machine
    started: Real = 0.0  # seconds since 1970
    updated: Real = 0.0  # seconds since 1970
    restarts: Count = 0  # how many times the launcher has restarted all ranks
    num_ranks: Count
    ranks: list[RankEntry] = []
    strategy: Text
    precision: Text
    phase: Phase = "starting"
    iteration: Count = 0
    global_step: Count = 0
    episodes: Count = 0
    target: Count  # length of the whole run, in the unit below
    unit: Text  # "episodes" or "steps"
    checkpoint: SavedCheckpoint | None = None
    gradient_bytes: Count = 0  # size of the gradients that the ranks reduce in each step
    exit: RunExit | None = None


class RunDir(AbstractContextManager["RunDir"]):
    """A run directory, and the lock that a training run holds on it.

    A training run takes the lock before it chooses the checkpoint to start from, and holds it until
    the run ends. If a RunDir is pickled for a new process, both processes share the open lock file.
    The lock is released when all of these processes have closed the file or ended.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = absolute(path)
        self.config_path = self.path / "config.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.state_path = self.path / STATE_FILE
        self.summary_path = self.path / "summary.json"  # exists only if the run has finished
        self.checkpoints = self.path / CHECKPOINT_DIR
        self.best = self.checkpoints / BEST_FILE
        self.logs = self.path / "logs"
        self.evaluation = self.path / "evaluation"
        self.test_looks = self.path / "test_looks.jsonl"  # one line per evaluation on test data
        self.lock: IO[bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to be pickled, with a duplicate of the lock's descriptor."""
        return vars(self) | {"lock": self.lock and reduction.DupFd(self.lock.fileno())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore pickled attributes, and open the duplicate of the lock file."""
        vars(self).update(state)
        if state["lock"]:
            self.lock = os.fdopen(state["lock"].detach(), "r+b")

    def log_of(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self.logs / f"rank_{rank}.log"

    def picture(self, name: str) -> Path:
        """Return the path of a plot after checking that it is safe to write."""
        return self.writable(self.path / "plots" / f"{name}.png")

    def writable(self, path: Path) -> Path:
        """Return a path in this directory after checking that it is safe to write."""
        return path_to_write(self.path, path.relative_to(self.path))

    # ---- the directory and its lock

    @classmethod
    def fresh(cls, runs: Path) -> Self:
        """Create a run directory with a unique name made from the current time."""
        stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
        try:
            runs.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                path = runs / (f"{stamp}_{number}" if number > 1 else stamp)
                with suppress(FileExistsError):
                    path.mkdir()
                    break
        except OSError as error:
            raise unwritable(str(runs), error) from None
        return cls(path)

    def hold(self, patience_s: float = PATIENCE_S) -> Self:
        """Take the lock; create config.json if it is missing.

        Raises:
            UserError: another run still holds the lock after `patience_s` seconds, or a file cannot
                be written.
        """
        check_layout(self.path)
        in_use = f"{self.path} is in use by another training run"
        deadline_s = time.monotonic() + patience_s
        if patience_s and self.is_locked():
            print(f"{in_use}: waiting up to {patience_s:g} s", flush=True)
        while not self._try_to_hold():
            if time.monotonic() >= deadline_s:
                raise UserError(f"{in_use}: wait until it ends, or stop it")
            time.sleep(0.1)
        return self

    def hold_new(self) -> Self:
        """Take the lock for a new run; refuse a directory that already contains a run."""
        self.hold(0.0)
        if self.config_path.stat().st_size:  # another run has used the directory
            self.release()
            raise UserError(
                f"{self.path} already contains a run: continue it with --resume {self.path}, or "
                "use another directory"
            )
        return self

    def _try_to_hold(self) -> bool:
        """Try once to take the lock; return True if this process now holds it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # on NFS, only a file that is open for writing can be locked
            file = open(self.config_path, "a+b", opener=plain_file)  # noqa: SIM115
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if leads_to(self.config_path, file):  # False: the file was removed or replaced
                    self.lock = file
                    return True
            file.close()
        except OSError as error:
            raise unwritable(str(self.config_path), error) from None
        return False

    def release(self) -> None:
        """Close the lock file in this process; other processes may still hold the lock."""
        if self.lock:
            with suppress(OSError):  # an environment may have closed the file descriptor
                self.lock.close()
        self.lock = None

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def is_locked(self) -> bool:
        """Return True if a training run holds the lock."""
        try:
            with open(self.config_path, "rb", opener=plain_file) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                # Leaving `with` closes the file and frees this shared lock. A run that waits for
                # the lock tries again.
                return False
        except BlockingIOError:
            return True
        except OSError:
            return False

    def is_in_place(self) -> bool:
        """Return False if this run holds a lock, but its directory was deleted or replaced."""
        return self.lock is None or leads_to(self.config_path, self.lock)

    def is_unused(self) -> bool:
        """Return True if the directory is missing or contains only logs and config.json."""
        return not self.path.exists() or set(self.path.iterdir()) <= {self.logs, self.config_path}

    def discard_unstarted(self, exit_code: int) -> None:
        """Delete the files of this run if it finished no iteration.

        If `exit_code` is 1, keep the logs. If this process does not hold the lock, do nothing.
        """
        has_lock = self.lock and self.is_in_place()
        if not has_lock or self.checkpoints.exists() or self.records(last=1):
            return
        logs = self.logs.glob("rank_*.log") if exit_code != 1 else ()
        events = self.path.glob("events.out.tfevents.*")
        # delete the locked file last; keep files that this program did not write
        for path in (self.state_path, self.metrics_path, *events, *logs, self.config_path):
            path.unlink(missing_ok=True)
        for folder in (self.logs, self.path):
            with suppress(OSError):  # the folder is not empty
                folder.rmdir()

    # ---- config.json and summary.json

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return read_object(self.config_path)

    def write_config(self, content: Mapping[str, Any]) -> None:
        """Overwrite the locked config.json in place; restore its old content on an error."""
        old_content = read_plain(self.config_path)
        try:
            self._overwrite_config(json.dumps(content, indent=2).encode() + b"\n")
        except OSError as error:
            with suppress(OSError):
                self._overwrite_config(old_content)
            raise unwritable(str(self.config_path), error) from None

    def _overwrite_config(self, data: bytes) -> None:
        with open(self.config_path, "r+b", opener=plain_file) as file:
            file.write(data)
            file.truncate()

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json, or {} if the run has not finished."""
        return read_object(self.summary_path) if self.summary_path.exists() else {}

    def write_summary(self, content: Mapping[str, Any]) -> None:
        """Write summary.json; call this last, because this file marks a finished run."""
        write_whole(self.summary_path, json.dumps(content, indent=2) + "\n")

    # ---- metrics.jsonl

    def records(self, last: int | None = None) -> list[Record]:
        """Return the valid records of metrics.jsonl; with `last`, only the newest ones."""
        try:
            content = read_tail(self.metrics_path) if last else read_plain(self.metrics_path, None)
        except OSError:
            return []
        records = [record for line in content.splitlines() if (record := parse_record(line))]
        return records[-last:] if last else records

    def cut_records(self, iteration: int) -> None:
        """Remove the records of all iterations after `iteration`, and incomplete lines.

        Raises:
            UserError: the file cannot be written. In this case, the file is unchanged.
        """
        if not self.metrics_path.exists():
            return
        old_content = read_plain(self.metrics_path, None)
        kept_lines = [
            line + b"\n"
            for line in old_content.splitlines()
            if (record := parse_record(line)) and record["iteration"] <= iteration
        ]
        if (new_content := b"".join(kept_lines)) != old_content:
            write_whole(self.metrics_path, new_content.decode())

    def write_records(self, records: Sequence[Record]) -> None:
        """Replace the content of metrics.jsonl with these records."""
        write_whole(self.metrics_path, "".join(json.dumps(record) + "\n" for record in records))

    # ---- state.json

    def state(self) -> JobState | None:
        """Return the content of state.json, or None if there is no such file.

        Raises:
            UserError: the file is incomplete, or another program or version wrote it.
            OSError: the file cannot be read.
        """
        try:
            return JobState.model_validate_json(read_plain(self.state_path), strict=True)
        except FileNotFoundError:
            return None
        except ValidationError as error:
            problem = f"{self.state_path} is incomplete, or another program or version wrote it"
            raise UserError(f"{problem}: {one_line(error, 150, named=False)}") from None

    def begin_state(self, **values: Any) -> None:
        """Write the first state.json of a run; `values` sets fields of `JobState`."""
        host = socket.gethostname()
        state = JobState(started=time.time(), launcher_pid=launcher_pid(), host=host, **values)
        with suppress(OSError):
            self._write_state(state)

    def update_state(self, **changes: Any) -> None:
        """Change fields of state.json; do nothing if it is invalid or cannot be written."""
        with suppress(OSError, UserError):
            state = self.state()
            if state and self.is_in_place():
                self._write_state(state, **changes)

    def record_exit(
        self, pid: int, code: int, error: str = "", signum: int = 0, *, may_restart: bool = False
    ) -> None:
        """Record in state.json how the run ended; ignore a missing or unwritable file.

        Call this after all ranks have ended. Only the first call changes the file.

        Args:
            pid: process id of the launcher. If another launcher wrote the file, do not change it.
            code: exit code of the run.
            error: why the run failed.
            signum: number of the signal that ended the launcher; 0: no signal.
            may_restart: True if torchrun ended the ranks and may start them again.
        """
        with suppress(OSError, UserError):
            state = self.state()
            if not state or state.launcher_pid != pid or state.exit:
                return
            # If a signal killed the launcher, its ranks may nevertheless have saved and stopped.
            stopped = code > 128 or (signum and state.phase == "stopped")
            phase = "stopped" if stopped else "failed" if code else "done"
            signum = max(signum, code - 128)
            run_exit = RunExit(
                code=code,
                signal=signal.Signals(signum).name if signum in {*signal.Signals} else None,
                error=one_line(ValueError(error), LONGEST_ERROR, named=False)
                if code and error
                else "",
            )
            self._write_state(state, exit=run_exit, phase="restarting" if may_restart else phase)

    def _write_state(self, state: JobState, **changes: Any) -> None:
        state = state.model_copy(update=changes | {"updated": time.time()})
        data = state.model_dump_json().encode()
        try:
            replace_file(self.state_path, data)
        except OSError:
            # The disk may be full. Overwrite the old content if its blocks have enough space.
            with open(self.state_path, "r+b", opener=plain_file) as file:
                if len(data) <= os.fstat(file.fileno()).st_blocks * 512:
                    file.write(data.ljust(os.fstat(file.fileno()).st_size))


def launcher_pid() -> int:
    """Return the process id of the launcher, which starts the ranks."""
    return os.getppid() if "RANK" in os.environ else os.getpid()
