"""Where the time of a training loop goes: by the clock and by torch.profiler.

    profiler = Profiler(run_dir, world, on=True)
    for iteration in ...:
        profiler.begin(iteration)
        ...  # with section("collect"): ...
        profiler.end(say=print)
    profiler.close(say=print)

One window after the start of the process: an iteration is left out, two are timed by the clock alone, because tracing
slows short operators down; one warms the tracer up and one is traced. Before and after, nothing is measured.
Every rank writes RUN_DIR/profile/rank_N.txt and a trace that TensorBoard, Chrome and Perfetto open.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function, tensorboard_trace_handler

from rl_dist.process_group.phases import SectionTimes, listen
from rl_dist.process_group.world import World

logger = logging.getLogger(__name__)
FOLDER = "profile"
STAGES = ("leave out", "time", "time", "warm up", "trace")  # of the first iterations of a process
GRADIENTS = "waiting for gradients of other ranks"
WAITING = "waiting for other ranks elsewhere"
COPIES = "copies to and from the GPU"
INSIDE = (GRADIENTS, WAITING, COPIES)  # not sections, but within them
NUM_OPERATORS, WRITTEN_OPERATORS = 8, 40
Say = Callable[[str], None]
Explain = Callable[[Mapping[str, float]], str]


class Profiler:
    """Measures one window of iterations of this rank, then says what it found.

    Args:
        run_dir: gets the folder `profile`.
        on: False: nothing is ever measured.
        explain: makes a sentence of the seconds of an iteration by section; "" = none.
    """

    def __init__(self, run_dir: Path, world: World, *, on: bool, explain: Explain = lambda seconds: "") -> None:
        self._folder, self._world, self._explain = run_dir / FOLDER, world, explain
        self._stages = list(STAGES) if on else []
        self._times = SectionTimes(world.device)
        self._trace: profile | None = None
        self._started = self._timed_s = self._gradients_s = self._waited_s = 0.0
        self._iterations: dict[str, list[int]] = {stage: [] for stage in STAGES}

    def begin(self, iteration: int) -> None:
        """Before the work of an iteration."""
        if not self._stages:
            return
        stage = self._stages[0]
        self._iterations[stage].append(iteration)
        if stage == "time":
            listen(self._times)
            self._started = self._times.now()
            self._gradients_s -= self._world.gradient_seconds
            self._waited_s -= self._world.sync_seconds
        elif stage != "leave out":
            on_gpu = self._world.device.type == "cuda"
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it tells stderr that it starts and stops
            listen(record_function if stage == "trace" else None)
            self._trace = profile(activities=activities, acc_events=True)  # else torch 2.11 warns of a second window
            self._trace.start()

    def end(self, say: Say) -> None:
        """After it; at the end of the window, `say` is told the findings."""
        if not self._stages:
            return
        stage = self._stages.pop(0)
        listen(None)
        if stage == "time":
            self._timed_s += self._times.now() - self._started
            self._gradients_s += self._world.gradient_seconds
            self._waited_s += self._world.sync_seconds
        if self._trace is not None:
            self._trace.stop()
            if stage == "trace":
                say(self._report(self._trace))
            self._trace = None

    def close(self, say: Say) -> None:
        """The training has ended, maybe too early."""
        if self._stages and len(self._stages) < len(STAGES):
            done = len(STAGES) - len(self._stages)
            say(f"no profile: training ended after {done} iteration(s), --profile needs {len(STAGES)}")
        self._stages = []
        listen(None)

    def _report(self, trace: profile) -> str:
        """Write this rank's files; returns what the user is told."""
        operators, copies_s = read_operators(trace, on_gpu=self._world.device.type == "cuda")
        timed = self._iterations["time"]
        seconds = {name: spent / len(timed) for name, spent in self._times.seconds.items()}
        if self._world.size > 1:
            seconds |= {GRADIENTS: self._gradients_s / len(timed), WAITING: self._waited_s / len(timed)}
        if copies_s:
            seconds[COPIES] = copies_s
        head = f"profile of rank {self._world.rank}, "
        shares = f"{head}mean of iterations {timed[0]} to {timed[-1]}\n" + section_table(
            seconds, self._timed_s / len(timed)
        )
        heading = f"operators of iteration {self._iterations['trace'][0]} by their own time, tracing included\n"
        explained = self._explain(seconds)
        text = f"{shares}\n{heading}{operator_table(operators, NUM_OPERATORS)}"
        whole = f"{shares}\n{heading}{operator_table(operators, WRITTEN_OPERATORS)}\n{explained}\n"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            Path(self._folder, f"rank_{self._world.rank}.txt").write_text(whole, encoding="utf-8")
            tensorboard_trace_handler(str(self._folder), f"rank_{self._world.rank}", use_gzip=True)(trace)
        except OSError as error:  # training is worth more than its profile
            logger.warning("the profile cannot be written to %s: %s", self._folder, error.strerror or error)
            return f"{text}\n{explained}"
        self._world.beat()
        opened = "chrome://tracing, ui.perfetto.dev or TensorBoard with torch-tb-profiler"
        return f"{text}\n{explained}\nprofile: {self._folder} (rank_N.txt; traces for {opened})"


