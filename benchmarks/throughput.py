"""Environment steps per second: the trading environment alone, and the whole main job.

    python benchmarks/throughput.py [--num_stocks 30] [--windows 7] [--threads 2]

Prints one JSON line per figure: median, minimum and maximum over windows, warm-up excluded. Machines are
noisy: compare figures of one run only.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from agents.policy import PolicyConfig
from agents.ppo import PPOConfig
from agents.sizes import TrainConfig
from agents.trainer import Job, Training, episode_metrics
from envs.trading.config import TradingConfig
from envs.trading.market_data import DataConfig
from envs.trading.simulated_market import SimulatedMarketConfig
from envs.trading.task import prepare_task
from rl_dist.hardware.host_memory import available_cores
from rl_dist.process_group.world import close_world, open_world
from rl_dist.seeding import ENVIRONMENT_STREAM, stream_seeds

ENV_STEPS_PER_WINDOW = 300


def say(name: str, rates: list[float], **more: object) -> None:
    """One figure as a JSON line."""
    spread = {"median": round(float(np.median(rates))), "min": round(min(rates)), "max": round(max(rates))}
    print(json.dumps({"figure": name, "steps_per_s": spread, "windows": len(rates), **more}), flush=True)


def environment_rate(task, num_envs: int, windows: int) -> list[float]:
    """Random actions in the trading environment alone, all environments of one process."""
    env = task.training_env(num_envs)
    env.reset(seed=stream_seeds(1, ENVIRONMENT_STREAM, 0, num_envs))
    actions = torch.rand(16, num_envs, len(env.tickers)) * 2 - 1
    rates = []
    for window in range(windows + 1):
        started = time.perf_counter()
        for step in range(ENV_STEPS_PER_WINDOW):
            env.step(actions[step % 16])
        if window:  # the first one warms up
            rates.append(ENV_STEPS_PER_WINDOW * num_envs / (time.perf_counter() - started))
    return rates


def job_rates(task, windows: int, update_epochs: int, policy: str) -> tuple[list[float], list[float], list[float]]:
    """Whole iterations of the main job with its default sizes: steps/s, collect and update seconds."""
    world = open_world("cuda" if torch.cuda.is_available() else "cpu")
    job = Job(
        train=TrainConfig(),
        policy=PolicyConfig(policy=policy),
        ppo=PPOConfig(update_epochs=update_epochs),
        make_env=lambda count, first: task.training_env(count, first, world.device),
        run_dir=Path(tempfile.gettempdir()),
    )
    training = Training(job, world)
    training.warm_up_normalizers()
    rates, collect_s, update_s = [], [], []
    for iteration in range(1, windows + 3):
        started = time.perf_counter()
        training.iteration = iteration
        rollout = training.collect(iteration * job.train.num_steps)
        collected = time.perf_counter()
        training.update(rollout)
        episode_metrics(rollout, {}, training.env_restarts, world)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        ended = time.perf_counter()
        if iteration > 2:
            rates.append(training.sizes.global_num_envs * job.train.num_steps / (ended - started))
            collect_s.append(collected - started)
            update_s.append(ended - collected)
    close_world(world)
    return rates, collect_s, update_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_stocks", type=int, default=30)
    parser.add_argument("--num_envs", type=int, default=64, help="of the environment-alone figure")
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--update_epochs", type=int, default=4)
    parser.add_argument("--policy", default="clstm", choices=("clstm", "mlp"))
    parser.add_argument("--threads", type=int, default=available_cores())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    print(json.dumps({"torch": torch.__version__, "cpu": platform.processor() or platform.machine(), "gpu": gpu,
                      "cores": available_cores(), "threads": args.threads}))  # fmt: skip
    simulated = SimulatedMarketConfig(num_stocks=args.num_stocks, num_worlds=16)
    task = prepare_task(DataConfig(), simulated, TradingConfig())
    plain = prepare_task(DataConfig(), simulated, TradingConfig(reward="plain", risk_aversion=0.0))
    for name, kind in (("plain rewards", plain), ("training rewards", task)):
        say(f"trading environment alone, {name}", environment_rate(kind, args.num_envs, args.windows),
            num_envs=args.num_envs, num_stocks=args.num_stocks)  # fmt: skip
    rates, collect_s, update_s = job_rates(task, args.windows, args.update_epochs, args.policy)
    say("main job", rates, num_stocks=args.num_stocks, update_epochs=args.update_epochs, policy=args.policy,
        collect_s=round(float(np.median(collect_s)), 3), update_s=round(float(np.median(update_s)), 3))  # fmt: skip


if __name__ == "__main__":
    main()
