"""Show training progress: a bar on a terminal, otherwise single lines."""

from __future__ import annotations

import io
import math
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

# tqdm's own lock uses a semaphore. A failing rank would leak it and print a warning.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0  # no monitor thread, because every iteration refreshes the bar

LINE_EVERY_S = 5.0
LINE = "{n}/{total}{unit} ({percentage:.0f}%){postfix} | {remaining} left"
SHOWN = ("time/sps", "episode/return", "valid/sharpe", "valid/return")


class Progress:
    """Shows progress, the latest metrics and the remaining time on stderr."""

    def __init__(self, total: int, unit: str, start: int) -> None:
        """Begin at `start`, which is above 0 in a resumed run."""
        self._figures: dict[str, str] = {}  # latest values of the metrics in SHOWN
        self._printed_s = -math.inf
        self._line = ""  # latest line, if it is not printed yet
        self._on_terminal = sys.stderr.isatty()
        # Without a terminal, the bar only formats the text of a line.
        self._bar = tqdm(
            total=total,
            unit=f" {unit}",
            initial=min(start, total),
            dynamic_ncols=self._on_terminal,
            bar_format=None if self._on_terminal else LINE,
            file=sys.stderr if self._on_terminal else io.StringIO(),
        )

    def show(self, record: Mapping[str, Any], done: int) -> None:
        """Show the progress and metrics of an iteration."""
        for name in SHOWN:
            if (value := record.get(name)) is not None:
                self._figures[name] = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        figures = ", ".join(f"{name} {text}" for name, text in self._figures.items())
        self._bar.set_postfix_str(figures, refresh=False)
        # The last iteration may exceed the total.
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
        """Close the bar and print a pending line; safe to call twice."""
        self._bar.close()
        self._print()
