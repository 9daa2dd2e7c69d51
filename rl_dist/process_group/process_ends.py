"""Handle stop signals and the parent's death, and report how a process ends.

This module imports only the standard library, because it is loaded by the supervisor and by the
processes in which environments run.
"""

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# One Ctrl-C may arrive twice: from the terminal, and from a launcher that passes it on.
SAME_KEYPRESS_S = 0.5
TEARDOWN_S = 20.0  # longest teardown of a process after it has reported its exit code
ORPHAN_GRACE_S = 20.0  # longest time for ranks to save after their launcher has died
PAGE_BYTES = 2**19
# Exit code of a spawned rank in which importing the user's script calls train() again
SCRIPT_RAN_AGAIN = 79
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Load libc now: loading it between fork and exec can deadlock a process with several threads.
_prctl = ctypes.CDLL(None).prctl


class StopFlag:
    """Remembers stop signals; several signals from one key press count as one.

    `signum` is the number of the first signal, or 0. A rank must not react to a signal alone:
    first, all ranks agree (`all_reduce_max(stop_flag.signum, world)`), then they save and exit
    together with code 128 + signum. `insists` is True after a second SIGINT or SIGTERM. Other stop
    signals do not change `insists`, because schedulers send them as a warning before SIGTERM.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """Forget all signals, and the handlers that `install` replaced."""
        self.signum = 0
        self.notice = ""  # text to print when the first signal arrives
        self._second_ends = False
        self._demands = 0  # number of SIGINT and SIGTERM signals counted so far
        # Time of the last *counted* signal. Other signals do not change this time; otherwise, many
        # rapid key presses would count only once.
        self._counted_s = -SAME_KEYPRESS_S
        self._previous: dict[int, Any] = {}  # signal -> handler that `install` replaced

    @property
    def insists(self) -> bool:
        """True after a second SIGINT or SIGTERM; the process must then end immediately."""
        return self._demands > 1

    def install(self, *, second_ends: bool = False) -> None:
        """Install handlers for the stop signals, then unblock these signals.

        Outside the main thread, do nothing: Python can set signal handlers only in the main thread.

        Args:
            second_ends: whether a second SIGINT or SIGTERM ends this process immediately.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._second_ends = second_ends
        for signum in awaited_signals():
            self._previous.setdefault(signum, signal.signal(signum, self._on_signal))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def replace(self, handler: Any) -> None:
        """Use another handler for all stop signals until `uninstall`."""
        for signum in self._previous:
            signal.signal(signum, handler)

    def uninstall(self) -> None:
        """Restore the handlers that `install` replaced, and forget all signals."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._forget()

    def count(self, signum: int) -> None:
        """Count a signal, unless it comes from the same key press as the last signal."""
        now_s = time.monotonic()
        if now_s - self._counted_s < SAME_KEYPRESS_S:
            return
        self._counted_s = now_s
        if signum in (signal.SIGINT, signal.SIGTERM):
            self._demands += 1
        self.signum = self.signum or signum

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.notice and not self.signum:
            with suppress(OSError):  # stderr has no reader
                os.write(2, f"\n{signal.Signals(signum).name}: {self.notice}\n".encode())
        self.count(signum)
        if self._second_ends and self.insists:
            leave(128 + self.signum)


def awaited_signals() -> list[signal.Signals]:
    """Return the stop signals, but without SIGHUP if it is ignored (as under nohup)."""
    return [
        signum
        for signum in STOP_SIGNALS
        if not (signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN)
    ]


def die_with_parent(parent_pid: int, signum: int = signal.SIGTERM) -> None:
    """Make Linux send `signum` to this process when the parent dies."""
    _prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent died before the call above
        os.kill(os.getpid(), signum)


def leave_with_parent(parent_pid: int) -> None:
    """Make this process receive SIGTERM when its parent dies, and exit soon afterwards.

    The process has ORPHAN_GRACE_S seconds to save a checkpoint.
    """

    def leave_when_orphaned() -> None:
        while os.getppid() == parent_pid:
            time.sleep(0.2)
        time.sleep(ORPHAN_GRACE_S)
        os._exit(1)

    die_with_parent(parent_pid)
    threading.Thread(target=leave_when_orphaned, daemon=True).start()


class ReportPage:
    """Shared memory in which a process stores facts for the process that watches it.

    The memory outlives the reporting process. Writing to it works even if the disk is full or the
    process cannot open more files.
    """

    def __init__(self) -> None:
        self._text = RawArray("c", PAGE_BYTES)  # this type can be passed to spawned processes

    def write(self, **facts: object) -> None:
        """Add facts to the shared memory."""
        self._text.value = json.dumps(self.read() | facts).encode()

    def read(self) -> dict[str, Any]:
        """Return the facts in the shared memory; {} if there are none or they are half written."""
        try:
            return json.loads(self._text.value or b"{}")
        except ValueError:
            return {}


_page: ReportPage | None = None  # None: no process watches this process
_owner = 0  # id of the process that may report; its forked children must not report


def report_to(page: ReportPage) -> None:
    """Make `report` write to this `ReportPage` from now on."""
    global _page, _owner
    _page = page
    _owner = os.getpid()


def report(**facts: object) -> None:
    """Report facts to the watching process, if there is one."""
    if _page is not None and os.getpid() == _owner:
        _page.write(**facts)


def leave(code: int) -> NoReturn:
    """Report an exit code and end this process without teardown."""
    report(exit_code=code)
    os._exit(code)


def flush_and_leave(code: int) -> NoReturn:
    """Flush output and logs, and end this process without teardown."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    leave(code)


def stopped_in_evaluation(signum: int, run_dir: Path | None) -> str:
    """Return a message that says which signal stopped the evaluation.

    If there is a run directory, the message also says how to resume.
    """
    message = f"stopped by {signal.Signals(signum).name}"
    if run_dir is None:
        return message
    return f"{message} during the evaluation; training is saved: evaluate with --resume {run_dir}"


def how_it_ended(code: int) -> str:
    """Describe how a process ended without a report; code -n means that signal n killed it."""
    if code == SCRIPT_RAN_AGAIN:
        return 'ran the whole script again: move train() below `if __name__ == "__main__":`'
    if code >= 0:
        return f"ended with code {code} without a report: perhaps a library or environment ended it"
    names = {member.value: member.name for member in signal.Signals}
    return f"was ended by {names.get(-code, f'signal {-code}')}"
