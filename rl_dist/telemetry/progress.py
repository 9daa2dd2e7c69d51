"""The progress of a training: a bar on terminals, lines elsewhere."""

from __future__ import annotations

import io
import math
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

# tqdm's own lock holds a semaphore, which a rank that fails would leak with a warning.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0  # no watcher thread: every iteration refreshes the bar

LINE_EVERY_S = 5.0
LINE = "{n}/{total}{unit} ({percentage:.0f}%){postfix} | {remaining} left"
SHOWN = ("time/sps", "episode/return", "valid/sharpe", "valid/return")


class Progress:
    """Shows how far a training is, its latest figures and the time left, on stderr."""

    def __init__(self, total: int, unit: str, start: int) -> None:
        """Begin at `start`, above 0 on resume."""
        self._figures: dict[str, str] = {}  # the latest of SHOWN
        self._printed_s = -math.inf
        self._line = ""  # not printed yet
        self._on_terminal = sys.stderr.isatty()
        # Without a terminal the bar only formats the line.
        self._bar = tqdm(
            total=total,
            unit=f" {unit}",
            initial=min(start, total),
            dynamic_ncols=self._on_terminal,
            bar_format=None if self._on_terminal else LINE,
            file=sys.stderr if self._on_terminal else io.StringIO(),
        )

    def show(self, record: Mapping[str, Any], done: int) -> None:
        """Take an iteration's metrics."""
        for name in SHOWN:
            if (value := record.get(name)) is not None:
                self._figures[name] = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        figures = ", ".join(f"{name} {text}" for name, text in self._figures.items())
        self._bar.set_postfix_str(figures, refresh=False)
        # The last iteration exceeds the budget.
        self._bar.update(min(done, self._bar.total) - self._bar.n)
        if self._on_terminal:
            self._bar.refresh()
            return
        self._line = f"iteration {record['iteration']} | {self._bar}"
        if time.monotonic() - self._printed_s >= LINE_EVERY_S:
            self._printed_s = time.monotonic()
            self._print()

    def _print(self) -> None:
        if self._line:
            print(self._line, file=sys.stderr, flush=True)
        self._line = ""

    def close(self) -> None:
        """Print the last line; safe to call twice."""
        self._bar.close()
        self._print()
