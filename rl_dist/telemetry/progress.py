"""Show the progress of a training run, and notice if the returns do not rise."""

import io
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

from tqdm import tqdm

from rl_dist.files import Record

# Use a lock without a semaphore: a failing rank would leak the semaphore of tqdm's default lock and
# print a warning.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0  # disable tqdm's monitor thread: every iteration refreshes the bar

LINE_EVERY_S = 5.0  # shortest time between two printed lines of progress
LINE = "{n}/{total}{unit} ({percentage:.0f}%){postfix} | {remaining} left"
EPISODES = 100  # number of latest episodes whose mean return is shown
VALIDATED = ("valid/sharpe", "valid/return")  # metrics that are shown for a short time


class RecentReturns:
    """Computes the mean return of the last 100 episodes, from the means of iterations.

    The mean includes only whole iterations, so it may include more than 100 episodes.
    """

    def __init__(self) -> None:
        # for each of the last iterations: number of episodes, and their mean return
        self._latest: deque[tuple[int, float]] = deque()
        self.num_episodes = 0  # number of episodes in the mean

    def add(self, record: Record) -> float | None:
        """Add the record of an iteration; return the mean, or None if no episode has ended."""
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
    """Describe the returns in the first half of a run if they have not risen.

    Args:
        records: the records of the first half of the run.

    Returns:
        One line; or "" if fewer than 100 episodes ended, or if the best mean of 100 episodes is
        higher than all means in the first tenth of the run.
    """
    recent = RecentReturns()
    means = [mean for record in records if (mean := recent.add(record)) is not None]
    # a fifth of this half is a tenth of the run
    first_tenth = means[: math.ceil(len(means) / 5)]
    if recent.num_episodes < EPISODES or max(means) > max(first_tenth):
        return ""
    return (
        f"half of the run is done, and the best mean return of {EPISODES} episodes, "
        f"{max(means):.4g}, is still that of the first tenth; unless the task is solved"
    )


class Progress:
    """Shows progress on stderr: a bar if stderr is a terminal, otherwise single lines."""

    def __init__(self, total: int, unit: str, start: int) -> None:
        self._figures: dict[str, str] = {}  # values to show, by name
        self._recent = RecentReturns()
        self._printed_s = -math.inf
        self._on_terminal = sys.stderr.isatty()
        # Without a terminal, the bar is not shown. It only formats the text of the lines.
        self._bar = tqdm(
            total=total,
            unit=f" {unit}",
            initial=min(start, total),
            dynamic_ncols=True,
            smoothing=0.0,  # else, the remaining time would jump after a validation
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
        # In the last iteration, `done` may exceed the total.
        self._bar.update(min(done, self._bar.total) - self._bar.n)
        self._bar.set_postfix(self._figures, refresh=self._on_terminal)
        if time.monotonic() - self._printed_s < LINE_EVERY_S and done < self._bar.total:
            return
        self._printed_s = time.monotonic()
        if not self._on_terminal:
            print(f"iteration {record['iteration']} | {self._bar}", file=sys.stderr, flush=True)
        for name in VALIDATED:
            self._figures.pop(name, None)
