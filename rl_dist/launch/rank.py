"""One rank's process: run the function it is for, report how it ended, leave."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from rl_dist.errors import outlive_readers
from rl_dist.hardware.addresses import ADDRESS_VARIABLES
from rl_dist.process_group import process_ends
from rl_dist.process_group.process_ends import STOP_SIGNALS, ReportPage, die_with_parent, report_to
from rl_dist.process_group.watchdog import JOB_DIR_VARIABLE
from rl_dist.process_group.world import (
    close_any_world,
    connection_broke,
    leave_when_orphaned,
    stop_flag,
)
from rl_dist.telemetry import events

# for the log files only: `launch` prints to the console, once
logger = logging.getLogger(__name__)
logger.addHandler(logging.NullHandler())
# characters, of up to six bytes each in a page
LONGEST_MESSAGE = 50_000
LONGEST_SUMMARY = 5_000
RankFunction = Callable[..., int | None]


@dataclass
class RankReport:
    """How one rank ended."""

    exit_code: int
    message: str = ""  # for the user
    rank: int = 0
    # when it raised (0: it returned); the earliest is the cause, the others consequences
    at_ns: int = 0
    summary: str = ""  # the message in one line
    by_user: bool = False  # to start again would not help
    # of another rank's end: the connection to it broke, or it was waited for in vain
    consequence: bool = False

    @property
    def failed(self) -> bool:
        """True if the rank raised, instead of returning an exit code."""
        return self.at_ns > 0


@dataclass(frozen=True)
class RankPlace:
    """Which rank a new process is, and of which group."""

    rank: int
    num_ranks: int
    restarts: int  # of the group so far
    job_dir: str
    page: ReportPage
    launcher_pid: int
    address: tuple[str, int] | None  # where the ranks meet; None: in `job_dir`

    def variables(self) -> dict[str, str]:
        """Return the environment of the rank, in torchrun's words."""
        found = {JOB_DIR_VARIABLE: self.job_dir, "TORCHELASTIC_RESTART_COUNT": str(self.restarts)}
        found |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(self.rank))
        found |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.num_ranks))
        address = map(str, self.address or ())
        return found | dict(zip(ADDRESS_VARIABLES, address, strict=False))


_raised_ns = 0  # when this rank's function failed; 0: it has not


def mark_failure() -> None:
    """Note the time at which this rank failed: what it closes next may take long."""
    global _raised_ns
    _raised_ns = _raised_ns or time.monotonic_ns()


def run_guarded(fn: RankFunction, args: tuple[Any, ...]) -> RankReport:
    """Run `fn(*args)` and report how it ended."""
    global _raised_ns
    rank = int(os.environ.get("RANK", 0))
    _raised_ns = 0
    by_user = consequence = False
    try:
        return RankReport(exit_code=int(fn(*args) or 0), rank=rank)
    except ValueError as error:
        mark_failure()
        logger.exception("rank %d stops", rank)
        summary = " ".join(str(error).split())
        message = f"error: {summary}"
        code = getattr(error, "exit_code", 2)
        by_user = code == 2
        consequence = connection_broke(error)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return RankReport(exit_code=leaving.code or 0, rank=rank)
        mark_failure()
        message = summary = str(leaving.code)
        by_user, code = True, 1
    except BaseException as error:
        mark_failure()
        logger.exception("rank %d failed", rank)
        summary = " ".join(f"rank {rank} failed with {type(error).__name__}: {error}".split())
        message = f"{traceback.format_exc()}error: rank {rank} failed, see the traceback above"
        code = 1
        consequence = connection_broke(error)
    return RankReport(code, message, rank, _raised_ns, summary, by_user, consequence)


def run_as_rank(fn: RankFunction, args: tuple[Any, ...], place: RankPlace) -> None:
    """Be a rank; stop signals are blocked until `install`."""
    for name in ADDRESS_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(place.variables())
    outlive_readers()
    # A spawned process would spawn all of its own, such as a DataLoader's workers: seconds each,
    # and only for what can be pickled. They shall start as they do without ranks.
    multiprocessing.set_start_method(None, force=True)
    stop_flag.install(second_ends=False)  # the launcher counts Ctrl-C
    # Python restores their deadly defaults while it shuts down
    atexit.register(_ignore_stop_signals)
    die_with_parent(place.launcher_pid)
    done = threading.Event()
    threading.Thread(
        target=leave_when_orphaned, args=(place.launcher_pid, done), daemon=True
    ).start()
    report_to(place.page)
    report = run_guarded(fn, args)
    report.message = report.message[-LONGEST_MESSAGE:]
    report.summary = report.summary[:LONGEST_SUMMARY]
    process_ends.report(**vars(report))
    events.close()
    if report.failed:  # without teardown, which could wait for the other ranks for ever
        flush_and_exit(report.exit_code or 1)
    close_any_world()
    done.set()


def flush_and_exit(code: int) -> NoReturn:
    """End this process without teardown, after its last words."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


def _ignore_stop_signals() -> None:
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
