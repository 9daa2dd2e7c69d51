"""Guard calls into environments: report failures clearly and end calls that hang.

A thread watches the current call and reports progress. A call that hangs is ended in up to three
steps:

1. After `timeout_s` seconds, the thread sends a signal to the main thread. The signal handler
   raises HungError inside the environment.
2. If the call waits in C code or catches the error, it still does not return. After GRACE_S more
   seconds, the thread logs the Python stack and ends the process.
3. If C code holds the GIL, the watching thread cannot run. Then faulthandler ends the process,
   because it does not need the GIL.
"""

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
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from envs.vector.spaces import RowFaultError
from rl_dist.errors import one_line, text_of

T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)
GRACE_S = 5.0  # time from step 1 to step 2, and from step 2 to step 3, of the list above
MIN_FAULTHANDLER_S = 30.0  # lower bound of faulthandler's time limit in step 3
# Environments and tests may use SIGALRM, so prefer a real-time signal, which is rarely used.
_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGALRM)


class EnvironmentFaultError(RuntimeError):
    """Error: an environment or its worker failed; the message names the environment."""


class Interruption(BaseException):
    """Base class of the exceptions that our signal handlers raise."""


class HungError(Interruption):
    """Raised inside an environment that hangs; `except Exception` does not catch it."""


def is_own_fault(error: BaseException) -> bool:
    """Return whether the environment caused an error; False if the user or a signal did."""
    by_user = (
        isinstance(error, KeyboardInterrupt)
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    return not by_user and not isinstance(error, Interruption)


def place_of(error: BaseException) -> str:
    """Return " (FILE:LINE)" for the innermost frame outside libraries, or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/lib/python" not in frame.filename and not frame.filename.startswith("<"):
            return f" ({Path(frame.filename).name}:{frame.lineno})"
    return ""


def end_process(message: str) -> None:
    """Print an error and exit without cleanup, because cleanup could hang too."""
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    logging.shutdown()
    os._exit(1)


@dataclass(eq=False)
class HangWatch:
    """Makes the calls into environments and limits how long each may take."""

    timeout_s: float  # time limit of one call; 0: no limit
    # Takes the row of an environment (None if unknown) and a problem. Returns a line that names the
    # environment and the problem.
    describe: Callable[[int | None, str], str]
    end: Callable[[str], None]  # ends the process; must not return
    heartbeat: Callable[[], None]  # reports progress
    row: int | None = None  # row of the environment in the latest call; None: all rows

    newest: "ClassVar[HangWatch | None]" = None  # the HangWatch that made the latest call

    def __post_init__(self) -> None:
        self.is_limited = True  # False: a call may take any time
        self._started_s = 0.0  # start time of the current call; 0 between calls
        self._interrupted_s = 0.0  # start time of the most recently interrupted call
        self._closed = threading.Event()
        self._thread_id = threading.get_ident()
        self._problem = f"did not come back within {self.timeout_s:g} s (--env_timeout)"
        self._can_interrupt = threading.current_thread() is threading.main_thread()
        if self.timeout_s:
            if self._can_interrupt:
                signal.signal(_SIGNAL, self._interrupt)
            threading.Thread(target=self._watch, name="environment watch", daemon=True).start()

    def call(self, row: int | None, function: Callable[..., T], *args: object) -> T:
        """Call a function of the environment in one row; row None means all rows.

        Raises:
            EnvironmentFaultError: the call failed; the message names the environment.
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
            problem = text_of(error)
            if isinstance(error, RowFaultError):
                row = error.row if row is None else row
            elif is_own_fault(error):
                problem = f"raised {one_line(error)}{place_of(error)}"
            elif not isinstance(error, HungError):
                raise
            raise EnvironmentFaultError(self.describe(row, problem)) from error

    def close_env(self, row: int | None, env: Any) -> None:
        """Close an environment; log a failure instead of raising it."""
        try:
            self.call(row, env.close)
        except EnvironmentFaultError as fault:
            _LOGGER.warning("%s while it was being closed", fault)

    def close(self) -> None:
        """Stop watching; safe to call twice."""
        self._closed.set()
        HangWatch.newest = None  # frees the environments, whose libraries may report leaks at exit

    def _watch(self) -> None:
        """Report progress and end hanging calls, in a thread, until `close` is called."""
        limit_s = max(self.timeout_s + 2 * GRACE_S, MIN_FAULTHANDLER_S)
        while True:
            # Restart faulthandler's timer. If this loop stops running, the timer ends the process.
            with suppress(RuntimeError, ValueError):  # no thread can start, or stderr is closed
                faulthandler.dump_traceback_later(
                    limit_s, exit=True, file=sys.__stderr__ or sys.stderr
                )
            if self._closed.wait(min(1.0, max(0.05, self.timeout_s / 20))):
                break
            started_s = self._started_s
            if not started_s:
                continue
            self.heartbeat()
            waited_s = time.monotonic() - started_s if self.is_limited else 0.0
            if waited_s >= self.timeout_s + GRACE_S:
                stack = traceback.format_stack(sys._current_frames()[self._thread_id])
                problem = f"{self._problem} and cannot be interrupted: the process ends"
                message = self.describe(self.row, problem)
                _LOGGER.info("%s; its stack is\n%s", message, "".join(stack))
                self.end(message)
            elif waited_s >= self.timeout_s and self._interrupted_s != started_s:
                self._interrupted_s = started_s
                if self._can_interrupt:
                    signal.pthread_kill(self._thread_id, _SIGNAL)
        faulthandler.cancel_dump_traceback_later()

    @staticmethod
    def _interrupt(*_: object) -> None:
        """Handle the signal: raise HungError unless the call has returned meanwhile."""
        watch = HangWatch.newest
        if watch and watch._started_s and watch._started_s == watch._interrupted_s:
            raise HungError(watch._problem)
