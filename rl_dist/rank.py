"""One rank's process: run the function it is for, report how it ended, leave."""

from __future__ import annotations

import atexit
import json
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
from pathlib import Path
from typing import Any

from rl_dist import events
from rl_dist.console import outlive_readers
from rl_dist.rendezvous import ADDRESS_VARIABLES
from rl_dist.watchdog import leave_report
from rl_dist.world import (
    JOB_DIR_VARIABLE,
    STOP_SIGNALS,
    close_any_world,
    die_with_parent,
    leave_when_orphaned,
    stop_flag,
)

logger = logging.getLogger(__name__)  # for the log files only: `launch` itself tells the console, once
logger.addHandler(logging.NullHandler())
RankFunction = Callable[..., int | None]


@dataclass
class Report:
    """How one rank ended."""

    exit_code: int
    message: str = ""  # for the user
    rank: int = 0
    at_ns: int = 0  # when it raised (0: it returned); the earliest is the cause, the others consequences
    summary: str = ""  # the message in one line
    by_user: bool = False  # to start again would not help


def run_guarded(fn: RankFunction, args: tuple[Any, ...]) -> Report:
    """Run `fn(*args)` and tell what became of it."""
    rank = int(os.environ.get("RANK", 0))
    by_user = True
    try:
        return Report(exit_code=int(fn(*args) or 0), rank=rank)
    except ValueError as error:
        logger.exception("rank %d stops", rank)
        summary = " ".join(str(error).split())
        message, code = f"error: {summary}", getattr(error, "exit_code", 2)
        by_user = code == 2
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return Report(exit_code=leaving.code or 0, rank=rank)
        message = summary = str(leaving.code)
        code = 1
    except Exception as error:
        logger.exception("rank %d failed", rank)
        summary = " ".join(f"rank {rank} failed with {type(error).__name__}: {error}".split())
        message, code = f"{traceback.format_exc()}error: rank {rank} failed, see the traceback above", 1
        by_user = False
    return Report(
        exit_code=code, message=message, rank=rank, at_ns=time.monotonic_ns(), summary=summary, by_user=by_user
    )


def run_as_rank(fn: RankFunction, args: tuple[Any, ...], job_dir: str, launcher_pid: int, at_address: bool) -> int:
    """Be a rank; stop signals are blocked until `install`."""
    outlive_readers()
    # A spawned process would spawn all of its own, such as a DataLoader's workers: seconds each, and only for what can
    # be pickled. They shall start as they do without ranks, or under torchrun.
    multiprocessing.set_start_method(None, force=True)
    stop_flag.install(second_ends=False)  # the launcher counts Ctrl-C
    atexit.register(_ignore_stop_signals)  # Python restores their deadly defaults while it shuts down
    die_with_parent(launcher_pid)
    done = threading.Event()
    threading.Thread(target=leave_when_orphaned, args=(launcher_pid, done), daemon=True).start()
    os.environ[JOB_DIR_VARIABLE] = job_dir
    if not at_address:  # the agent's: the ranks meet in `job_dir`
        for name in ADDRESS_VARIABLES:
            os.environ.pop(name, None)
    report = run_guarded(fn, args)
    events.close()
    if report.at_ns:
        _leave_failed(report, job_dir)
    close_any_world()
    done.set()  # torch keeps the process until the launcher has read the result: a dead one never will
    return report.exit_code


def failure_reports(job_dir: str) -> list[Report]:
    """Reports of failed ranks, the cause first."""
    found = [Report(**json.loads(path.read_text())) for path in Path(job_dir).glob("rank_*.json")]
    return sorted(found, key=lambda report: report.at_ns)


def _leave_failed(report: Report, job_dir: str) -> None:
    """Say why and leave without teardown, which could wait for the other ranks for ever."""
    leave_report(job_dir, vars(report))
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(report.exit_code or 1)


def _ignore_stop_signals() -> None:
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
