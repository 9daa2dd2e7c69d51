"""Where the time of gradient steps goes, by phase."""

from __future__ import annotations

import time
from statistics import stdev

import torch

Mark = tuple[str, float | torch.cuda.Event]


class StepClock:
    """Marks the ends of phases; on a GPU by events, which nobody waits for.

    A step's own part of its backward pass is what is left of it without the waiting for others.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Mark] = []
        self._waited_s: list[float] = []  # by step
        self._own_s: list[float] = []  # of each step of the last reading

    def start(self) -> None:
        """Forget what was, and begin the first phase."""
        self._marks, self._waited_s = [], []
        self.mark("")

    def mark(self, phase: str) -> None:
        """What was done since the last mark belongs to `phase`; "": to none."""
        now: float | torch.cuda.Event
        if self._on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self._marks.append((phase, now))

    def waited(self, seconds: float) -> None:
        """How long the step under way has waited for the gradients of others."""
        self._waited_s.append(seconds)

    def read(self) -> dict[str, float]:
        """Seconds since `start` by phase; on a GPU, call it when its queue is done.

        Returns:
            time/forward_s, time/backward_s and time/optimizer_s without waiting; time/gradient_wait_s;
            time/reduction_s: the shortest wait, that is of a step to which this rank came last;
            time/step_spread_s: the standard deviation of one step's own seconds, without what repeats from
            one reading to the next (such as a slow first step).
        """
        totals = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        steps = [0.0]
        for (_, begun), (phase, ended) in zip(self._marks, self._marks[1:], strict=False):
            if not phase:
                continue
            totals[phase] += _between(begun, ended)
            steps[-1] += _between(begun, ended)
            if phase == "optimizer":
                steps.append(0.0)
        waits = self._waited_s
        own = [step - wait for step, wait in zip(steps, waits, strict=False)]
        before = self._own_s if len(self._own_s) == len(own) else []
        changes = [(now - then) / 2**0.5 for now, then in zip(own, before, strict=True)] if before else own
        self._own_s = own
        totals["backward"] = max(0.0, totals["backward"] - sum(waits))
        return {
            **{f"time/{phase}_s": seconds for phase, seconds in totals.items()},
            "time/gradient_wait_s": sum(waits),
            "time/reduction_s": min(waits, default=0.0),
            "time/step_spread_s": stdev(changes) if len(changes) > 1 else 0.0,
        }


def _between(begun: float | torch.cuda.Event, ended: float | torch.cuda.Event) -> float:
    if isinstance(begun, float) and isinstance(ended, float):
        return ended - begun
    return begun.elapsed_time(ended) / 1000.0  # type: ignore[union-attr, arg-type]
