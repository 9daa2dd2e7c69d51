"""What the monitor costs: training with it and without, turn by turn in one run.

    python benchmarks/monitor_cost.py [--pairs 15] [--every 1.0] [--small]

Prints one JSON line. `sample_cpu_s` is the CPU time of one sample, `share_by_cpu_time` what that makes at the interval.
`slowdown` has the quartiles over pairs of the time with the monitor divided by the time without, minus one, by the wall
clock and by the CPU time of the process, which other jobs disturb less; `slowdown_hundredfold` is the same with 100
times as many samples, in 10 times as many pairs of shorter blocks: a hundredth of it is the cost at the interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

from agents.clstm import PolicyConfig
from agents.ppo import PPOConfig
from agents.sizes import TrainConfig
from agents.trainer import Job, Training, episode_metrics
from envs.market_data import DataConfig
from envs.simulated_market import SimulatedMarketConfig
from envs.trading_config import TradingConfig
from envs.trading_task import prepare_task
from rl_dist.monitor import Monitor, sources_of
from rl_dist.world import World, close_world, open_world

SAMPLES = 300


def main_job(world: World, run_dir: str, small: bool) -> Callable[[], None]:
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
        episode_metrics(rollout, {}, training.env_restarts, world)

    return iterate


def seconds(iterate: Callable[[], None], world: World, every_s: float, block_s: float) -> tuple[float, float]:
    """Wall and CPU seconds per iteration with a monitor at this interval, over a block."""
    world.monitor = Monitor(sources_of(world.device), every_s)
    count, started, started_cpu = 0, time.perf_counter(), time.process_time()
    while not count or time.perf_counter() - started < block_s:
        iterate()
        count += 1
    taken = (time.perf_counter() - started) / count, (time.process_time() - started_cpu) / count
    world.monitor.close()
    return taken


def slowdown(
    iterate: Callable[[], None], world: World, every_s: float, pairs: int, block_s: float
) -> dict[str, object]:
    """Of blocks with the monitor beside blocks without, whose order changes from pair to pair."""
    found: dict[str, list[float]] = {"wall": [], "cpu": []}
    for pair in range(pairs):
        order = (0.0, every_s) if pair % 2 else (every_s, 0.0)
        taken = {interval: seconds(iterate, world, interval, block_s) for interval in order}
        for clock, number in (("wall", 0), ("cpu", 1)):
            found[clock].append(taken[every_s][number] / taken[0.0][number] - 1)
    quartiles = {clock: statistics.quantiles(values, n=4) for clock, values in found.items()}
    return {clock: [round(value, 5) for value in values] for clock, values in quartiles.items()}


def sample_cpu_s(world: World) -> float:
    """CPU seconds of one sample of all sources."""
    readers = [source.begin() for source in sources_of(world.device)]
    started = time.thread_time()
    for _ in range(SAMPLES):
        for read in readers:
            read()
    return (time.thread_time() - started) / SAMPLES


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument(
        "--every", type=float, default=TrainConfig().monitor_every, help="seconds (default: %(default)s)"
    )
    parser.add_argument("--block", type=float, default=3.0, help="seconds of training at a time (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="small sizes, for a try")
    args = parser.parse_args()
    world = open_world("cpu")
    with tempfile.TemporaryDirectory() as run_dir:
        iterate = main_job(world, run_dir, args.small)
        iterate()
        cpu_s = sample_cpu_s(world)
        found = {
            "every_s": args.every,
            "pairs": args.pairs,
            "iteration_s": round(seconds(iterate, world, 0.0, args.block)[0], 4),
            "sample_cpu_s": round(cpu_s, 6),
            "share_by_cpu_time": round(cpu_s / args.every, 6),
            "slowdown": slowdown(iterate, world, args.every, args.pairs, args.block),
            "slowdown_hundredfold": slowdown(iterate, world, args.every / 100, 10 * args.pairs, args.block / 10),
        }
    print(json.dumps(found), flush=True)
    close_world(world)
    return 0


if __name__ == "__main__":
    sys.exit(main())
