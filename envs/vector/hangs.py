"""Notices environments that do not come back from a call, and gets out of them.

Environments run in this process, one after the other. A thread watches the call under way and acts in three steps:

1. after `timeout_s` it sends SIGALRM to the main thread, whose handler raises HungError inside the environment:
   this ends any wait and any loop in Python, and the run can go on with the environment made anew;
2. a call that still does not come back (it waits in C, or swallows the error) ends the process, with the Python
   stack in the log;
3. a call in C that does not even let other threads run is ended by faulthandler, with the stack on stderr, as
   would be any other such call in this process that took longer.

Until then the thread says that work goes on: `timeout_s` alone decides how long a call may take, however many hang.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from envs.vector.faults import Interruption

_LOGGER = logging.getLogger(__name__)
GRACE_S = 5.0  # from one step to the next
NO_THREAD_RUNS_S = 30.0  # at least, before the third step
_watches: set[HangWatch] = set()


class HungError(Interruption):
    """An environment hangs; no `except Exception` of its own shall catch this."""


def end_process(message: str) -> None:
    """Say why and end this process, without teardown that could wait for the call."""
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    logging.shutdown()
    os._exit(1)


class HangWatch:
    """Watches the calls between `begin` and `end`; they cost no look at a clock.

    Args:
        timeout_s: longest time for one call.
        describe: names the environment of a row and its problem, in one line.
        end: how to end the process; must not return.
        beat: says that work goes on, from a thread, while a call may still come back.
    """

    def __init__(
        self,
        timeout_s: float,
        describe: Callable[[int | None, str], str],
        end: Callable[[str], None] = end_process,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.timeout_s = timeout_s
        self._describe, self._end, self._beat = describe, end, beat
        self._row: int | None = None
        self._call = 0  # number of the call under way
        self._busy = False
        self._suspect = 0  # number of the call that the alarm is meant for
        self._closed = threading.Event()
        self._main = threading.current_thread()
        if self._main is threading.main_thread() and signal.getsignal(signal.SIGALRM) is not _on_alarm:
            signal.signal(signal.SIGALRM, _on_alarm)
        _watches.add(self)
        threading.Thread(target=self._watch, name="environment watch", daemon=True).start()

    def begin(self, row: int | None) -> None:
        """A call into the environment of this row, or into all together, begins."""
        self._row, self._call, self._busy = row, self._call + 1, True

    def end(self) -> None:
        """It came back."""
        self._busy = False

    def close(self) -> None:
        """Stop watching; safe to call twice."""
        self._closed.set()
        _watches.discard(self)

    @property
    def problem(self) -> str:
        """What is said of an environment that hangs."""
        return f"did not come back within {self.timeout_s:g} s (--env_timeout)"

    @property
    def is_due(self) -> bool:
        """Whether the alarm that arrived is meant for the call under way."""
        return self._busy and self._call == self._suspect

    def _watch(self) -> None:
        seen, since_s = 0, 0.0
        while not self._closed.wait(min(1.0, max(0.05, self.timeout_s / 20))):
            busy, call, now_s = self._busy, self._call, time.monotonic()
            self._arm()
            if busy:
                self._beat()
            if not busy or call != seen:
                seen, since_s = call, now_s
            elif now_s - since_s >= self.timeout_s + GRACE_S:
                self._give_up()
            elif now_s - since_s >= self.timeout_s and self._suspect != call:
                self._suspect = call
                if self._main is threading.main_thread() and self._main.ident:
                    signal.pthread_kill(self._main.ident, signal.SIGALRM)
        faulthandler.cancel_dump_traceback_later()

    def _arm(self) -> None:
        """Have the process ended from outside Python, should this thread not run for so long."""
        if sys.__stderr__ is not None and not sys.__stderr__.closed:
            limit_s = max(self.timeout_s + 2 * GRACE_S, NO_THREAD_RUNS_S)
            with suppress(RuntimeError):  # no thread to be had: the other steps are left
                faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)

    def _give_up(self) -> None:
        frame = sys._current_frames().get(self._main.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        message = self._describe(self._row, f"{self.problem} and cannot be interrupted: the process ends")
        _LOGGER.info("%s; it is at\n%s", message, stack)  # `end` tells the console
        self._end(message)


def _on_alarm(signum: int, frame: FrameType | None) -> Any:
    for watch in list(_watches):
        if watch.is_due:
            raise HungError(watch.problem)
