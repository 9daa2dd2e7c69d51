"""Where the time of a training loop goes: by the clock and by torch.profiler.

    profiler = Profiler(run_dir, world)
    for iteration in ...:
        profiler.begin(iteration)
        ...  # with section("collect"): ...
        profiler.end(say=print)
    profiler.close(say=print)

One window after the start of the process: an iteration is left out, two are timed by the clock
alone, because tracing slows short operators down; one warms the tracer up and one is traced.
Every rank writes RUN_DIR/profile/rank_N.txt and a trace that TensorBoard, Chrome and Perfetto open.
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

from rl_dist.files import path_to_write
from rl_dist.process_group.clock import listen
from rl_dist.process_group.world import World

logger = logging.getLogger(__name__)
FOLDER = "profile"
WINDOW = 5  # iterations
TIMED = (2, 3)  # of them
GRADIENTS = "waiting for gradients of other ranks"
WAITING = "waiting for other ranks elsewhere"
INSIDE = (GRADIENTS, WAITING)  # not sections, but within them
NUM_OPERATORS = 12  # that are shown; the trace holds all
Say = Callable[[str], None]
Explain = Callable[[Mapping[str, float]], str]


class SectionTimes:
    """A listener that adds up seconds by path, such as "collect/environment".

    It waits for the GPU at both ends of a section, so that the section that asked for work pays.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}  # in the order in which sections were first left
        self._device = device
        self._path = ""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time one section."""
        outer = self._path
        self._path = f"{outer}/{name}".lstrip("/")
        started = self.now()
        try:
            yield
        finally:
            self.seconds[self._path] = self.seconds.get(self._path, 0.0) + self.now() - started
            self._path = outer

    def now(self) -> float:
        """Return the clock's seconds, once the GPU has done what it was asked to."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class Profiler:
    """Measures one window of iterations of this rank, then reports what it found."""

    def __init__(self, run_dir: Path, world: World, explain: Explain) -> None:
        """Prepare a window; `explain` makes a sentence of seconds by section."""
        self._folder = run_dir / FOLDER
        self._world, self._explain = world, explain
        self._number = 0  # of the iteration within the window
        self._first = 0  # iteration of the window
        self._times = SectionTimes(world.device)
        self._totals = dict.fromkeys(("whole", GRADIENTS, WAITING), 0.0)  # seconds, if timed
        self._on_gpu = world.device.type == "cuda"
        # else it writes to stderr that it starts and stops
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._trace = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            schedule=schedule(wait=WINDOW - 2, warmup=1, active=1, repeat=1),
            acc_events=True,  # else torch 2.11 warns of a second window
        )

    def begin(self, iteration: int) -> None:
        """Begin an iteration, before its work."""
        self._number += 1
        if self._number > WINDOW:
            return
        if self._number == 1:
            self._first = iteration
            self._trace.start()
        else:
            self._trace.step()
        if self._number in TIMED:
            listen(self._times)
            self._add_clocks(-1)
        elif self._number == WINDOW:
            listen(record_function)

    def end(self, say: Say) -> None:
        """End an iteration; at the end of the window, `say` gets the findings."""
        listen(None)
        if self._number in TIMED:
            self._add_clocks(+1)
        elif self._number == WINDOW:
            self._trace.stop()
            say(self._report())

    def close(self, say: Say) -> None:
        """End a training, maybe too early for a profile."""
        if 0 < self._number < WINDOW:
            say(f"no profile: {self._number} iteration(s), and --profile needs {WINDOW}")

    def _add_clocks(self, sign: int) -> None:
        self._totals["whole"] += sign * self._times.now()
        self._totals[GRADIENTS] += sign * self._world.gradient_seconds
        self._totals[WAITING] += sign * self._world.sync_seconds

    def _report(self) -> str:
        """Write this rank's files; returns the text for the user."""
        # seconds of one iteration by section
        spent = self._times.seconds
        if self._world.size > 1:
            spent = spent | {name: self._totals[name] for name in (GRADIENTS, WAITING)}
        seconds = {name: total_s / len(TIMED) for name, total_s in spent.items()}
        name = f"rank_{self._world.rank}"
        timed = [self._first + number - 1 for number in TIMED]
        kind = "device" if self._on_gpu else "cpu"
        operators = self._trace.key_averages().table(
            sort_by=f"self_{kind}_time_total", row_limit=NUM_OPERATORS, max_name_column_width=48
        )
        text = (
            f"profile of rank {self._world.rank}, mean of iterations {timed[0]} to {timed[-1]}\n"
            f"{section_table(seconds, self._totals['whole'] / len(TIMED))}\n"
            f"operators of iteration {self._first + WINDOW - 1} by their own time, "
            f"tracing included\n{operators}\n"
            f"{self._explain(seconds)}"
        )
        try:
            path = path_to_write(self._folder.parent, f"{FOLDER}/{name}.txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n", encoding="utf-8")
            tensorboard_trace_handler(str(self._folder), name, use_gzip=True)(self._trace)
        except OSError as error:  # training is worth more than its profile
            why = error.strerror or error
            logger.warning("the profile cannot be written to %s: %s", self._folder, why)
            return text
        self._world.heartbeat()
        opened = "chrome://tracing, ui.perfetto.dev or TensorBoard with torch-tb-profiler"
        return f"{text}\nprofile: {self._folder} (rank_N.txt; traces for {opened})"


def section_table(seconds: Mapping[str, float], total_s: float) -> str:
    """Return sections as a tree with their shares of an iteration.

    Args:
        seconds: of one iteration, by path; what a section does outside its own parts is its `rest`.
        total_s: of the whole iteration.
    """
    lines = [f"  {'section':<44}{'seconds':>10}{'share':>8}"]

    def add(name: str, depth: int, spent: float) -> None:
        lines.append(f"  {'  ' * depth + name:<44}{spent:>10.4f}{spent / total_s:>8.1%}")

    def branch(path: str, depth: int, whole_s: float) -> None:
        inner = [p for p in seconds if p not in INSIDE and p.rpartition("/")[0] == path]
        for child in inner:
            add(child.rpartition("/")[2], depth, seconds[child])
            branch(child, depth + 1, seconds[child])
        if inner:
            add("rest", depth, max(0.0, whole_s - sum(seconds[child] for child in inner)))

    branch("", 0, total_s)
    add("whole", 0, total_s)
    for name in INSIDE:
        if name in seconds:
            add(f"in it {name}", 0, seconds[name])
    return "\n".join(lines)
