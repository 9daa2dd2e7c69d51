"""One rank's process: run the function it is for, report how it ended, leave."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rl_dist.errors import one_line, outlive_readers
from rl_dist.process_group import process_ends
from rl_dist.process_group.addresses import ADDRESS_VARIABLES
from rl_dist.process_group.process_ends import STOP_SIGNALS, ReportPage, report_to
from rl_dist.process_group.world import (
    close_any_world,
    connection_broke,
    leave_with_parent,
    stop_flag,
)
from rl_dist.telemetry import events

# for the log files only: `launch` prints to the console, once
logger = logging.getLogger("rl_dist.launch.ranks")
logger.addHandler(logging.NullHandler())
# characters, of up to six bytes each in a page
LONGEST_TRACEBACK = 50_000
LONGEST_SUMMARY = 5_000
RankFunction = Callable[..., int | None]


@dataclass
class RankReport:
    """How one rank, or a group of them, ended."""

    exit_code: int
    rank: int = 0
    failed: bool = False  # it raised or died, instead of returning an exit code
    summary: str = ""  # for the user, in one line
    traceback: str = ""  # of what is no mistake of the user
    by_user: bool = False  # to start again would not help
    # 0: it is the cause; 1: it names another rank as the cause; 2: it only lost a connection
    consequence: int = 0


def run_guarded(fn: RankFunction, args: tuple[Any, ...]) -> RankReport:
    """Run `fn(*args)` and report how it ended."""
    rank = int(os.environ.get("RANK", 0))
    try:
        return RankReport(int(fn(*args) or 0), rank)
    except BaseException as error:  # SystemExit too: it may come from the user's code
        logger.exception("rank %d failed", rank)
        found = RankReport(1, rank, failed=True, consequence=2 * connection_broke(error))
        if isinstance(error, ValueError):
            found.summary = one_line(error, LONGEST_SUMMARY, named=False)
            found.exit_code = getattr(error, "exit_code", 2)
            found.by_user = found.exit_code == 2
        else:
            found.summary = f"rank {rank} failed with {one_line(error, LONGEST_SUMMARY)}"
            found.traceback = traceback.format_exc()[-LONGEST_TRACEBACK:]
        return found


def run_as_rank(
    fn: RankFunction,
    args: tuple[Any, ...],
    variables: Mapping[str, str],
    page: ReportPage,
    launcher_pid: int,
) -> None:
    """Run `fn` as this rank's process; stop signals are blocked until `install`."""
    for name in ADDRESS_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    outlive_readers()
    # A spawned process would spawn all of its own, such as a DataLoader's workers: seconds each,
    # and only for what can be pickled. They shall start as they do without ranks.
    multiprocessing.set_start_method(None, force=True)
    stop_flag.install(second_ends=False)  # the launcher counts Ctrl-C
    # Python restores their deadly defaults while it shuts down
    atexit.register(_ignore_stop_signals)
    leave_with_parent(launcher_pid)
    report_to(page)
    report = run_guarded(fn, args)
    process_ends.report(**vars(report))
    events.close()
    if report.failed:  # without teardown, which could wait for the other ranks for ever
        flush_and_exit(report.exit_code or 1)
    close_any_world()


def flush_and_exit(code: int) -> NoReturn:
    """Flush output and logs, and end this process without teardown."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


def _ignore_stop_signals() -> None:
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
