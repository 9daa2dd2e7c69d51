"""One rank's process: run the function it is for, report how it ended, leave."""

from __future__ import annotations

import atexit
import json
import logging
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

from rl_dist.world import JOB_DIR_VARIABLE, STOP_SIGNALS, close_any_world, die_with_parent, stop_flag

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


def run_guarded(fn: RankFunction, args: tuple[Any, ...]) -> Report:
    """Run `fn(*args)` and tell what became of it."""
    rank = int(os.environ.get("RANK", 0))
    try:
        return Report(exit_code=int(fn(*args) or 0), rank=rank)
    except ValueError as error:
        logger.exception("rank %d stops", rank)
        message = "error: " + " ".join(str(error).split())
        code = getattr(error, "exit_code", 2)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return Report(exit_code=leaving.code or 0, rank=rank)
        message, code = str(leaving.code), 1
    except Exception:
        logger.exception("rank %d failed", rank)
        message, code = f"{traceback.format_exc()}error: rank {rank} failed, see the traceback above", 1
    return Report(exit_code=code, message=message, rank=rank, at_ns=time.monotonic_ns())


def run_as_rank(fn: RankFunction, args: tuple[Any, ...], job_dir: str, launcher_pid: int) -> int:
    """Be a rank; stop signals are blocked until `install`."""
    stop_flag.install(second_ends=False)  # the launcher counts Ctrl-C
    atexit.register(_ignore_stop_signals)  # Python restores their deadly defaults while it shuts down
    die_with_parent(launcher_pid)
    os.environ[JOB_DIR_VARIABLE] = job_dir
    report = run_guarded(fn, args)
    if report.at_ns:
        _leave_failed(report, Path(job_dir, f"rank_{report.rank}.json"))
    close_any_world()
    threading.Thread(target=_leave_when_orphaned, args=(launcher_pid, report.exit_code), daemon=True).start()
    return report.exit_code


def _leave_failed(report: Report, path: Path) -> None:
    """Say why and leave without teardown, which could wait for the other ranks for ever."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(vars(report)))
    part.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(report.exit_code or 1)


def _ignore_stop_signals() -> None:
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _leave_when_orphaned(launcher_pid: int, exit_code: int) -> None:
    """A rank that is done waits for its launcher to read the result: not for a dead one."""
    while os.getppid() == launcher_pid:
        time.sleep(0.2)
    os._exit(exit_code)