@dataclass(frozen=True)
class Operator:
    """All calls of one operator."""

    name: str
    calls: int
    self_s: float  # without operators that it called; on a GPU its kernels' time


def read_operators(trace: profile, *, on_gpu: bool) -> tuple[list[Operator], float]:
    """Operators of a trace, longest first, and seconds of copies to and from a GPU."""
    found, copies_s = [], 0.0
    for event in trace.key_averages():
        self_us: Any = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if event.key.startswith(("Memcpy HtoD", "Memcpy DtoH")):
            copies_s += self_us / 1e6
        if self_us and not event.is_user_annotation:
            found.append(Operator(event.key, event.count, self_us / 1e6))
    return sorted(found, key=lambda operator: -operator.self_s), copies_s


def section_table(seconds: Mapping[str, float], total_s: float) -> str:
    """Sections as a tree with their shares of an iteration.

    Args:
        seconds: of one iteration, by path; what a section does outside its own parts is its `rest`.
        total_s: of the whole iteration.
    """
    lines = [f"  {'section':<44}{'seconds':>10}{'share':>8}"]

    def add(name: str, depth: int, spent: float) -> None:
        lines.append(f"  {'  ' * depth + name:<44}{spent:>10.4f}{spent / total_s:>8.1%}")

    def branch(path: str, depth: int, whole_s: float) -> None:
        prefix = f"{path}/" if path else ""
        below = (p for p in seconds if p.startswith(prefix) and p not in INSIDE)
        inner = [p for p in below if "/" not in p[len(prefix) :]]
        for child in inner:
            add(child[len(prefix) :], depth, seconds[child])
            branch(child, depth + 1, seconds[child])
        if inner:
            add("rest", depth, max(0.0, whole_s - sum(seconds[child] for child in inner)))

    branch("", 0, total_s)
    add("whole", 0, total_s)
    for name in INSIDE:
        if name in seconds:
            add(f"in it {name}", 0, seconds[name])
    return "\n".join(lines)


def operator_table(operators: list[Operator], most: int) -> str:
    """The first operators with their shares of the time of all."""
    total_s = sum(operator.self_s for operator in operators) or 1.0
    lines = [f"  {'operator':<50}{'calls':>9}{'seconds':>10}{'share':>8}"]
    for operator in operators[:most]:
        name = operator.name if len(operator.name) <= 48 else operator.name[:45] + "..."
        lines.append(f"  {name:<50}{operator.calls:>9,}{operator.self_s:>10.4f}{operator.self_s / total_s:>8.1%}")
    return "\n".join(lines)
