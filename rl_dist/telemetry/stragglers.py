"""Finds the rank that keeps the others waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

FACTOR = 3.0  # times the median of the other ranks
EXCESS_S = 0.02  # and at least so much longer: below, any hiccup of the machine would count
IN_A_ROW = 3  # iterations, before a rank is called slow and before it is called well again


@dataclass
class _Streak:
    slow: int = 0  # iterations in a row
    well: int = 0
    told: bool = False


class Stragglers:
    """Remembers who was slow, and in what; every rank comes to the same result."""

    def __init__(self) -> None:
        self._streaks: dict[tuple[str, int], _Streak] = {}

    def observe(self, phases: Mapping[str, Sequence[float]]) -> list[str]:
        """Take one iteration's seconds of every rank by phase, without waiting.

        Returns:
            A line for each rank that has just been slow for IN_A_ROW iterations: once until it is well again.
        """
        lines = []
        for phase, seconds in phases.items():
            for rank, own_s in enumerate(seconds):
                others = [*seconds[:rank], *seconds[rank + 1 :]]
                if not others:
                    continue
                other_s = median(others)
                slow = own_s > FACTOR * other_s and own_s - other_s > EXCESS_S
                if self._count(self._streaks.setdefault((phase, rank), _Streak()), slow):
                    lines.append(
                        f"straggler: rank {rank} is slow in {phase}: {own_s:.3g} s of its own work per iteration, "
                        f"the other ranks {other_s:.3g} s (median), for {IN_A_ROW} iterations in a row"
                    )
        return lines

    @staticmethod
    def _count(streak: _Streak, slow: bool) -> bool:
        """Count an iteration; whether the rank has just become a straggler."""
        streak.slow = streak.slow + 1 if slow else 0
        streak.well = 0 if slow else streak.well + 1
        if streak.well >= IN_A_ROW:
            streak.told = False
        if streak.slow < IN_A_ROW or streak.told:
            return False
        streak.told = True
        return True
