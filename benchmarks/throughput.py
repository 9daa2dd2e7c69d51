"""Environment steps per second: the trading environment alone, and the whole main job.

    python benchmarks/throughput.py [--num_stocks 30] [--windows 7] [--threads 2]

Prints one JSON line per figure: median, minimum and maximum over windows, warm-up excluded.
Machines are noisy: compare figures of one run only.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

import torch
from main_job import command_line, iterate, main_job, trading_task

from agents.policy import PolicyConfig
from agents.ppo import PPOConfig
from envs.trading.task import TradingTask
from envs.trading_config import TradingConfig
from rl_dist.hardware.memory import available_cores
from rl_dist.process_group.world import close_world, open_world
from rl_dist.seeding import ENVIRONMENT_STREAM, stream_seeds

ENV_STEPS_PER_WINDOW = 300


def say(name: str, rates: list[float], **more: object) -> None:
    """One figure as a JSON line."""
    spread = {"median": round(median(rates)), "min": round(min(rates)), "max": round(max(rates))}
    figure = {"figure": name, "steps_per_s": spread, "windows": len(rates), **more}
    print(json.dumps(figure), flush=True)


def environment_rate(task: TradingTask, num_envs: int, windows: int) -> list[float]:
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


def job_rates(
    task: TradingTask, windows: int, ppo: PPOConfig, policy: PolicyConfig
) -> list[tuple[float, float, float]]:
    """Steps per second, collect and update seconds of whole iterations of the main job."""
    world = open_world("cuda" if torch.cuda.is_available() else "cpu")
    training = main_job(world, tempfile.gettempdir(), task, policy=policy, ppo=ppo)
    steps = training.sizes.global_num_envs * training.job.train.num_steps
    found = []
    for _ in range(windows + 2):
        started = time.perf_counter()
        collect_s, update_s = iterate(training)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        found.append((steps / (time.perf_counter() - started), collect_s, update_s))
    close_world(world)
    return found[2:]  # the first two warm up


def main() -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--num_stocks", type=int, default=30)
    parser.add_argument("--num_envs", type=int, default=64, help="of the environment-alone figure")
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--update_epochs", type=int, default=4)
    parser.add_argument("--policy", default="clstm", choices=("clstm", "mlp"))
    parser.add_argument("--threads", type=int, default=available_cores())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine = {
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "cores": available_cores(),
        "threads": args.threads,
    }
    print(json.dumps(machine))
    kinds = {"plain": TradingConfig(reward="plain", risk_aversion=0.0), "training": TradingConfig()}
    sizes = {"num_envs": args.num_envs, "num_stocks": args.num_stocks}
    for name, trading in kinds.items():
        task = trading_task(args.num_stocks, trading)
        rates = environment_rate(task, args.num_envs, args.windows)
        say(f"trading environment alone, {name} rewards", rates, **sizes)
    ppo, policy = PPOConfig(update_epochs=args.update_epochs), PolicyConfig(policy=args.policy)
    job, collect_s, update_s = zip(*job_rates(task, args.windows, ppo, policy), strict=True)
    sizes = {"num_stocks": args.num_stocks, "update_epochs": args.update_epochs}
    seconds = {"collect_s": round(median(collect_s), 3), "update_s": round(median(update_s), 3)}
    say("main job", list(job), policy=args.policy, **sizes, **seconds)


if __name__ == "__main__":
    main()
