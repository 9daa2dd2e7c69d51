"""Show the progress of a training run, and notice if the returns do not rise."""

import io
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from tqdm import tqdm

from rl_dist.files import Record

# Use a lock without a semaphore: a failing rank would leak the semaphore of tqdm's default lock and
# print a warning.
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0  # disable tqdm's monitor thread: every iteration refreshes the bar

LINE_EVERY_S = 5.0  # shortest time between two printed lines of progress
LINE = "{n}/{total}{unit} ({percentage:.0f}%){postfix} | {remaining} left"
EPISODES = 100  # fewest episodes in a mean on which a decision depends
EPISODE_MEANS = ("episode/return", "episode/length")
VALIDATED = ("valid/sharpe", "valid/return")  # metrics that are shown for a short time


class RecentMeans:
    """Computes the means of the last 100 episodes, from the means of iterations.

    The means include only whole iterations, so they may include more than 100 episodes.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        """Start with the records of earlier iterations."""
        self._latest: deque[Record] = deque()  # records of the last iterations with episodes
        self.num_episodes = 0  # number of episodes in the means
        for record in records:
            self.add(record)

    def add(self, record: Record) -> Record:
        """Add the record of an iteration; return the means by name, {} if no episode has ended."""
        if record.get("episode/count") and record.get("episode/return") is not None:
            self._latest.append(record)
            self.num_episodes += record["episode/count"]
            while self.num_episodes - self._latest[0]["episode/count"] >= EPISODES:
                self.num_episodes -= self._latest.popleft()["episode/count"]
        return {
            name: sum(r["episode/count"] * r[name] for r in self._latest) / self.num_episodes
            for name in EPISODE_MEANS
            if self._latest
        }

    def decisive(self, record: Record) -> Record:
        """Add a record; return it with the means of the last 100 episodes, None if fewer ended."""
        means = self.add(record)
        return record | (means if self.num_episodes >= EPISODES else dict.fromkeys(EPISODE_MEANS))


def stalled(records: Sequence[Record]) -> str:
    """Describe the returns in the first half of a run if they have not risen.

    Args:
        records: the records of the first half of the run.

    Returns:
        One line; or "" if fewer than 100 episodes ended, or if the best mean of 100 episodes is
        higher than all means in the first tenth of the run, counted from the 100th episode on.
    """
    recent = RecentMeans()
    returns = [recent.decisive(record)["episode/return"] for record in records]
    means = [mean for mean in returns if mean is not None]
    # a fifth of this half is a tenth of the run
    first_tenth = means[: math.ceil(len(means) / 5)]
    if not means or max(means) > max(first_tenth):
        return ""
    return (
        f"half of the run is done, and the best mean return of {EPISODES} episodes, "
        f"{max(means):.4g}, is still that of the first tenth; unless the task is solved"
    )


class Progress:
    """Shows progress on stderr: a bar if stderr is a terminal, otherwise single lines."""

    def __init__(self, total: int, unit: str, start: int) -> None:
        self._figures: dict[str, str] = {}  # values to show, by name
        self._recent = RecentMeans()
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
        values["return"] = self._recent.add(record).get("episode/return")
        for name, value in values.items():
            if value is not None:
                self._figures[name] = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        if "return" in self._figures:
            self._figures["return"] += f" of {self._recent.num_episodes} episodes"
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
