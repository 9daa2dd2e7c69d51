"""Calls into environments: faults are named, hangs ended, restarts made.

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
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from envs.vector.batched import has_snapshots
from envs.vector.spaces import MASK_KEY, ObservationEncoder, RowFaultError, check_masks, flat_mask
from rl_dist.errors import one_line

_LOGGER = logging.getLogger(__name__)
MAX_REWARD = 1e30  # larger ones count as infinite
GRACE_S = 5.0  # from the signal to the end of the process, and from there to faulthandler's
MIN_FAULTHANDLER_S = 30.0
# nobody else uses it: environments and tests have alarms of their own
_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGALRM)
_watches: set[HangWatch] = set()


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
    """Return " (FILE:LINE)" of the environment's own code that raised, or ""."""
    folder = Path(__file__).parent
    libraries = (str(folder), str(folder.with_name("__init__.py")), str(Path(os.__file__).parent))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        name = frame.filename
        if not name.startswith((*libraries, "<")) and "-packages" not in name:
            return f" ({Path(name).name}:{frame.lineno})"
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

    def __post_init__(self) -> None:
        self._call = 0  # number of the call under way, or of the last one
        self._busy = False
        self._suspect = 0  # number of the call that the signal is meant for
        self._closed = threading.Event()
        self._thread = threading.current_thread()
        self.problem = f"did not come back within {self.timeout_s:g} s (--env_timeout)"
        if self.timeout_s:
            if self._thread is threading.main_thread():
                signal.signal(_SIGNAL, _interrupt)
            _watches.add(self)
            threading.Thread(target=self._watch, name="environment watch", daemon=True).start()

    def call(self, row: int | None, function: Callable[..., Any], *args: Any) -> Any:
        """Call into the environment of a row (None: all); RowFaultError if it fails."""
        self.row = row
        self.heartbeat()
        self._call += 1
        try:
            self._busy = True
            try:
                return function(*args)
            finally:
                self._busy = False
        except RowFaultError as fault:
            raise RowFaultError(fault.row if row is None else row, str(fault)) from None
        except HungError as error:
            raise RowFaultError(row, str(error)) from error
        except BaseException as error:
            if not is_own_fault(error):
                raise
            raise RowFaultError(row, f"raised {one_line(error)}{place_of(error)}") from error
        finally:
            if has_closed_descriptors():  # gloo aborts the process in a few milliseconds
                problem = "closed files and connections that are not its own: the process ends"
                self.end(self.describe(row, problem))

    def close_env(self, row: int | None, env: Any) -> None:
        """Close an environment or a batch; a failure is only logged."""
        try:
            self.call(row, env.close)
        except RowFaultError as fault:
            _LOGGER.warning(self.describe(fault.row, f"{fault}, when it was closed"))

    def close(self) -> None:
        """Stop watching; safe to call twice."""
        self._closed.set()
        _watches.discard(self)

    def _watch(self) -> None:
        last_call, since_s = 0, 0.0
        while not self._closed.wait(min(1.0, max(0.05, self.timeout_s / 20))):
            # end the process from outside Python, should this thread not run for so long
            if sys.__stderr__ is not None and not sys.__stderr__.closed:
                limit_s = max(self.timeout_s + 2 * GRACE_S, MIN_FAULTHANDLER_S)
                with suppress(RuntimeError):  # no thread can start: the other steps are left
                    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
            call, now_s = self._call, time.monotonic()
            if not self._busy or call != last_call:
                last_call, since_s = call, now_s
            if not self._busy:
                continue
            self.heartbeat()
            waited_s = now_s - since_s
            if waited_s >= self.timeout_s + GRACE_S:
                frame = sys._current_frames().get(self._thread.ident or 0)
                stack = "".join(traceback.format_stack(frame)) if frame else ""
                problem = f"{self.problem} and cannot be interrupted: the process ends"
                message = self.describe(self.row, problem)
                _LOGGER.info("%s; it is at\n%s", message, stack)
                self.end(message)
            elif waited_s >= self.timeout_s and self._suspect != call:
                self._suspect = call
                if self._thread is threading.main_thread() and self._thread.ident:
                    signal.pthread_kill(self._thread.ident, _SIGNAL)
        faulthandler.cancel_dump_traceback_later()

    def raise_if_hung(self) -> None:
        """Raise HungError if the signal that arrived is meant for the call under way."""
        if self._busy and self._call == self._suspect:
            raise HungError(self.problem)


def _interrupt(*_: Any) -> None:
    for watch in list(_watches):
        watch.raise_if_hung()


