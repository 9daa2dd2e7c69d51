"""One rank's process: run its function, report how it ended, leave."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_dist.errors import one_line, outlive_readers
from rl_dist.process_group import process_ends
from rl_dist.process_group.join import ADDRESS_VARIABLES
from rl_dist.process_group.world import close_world, connection_broke, stop_flag
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
    """Exit code of one rank or of a group of ranks, and its error, if any."""

    exit_code: int  # 2: a mistake of the user, which a restart would repeat
    rank: int = 0
    failed: bool = False  # it raised or died, instead of returning an exit code
    summary: str = ""  # for the user, in one line
    traceback: str = ""  # unless the user made a mistake
    # 0: it is the cause; 1: it names another rank as the cause; 2: it only lost a connection
    consequence: int = 0


def run_guarded(fn: RankFunction, args: tuple[Any, ...]) -> RankReport:
    """Run `fn(*args)` and report how it ended."""
    rank = int(os.environ.get("RANK", 0))
    try:
        return RankReport(int(fn(*args) or 0), rank)
    except BaseException as error:  # SystemExit too: it may come from the user's code
        logger.exception("rank %d failed", rank)
        failure = RankReport(1, rank, failed=True, consequence=2 * connection_broke(error))
        if isinstance(error, ValueError):
            failure.summary = one_line(error, LONGEST_SUMMARY, named=False)
            failure.exit_code = getattr(error, "exit_code", 2)
        else:
            failure.summary = f"rank {rank} failed with {one_line(error, LONGEST_SUMMARY)}"
            failure.traceback = traceback.format_exc()[-LONGEST_TRACEBACK:]
        return failure


def run_as_rank(
    fn: RankFunction,
    args: tuple[Any, ...],
    variables: Mapping[str, str],
    page: process_ends.ReportPage,
    launcher_pid: int,
) -> None:
    """Run `fn` as this rank's process; stop signals are blocked until `install`."""
    for name in ADDRESS_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    outlive_readers()
    # A spawned process also spawns its children, such as a DataLoader's workers. That takes seconds
    # each and needs picklable arguments, so restore the default that a process without ranks has.
    multiprocessing.set_start_method(None, force=True)
    stop_flag.install()  # a second signal ends nothing here: the launcher counts Ctrl-C
    # Python restores their deadly defaults while it shuts down
    atexit.register(stop_flag.replace, signal.SIG_IGN)
    process_ends.leave_with_parent(launcher_pid)
    process_ends.report_to(page)
    report = run_guarded(fn, args)
    process_ends.report(**vars(report))
    events.close()
    if report.failed:  # without teardown, which could wait for the other ranks forever
        process_ends.flush_and_leave(report.exit_code or 1)
    close_world()
