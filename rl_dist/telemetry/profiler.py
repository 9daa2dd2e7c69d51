"""Trace one iteration of a training loop with torch.profiler.

    profiler = Profiler(run_dir, world)
    for iteration in ...:
        profiler.begin(iteration)
        ...  # with section("collect"): ...
        profiler.end(say=print)

Each process skips its first iteration, warms up the tracer in its second iteration and traces its
third iteration. Every rank writes RUN_DIR/profile/rank_N.txt and a trace for TensorBoard, Chrome or
Perfetto. Tracing slows down short operators in the traced iteration. It does not affect the `time/`
metrics of other iterations.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from torch.profiler import profile, record_function, schedule, tensorboard_trace_handler

from rl_dist.files import path_to_write
from rl_dist.process_group.clock import listen
from rl_dist.process_group.world import World

logger = logging.getLogger(__name__)
FOLDER = "profile"
TRACED = 3  # number of the traced iteration; the first iteration of this process has number 1
NUM_ROWS = 40  # the report lists only this many of the longest sections and operators


class NullProfiler:
    """Has the methods of `Profiler`, but does nothing."""

    def begin(self, *_: object) -> None:
        """Do nothing."""

    end = begin


class Profiler:
    """Traces the sections and operators of one iteration of this rank."""

    def __init__(self, run_dir: Path, world: World) -> None:
        self._run_dir = run_dir
        self._world = world
        self._number = 0  # number of iterations that this process has begun
        # prevent the tracer from printing on stderr that it starts and stops
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._trace = profile(
            schedule=schedule(wait=TRACED - 2, warmup=1, active=1, repeat=1),
            acc_events=True,  # otherwise torch 2.11 warns that events are cleared
        )

    def begin(self, iteration: int) -> None:
        """Begin an iteration; call this before the iteration's work."""
        self._number += 1
        if self._number == 1:
            self._trace.start()
        elif self._number <= TRACED:
            self._trace.step()
        if self._number == TRACED:
            self._title = f"profile of rank {self._world.rank}, iteration {iteration}"
            listen(record_function)

    def end(self, say: Callable[[str], None]) -> None:
        """End an iteration; if it was the traced one, pass the report to `say`."""
        if self._number != TRACED:
            return
        listen(None)
        self._trace.stop()
        device = "cpu" if self._world.device.type == "cpu" else "device"
        table = self._trace.key_averages().table(
            sort_by=f"{device}_time_total", row_limit=NUM_ROWS, max_name_column_width=48
        )
        text = f"{self._title}; times include tracing overhead\n{table}"
        name = f"rank_{self._world.rank}"
        folder = self._run_dir / FOLDER
        try:
            path = path_to_write(self._run_dir, f"{FOLDER}/{name}.txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n", encoding="utf-8")
            tensorboard_trace_handler(str(folder), name, use_gzip=True)(self._trace)
        except OSError as error:  # a profile that cannot be written must not stop training
            logger.warning("the profile cannot be written to %s: %s", folder, error)
        self._world.heartbeat()
        opened = "chrome://tracing, ui.perfetto.dev or TensorBoard with torch-tb-profiler"
        say(f"{text}\nprofile: {folder} (rank_N.txt, and traces for {opened})")
