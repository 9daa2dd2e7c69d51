"""state.json of a run directory: what the run is doing, for programs and people.

One process writes at a time: the launcher before its ranks start, between two starts and after
their end, the main rank in between. The file is replaced as a whole: no reader sees half of it.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import pydantic

from rl_dist.errors import UserError, printable
from rl_dist.files import leads_to, log_once, read_plain
from rl_dist.process_group.addresses import may_start_again
from rl_dist.process_group.process_ends import STOP_SIGNALS

STATE_FILE = "state.json"
WORKING = ("dry_run", "warm_up", "training", "validation", "saving", "evaluation")
TIME_SHARE = 0.005  # of the run's time that the updates of iterations may take
LONGEST_ERROR = 2000  # characters


# what is read back may come from anybody; larger numbers are rubbish
Count = Annotated[int, pydantic.Field(ge=0, lt=10**18)]
Real = Annotated[float, pydantic.Field(ge=0, lt=1e18)]
Text = Annotated[str, pydantic.Field(pattern=r"^[^\p{C}]*$")]
ENDED = ("done", "stopped", "failed")
PHASES = ("starting", "restarting", *WORKING, *ENDED)
Phase = Literal[PHASES]  # type: ignore[valid-type]


class StateFileError(UserError):
    """A state.json that is torn, foreign or newer; the message is one line."""


@dataclass(kw_only=True)
class RankEntry:
    """One rank."""

    rank: Count
    pid: Count
    host: Text
    device: Text
    memory_peak_gib: Real | None = None  # of its tensors on a GPU, else of its process


@dataclass(kw_only=True)
class SavedCheckpoint:
    """The last checkpoint of a run."""

    path: Text  # within the run directory
    iteration: Count


@dataclass(kw_only=True)
class RunExit:
    """How a run ended."""

    code: Count
    signal: Text | None = None  # such as SIGTERM
    error: Text = ""  # one line


@dataclass(kw_only=True)
class JobState:
    """The content of state.json."""

    version: Literal[1] = 1
    launcher_pid: Count = 0
    host: Text = ""  # of the launcher
    started: Real = 0.0  # seconds since 1970
    updated: Real = 0.0  # the same, of this content
    restarts: Count = 0  # of all ranks by the launcher, since it started
    num_ranks: Count
    ranks: list[RankEntry] = field(default_factory=list)
    strategy: Text
    precision: Text
    phase: Phase = "starting"
    iteration: Count = 0
    global_step: Count = 0
    episodes: Count = 0
    target: Count
    unit: Text  # of the target: episodes or steps
    checkpoint: SavedCheckpoint | None = None
    gradient_bytes: Count = 0  # that every gradient step reduces over the ranks
    exit: RunExit | None = None


# ---- the main rank


class StateFile:
    """Keeps the state.json that a run began with up to date; never fails."""

    def __init__(
        self, run_dir: Path, state: JobState, lock: tuple[Path, IO[bytes]] | None = None
    ) -> None:
        """Continue from a state; a directory whose `lock` was replaced is left alone."""
        self.state = state
        self._run_dir, self._lock = run_dir, lock
        self._since_s, self._spent_s = time.perf_counter(), 0.0
        self._pending = False

    def update(self, *, spare: bool = False, **changes: Any) -> None:
        """Change fields of the state and write the file.

        Args:
            spare: keep the changes for a later call if writing takes over TIME_SHARE of the time.
        """
        vars(self.state).update(changes)
        begun_s = time.perf_counter()
        self._pending = spare and self._spent_s > TIME_SHARE * (begun_s - self._since_s)
        if self._pending or (self._lock and not leads_to(*self._lock)):
            return
        try:
            self.write()
        except OSError as error:
            path = self._run_dir / STATE_FILE
            log_once(f"{path} cannot be written: {error.strerror}; training goes on")
        self._spent_s += time.perf_counter() - begun_s

    def write(self) -> None:
        """Replace state.json by the state."""
        self.state.updated = time.time()
        replace_file(self._run_dir / STATE_FILE, json.dumps(self.state, default=vars) + "\n")

    def add_record(self, record: Mapping[str, Any]) -> None:
        """Take counters and memory of a record, see `MetricsWriter.write`."""
        entries = {entry["rank"]: entry for entry in record.get("ranks", ())}
        for rank in self.state.ranks:
            entry = entries.get(rank.rank, {})
            used = entry.get("gpu/memory_peak_gib") or entry.get("ram/used_gib") or 0.0
            rank.memory_peak_gib = max(rank.memory_peak_gib or 0.0, used) or None
        self.update(
            spare=self.state.phase == "training",
            phase="training",
            iteration=record["iteration"],
            global_step=record["global_step"],
            episodes=record.get("episode/total", self.state.episodes),
        )

    def close(self) -> None:
        """Write what `update` has kept."""
        if self._pending:
            self.update()


def open_state(run_dir: Path, lock: tuple[Path, IO[bytes]] | None = None) -> StateFile | None:
    """Return the keeper of a run's state.json; None without a valid one."""
    try:
        state = read_state(run_dir)
    except StateFileError:
        return None
    return StateFile(run_dir, state, lock) if state else None


