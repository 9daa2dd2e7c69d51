"""Faults of environments, named by environment and step."""

from __future__ import annotations

import os
import signal
from functools import cache
from typing import Any

import numpy as np

MAX_REWARD = 1e30  # larger ones count as infinite
MAX_OBSERVATION = float(np.finfo(np.float32).max)
CLOSED = "closed files and connections that are not its own: the process ends"

def one_line(error: BaseException, limit: int = 300) -> str:
    """Name an error and its message on one line of at most about `limit` characters."""
    message = " ".join(str(error).split())
    shown = message if len(message) <= limit else message[:limit] + "..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def one_word(value: Any) -> str:
    """A value that an environment should not have returned, shortened."""
    return f"{value!r:.40}" if isinstance(value, str | bytes | int | float | None) else f"a {type(value).__name__}"


def are_flags(values: Any) -> bool:
    """Whether these are truth values, be it as 0 and 1; a text would always be true."""
    array = np.asarray(values)
    return array.dtype.kind in "biuf" and bool(((array == 0) | (array == 1)).all())


class EnvironmentFault(RuntimeError):
    """An environment raised or returned what no learner can use, told in one line."""

    def __init__(self, env_id: str, number: str, step: int, problem: str, kind: str = "environment") -> None:
        """Name the environment's id, its global number, its lifetime step (0 = reset) and the problem."""
        super().__init__(f"{kind} {env_id} number {number} at its step {step}: {problem}")
        self.env_id = env_id
        self.number = number
        self.step = step

    def __reduce__(self) -> tuple[Any, ...]:
        # Faults travel between processes by pickle, which would call __init__ with the text alone.
        return (_rebuild, (self.args, self.__dict__))


def _rebuild(args: tuple[Any, ...], attributes: dict[str, Any]) -> EnvironmentFault:
    fault = EnvironmentFault.__new__(EnvironmentFault, *args)
    fault.__dict__.update(attributes)
    return fault


class Interruption(BaseException):
    """Raised by a signal handler of ours, wherever the program is at the time."""


def is_own_fault(error: BaseException) -> bool:
    """Whether an environment itself raised this: foreign code may raise anything."""
    by_user = isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return not by_user and not isinstance(error, Interruption | EnvironmentFault)


@cache
def _sentinel() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def has_closed_descriptors() -> bool:
    """Whether somebody has closed descriptors that are not his own."""
    try:
        os.get_inheritable(_sentinel())  # the cheapest question: 0.1 us
    except OSError:
        return True
    return False


class LocatedFault(Exception):
    """A problem of one row of a vector environment, to become an EnvironmentFault."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(problem)
        self.row = row
