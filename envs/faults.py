"""Faults of environments, named by environment and step."""

from __future__ import annotations

from typing import Any


def one_line(error: BaseException, limit: int = 300) -> str:
    """Name an error and its message on one line of at most about `limit` characters."""
    message = " ".join(str(error).split())
    shown = message if len(message) <= limit else message[:limit] + "..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


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


class LocatedFault(Exception):
    """A problem of one row of a vector environment, to become an EnvironmentFault."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(problem)
        self.row = row
