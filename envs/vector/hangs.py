"""Calls into environments: faults are located, and those that hang are ended.

A thread watches the call under way. After `timeout_s` it sends SIGALRM to the main thread, whose
handler raises HungError inside the environment. A call that still does not return (it waits in C,
or swallows the error) ends the process, with the Python stack in the log; faulthandler ends one in
C that does not even let other threads run. Until then the thread reports that work goes on.
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
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from envs.vector.faults import Interruption, RowFaultError, has_closed_descriptors, is_own_fault
from rl_dist.errors import one_line

_LOGGER = logging.getLogger(__name__)
GRACE_S = 5.0  # from one step to the next
NO_THREAD_RUNS_S = 30.0  # at least, before the third step
_watches: set[HangWatch] = set()


class HungError(Interruption):
    """An environment hangs; no `except Exception` of its own shall catch this."""


def end_process(message: str) -> None:
    """Print why and end this process, without teardown that could wait for the call."""
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()
    logging.shutdown()
    os._exit(1)


class HangWatch:
    """Makes the calls into environments and watches them.

    `describe` names the environment of a row (None: all of them) and its problem, in one line;
    `end` ends the process and must not return; the rest as in `TorchVectorEnv`.
    """

    def __init__(
        self,
        timeout_s: float,
        describe: Callable[[int | None, str], str],
        end: Callable[[str], None],
        heartbeat: Callable[[], None],
    ) -> None:
        self.describe = describe
        self._timeout_s = timeout_s
        self._end = end
        self._heartbeat = heartbeat
        self.row: int | None = None  # that is being called, or was last
        self._call = 0  # number of the call under way
        self._busy = False
        self._suspect = 0  # number of the call that the alarm is meant for
        self._closed = threading.Event()
        self._thread = threading.current_thread()
        self._can_interrupt = self._thread is threading.main_thread()
        self.problem = f"did not come back within {timeout_s:g} s (--env_timeout)"
        if timeout_s:
            if self._can_interrupt:
                _alarm.install()
            _watches.add(self)
            threading.Thread(target=self._watch, name="environment watch", daemon=True).start()

    def call(self, row: int | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call into the environment of a row (None: all); RowFaultError if it fails."""
        self.row = row
        self._heartbeat()
        try:
            self._call += 1
            self._busy = True
            try:
                return function(*args, **kwargs)
            finally:
                self._busy = False
        except RowFaultError:
            raise
        except HungError as error:
            raise RowFaultError(row, str(error)) from error
        except BaseException as error:
            if not is_own_fault(error):
                raise
            raise RowFaultError(row, f"raised {one_line(error)}{_place_of(error)}") from error
        finally:
            if has_closed_descriptors():  # gloo aborts the process in a few milliseconds
                problem = "closed files and connections that are not its own: the process ends"
                self._end(self.describe(row, problem))

    def close(self) -> None:
        """Stop watching; safe to call twice."""
        self._closed.set()
        _watches.discard(self)
        if not _watches and threading.current_thread() is threading.main_thread():
            _alarm.uninstall()

    def _watch(self) -> None:
        seen, since_s = 0, 0.0
        while not self._closed.wait(min(1.0, max(0.05, self._timeout_s / 20))):
            busy = self._busy
            call = self._call
            now_s = time.monotonic()
            # Have the process ended from outside Python, should this thread not run for so long
            if sys.__stderr__ is not None and not sys.__stderr__.closed:
                limit_s = max(self._timeout_s + 2 * GRACE_S, NO_THREAD_RUNS_S)
                with suppress(RuntimeError):  # no thread to be had: the other steps are left
                    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
            if busy:
                self._heartbeat()
            if not busy or call != seen:
                seen, since_s = call, now_s
            elif now_s - since_s >= self._timeout_s + GRACE_S:
                frame = sys._current_frames().get(self._thread.ident or 0)
                stack = "".join(traceback.format_stack(frame)) if frame else ""
                problem = f"{self.problem} and cannot be interrupted: the process ends"
                message = self.describe(self.row, problem)
                _LOGGER.info("%s; it is at\n%s", message, stack)  # `end` prints to the console
                self._end(message)
            elif now_s - since_s >= self._timeout_s and self._suspect != call:
                self._suspect = call
                if self._can_interrupt and self._thread.ident:
                    _alarm.is_ours = True
                    signal.pthread_kill(self._thread.ident, signal.SIGALRM)
        faulthandler.cancel_dump_traceback_later()

    def _raise_if_due(self) -> None:
        """Raise HungError if the alarm that arrived is meant for the call under way."""
        if self._busy and self._call == self._suspect:
            raise HungError(self.problem)


def _place_of(error: BaseException) -> str:
    """Return file and line where an environment raised: its own, rather than a library's.

    Where a library could not unpack what it returned, what that should have been.
    """
    own = own_place_of(error)
    if not own and "values to unpack" in str(error):
        step = "observation, reward, terminated, truncated, info"
        return f": reset has to return observation, info, and step {step}"
    return own or _last_of(traceback.extract_tb(error.__traceback__))


def own_place_of(error: BaseException) -> str:
    """Return file and line where an environment's own code raised, or ""."""
    folder = Path(__file__).parent
    libraries = (str(folder), str(folder.with_name("__init__.py")), str(Path(os.__file__).parent))
    frames = traceback.extract_tb(error.__traceback__)
    return _last_of(
        frame
        for frame in frames
        if not frame.filename.startswith((*libraries, "<")) and "-packages" not in frame.filename
    )


def _last_of(frames: Iterable[traceback.FrameSummary]) -> str:
    *_, last = None, *frames
    return f" ({Path(last.filename).name}:{last.lineno})" if last else ""


class _Alarm:
    """The handler of SIGALRM; passes on what others sent, such as the time limit of a test."""

    is_ours = False  # the one under way
    before: Any = None  # the handler of others

    def install(self) -> None:
        if signal.getsignal(signal.SIGALRM) is not self:
            self.before = signal.signal(signal.SIGALRM, self)

    def uninstall(self) -> None:
        if isinstance(signal.getsignal(signal.SIGALRM), _Alarm):
            signal.signal(signal.SIGALRM, self.before)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        was_ours, self.is_ours = self.is_ours, False
        if was_ours:
            for watch in list(_watches):
                watch._raise_if_due()
        elif callable(self.before):
            self.before(signum, frame)


_alarm = _Alarm()
