"""The directory of a run: paths, lock, one reader and one writer of each file.

config.json is written in place, because the lock is on it. state.json and summary.json are replaced
as a whole: no reader sees half of one. `rl_dist.telemetry.metrics` appends to metrics.jsonl. A file
may be torn or foreign: readers skip bad lines, or refuse the file with an error of one line.
"""

from __future__ import annotations

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

from rl_dist.errors import UserError, printable, unwritable
from rl_dist.files import (
    EVENT_FILES,
    Record,
    check_layout,
    leads_to,
    parse_record,
    plain_file,
    read_object,
    read_plain,
    read_tail,
    replace_file,
    write_whole,
)

STATE_FILE = "state.json"
CHECKPOINT_DIR = "checkpoints"
PATIENCE_S = 25.0  # after the kill of a launcher its ranks still save (ORPHAN_GRACE_S)
# Entries of config.json that are not flags, or that another run of the same job may not share.
RECORDED = {"data_digest", "callback", "threads", "chosen_strategy", "chosen_on", "on_event"}
LONGEST_ERROR = 2000  # characters
WORKING = ("dry_run", "warm_up", "training", "validation", "saving", "evaluation")
ENDED = ("done", "stopped", "failed")
PHASES = ("starting", "restarting", *WORKING, *ENDED)

# `status` prints a state.json that may be foreign: no control characters, no absurd numbers.
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
    memory_peak_gib: Real | None = None  # GPU memory of tensors, else RAM of the process


class SavedCheckpoint(BaseModel):
    """The last checkpoint of a run."""

    path: Text  # relative to the run directory
    iteration: Count


class RunExit(BaseModel):
    """The end of a run."""

    code: Count
    signal: Text | None = None  # for example SIGTERM
    error: Text = ""  # one line


class JobState(BaseModel):
    """The content of state.json, which the main rank or the launcher writes."""

    version: Literal[1] = 1
    launcher_pid: Count = 0
    host: Text = ""  # machine of the launcher
    started: Real = 0.0  # seconds since 1970
    updated: Real = 0.0  # seconds since 1970
    restarts: Count = 0  # restarts of all ranks since the launcher started
    num_ranks: Count
    ranks: list[RankEntry] = []
    strategy: Text
    precision: Text
    phase: Phase = "starting"
    iteration: Count = 0
    global_step: Count = 0
    episodes: Count = 0
    target: Count
    unit: Text  # "episodes" or "steps"
    checkpoint: SavedCheckpoint | None = None
    gradient_bytes: Count = 0  # bytes that a gradient step reduces over the ranks
    exit: RunExit | None = None


