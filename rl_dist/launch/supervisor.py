"""Supervise the training process, and print an error if it dies silently.

`supervise` forks before torch is imported. The child trains or starts the ranks. The parent, which
is called the supervisor, passes stop signals on and waits for the child. If the child dies without
printing an error, the parent prints how the child died. The parent needs only the standard library.
"""

import atexit
import math
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_dist.errors import outlive_readers, report_to_caller, restarts_refused, use_utf8
from rl_dist.process_group.process_ends import (
    STOP_SIGNALS,
    TEARDOWN_S,
    ReportPage,
    StopFlag,
    awaited_signals,
    die_with_parent,
    how_it_ended,
    report,
    report_to,
)
from rl_dist.telemetry import events

POLL_S = 0.02
SI_KERNEL = 0x80  # si_code of a signal from the kernel: linux/asm-generic/siginfo.h
LAST_WORD_S = 3.0  # after a second signal, kill the child if it has not exited within this time


def supervise() -> None:
    """Fork, and return only in the child.

    The parent watches the child and exits with the child's exit code, or with 1 if the child died
    without a report. Under torchrun, which watches its ranks itself, this function does not fork.
    """
    if restarts_refused():
        sys.exit(2)
    use_utf8()
    # If a command ends with `&`, the shell starts it with SIGINT ignored. Restore the default
    # actions, so that stop signals work even before training installs its handlers.
    for signum in awaited_signals():
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "RANK" in os.environ:
        return
    # Open the descriptors 0 to 2 if they are closed. If stdout stayed closed, the next file to be
    # opened would get its descriptor, and lines for the user would be written to this file.
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(spare)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # waitpid would fail if SIGCHLD were ignored
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    page = ReportPage()
    supervisor = os.getpid()
    if child := os.fork():
        sys.exit(_watch(child, page))
    die_with_parent(supervisor, signal.SIGKILL)  # killing the supervisor also kills the training
    sys.excepthook = _quiet_interrupt
    report_to(page)
    # Without this report, the parent treats any exit code as a failure.
    atexit.register(report, ended_in_order=True)


def imports_done() -> None:
    """Unblock the stop signals after the imports.

    They were blocked because a signal that arrives during an import can get lost.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _quiet_interrupt(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print the traceback of an error, but print none after Ctrl-C."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


def _watch(child: int, page: ReportPage) -> int:
    """Wait for the child; return its exit code, or 1 if it died without a report."""

    def pass_on(signum: int) -> None:
        with suppress(ProcessLookupError):  # the child has just ended
            os.kill(child, signum)

    stop = StopFlag()
    awaited = awaited_signals()
    deadline_s = math.inf
    # Wait for any process: in a container, the supervisor may be the process with id 1, which
    # inherits all orphans.
    while (pid_and_status := os.waitpid(-1, os.WNOHANG))[0] != child:
        if deadline_s == math.inf and "exit_code" in page.read():
            deadline_s = time.monotonic() + TEARDOWN_S
        if time.monotonic() > deadline_s:
            pass_on(signal.SIGKILL)
        time.sleep(0 if pid_and_status[0] else POLL_S)
        # The awaited signals were blocked before the fork, so read them with sigtimedwait. Use a
        # timeout of 0: if the process is suspended and continued during a longer wait, sigtimedwait
        # returns an arbitrary signal number.
        if arrived := signal.sigtimedwait(awaited, 0):
            stop.count(arrived.si_signo)
            # A signal from the terminal, such as Ctrl-C, also reaches the child directly.
            if arrived.si_code != SI_KERNEL:
                pass_on(arrived.si_signo)
            if stop.insists:
                deadline_s = min(deadline_s, time.monotonic() + LAST_WORD_S)
    return _conclude(child, page.read(), os.waitstatus_to_exitcode(pid_and_status[1]), stop)


def _conclude(child: int, facts: dict[str, Any], code: int, stop: StopFlag) -> int:
    """Return the exit code; report how the child ended, unless the child itself did so.

    The report consists of a line on stderr, an entry in state.json and the event `failed`.
    """
    run_dir = facts.get("run_dir", "")
    error = ""
    signum = max(0, -code)
    if "exit_code" in facts:  # ignore failures after the child has reported this
        code = facts["exit_code"]
        signum = 0
        error = facts.get("summary", "")  # the child has already printed this error
    elif not facts.get("ended_in_order") or code < 0:
        if stop.signum and (stop.insists or signum in STOP_SIGNALS):
            line = f"stopped by {signal.Signals(stop.signum).name}"
            code = 128 + stop.signum
        else:
            error = f"the training process ({child}) {how_it_ended(code)}"
            line = f"error: {error}"
            if run_dir and Path(run_dir, "checkpoints").is_dir():
                line += f"; continue with --resume {run_dir}"
            code = 1
        outlive_readers()
        print(line, file=sys.stderr, flush=True)
    if run_dir and "exit_recorded" not in facts:
        from rl_dist.run_dir import RunDir  # a late import saves 300 ms at start-up

        RunDir(run_dir).record_exit(child, code, error, signum)
    if error:
        report_to_caller(error=error)
        events.configure(facts.get("on_event", ""), run_dir)
        events.notify("failed", error, exit_code=1)
        events.close()
    return code
