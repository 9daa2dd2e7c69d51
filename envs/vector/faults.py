"""Faults of environments, named by environment and step."""

from __future__ import annotations

import os
import signal
from functools import cache
from typing import Any

import numpy as np

MAX_REWARD = 1e30  # larger ones count as infinite
MAX_OBSERVATION = float(np.finfo(np.float32).max)


def are_flags(values: Any) -> bool:
    """Return whether these are truth values, or 0 and 1; a text is not."""
    array = np.asarray(values)
    return array.dtype.kind in "biuf" and bool(((array == 0) | (array == 1)).all())


class EnvironmentFaultError(RuntimeError):
    """An environment raised or returned what no learner can use, said in one line."""

    def __init__(
        self, env_id: str, number: str, step: int, problem: str, kind: str = "environment"
    ) -> None:
        """Name id, global number, lifetime step (0 = reset), problem; pickle needs `args`."""
        super().__init__(env_id, number, step, problem, kind)

    def __str__(self) -> str:
        """Return the fault in one line."""
        env_id, number, step, problem, kind = self.args
        return f"{kind} {env_id} number {number} at its step {step}: {problem}"


class WorkerFaultError(EnvironmentFaultError):
    """The end of a worker process with environments, said in one line."""

    def __init__(self, message: str) -> None:
        RuntimeError.__init__(self, message)

    def __str__(self) -> str:
        """Return the message."""
        return str(self.args[0])


class RowFaultError(ValueError):
    """A problem of one row of a batch (None: of all), not yet located."""

    def __init__(self, row: int | None, problem: str) -> None:
        super().__init__(problem)
        self.row = row


class Interruption(BaseException):
    """Raised by a signal handler of ours, wherever the program is at the time."""


def is_own_fault(error: BaseException) -> bool:
    """Return whether an environment raised this: foreign code may raise anything."""
    by_user = (
        isinstance(error, KeyboardInterrupt)
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    return not by_user and not isinstance(error, Interruption | EnvironmentFaultError)


@cache
def _sentinel() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def has_closed_descriptors() -> bool:
    """Return whether somebody has closed descriptors that are not his own."""
    try:
        os.get_inheritable(_sentinel())  # the cheapest question: 0.1 us
    except OSError:
        return True
    return False
