"""Show the progress of a training run, and notice if it does not learn."""

import io
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

from tqdm import tqdm

from rl_dist.files import Record

# tqdm's default lock uses a semaphore. A failing rank would leak it and print a warning.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0  # disable tqdm's monitor thread: every iteration refreshes the bar

LINE_EVERY_S = 5.0  # shortest time between two printed lines of progress
LINE = "{n}/{total}{unit} ({percentage:.0f}%){postfix} | {remaining} left"
EPISODES = 100  # number of latest episodes whose mean return is shown
VALIDATED = ("valid/sharpe", "valid/return")  # shown only while they are new


class RecentReturns:
    """Mean return of the last 100 training episodes, in steps of whole iterations."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, float]] = deque()  # (episodes, their mean return)
        self.num_episodes = 0  # number of episodes in the mean

    def add(self, record: Record) -> float | None:
        """Add the record of an iteration; return the mean, or None without episodes."""
        count = record.get("episode/count")
        mean = record.get("episode/return")
        if count and mean is not None:
            self._latest.append((count, mean))
            self.num_episodes += count
            while self.num_episodes - self._latest[0][0] >= EPISODES:
                self.num_episodes -= self._latest.popleft()[0]
        total = sum(count * mean for count, mean in self._latest)
        return total / self.num_episodes if self._latest else None


def stalled(records: Sequence[Record]) -> str:
    """Describe the returns of half a run if they have not risen since its first tenth.

    Args:
        records: the records of the first half of the run.

    Returns:
        One line; "" if the best mean of 100 episodes is higher than all means in the first tenth,
        or if fewer than 100 episodes ended.
    """
    recent = RecentReturns()
    means = [mean for record in records if (mean := recent.add(record)) is not None]
    first = means[: math.ceil(len(means) / 5)]
    if recent.num_episodes < EPISODES or max(means) > max(first):
        return ""
    return (
        f"half of the run is done, and the best mean return of {EPISODES} episodes, "
        f"{max(means):.4g}, is still that of the first tenth; unless the task is solved"
    )


class Progress:
    """Shows progress on stderr: as a bar on a terminal, otherwise as single lines."""

    def __init__(self, total: int, unit: str, start: int) -> None:
        self._figures: dict[str, str] = {}  # latest values, by name on the console
        self._recent = RecentReturns()
        self._printed_s = -math.inf
        self._on_terminal = sys.stderr.isatty()
        # Without a terminal, the bar is not shown; it only formats the text of the lines.
        self._bar = tqdm(
            total=total,
            unit=f" {unit}",
            initial=min(start, total),
            dynamic_ncols=True,
            smoothing=0.0,  # else, the time left jumps after every validation
            bar_format=None if self._on_terminal else LINE,
            file=sys.stderr if self._on_terminal else io.StringIO(),
        )
        self.close = self._bar.close

    def show(self, record: Record, done: int) -> None:
        """Show the progress and metrics of an iteration."""
        values = {name: record.get(name) for name in ("time/sps", *VALIDATED)}
        values[f"return of {EPISODES} episodes"] = self._recent.add(record)
        for name, value in values.items():
            if value is not None:
                self._figures[name] = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        # The last iteration may exceed the total.
        self._bar.update(min(done, self._bar.total) - self._bar.n)
        self._bar.set_postfix(self._figures, refresh=self._on_terminal)
        if time.monotonic() - self._printed_s < LINE_EVERY_S and done < self._bar.total:
            return
        self._printed_s = time.monotonic()
        if not self._on_terminal:
            print(f"iteration {record['iteration']} | {self._bar}", file=sys.stderr, flush=True)
        for name in VALIDATED:
            self._figures.pop(name, None)
