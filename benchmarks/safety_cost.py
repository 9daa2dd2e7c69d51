"""What safety costs: sync checks, announcements, snapshots and checkpoints, as a share of training.

    python benchmarks/safety_cost.py [--num_gpus 2] [--iterations 10]

Trains the main job at its default sizes and times each part in the same run: medians, in seconds, then the share of
an iteration that it takes at the default intervals. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

from agents.policy import PolicyConfig
from agents.ppo import PPOConfig
from agents.sizes import TrainConfig
from agents.trainer import Job, Training, episode_metrics, save
from envs.trading.config import TradingConfig
from envs.trading.market_data import DataConfig
from envs.trading.simulated_market import SimulatedMarketConfig
from envs.trading.task import prepare_task
from rl_dist.checkpoint.folder import Best
from rl_dist.launch.launcher import launch
from rl_dist.process_group.collectives import agree_max, check_in_sync
from rl_dist.process_group.world import close_world, open_world


def median_s(call: Callable[[], object], times: int) -> float:
    """Median seconds of a call."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return float(np.median(taken))


def measure(iterations: int, run_dir: str) -> int:
    """What every rank does."""
    world = open_world("cpu")
    task = prepare_task(DataConfig(), SimulatedMarketConfig(num_worlds=16), TradingConfig())
    job = Job(
        train=TrainConfig(), policy=PolicyConfig(), ppo=PPOConfig(), make_env=task.training_env, run_dir=Path(run_dir)
    )
    training = Training(job, world)
    training.warm_up_normalizers()
    best = Best((), Path(run_dir, "checkpoints"), world)

    def iterate() -> None:
        training.iteration += 1
        rollout = training.collect(training.iteration * job.train.num_steps)
        training.update(rollout)
        episode_metrics(rollout, {}, training.env_restarts, world)

    def save_one() -> None:
        training.iteration += 1  # a name of its own, as in a run
        save(training, best, last=False)

    iterate()
    iteration_s = median_s(iterate, iterations)
    check_s = median_s(lambda: check_in_sync(training.replicated(), world), 3 * iterations)
    save_s = median_s(save_one, iterations)
    agree_s = median_s(lambda: agree_max(0, world), 10 * iterations)
    share = (check_s / job.train.sync_check_every + save_s / job.train.checkpoint_every) / iteration_s
    if world.main:
        found = {"ranks": world.size, "iteration_s": iteration_s, "sync_check_s": check_s, "save_s": save_s,
                 "agreement_s": agree_s, "share_of_time": share}  # fmt: skip
        print(json.dumps({name: round(value, 6) for name, value in found.items()}), flush=True)
    close_world(world)
    return 0


def main() -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_gpus", type=int, default=1, help="CPU ranks")
    parser.add_argument("--iterations", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as run_dir:
        return launch(measure, (args.iterations, run_dir), args.num_gpus)


if __name__ == "__main__":
    sys.exit(main())