@dataclass(eq=False, kw_only=True)
class GuardedEnv:
    """One Python environment: checked, and made again after a fault.

    A fault is a RowFaultError. With restarts left the environment is made again instead, and its
    episode is truncated, with reward 0 and the last good row.
    """

    env: gymnasium.Env[Any, Any]
    make: Callable[[], gymnasium.Env[Any, Any]]  # makes it again
    row: int  # its place in the batch
    max_restarts: int
    watch: HangWatch
    encoder: ObservationEncoder
    mask_sizes: np.ndarray  # number of options per choice; empty: info has no mask
    on_metric: Callable[[str, Any], None]  # called for every item of info["metrics"]
    restarts: int = 0
    life_seed: int = 0  # the seed with which its life began
    last_row: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    next_row: np.ndarray | None = None  # starts the episode that follows a fault

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Start an episode; return its first row [F]."""
        if seed is not None:
            self.life_seed = seed
            self.next_row = None
        if self.next_row is None:
            self._guarded(self._start, seed)
        assert self.next_row is not None
        self.last_row = self.next_row
        self.next_row = None
        return self.last_row

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool]:
        """Step; return row [F], reward, terminated and truncated."""
        outcome = self._guarded(self._step, action) if self.next_row is None else None
        if outcome is not None:
            return outcome
        row = self.last_row.copy()
        row[len(row) - self.mask_sizes.sum() :] = 1.0
        return row, 0.0, False, True

    def begin_again(self, life_seed: int, restarts: int, last_row: np.ndarray) -> None:
        """Replace an environment of a dead process; its next step is truncated."""
        self.life_seed = life_seed
        self.restarts = restarts
        self.last_row = last_row
        self._guarded(self._begin)

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call into the environment; after a fault make it again, and return None."""
        try:
            return self.watch.call(self.row, call, *args)
        except RowFaultError as error:
            fault = error
        while True:  # every attempt takes a restart
            if self.restarts >= self.max_restarts:
                used = f" (after {self.restarts} restarts, --env_restarts)" * bool(self.restarts)
                raise RowFaultError(self.row, f"{fault}{used}") from fault.__cause__
            self.restarts += 1
            problem = f"{fault}; made again, {self.restarts} of {self.max_restarts}"
            _LOGGER.warning(self.watch.describe(self.row, problem))
            self.watch.close_env(self.row, self.env)
            try:
                self.env = self.watch.call(self.row, self.make)
                return self.watch.call(self.row, self._begin)
            except RowFaultError as error:
                fault = RowFaultError(self.row, f"could not be made again: {error}")

    def _begin(self) -> None:
        """Start the episode that follows the last restart."""
        entropy = np.random.SeedSequence([self.life_seed, self.restarts])
        self._start(int(entropy.generate_state(1, np.uint64)[0]) >> 1)

    def _start(self, seed: int | None) -> None:
        """Start an episode, and keep its first row."""
        obs, info = self.env.reset(seed=seed)
        self.next_row = self._row_of(obs, info)

    def _step(self, action: Any) -> tuple[np.ndarray, float, bool, bool]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        reward = np.asarray(reward, np.float64).item()
        if not abs(reward) <= MAX_REWARD:  # NaN is not
            raise RowFaultError(None, f"reward is {reward}")
        for flag in (terminated, truncated):
            if flag not in (True, False):
                problem = f"terminated or truncated is {flag!r:.40}, neither true nor false"
                raise RowFaultError(None, problem)
        metrics = info.get("metrics")
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            self.on_metric(name, value)
        # no action follows the last observation of an episode
        row = self._row_of(obs, None if terminated or truncated else info)
        self.last_row = row
        return row, reward, bool(terminated), bool(truncated)

    def _row_of(self, obs: Any, info: Any) -> np.ndarray:
        """Return the row of an observation; at the end of an episode `info` is None."""
        row = self.encoder([obs], 1)[0]
        if not len(self.mask_sizes):
            return row
        mask = np.ones(self.mask_sizes.sum(), np.float32)
        if info is not None:
            mask = flat_mask(info[MASK_KEY])
            check_masks(mask[None], self.mask_sizes)
        return np.concatenate([row, mask])

    @property
    def can_snapshot(self) -> bool:
        """True if get_state and set_state work."""
        return has_snapshots(self._unwrapped()[0])

    def get_state(self) -> dict[str, Any]:
        """Return the state of the environment, its time limits and its restarts."""
        env, limits = self._unwrapped()
        state = dict(env.get_state())
        for i, limit in enumerate(limits):
            state[f"time_limit/{i}"] = limit._elapsed_steps
        state |= {"guard/restarts": self.restarts, "guard/life_seed": self.life_seed}
        return state | ({"guard/last_row": self.last_row} if self.max_restarts else {})

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where `get_state` was called; entries of the guard may be missing."""
        env, limits = self._unwrapped()
        self.restarts = state.pop("guard/restarts", self.restarts)
        self.life_seed = state.pop("guard/life_seed", self.life_seed)
        self.last_row = np.asarray(state.pop("guard/last_row", self.last_row), np.float32)
        self.next_row = None
        for i, limit in enumerate(limits):
            limit._elapsed_steps = state.pop(f"time_limit/{i}")
        env.set_state(state)

    def _unwrapped(self) -> tuple[Any, list[TimeLimit[Any, Any]]]:
        """Return the environment inside its time limits, and these.

        Other wrappers may hold a state that is lost.
        """
        env: Any = self.env
        limits: list[TimeLimit[Any, Any]] = []
        while isinstance(env, TimeLimit | OrderEnforcing) and not has_snapshots(env):
            if isinstance(env, TimeLimit):
                limits.append(env)
            env = env.env
        return env, limits
