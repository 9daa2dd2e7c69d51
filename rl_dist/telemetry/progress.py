"""The progress of a training: a line every few seconds."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

LINE_EVERY_S = 5.0
SHOWN = ("time/sps", "episode/return", "valid/sharpe", "valid/return")


class Progress:
    """The progress of a training, with the figures of its latest iterations."""

    def __init__(self, total: int, unit: str, start: int) -> None:
        """Begin at `start`, above 0 on resume."""
        self._total, self._unit, self._start = total, unit, start
        self._figures: dict[str, str] = {}  # the latest of SHOWN
        self._began_s = time.monotonic()
        self._printed_s = -math.inf
        self._line = ""  # not printed yet

    def show(self, record: Mapping[str, Any], done: int) -> None:
        """Take an iteration's metrics."""
        done = min(done, self._total)  # the last iteration exceeds it
        for name in SHOWN:
            if (value := record.get(name)) is not None:
                self._figures[name] = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        now_s = time.monotonic()
        left_s = (now_s - self._began_s) * (self._total - done) / max(1, done - self._start)
        figures = ", ".join(f"{name} {text}" for name, text in self._figures.items())
        self._line = (
            f"iteration {record['iteration']} | {done}/{self._total} {self._unit} "
            f"({done / self._total:.0%}) | {figures} | {timedelta(seconds=round(left_s))} left"
        )
        if now_s - self._printed_s >= LINE_EVERY_S:
            self._printed_s = now_s
            self.flush()

    def flush(self) -> None:
        """Print the last line unless it has been printed."""
        if self._line:
            print(self._line, file=sys.stderr, flush=True)
        self._line = ""
