"""Supervises the training process: a death without a report is a failure.

`supervise` forks before torch is imported: the child trains, or starts the ranks; this process passes stop signals on,
waits, and prints how the child died where the child could not. It loads the standard library only.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from rl_dist.process_group.process_ends import (
    EXIT_GRACE_S,
    STOP_SIGNALS,
    ReportPage,
    StopRelay,
    die_with_parent,
    how_it_ended,
    report,
    report_to,
)

POLL_S = 0.02
SI_KERNEL = 0x80  # linux/asm-generic/siginfo.h: not sent by a process
LOOKING_IN = {"bdb", "profile", "pydevd"}  # modules of what would look into this process instead of the training
LAST_WORD_S = 3.0  # for the child to end itself at a second stop signal


def supervise() -> None:
    """Return in a child that this process watches and then follows.

    This process ends here, with the child's exit code, or 1 where it died without a report. Under torchrun, which
    watches its ranks, under a debugger or profiler and with `python -i` it returns at once.
    """
    looked_into = sys.flags.interactive or sys.modules.keys() & LOOKING_IN
    if "RANK" in os.environ or not hasattr(signal, "sigtimedwait") or looked_into:  # that macOS lacks
        return
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:  # or a file of ours would become a closed stdout
        pass
    os.close(spare)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody learns of a death
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        page, supervisor, child = ReportPage(by_fork=True), os.getpid(), os.fork()
    except OSError as error:
        sys.exit(f"error: the training process cannot be started: {error.strerror}")
    if child:
        sys.exit(_watch(child, page))
    die_with_parent(supervisor, signal.SIGKILL)  # who kills the process that he started means this one
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    sys.excepthook = _quiet_interrupt
    report_to(page)
    atexit.register(report, ended_in_order=True)  # then its exit code is what it means


def _quiet_interrupt(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print no traceback of a Ctrl-C that comes before training does."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


def _watch(child: int, page: ReportPage) -> int:
    """Wait for the child; its exit code, or 1 where it died without a report."""
    def pass_on(signum: int) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(child, signum)

    relay = StopRelay()
    awaited = {signum for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN}  # nohup
    deadline_s: float | None = None
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if deadline_s is None and (relay.insists or "exit_code" in page.read()):
            deadline_s = time.monotonic() + (LAST_WORD_S if relay.insists else EXIT_GRACE_S)
        if deadline_s is not None and time.monotonic() > deadline_s:
            pass_on(signal.SIGKILL)
        if arrived := signal.sigtimedwait(awaited, POLL_S):  # they are blocked since before the fork
            relay.count(arrived.si_signo)
            if arrived.si_code != SI_KERNEL:  # else the terminal has sent it to the child as well
                pass_on(arrived.si_signo)
    facts, code = page.read(), os.waitstatus_to_exitcode(status)
    if "exit_code" in facts:
        return facts["exit_code"]
    if facts.get("ended_in_order") and code >= 0:
        return code
    from rl_dist.errors import outlive_readers  # not before it is needed

    outlive_readers()
    if relay.signums and (relay.insists or -code in relay.signums):
        print(f"stopped by {signal.Signals(relay.signums[0]).name}", file=sys.stderr)
        return 128 + relay.signums[0]
    return _print_death(child, code, facts)


def _print_death(child: int, code: int, facts: dict[str, Any]) -> int:
    run_dir = facts.get("run_dir", "")
    words = f"the training process ({child}) {how_it_ended(code)}"
    fix = f"; go on with --resume {run_dir}" if run_dir and os.path.isdir(os.path.join(run_dir, "checkpoints")) else ""
    print(f"error: {words}{fix}", file=sys.stderr, flush=True)
    if facts.get("on_event"):
        from rl_dist.telemetry import events

        events.configure(facts["on_event"], run_dir)
        events.notify("failed", words, exit_code=1)
        events.close()
    return 1
