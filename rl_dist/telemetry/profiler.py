"""Measure the time of each part of a training loop by clock and torch.profiler.

    profiler = Profiler(run_dir, world)
    for iteration in ...:
        profiler.begin(iteration)
        ...  # with section("collect"): ...
        profiler.end(say=print)

Each process profiles its first 5 iterations: it skips iteration 1, times iterations 2 and 3 with
the clock only (tracing slows short operators down), warms the tracer up in iteration 4 and traces
iteration 5. A shorter training run gets no profile. Every rank writes RUN_DIR/profile/rank_N.txt
and a trace for TensorBoard, Chrome or Perfetto.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import (
    ProfilerActivity,
    profile,
    record_function,
    schedule,
    tensorboard_trace_handler,
)

from rl_dist.errors import table
from rl_dist.files import path_to_write
from rl_dist.process_group.clock import listen
from rl_dist.process_group.world import World

logger = logging.getLogger(__name__)
FOLDER = "profile"
WINDOW = 5  # number of profiled iterations
TIMED = (2, 3)  # numbers of the iterations that are timed with the clock
WHOLE = "whole iteration"
# The waiting times are also included in the times of the sections.
GRADIENTS = "waiting for gradients of other ranks"
WAITING = "waiting for other ranks elsewhere"
TOTALS = (WHOLE, GRADIENTS, WAITING)
NUM_OPERATORS = 12  # number of operators in the report; the trace has all
Say = Callable[[str], None]


class SectionTimes:
    """A section listener that sums seconds by path, such as "collect/environment".

    It waits for the GPU at the start and end of each section, so that GPU work counts for the
    section that started it.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._path = ""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time one section."""
        outer = self._path
        path = self._path = f"{outer}/{name}".lstrip("/")
        started_s = self.now()
        try:
            yield
        finally:
            self.seconds[path] = self.seconds.get(path, 0.0) + self.now() - started_s
            self._path = outer

    def now(self) -> float:
        """Wait until the GPU has finished its work, then return the time in seconds."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class Profiler:
    """Measures the first WINDOW iterations of this rank, then reports their times."""

    def __init__(self, run_dir: Path, world: World) -> None:
        self._run_dir, self._world = run_dir, world
        self._number = 0  # counts the iterations of this process from 1
        self._times = SectionTimes(world.device)
        self._totals = dict.fromkeys(TOTALS, 0.0)  # seconds in the TIMED iterations
        on_gpu = world.device.type == "cuda"
        self._sort_by = f"self_{'device' if on_gpu else 'cpu'}_time_total"
        # keep the tracer from printing its start and stop on stderr
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._trace = profile(
            activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu],
            schedule=schedule(wait=WINDOW - 2, warmup=1, active=1, repeat=1),
            acc_events=True,  # otherwise torch 2.11 warns about a second window
        )

    def begin(self, iteration: int) -> None:
        """Begin to measure an iteration; call this before the iteration's work."""
        self._number += 1
        if self._number == 1:
            self._first = iteration
            self._trace.start()
        elif self._number <= WINDOW:
            self._trace.step()
        if self._number in TIMED:
            listen(self._times)
            self._add_clocks(-1)
        elif self._number == WINDOW:
            listen(record_function)

    def end(self, say: Say) -> None:
        """End an iteration; after the last profiled one, pass the report to `say`."""
        listen(None)
        if self._number in TIMED:
            self._add_clocks(+1)
        elif self._number == WINDOW:
            self._trace.stop()
            say(self._report())

    def _add_clocks(self, sign: int) -> None:
        self._totals[WHOLE] += sign * self._times.now()
        self._totals[GRADIENTS] += sign * self._world.gradient_seconds
        self._totals[WAITING] += sign * self._world.sync_seconds

    def _report(self) -> str:
        """Write this rank's profile files and return the report for the user."""
        totals = self._times.seconds | self._totals
        seconds = {name: total_s / len(TIMED) for name, total_s in totals.items()}
        operators = self._trace.key_averages().table(
            sort_by=self._sort_by, row_limit=NUM_OPERATORS, max_name_column_width=48
        )
        rank = self._world.rank
        first = self._first
        text = (
            f"profile of rank {rank}, mean of iterations {first + 1} to {first + 2}\n"
            f"{section_table(seconds)}\n"
            f"operators of iteration {first + WINDOW - 1} by their own time, tracing included\n"
            f"{operators}"
        )
        folder = self._run_dir / FOLDER
        try:
            path = path_to_write(self._run_dir, f"{FOLDER}/rank_{rank}.txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n", encoding="utf-8")
            tensorboard_trace_handler(str(folder), f"rank_{rank}", use_gzip=True)(self._trace)
        except OSError as error:  # a profile that cannot be written must not stop training
            logger.warning("the profile cannot be written to %s: %s", folder, error)
        self._world.heartbeat()
        opened = "chrome://tracing, ui.perfetto.dev or TensorBoard with torch-tb-profiler"
        return f"{text}\nprofile: {folder} (rank_N.txt; traces for {opened})"


def section_table(seconds: Mapping[str, float]) -> str:
    """Format the sections as a table with their shares of the whole iteration."""
    names = sorted(seconds, key=lambda name: (name in TOTALS, name))
    whole = seconds[WHOLE]
    rows = [(name, f"{seconds[name]:.4f}", f"{seconds[name] / whole:.1%}") for name in names]
    return table(("section", "seconds", "share"), rows)