# ---- the launcher


def launcher_pid() -> int:
    """Return the process that starts the ranks, seen from that of the command."""
    return os.getppid() if "RANK" in os.environ else os.getpid()


def begin_state(run_dir: Path, **values: Any) -> None:
    """Write the state of a run that begins; `values` are fields of `JobState`."""
    state = JobState(
        launcher_pid=launcher_pid(), host=socket.gethostname(), started=time.time(), **values
    )
    with suppress(OSError):  # the main rank says so
        StateFile(run_dir, state).write()


def update_state(run_dir: Path, **changes: Any) -> None:
    """Change fields of the state of a run that nobody else writes now; never fails."""
    if keeper := open_state(run_dir):
        vars(keeper.state).update(changes)
        with suppress(OSError):
            keeper.write()


def record_exit(
    run_dir: Path, pid: int, code: int, error: str = "", signum: int | None = None
) -> None:
    """Write how a run ended, unless that is known; its ranks are gone.

    Args:
        pid: the launcher's.
        signum: what ended it, where the code does not say so.
    """
    keeper = open_state(run_dir)
    if not keeper or keeper.state.launcher_pid != pid or keeper.state.exit:
        return
    stopped = code - 128 in STOP_SIGNALS
    # the ranks of a launcher that was killed may have saved and stopped by now
    saved = signum is not None and keeper.state.phase == "stopped"
    signum = code - 128 if stopped else signum
    names = {each.value: each.name for each in signal.Signals}
    ended = RunExit(
        code=code,
        signal=names.get(signum, f"signal {signum}") if signum else None,
        error=printable(" ".join(error.split()))[:LONGEST_ERROR] if code else "",
    )
    phase = "stopped" if stopped or saved else "failed" if code else "done"
    phase = "restarting" if may_start_again(code - 128) else phase
    update_state(run_dir, phase=phase, exit=ended)


def replace_file(path: Path, text: str, *, sync: bool = False) -> None:
    """Make a file hold `text`, or leave it as it was.

    Args:
        sync: wait until the disk has it.
    """
    part = path.with_name(f"{path.name}.tmp")
    try:
        part.unlink(missing_ok=True)  # whatever it is
        with part.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


# ---- readers


def runs_below(folder: Path) -> str:
    """Return a clause that names the runs in a folder; "": there are none."""
    found = sorted(str(path.parent) for path in folder.glob(f"*/{STATE_FILE}"))
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"it holds runs, name one: {', '.join(found[:5])}{more}" if found else ""


def read_state(run_dir: Path) -> JobState | None:
    """Return the state of a run, or None without state.json (older versions).

    Raises:
        StateFileError: the file is torn, foreign or of a newer version.
    """
    path = run_dir / STATE_FILE
    try:
        return _schema().validate_json(read_plain(path), strict=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateFileError(f"{path} cannot be read: {error.strerror or error}") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        what = f"{where}: {first['msg']}, got {first['input']!r:.60}"
        raise StateFileError(f"{path} is torn, foreign or of a newer version: {what}") from None


@functools.cache
def _schema() -> pydantic.TypeAdapter[JobState]:
    return pydantic.TypeAdapter(JobState)
