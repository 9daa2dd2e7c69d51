"""Run a function as one rank, and report how it ended."""

import atexit
import logging
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rl_dist.errors import one_line, outlive_readers
from rl_dist.process_group import process_ends
from rl_dist.process_group.process_ends import ReportPage
from rl_dist.process_group.world import close_world, connection_broke, stop_flag
from rl_dist.telemetry import events

# Lines of this logger appear only in log files, because `launch` itself prints errors.
logger = logging.getLogger("rl_dist.launch.ranks")
logger.addHandler(logging.NullHandler())

# lengths in characters; both texts together must fit into a `ReportPage`
LONGEST_TRACEBACK, LONGEST_SUMMARY = 50_000, 5_000
RankFunction = Callable[..., int | None]


@dataclass
class RankReport:
    """Exit code and error of one rank or of the whole job."""

    exit_code: int  # 2: user error, which a restart would not fix
    rank: int = 0
    failed: bool = False  # the rank raised or died instead of returning an exit code
    summary: str = ""  # one line for the user
    traceback: str = ""  # "" for a user error
    # 0: this rank caused the failure; 1: this rank ended because it waited for another rank;
    # 2: this rank lost its connection to another rank
    consequence: int = 0


def run_guarded(fn: RankFunction, args: tuple[object, ...]) -> RankReport:
    """Run `fn(*args)`; return a report with its exit code and error."""
    rank = int(os.environ.get("RANK", 0))
    try:
        return RankReport(int(fn(*args) or 0), rank)
    except BaseException as error:  # including SystemExit, which the user's code may raise
        logger.exception("rank %d failed", rank)
        consequence = 2 if connection_broke(error) else 0
        failure = RankReport(1, rank, failed=True, consequence=consequence)
        if isinstance(error, ValueError):
            failure.summary = one_line(error, LONGEST_SUMMARY, named=False)
            failure.exit_code = getattr(error, "exit_code", 2)
        else:
            failure.summary = f"rank {rank} failed with {one_line(error, LONGEST_SUMMARY)}"
            failure.traceback = traceback.format_exc()[-LONGEST_TRACEBACK:]
        return failure


def run_as_rank(
    fn: RankFunction,
    args: tuple[object, ...],
    variables: Mapping[str, str],
    page: ReportPage,
    parent_pid: int,
) -> None:
    """Run `fn` in the new process of a rank; stop signals are blocked at its start."""
    os.environ.update(variables)
    outlive_readers()
    # This rank was started with the start method "spawn". Restore Python's default method for its
    # children, such as a DataLoader's workers: "spawn" takes seconds for each child and needs
    # picklable arguments.
    multiprocessing.set_start_method(None, force=True)
    stop_flag.install()  # the launcher handles a second signal
    # Ignore stop signals at exit: Python's shutdown restores the default handlers, and another
    # signal would then kill the process.
    atexit.register(stop_flag.replace, signal.SIG_IGN)
    # If the launcher dies now, let Linux kill this rank, which has nothing to save yet. Otherwise,
    # it would wait forever for the store of the dead launcher.
    process_ends.die_with_parent(parent_pid, signal.SIGKILL)
    process_ends.report_to(page)
    report = run_guarded(fn, args)
    process_ends.report(**vars(report))
    events.close()
    if report.failed:  # teardown could wait forever for other ranks
        process_ends.flush_and_leave(report.exit_code)
    close_world()
