"""How far a run is: a bar on terminals, plain lines elsewhere."""

from __future__ import annotations

import math
import statistics
import sys
import threading
import time
from collections import deque
from typing import Any

from tqdm import tqdm

# tqdm's own lock has a semaphore, which a failed rank, leaving at once, would leak with a warning.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0  # no watcher thread: every iteration refreshes

PLAIN_LINE_EVERY_S = 5.0  # where stderr is no terminal
STAGE_LINE_EVERY_S = 15.0  # the same within a part of a plan
LATEST = 9  # iterations: the throughput of a single one jumps, so their median is shown


class Progress:
    """How far a training is, with the figures of its latest iterations."""

    def __init__(self, total: int | None, unit: str, start: int) -> None:
        """Begin at `start`, above 0 on resume; `total` may be unknown."""
        self._total, self._unit, self._start = total, unit, start
        self._rates: deque[float] = deque(maxlen=LATEST)
        self._figures: dict[str, str] = {}
        self._started_s = time.monotonic()
        self._printed_s = -math.inf
        self._pending = ""  # a line that is not printed yet
        self._bar: Any = None
        if sys.stderr.isatty():
            options = {"dynamic_ncols": True, "smoothing": 0.05}
            self._bar = tqdm(total=total, unit=f" {unit}", initial=start, **options)

    def show(self, record: dict[str, Any], done: int) -> None:
        """Take an iteration's metrics."""
        if record.get("time/sps") is not None:
            self._rates.append(record["time/sps"])
            self._figures["steps/s"] = _short(statistics.median(self._rates))
        if record.get("episode/return") is not None:
            self._figures["return"] = _short(record["episode/return"])
        if self._total:
            # the last iteration ends episodes beyond the budget
            self._total = max(self._total, done)
        if self._bar is None:
            self._show_line(record["iteration"], done)
            return
        self._bar.total = self._total
        self._bar.set_postfix(self._figures, refresh=False)
        self._bar.update(done - self._bar.n)
        self._bar.refresh()

    def _show_line(self, iteration: int, done: int) -> None:
        """Print a plain line every few seconds, for log files and pipes."""
        now = time.monotonic()
        reached = f"{done:,} {self._unit}"
        if self._total:
            reached = f"{done:,}/{self._total:,} {self._unit} ({done / self._total:.0%})"
        parts = [f"iteration {iteration}", reached]
        parts += [f"{name} {text}" for name, text in self._figures.items()]
        if self._total and done > self._start:
            left_s = (now - self._started_s) * (self._total - done) / (done - self._start)
            parts.append(f"ETA {tqdm.format_interval(left_s)}")
        self._pending = " | ".join(parts)
        if now - self._printed_s >= PLAIN_LINE_EVERY_S:
            self._printed_s = now
            self.close()

    def close(self) -> None:
        """End the display; the last line is printed in any case."""
        if self._bar is not None:
            self._bar.close()
        if self._pending:
            print(self._pending, file=sys.stderr, flush=True)
        self._pending = ""


class Stages:
    """How far a plan of unequal parts is: which of how many, and the time left.

        stages = Stages()
        stages.expect(1.0, 0.5)  # of whatever unit
        stages.begin("the long part")
        stages.advance(0.25)

    The time left follows from what the parts so far took and were expected to take.
    """

    def __init__(self, *, shown: bool = True) -> None:
        self._shown = shown
        self.number = 0  # of the part that is under way
        self._expected: list[float] = []
        self._share, self._what = 0.0, ""
        self._started_s = self._printed_s = time.monotonic()
        self._bar: Any = None

    @property
    def total(self) -> int:
        """Number of parts."""
        return len(self._expected)

    def expect(self, *times: float) -> None:
        """Set what follows the part that is under way."""
        self._expected[self.number :] = times

    def begin(self, what: str) -> None:
        """Begin the next part; the one before is done."""
        assert self.number < self.total, f"{what} was not expected"
        self.number, self._share, self._what = self.number + 1, 0.0, what
        self._print()

    def advance(self, share: float) -> None:
        """Set how much of this part is done; it may be called as often as one likes."""
        self._share = share
        every_s = 0.5 if sys.stderr.isatty() else STAGE_LINE_EVERY_S
        if time.monotonic() - self._printed_s >= every_s:
            self._print()

    def close(self) -> None:
        """End the display."""
        if self._bar is not None:
            self._bar.close()

    @property
    def left_s(self) -> float | None:
        """Seconds left; None: not known yet."""
        before = self._expected[: self.number]
        done = sum(before[:-1]) + self._share * sum(before[-1:])
        left = sum(self._expected) - done
        return (time.monotonic() - self._started_s) * left / done if done else None

    def _print(self) -> None:
        self._printed_s = time.monotonic()
        if not self._shown:
            return
        left = "time left: not known yet"
        if self.left_s is not None:
            left = f"about {tqdm.format_interval(self.left_s)} left"
        passed = tqdm.format_interval(self._printed_s - self._started_s)
        done = f" ({self._share:.0%})" if self._share else ""
        part = f"measuring {self.number} of {self.total}: {self._what}{done}"
        line = f"{part}; {passed} passed, {left}"
        if not sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)
            return
        if self._bar is None:
            self._bar = tqdm(bar_format="{desc}", dynamic_ncols=True, leave=False)
        self._bar.set_description_str(line)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
