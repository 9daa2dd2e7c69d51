"""Measure named sections and the phases of gradient steps, and find slow ranks.

    with section("environment"):
        env.step(actions)

    @section("update")
    def update(...): ...

Without a listener, a section costs one or two microseconds. A section never affects results.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from statistics import median, stdev

import torch

Listener = Callable[[str], AbstractContextManager[object]]
_listener: Listener | None = None
Mark = float | torch.cuda.Event

# In each phase, the time of a rank is compared with the median time of the other ranks. The rank is
# slow if its time is more than STRAGGLER_FACTOR times this median, and also exceeds the median by
# more than STRAGGLER_EXCESS_S seconds. After IN_A_ROW slow iterations in a row, a warning names the
# rank.
STRAGGLER_FACTOR = 3.0
STRAGGLER_EXCESS_S = 0.02
IN_A_ROW = 3


def listen(listener: Listener | None) -> None:
    """Run every later section inside the context `listener(name)`; None: no context."""
    global _listener
    _listener = listener


@contextmanager
def section(name: str) -> Iterator[None]:
    """Run a block inside the listener's context for `name`; usable as a decorator."""
    if _listener is None:
        yield
        return
    with _listener(name):
        yield


class StepClock:
    """Records when the phases of gradient steps end, without waiting for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Mark]] = []
        # for each step, the (begin, end) marks of all waits for other ranks
        self._waited: list[Sequence[tuple[Mark, Mark]]] = []

    def start(self) -> None:
        """Forget all marks and begin the first phase."""
        self._marks = []
        self._waited = []
        self.mark("")

    def mark(self, phase: str) -> None:
        """Record that a phase ends now; the phase began at the last mark.

        Args:
            phase: name of the phase; "" if the time since the last mark belongs to no phase.
        """
        self._marks.append((phase, mark(self._device)))

    def waited(self, waits: Sequence[tuple[Mark, Mark]]) -> None:
        """Record the current step's waits for the gradients of other ranks."""
        self._waited.append(waits)

    def read(self) -> dict[str, float]:
        """Return the time of each phase since `start`, in seconds; may wait for the GPU.

        Returns:
            time/forward_s, time/backward_s and time/optimizer_s: time of each phase, without waits
            for other ranks; time/gradient_wait_s: sum of these waits; time/reduction_s: the waits
            of the step that waited least (in that step, this rank probably arrived last and waited
            only for the transfer); time/step_spread_s: standard deviation of the steps' times,
            without waits.
        """
        totals = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        steps_s = [0.0]
        for (_, begun), (phase, ended) in pairwise(self._marks):
            if phase:
                seconds = between(begun, ended)
                totals[phase] += seconds
                steps_s[-1] += seconds
            if phase == "optimizer":
                steps_s.append(0.0)
        waits_s = [sum(between(*marks) for marks in step) for step in self._waited]
        work_s = [step - wait for step, wait in zip(steps_s, waits_s, strict=False)]
        totals["backward"] = max(0.0, totals["backward"] - sum(waits_s))
        return {
            **{f"time/{phase}_s": seconds for phase, seconds in totals.items()},
            "time/gradient_wait_s": sum(waits_s),
            "time/reduction_s": min(waits_s, default=0.0),
            "time/step_spread_s": stdev(work_s) if len(work_s) > 1 else 0.0,
        }


def mark(device: torch.device) -> Mark:
    """Return the current time; on a GPU, return an event that the GPU will record."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begun: Mark, ended: Mark) -> float:
    """Return the seconds between two marks, after waiting until the GPU has reached both."""
    if isinstance(begun, float) and isinstance(ended, float):
        return ended - begun
    ended.synchronize()  # type: ignore[union-attr]
    return begun.elapsed_time(ended) / 1000.0  # type: ignore[union-attr, arg-type]


class Stragglers:
    """Counts the consecutive slow iterations of each rank.

    All ranks observe the same metrics and therefore have the same counts.
    """

    # phase -> name of the metric for the time that a rank spends in the phase
    KEYS = {
        "collect": "time/collect_s",
        "update": "time/update_own_s",
    }

    def __init__(self) -> None:
        # (phase, rank) -> number of slow iterations in a row
        self._in_a_row: Counter[tuple[str, int]] = Counter()

    def observe(self, entries: Sequence[Mapping[str, float]]) -> list[str]:
        """Record one iteration; `entries` are the metrics of all ranks, in rank order.

        Returns:
            A warning for each rank that has just completed IN_A_ROW slow iterations in a row.
        """
        lines = []
        for phase, name in self.KEYS.items():
            seconds = [entry[name] for entry in entries]
            for rank, rank_s in enumerate(seconds):
                others_s = median(seconds[:rank] + seconds[rank + 1 :] or [rank_s])
                is_slow = rank_s > max(STRAGGLER_FACTOR * others_s, others_s + STRAGGLER_EXCESS_S)
                key = phase, rank
                self._in_a_row[key] = self._in_a_row[key] + 1 if is_slow else 0
                if self._in_a_row[key] == IN_A_ROW:
                    lines.append(
                        f"straggler: rank {rank} is slow in {phase}: {rank_s:.3g} s per iteration, "
                        f"waits excluded, while the other ranks need {others_s:.3g} s (median); "
                        f"it has been slow for {IN_A_ROW} iterations in a row"
                    )
        return lines
