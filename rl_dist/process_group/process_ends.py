"""How a process ends: stop signals, its parent's death, its last report."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Ctrl-C may come twice: from the terminal and from a launcher that passes it on
SAME_KEYPRESS_S = 0.5
# for the teardown of a process that has reported its end, or its failure; a thread may never end
EXIT_GRACE_S = 60.0
FAILED_GRACE_S = 10.0
PAGE_BYTES = 2**19
SCRIPT_RAN_AGAIN = 79  # exit code of a new rank in which the user's script calls train() again
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Looked up here: between fork and exec of a process with threads, loading a library can deadlock.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None
_prctl = getattr(_libc, "prctl", None)


class StopRelay:
    """Collects the stop signals that reach a process; one key press counts once.

    SIGUSR1 and SIGHUP announce an end: a SIGTERM may follow. A second SIGINT or SIGTERM insists.
    """

    def __init__(self) -> None:
        self.signums: list[int] = []
        self._last_s = 0.0
        self._previous: dict[int, Any] = {}  # handlers

    def install(self) -> None:
        """Set the handlers (in the main thread only) and forget earlier signals."""
        self.signums.clear()
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in STOP_SIGNALS:
            # nohup
            if not (signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN):
                self._previous[signum] = signal.signal(signum, self._on_signal)

    def replace(self, handler: Any) -> None:
        """Handle stop signals in another way until `uninstall`."""
        for signum in self._previous:
            signal.signal(signum, handler)

    def uninstall(self) -> None:
        """Restore the handlers of before `install`."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()

    @property
    def insists(self) -> bool:
        """True once the process shall end at once."""
        return sum(signum in (signal.SIGINT, signal.SIGTERM) for signum in self.signums) > 1

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.count(signum)

    def count(self, signum: int) -> None:
        """Remember a signal, unless it belongs to the key press before."""
        now_s = time.monotonic()
        if not self.signums or now_s - self._last_s > SAME_KEYPRESS_S:
            self.signums.append(signum)
            self._last_s = now_s  # of the last counted signal, so that rapid presses still add up


def die_with_parent(parent_pid: int, signum: int = signal.SIGTERM) -> None:
    """Ask Linux for a signal when the parent dies, even by SIGKILL; no-op elsewhere."""
    if _prctl is None:
        return
    _prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call above
        os.kill(os.getpid(), signum)


class ReportPage:
    """Memory in which a process reports to the one that watches it.

    It outlives the process. Closed descriptors, a full disk or a cleaner of temporary files do not
    take it away.
    """

    def __init__(self, descriptor: Any = None, *, by_fork: bool = False) -> None:
        """Make a page, or with the descriptor that `__reduce__` sends, share one.

        `by_fork`: only a fork of this process will share it, which needs no file.
        """
        if by_fork:
            self._descriptor = -1
        elif descriptor is None:
            self._descriptor = _unnamed_file()
            os.posix_fallocate(self._descriptor, 0, PAGE_BYTES)
        else:
            self._descriptor = descriptor.detach()
        self._memory = mmap.mmap(self._descriptor, PAGE_BYTES)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to a new process as an inherited descriptor."""
        from multiprocessing.reduction import DupFd

        return ReportPage, (DupFd(self._descriptor),)

    def write(self, **facts: Any) -> None:
        """Add facts to those reported before."""
        data = json.dumps(self.read() | facts, ensure_ascii=False).encode(errors="replace")
        assert len(data) < PAGE_BYTES, f"a report of {len(data)} bytes"
        self._memory[:] = data.ljust(PAGE_BYTES, b"\0")

    def read(self) -> dict[str, Any]:
        """Return what was reported; {}: nothing yet, or not to the end."""
        try:
            # `find` first: a slice of the whole page would cost the training time
            return json.loads(self._memory[: self._memory.find(b"\0")] or b"{}")
        except ValueError:
            return {}


def _unnamed_file() -> int:
    try:
        return os.memfd_create("report")
    except (AttributeError, OSError):  # another system, or a container that forbids it
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


_page: ReportPage | None = None  # None: nobody watches this process
_owner = 0  # the process that reports; its own children share the page, too


def report_to(page: ReportPage) -> None:
    """Report to the process that made the page, from now on."""
    global _page, _owner
    _page = page
    _owner = os.getpid()


def report(**facts: Any) -> None:
    """Report facts to the process that watches this one, if one does."""
    if _page is not None and os.getpid() == _owner:
        _page.write(**facts)


def leave(code: int) -> NoReturn:
    """End this process at once, without teardown, after it has printed why."""
    report(exit_code=code)
    os._exit(code)


def stopped_in_evaluation(signum: int, run_dir: Path | None) -> str:
    """Say that a signal ended an evaluation, of the training in `run_dir` if any."""
    words = f"stopped by {signal.Signals(signum).name}"
    if run_dir is None:
        return words
    return f"{words} during the evaluation; training is saved: --resume {run_dir} evaluates it"


def how_it_ended(code: int) -> str:
    """Describe a death without a report; `code` may be minus a signal's number."""
    if code == SCRIPT_RAN_AGAIN:
        return 'imported the script, whose train() belongs below `if __name__ == "__main__":`'
    if code >= 0:
        return (
            f"ended with code {code} and without a report: "
            "its environment or a library ended the process"
        )
    known = -code in {member.value for member in signal.Signals}
    return f"was ended by {signal.Signals(-code).name if known else f'signal {-code}'}"