class RunDir(AbstractContextManager["RunDir"]):
    """A run directory, and the lock on it while this process or a rank holds it.

    A training holds the lock from the choice of its checkpoint to its end. A RunDir that is pickled
    for a new process shares the open file with it. The lock is free when the last of these
    processes has closed the file or ended.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self.state_path = self.path / STATE_FILE
        self.summary_path = self.path / "summary.json"  # present if the run has finished
        self.checkpoints = self.path / CHECKPOINT_DIR
        self.logs = self.path / "logs"
        self.lock: IO[bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Share the lock with a new process, which inherits its descriptor."""
        return vars(self) | {"lock": self.lock and reduction.DupFd(self.lock.fileno())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if state["lock"]:
            self.lock = os.fdopen(state["lock"].detach(), "r+b")

    # ---- the directory and its lock

    @classmethod
    def fresh(cls, runs: Path) -> Self:
        """Make a run directory named after the time; the name is unique."""
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
            UserError: it is still held after `patience_s`, or a file cannot be written.
        """
        check_layout(self.path)
        in_use = f"{self.path} is in use by another training"
        deadline_s = time.monotonic() + patience_s
        if patience_s and self.is_locked():
            print(f"{in_use}: waiting up to {patience_s:g} s", flush=True)
        while not self._try_to_hold():
            if time.monotonic() >= deadline_s:
                raise UserError(f"{in_use}: wait for its end, or stop it")
            time.sleep(0.1)
        return self

    def hold_new(self) -> Self:
        """Take the lock for a new run; refuse a directory that holds one."""
        self.hold(0.0)
        if self.config_path.stat().st_size:  # another run began and ended meanwhile
            self.release()
            raise UserError(
                f"{self.path} holds a run already: continue it with --resume {self.path}, or name "
                "another directory"
            )
        return self

    def _try_to_hold(self) -> bool:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # NFS locks only a file that is open for writing
            file = open(self.config_path, "a+b", opener=plain_file)  # noqa: SIM115
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if leads_to(self.config_path, file):  # if not, another process removed it
                    self.lock = file
                    return True
            file.close()
        except OSError as error:
            raise unwritable(str(self.config_path), error) from None
        return False

    def release(self) -> None:
        """Close this process's share of the lock."""
        if self.lock:
            with suppress(OSError):  # an environment may have closed the descriptor
                self.lock.close()
        self.lock = None

    def __exit__(self, *exc_info: object) -> None:
        with suppress(OSError):
            if self.lock and self.is_in_place() and not self.config_path.stat().st_size:
                self.config_path.unlink()  # the start failed before its configuration was written
        self.release()

    def is_locked(self) -> bool:
        """Return True if a training holds the lock."""
        try:
            with open(self.config_path, "rb", opener=plain_file) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False  # closing unlocks; a training that starts just now tries again
        except BlockingIOError:
            return True
        except OSError:
            return False

    def is_in_place(self) -> bool:
        """Return False if the directory that is held was deleted or replaced."""
        return self.lock is None or leads_to(self.config_path, self.lock)

    def is_unused(self) -> bool:
        """Return True if the directory is missing, empty or holds only logs."""
        return not self.path.exists() or set(self.path.iterdir()) <= {self.logs}

    def discard_unstarted(self, exit_code: int) -> None:
        """Remove a held run without an iteration; keep the logs after exit code 1."""
        held = self.lock and self.is_in_place()
        if not held or self.checkpoints.exists() or self.records(last=1):
            return
        logs = self.logs.glob("rank_*.log") if exit_code != 1 else ()
        events = self.path.glob(EVENT_FILES)
        for path in (self.config_path, self.state_path, self.metrics_path, *events, *logs):
            path.unlink(missing_ok=True)
        for folder in (self.logs, self.path):
            with suppress(OSError):  # the folder still holds files
                folder.rmdir()

    # ---- config.json and summary.json

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return read_object(self.config_path)

    def flags(self) -> dict[str, str]:
        """Return the run's configuration as flags: values as text, by name."""
        sections = self.config().values()
        if not all(isinstance(section, dict) for section in sections):
            raise UserError(
                f"{self.config_path} is not the configuration of a run: give flags instead"
            )
        flags = {}
        for section in sections:
            for name, value in section.items():
                if name not in RECORDED:
                    flag = "preset" if name == "chosen_preset" else name
                    flags[flag] = "none" if value is None else str(value)
        return flags

    def write_config(self, content: Mapping[str, Any]) -> None:
        """Write config.json in place, as it is locked; a full disk leaves it as it was."""
        before = read_plain(self.config_path)
        try:
            self._overwrite_config(json.dumps(content, indent=2).encode() + b"\n")
        except OSError as error:
            with suppress(OSError):
                self._overwrite_config(before)
            raise unwritable(str(self.config_path), error) from None

    def _overwrite_config(self, data: bytes) -> None:
        with open(self.config_path, "r+b", opener=plain_file) as file:
            file.write(data)
            file.truncate()

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json, or {} before the run has finished."""
        return read_object(self.summary_path) if self.summary_path.exists() else {}

    def write_summary(self, content: Mapping[str, Any]) -> None:
        """Write summary.json, the last file: its presence marks a finished run."""
        write_whole(self.summary_path, json.dumps(content, indent=2) + "\n")

    # ---- metrics.jsonl

    def records(self, last: int | None = None) -> list[Record]:
        """Return the valid records of metrics.jsonl: all, or the `last` ones."""
        try:
            content = read_tail(self.metrics_path) if last else read_plain(self.metrics_path, None)
        except OSError:
            return []
        records = [record for line in content.splitlines() if (record := parse_record(line))]
        return records[-last:] if last else records

    def cut_records(self, iteration: int) -> None:
        """Remove torn lines and the records of later iterations.

        Raises:
            UserError: the file cannot be written, and stays as it was.
        """
        if not self.metrics_path.exists():
            return
        before = read_plain(self.metrics_path, None)
        kept = [
            line + b"\n"
            for line in before.splitlines()
            if (record := parse_record(line)) and record["iteration"] <= iteration
        ]
        if (text := b"".join(kept)) != before:
            write_whole(self.metrics_path, text.decode())

    def write_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Replace metrics.jsonl by these records."""
        write_whole(self.metrics_path, "".join(json.dumps(record) + "\n" for record in records))

    # ---- state.json

    def state(self) -> JobState | None:
        """Return the content of state.json, or None without the file.

        Raises:
            UserError: it is torn or foreign.
            OSError: it cannot be read.
        """
        try:
            return JobState.model_validate_json(read_plain(self.state_path), strict=True)
        except FileNotFoundError:
            return None
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            problem = f"{self.state_path} is torn, foreign or of a newer version"
            got = f"got {first['input']!r:.60}"
            raise UserError(f"{problem}: {place}: {first['msg']}, {got}") from None

    def begin_state(self, **values: Any) -> None:
        """Write the first state of a run; `values` are fields of `JobState`."""
        values |= {"launcher_pid": launcher_pid(), "host": socket.gethostname()}
        state = JobState(started=time.time(), **values)
        with suppress(OSError):
            self._write_state(state)

    def update_state(self, **changes: Any) -> None:
        """Change fields of a valid state.json; never fails."""
        with suppress(OSError, UserError):
            state = self.state()
            if state and self.is_in_place():
                self._write_state(state.model_copy(update=changes))

    def record_exit(
        self, pid: int, code: int, error: str = "", signum: int = 0, *, may_restart: bool = False
    ) -> None:
        """Record the end of a run once; never fails. Call it when all ranks have ended.

        Args:
            pid: the launcher's; the state of another launcher stays as it is.
            code: exit code of the run.
            error: why it failed.
            signum: the signal that ended the launcher, if any.
            may_restart: torchrun ended the ranks and may start them again.
        """
        with suppress(OSError, UserError):
            state = self.state()
            if not state or state.launcher_pid != pid or state.exit:
                return
            # the ranks of a killed launcher may have saved and stopped already
            stopped = code > 128 or (signum and state.phase == "stopped")
            phase = "stopped" if stopped else "failed" if code else "done"
            names = {member.value: member.name for member in signal.Signals}
            state.exit = RunExit(
                code=code,
                signal=names.get(max(signum, code - 128)),
                error=printable(" ".join(error.split()))[:LONGEST_ERROR] if code else "",
            )
            state.phase = "restarting" if may_restart else phase
            self._write_state(state)

    def _write_state(self, state: JobState) -> None:
        state.updated = time.time()
        replace_file(self.state_path, state.model_dump_json().encode())


def launcher_pid() -> int:
    """Return the id of the process that starts the ranks."""
    return os.getppid() if "RANK" in os.environ else os.getpid()


def runs_below(folder: Path) -> str:
    """Return a clause that names runs in a folder; "": there are none."""
    runs = sorted(str(path.parent) for path in folder.glob(f"*/{STATE_FILE}"))
    return f"it holds runs, name one: {', '.join(runs[:5])}" if runs else ""
