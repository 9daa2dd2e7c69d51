"""Measure named sections and the phases of gradient steps, and find slow ranks.

    with section("environment"):
        env.step(actions)

    @section("update")
    def update(...): ...

A section takes one or two microseconds if there is no listener. It never affects results.
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
# slow if its time is more than STRAGGLER_FACTOR times this median, and also exceeds it by more than
# STRAGGLER_EXCESS_S seconds. After IN_A_ROW slow iterations in a row, a warning names the rank.
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
        # one entry per step: the (begin, end) marks of the waits for other ranks
        self._waited: list[Sequence[tuple[Mark, Mark]]] = []

    def start(self) -> None:
        """Forget all marks and begin the first phase."""
        self._marks = []
        self._waited = []
        self.mark("")

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to `phase`; with "", discard this time."""
        self._marks.append((phase, mark(self._device)))

    def waited(self, waits: Sequence[tuple[Mark, Mark]]) -> None:
        """Record the current step's waits for the gradients of other ranks."""
        self._waited.append(waits)

    def read(self) -> dict[str, float]:
        """Return the seconds spent in each phase since `start`; may wait for the GPU.

        Returns:
            time/forward_s, time/backward_s and time/optimizer_s: seconds in each phase, without
            the waits for other ranks; time/gradient_wait_s: sum of these waits; time/reduction_s:
            the shortest wait of all steps (in that step, this rank probably arrived last and waited
            only for the transfer); time/step_spread_s: standard deviation of the time of a step,
            without waits.
        """
        totals = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        steps = [0.0]
        for (_, begun), (phase, ended) in pairwise(self._marks):
            if phase:
                seconds = between(begun, ended)
                totals[phase] += seconds
                steps[-1] += seconds
            if phase == "optimizer":
                steps.append(0.0)
        waits = [sum(between(*marks) for marks in step) for step in self._waited]
        own_s = [step - wait for step, wait in zip(steps, waits, strict=False)]
        totals["backward"] = max(0.0, totals["backward"] - sum(waits))
        return {
            **{f"time/{phase}_s": seconds for phase, seconds in totals.items()},
            "time/gradient_wait_s": sum(waits),
            "time/reduction_s": min(waits, default=0.0),
            "time/step_spread_s": stdev(own_s) if len(own_s) > 1 else 0.0,
        }


def mark(device: torch.device) -> Mark:
    """Return the current time; on a GPU, return an event in the GPU's queue instead."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begun: Mark, ended: Mark) -> float:
    """Wait until the GPU has reached two marks; return the seconds between them."""
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
        """Record one iteration, given the metrics of every rank.

        Returns:
            A warning for each rank that has just completed IN_A_ROW slow iterations in a row.
        """
        lines = []
        for phase, name in self.KEYS.items():
            seconds = [entry[name] for entry in entries]
            for rank, own_s in enumerate(seconds):
                other_s = median(seconds[:rank] + seconds[rank + 1 :] or [own_s])
                is_slow = own_s > max(STRAGGLER_FACTOR * other_s, other_s + STRAGGLER_EXCESS_S)
                key = phase, rank
                self._in_a_row[key] = self._in_a_row[key] + 1 if is_slow else 0
                if self._in_a_row[key] == IN_A_ROW:
                    lines.append(
                        f"straggler: rank {rank} is slow in {phase}: {own_s:.3g} s per iteration, "
                        f"waits excluded, while the other ranks need {other_s:.3g} s (median); "
                        f"it has been slow for {IN_A_ROW} iterations in a row"
                    )
        return lines
