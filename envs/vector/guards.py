"""Calls into environments: faults are named and hangs ended.

A thread watches the call under way. After `timeout_s` it sends a signal to the main thread, and
the handler raises HungError inside the environment. A call that still does not return (it waits in
C, or swallows the error) ends the process, with the Python stack in the log; faulthandler ends a
call in C that does not even let other threads run. Until then the thread reports progress.
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from envs.vector.spaces import RowFaultError
from rl_dist.errors import one_line

_LOGGER = logging.getLogger(__name__)
MAX_REWARD = 1e30  # larger ones count as infinite
GRACE_S = 5.0  # from the signal to the end of the process, and from there to faulthandler's
MIN_FAULTHANDLER_S = 30.0
# nobody else uses it: environments and tests have alarms of their own
_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGALRM)


class EnvironmentFaultError(RuntimeError):
    """An environment, or the worker process that holds it, failed; one line names it."""


class Interruption(BaseException):
    """Raised by a signal handler of ours, wherever the program is at the time."""


class HungError(Interruption):
    """An environment hangs; its own `except Exception` does not catch this."""


def is_own_fault(error: BaseException) -> bool:
    """Return whether an environment raised this: foreign code may raise anything."""
    by_user = (
        isinstance(error, KeyboardInterrupt)
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    return not by_user and not isinstance(error, Interruption)


def place_of(error: BaseException) -> str:
    """Return " (FILE:LINE)" of the innermost code outside libraries, or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/lib/python" not in frame.filename and not frame.filename.startswith("<"):
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""


@cache
def _sentinel() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def has_closed_descriptors() -> bool:
    """Return whether an environment has closed descriptors of others, such as gloo's."""
    try:
        os.get_inheritable(_sentinel())  # takes 0.1 us
    except OSError:
        return True
    return False


def end_process(message: str) -> None:
    """Print why and end this process, without teardown that could wait for the call."""
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    logging.shutdown()
    os._exit(1)


@dataclass(eq=False)
class HangWatch:
    """Makes the calls into environments and watches them."""

    timeout_s: float  # longest time for a call; 0: any
    # names the environment of a row (None: all of them) and its problem, in one line
    describe: Callable[[int | None, str], str]
    end: Callable[[str], None]  # ends the process; must not return
    heartbeat: Callable[[], None]  # reports progress
    row: int | None = None  # called now, or last

    newest: ClassVar[HangWatch | None] = None  # the watch of the newest call

    def __post_init__(self) -> None:
        self._started_s = 0.0  # when the call under way began; 0 between calls
        self._interrupted_s = 0.0  # when the call began that the signal is meant for
        self._closed = threading.Event()
        self._thread_id = threading.get_ident()
        self._problem = f"did not come back within {self.timeout_s:g} s (--env_timeout)"
        self._can_interrupt = threading.current_thread() is threading.main_thread()
        if self.timeout_s:
            if self._can_interrupt:
                signal.signal(_SIGNAL, self._interrupt)
            threading.Thread(target=self._watch, name="environment watch", daemon=True).start()

    def call(self, row: int | None, function: Callable[..., Any], *args: Any) -> Any:
        """Call into the environment of a row (None: all).

        Raises EnvironmentFaultError, which names the environment and the problem.
        """
        self.row = row
        self.heartbeat()
        HangWatch.newest = self
        try:
            self._started_s = time.monotonic()
            try:
                return function(*args)
            finally:
                self._started_s = 0.0
        except BaseException as error:
            problem = str(error)
            if isinstance(error, RowFaultError):
                row = error.row if row is None else row
            elif is_own_fault(error):
                problem = f"raised {one_line(error)}{place_of(error)}"
            elif not isinstance(error, HungError):
                raise
            raise EnvironmentFaultError(self.describe(row, problem)) from error
        finally:
            if has_closed_descriptors():  # gloo aborts the process in a few milliseconds
                problem = "closed files and connections that are not its own: the process ends"
                self.end(self.describe(row, problem))

    def close_env(self, row: int | None, env: Any) -> None:
        """Close an environment or a batch; a failure is only logged."""
        try:
            self.call(row, env.close)
        except EnvironmentFaultError as fault:
            _LOGGER.warning("%s, when it was closed", fault)

    def close(self) -> None:
        """Stop watching; safe to call twice."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, max(0.05, self.timeout_s / 20))):
            # end the process from outside Python, should this thread not run for so long
            limit_s = max(self.timeout_s + 2 * GRACE_S, MIN_FAULTHANDLER_S)
            with suppress(RuntimeError, ValueError):  # no thread can start, or stderr is closed
                faulthandler.dump_traceback_later(
                    limit_s, exit=True, file=sys.__stderr__ or sys.stderr
                )
            started_s = self._started_s
            if not started_s:
                continue
            self.heartbeat()
            waited_s = time.monotonic() - started_s
            if waited_s >= self.timeout_s + GRACE_S:
                stack = traceback.format_stack(sys._current_frames()[self._thread_id])
                problem = f"{self._problem} and cannot be interrupted: the process ends"
                message = self.describe(self.row, problem)
                _LOGGER.info("%s; it is at\n%s", message, "".join(stack))
                self.end(message)
            elif waited_s >= self.timeout_s and self._interrupted_s != started_s:
                self._interrupted_s = started_s
                if self._can_interrupt:
                    signal.pthread_kill(self._thread_id, _SIGNAL)
        faulthandler.cancel_dump_traceback_later()

    @staticmethod
    def _interrupt(*_: Any) -> None:
        """Raise HungError if the signal that arrived is meant for the call under way."""
        watch = HangWatch.newest
        if watch and watch._started_s and watch._started_s == watch._interrupted_s:
            raise HungError(watch._problem)
