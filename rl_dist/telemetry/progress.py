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

PLAIN_LINE_EVERY_S = 5.0  # where stderr is no terminal
STAGE_LINE_EVERY_S = 15.0  # the same within a part of a plan
SHOWN = {"steps/s": "time/sps", "return": "episode/return"}
LATEST = 9  # iterations: the throughput of a single one jumps, so their median is shown


def open_progress(total: int | None, unit: str, start: int) -> _Bar | _Lines:
    """What suits stderr; `total` may be unknown, `start` is above 0 on resume."""
    return _Bar(total, unit, start) if sys.stderr.isatty() else _Lines(total, unit, start)


class _Figures:
    """What is shown of the latest iterations."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._rates: deque[float] = deque(maxlen=LATEST)

    def add(self, record: dict[str, Any]) -> None:
        """Take an iteration's metrics."""
        self._last |= {name: record[key] for name, key in SHOWN.items() if record.get(key) is not None}
        if record.get("time/sps") is not None:
            self._rates.append(record["time/sps"])
            self._last["steps/s"] = statistics.median(self._rates)

    @property
    def shown(self) -> dict[str, str]:
        """Text by name."""
        return {name: _short(value) for name, value in self._last.items()}


class _Bar:
    """One tqdm bar, for terminals."""

    def __init__(self, total: int | None, unit: str, start: int) -> None:
        tqdm.monitor_interval = 0  # no watcher thread: every iteration refreshes
        self._bar = tqdm(total=total, unit=f" {unit}", initial=start, dynamic_ncols=True, smoothing=0.05)
        self._figures = _Figures()

    def show(self, record: dict[str, Any], done: int) -> None:
        self._figures.add(record)
        self._bar.set_postfix(self._figures.shown, refresh=False)
        if self._bar.total:
            self._bar.total = max(self._bar.total, done)  # the last iteration ends episodes beyond the budget
        self._bar.update(done - self._bar.n)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


class _Lines:
    """A plain line every few seconds, for log files and pipes."""

    def __init__(self, total: int | None, unit: str, start: int) -> None:
        self._total, self._unit, self._start = total, unit, start
        self._started_s = time.monotonic()
        self._printed_s = -math.inf
        self._pending = ""
        self._figures = _Figures()

    def show(self, record: dict[str, Any], done: int) -> None:
        self._figures.add(record)
        now = time.monotonic()
        self._pending = self._line(record, done, now - self._started_s)
        if now - self._printed_s >= PLAIN_LINE_EVERY_S:
            self._print(now)

    def _line(self, record: dict[str, Any], done: int, elapsed_s: float) -> str:
        parts = [f"iteration {record['iteration']}"]
        if self._total:
            total = max(self._total, done)  # the last iteration ends episodes beyond the budget
            parts.append(f"{done:,}/{total:,} {self._unit} ({done / total:.0%})")
        else:
            parts.append(f"{done:,} {self._unit}")
        parts += [f"{name} {text}" for name, text in self._figures.shown.items()]
        if self._total and done > self._start:
            left_s = elapsed_s * max(0, self._total - done) / (done - self._start)
            parts.append(f"ETA {tqdm.format_interval(left_s)}")
        return " | ".join(parts)

    def _print(self, now: float) -> None:
        print(self._pending, file=sys.stderr, flush=True)
        self._pending, self._printed_s = "", now

    def close(self) -> None:
        if self._pending:
            self._print(time.monotonic())


class Stages:
    """How far a plan of unequal parts is: which of how many, and the time left.

        stages = Stages()
        stages.expect(1.0, 0.5)  # of whatever unit
        stages.begin("the long part")
        stages.advance(0.25)

    The time left is what the parts so far took, by their expected times: unknown until something is done.
    """

    def __init__(self, *, shown: bool = True, verb: str = "measuring") -> None:
        self._shown, self._verb = shown, verb
        self.number = 0  # of the part that is under way
        self._expected: list[float] = []
        self._share, self._what = 0.0, ""
        self._started_s = self._told_s = time.monotonic()
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
        self._tell()

    def advance(self, share: float) -> None:
        """Tell how much of this part is done; it may be called as often as one likes."""
        self._share = share
        every_s = 0.5 if self._on_terminal else STAGE_LINE_EVERY_S
        if time.monotonic() - self._told_s >= every_s:
            self._tell()

    def close(self) -> None:
        """End the display."""
        if self._bar is not None:
            self._bar.close()

    @property
    def left_s(self) -> float | None:
        """Seconds left; None: not known yet."""
        total = sum(self._expected)
        part = self._expected[self.number - 1] if self.number else 0.0
        done = sum(self._expected[: max(0, self.number - 1)]) + self._share * part
        return (time.monotonic() - self._started_s) * (total - done) / done if done else None

    @property
    def _on_terminal(self) -> bool:
        return sys.stderr.isatty()

    def _tell(self) -> None:
        self._told_s = time.monotonic()
        if not self._shown:
            return
        left = "time left: not known yet" if self.left_s is None else f"about {tqdm.format_interval(self.left_s)} left"
        passed = tqdm.format_interval(self._told_s - self._started_s)
        done = f" ({self._share:.0%})" if self._share else ""
        line = f"{self._verb} {self.number} of {self.total}: {self._what}{done}; {passed} passed, {left}"
        if not self._on_terminal:
            print(line, file=sys.stderr, flush=True)
            return
        if self._bar is None:
            tqdm.monitor_interval = 0
            self._bar = tqdm(bar_format="{desc}", dynamic_ncols=True, leave=False)
        self._bar.set_description_str(line)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
