"""What the monitor costs a training of the main job: within a minute.

    python benchmarks/monitor_cost.py [--seconds 50] [--every 1.0] [--small]

Prints one JSON line. `share_by_cpu_time` is what the CPU time of the monitor's own thread, counted by the thread while
the training runs beside it, makes at the interval: other jobs hardly disturb it. It does not see what the training
loses by waiting for the thread (Python runs one at a time). That is in `slowdown`: iterations with a hundred times as
many samples beside iterations without, turn by turn. A hundredth of the difference, by wall clock and by the CPU time
of the process, with the quartiles over pairs, is the cost at the interval.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

from agents.policy import PolicyConfig
from agents.ppo import PPOConfig
from agents.rollout import episode_metrics
from agents.sizes import TrainConfig
from agents.trainer import Job, Training
from envs.trading.config import TradingConfig
from envs.trading.market_data import DataConfig
from envs.trading.simulated_market import SimulatedMarketConfig
from envs.trading.task import prepare_task
from rl_dist.process_group.world import World, close_world, open_world
from rl_dist.telemetry.monitor import Monitor, Source, sources_of

FASTER = 100  # times as many samples, so that their cost can be seen


def main_job(world: World, run_dir: str, small: bool) -> tuple[Training, Callable[[], None]]:
    """One iteration of the main job, as a function."""
    task = prepare_task(DataConfig(), SimulatedMarketConfig(num_worlds=16), TradingConfig())
    train = TrainConfig(num_envs=8, num_steps=16, bptt_steps=8, batch_size=8) if small else TrainConfig()
    policy = PolicyConfig(hidden_size=16) if small else PolicyConfig()
    parts = {"train": train, "policy": policy, "ppo": PPOConfig(), "run_dir": Path(run_dir)}
    training = Training(Job(make_env=task.training_env, **parts), world)
    training.warm_up_normalizers()

    def iterate() -> None:
        training.iteration += 1
        rollout = training.collect(training.iteration * train.num_steps)
        training.update(rollout)
        episode_metrics(rollout, {}, training.env_restarts, training.monitor.take(), world)

    return training, iterate


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


def iteration_s(training: Training, iterate: Callable[[], None], every_s: float) -> tuple[float, float, list[float]]:
    """Wall and CPU seconds of an iteration under a monitor (0: none), and CPU seconds of its samples."""
    clock, world = Clock(), training.world
    training.monitor = Monitor([*sources_of(world.device), Source(("clock",), clock.begin)], every_s)
    started, started_cpu = time.perf_counter(), time.process_time()
    iterate()
    taken = time.perf_counter() - started, time.process_time() - started_cpu
    training.monitor.close()
    return *taken, clock.sample_s


def measure(training: Training, iterate: Callable[[], None], every_s: float, budget_s: float) -> dict[str, object]:
    """Pairs of iterations, whose order changes, until the time is up."""
    slowdowns: dict[str, list[float]] = {"wall": [], "cpu": []}
    samples, plain_s, until_s = [], [], time.perf_counter() + budget_s
    while len(plain_s) < 3 or time.perf_counter() < until_s:
        order = (0.0, every_s / FASTER) if len(plain_s) % 2 else (every_s / FASTER, 0.0)
        taken = {interval: iteration_s(training, iterate, interval) for interval in order}
        watched, plain = taken[every_s / FASTER], taken[0.0]
        for number, name in enumerate(slowdowns):
            slowdowns[name].append((watched[number] / plain[number] - 1) / FASTER)
        samples += watched[2]
        plain_s.append(plain[0])
    return {
        "every_s": every_s,
        "pairs": len(plain_s),
        "samples": len(samples),
        "iteration_s": round(statistics.median(plain_s), 4),
        "sample_cpu_s": round(statistics.mean(samples), 7),
        "share_by_cpu_time": round(statistics.mean(samples) / every_s, 7),
        "slowdown": {
            name: [round(value, 6) for value in statistics.quantiles(values, n=4)] for name, values in slowdowns.items()
        },
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every_s = TrainConfig().monitor_every
    parser.add_argument("--seconds", type=float, default=50.0, help="to measure for (default: %(default)s)")
    parser.add_argument("--every", type=float, default=every_s, help="interval in seconds (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="small sizes, for a try")
    args = parser.parse_args()
    if not args.every > 0:
        parser.error(f"--every must be above 0 seconds, got {args.every:g}")
    world = open_world("cpu")
    with tempfile.TemporaryDirectory() as run_dir:
        training, iterate = main_job(world, run_dir, args.small)
        iterate()
        print(json.dumps(measure(training, iterate, args.every, args.seconds)), flush=True)
    close_world(world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
