"""Cost of the monitor in a training of the main job, within a minute.

    python benchmarks/monitor_cost.py [--seconds 50] [--every 1.0] [--small]

Prints one JSON line. `share_by_cpu_time` is the CPU time of the monitor's own thread, counted by
the thread while the training runs beside it, as a share of the interval: other jobs hardly disturb
it. It does not see what the training loses by waiting for the thread (Python runs one at a time).
That is in `slowdown`: iterations with a hundred times as many samples beside iterations without,
turn by turn. A hundredth of the difference, by wall clock and by the CPU time of the process, with
the quartiles over pairs, is the cost at the interval.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

from main_job import SMALL, command_line, iterate, main_job

from agents.policy import PolicyConfig
from agents.sizes import TrainConfig
from agents.trainer import Training
from rl_dist.process_group.world import close_world, open_world
from rl_dist.telemetry.monitor import Monitor, Source, sources_of

FASTER = 100  # times as many samples, so that their cost can be seen


class Clock:
    """A source that notes the CPU time of the thread that samples, once per sample."""

    def __init__(self) -> None:
        self.cpu_s: list[float] = []

    def begin(self) -> Callable[[], dict[str, float | None]]:
        """Called in the thread, as is what it returns."""

        def read() -> dict[str, float | None]:
            self.cpu_s.append(time.thread_time())
            return {"clock": None}

        return read

    @property
    def sample_s(self) -> list[float]:
        """CPU seconds between one sample and the next."""
        return [b - a for a, b in itertools.pairwise(self.cpu_s)]


def iteration_s(training: Training, every_s: float) -> tuple[dict[str, float], list[float]]:
    """Seconds of an iteration under a monitor (0: none), and CPU seconds of its samples."""
    clock = Clock()
    sources = [*sources_of(training.world.device), Source(("clock",), clock.begin)]
    training.monitor = Monitor(sources, every_s)
    started, started_cpu = time.perf_counter(), time.process_time()
    iterate(training)
    taken = {"wall": time.perf_counter() - started, "cpu": time.process_time() - started_cpu}
    training.monitor.close()
    return taken, clock.sample_s


def measure(training: Training, every_s: float, budget_s: float) -> dict[str, object]:
    """Pairs of iterations, whose order changes, until the time is up."""
    slowdowns: dict[str, list[float]] = {"wall": [], "cpu": []}
    samples: list[float] = []
    plain_s: list[float] = []
    until_s = time.perf_counter() + budget_s
    while len(plain_s) < 3 or time.perf_counter() < until_s:
        order = (0.0, every_s / FASTER) if len(plain_s) % 2 else (every_s / FASTER, 0.0)
        taken = {interval: iteration_s(training, interval) for interval in order}
        (watched, sampled), (plain, _) = taken[every_s / FASTER], taken[0.0]
        for name, values in slowdowns.items():
            values.append((watched[name] / plain[name] - 1) / FASTER)
        samples += sampled
        plain_s.append(plain["wall"])
    quartiles = {name: statistics.quantiles(values, n=4) for name, values in slowdowns.items()}
    return {
        "every_s": every_s,
        "pairs": len(plain_s),
        "samples": len(samples),
        "iteration_s": round(statistics.median(plain_s), 4),
        "sample_cpu_s": round(statistics.mean(samples), 7),
        "share_by_cpu_time": round(statistics.mean(samples) / every_s, 7),
        "slowdown": {name: [round(v, 6) for v in values] for name, values in quartiles.items()},
    }


def main() -> int:
    """Measure and print."""
    parser = command_line(__doc__)
    every_s = TrainConfig().monitor_every
    parser.add_argument("--seconds", type=float, default=50.0, help="to measure for")
    parser.add_argument("--every", type=float, default=every_s, help="interval in seconds")
    parser.add_argument("--small", action="store_true", help="small sizes, for a try")
    args = parser.parse_args()
    if not args.every > 0:
        parser.error(f"--every must be above 0 seconds, got {args.every:g}")
    world = open_world("cpu")
    with tempfile.TemporaryDirectory() as run_dir:
        if args.small:
            training = main_job(world, run_dir, None, SMALL, PolicyConfig(hidden_size=16))
        else:
            training = main_job(world, run_dir)
        iterate(training)
        print(json.dumps(measure(training, args.every, args.seconds)), flush=True)
    close_world(world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
