"""Speed of this checkout, beside a fixed matrix product: what `make bench` runs.

    python benchmarks/throughput.py [--turns 8] [--threads 2] [--folder runs/bench]

Three pieces of work, an iteration each in turn: A, CartPole-v1 with one LSTM of 128; B, a
market-like task (181 inputs, 30 continuous actions) with one LSTM of 256; both 64 environments for
128 steps, 4 epochs of 4 minibatches; C, the main job with 30 stocks. A fixed product of matrices is
timed before each turn. What is printed: steps per second, seconds of the phases, GFLOP/s of the
whole iteration, its part of the product's, and that part against the last file of the folder, which
gains a new one. So figures of two days can be compared although the machine was faster on one of
them. Last come the steps per second of the trading environment alone, with random actions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import torch
from against_peers import Trainer, median_interval
from main_job import trading_task
from turns import NUM_ENVS, TASKS, Task

from envs.trading.task import TradingTask
from envs.trading_config import TradingConfig
from rl_dist.seeding import ENVIRONMENT_STREAM, stream_seeds

SIDE, PRODUCTS = 1024, 8  # of the fixed product
ENV_STEPS_PER_WINDOW = 300
LETTERS = {"A": "cartpole", "B": "stocks", "C": "main"}


def yardstick_gflops() -> float:
    """Return GFLOP/s of a fixed product of matrices right now: the best of a few."""
    left = torch.ones(SIDE, SIDE)
    best_s = float("inf")
    for _ in range(PRODUCTS):
        began = time.perf_counter()
        left @ left
        best_s = min(best_s, time.perf_counter() - began)
    return 2.0 * SIDE**3 / best_s / 1e9


def row_of(letter: str, task: Task, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of a piece of work, with intervals by bootstrap for what is compared."""

    def middle(values: list[float], digits: int = 3) -> list[float]:
        return [round(value, digits) for value in median_interval(values)]

    rates = [task.train_flops / turn["seconds"] / 1e9 for turn in turns]  # GFLOP/s
    fractions = [rate / turn["yardstick"] for rate, turn in zip(rates, turns, strict=True)]
    return {
        "work": letter,
        "task": task.name,
        "steps_per_s": middle([task.steps / turn["seconds"] for turn in turns], 0),
        **{name: middle([turn[name] for turn in turns])[0] for name in ("collect_s", "update_s")},
        "gflops": middle(rates, 1)[0],
        "part_of_product": middle(fractions),
        "turns": len(turns),
    }


def measure(works: list[str], num_turns: int, threads: int) -> list[dict[str, Any]]:
    """Let all pieces of work take turns; one row for each."""
    taken: dict[str, list[dict[str, Any]]] = {letter: [] for letter in works}
    with ExitStack() as held:
        python = sys.executable
        trainers = {
            letter: Trainer(held, python, "ours", LETTERS[letter], threads) for letter in works
        }
        for trainer in trainers.values():
            trainer.report()
            trainer.turn()
        for _ in range(num_turns):
            for letter, trainer in trainers.items():
                yardstick = yardstick_gflops()
                taken[letter].append(trainer.turn() | {"yardstick": yardstick})
    return [row_of(letter, TASKS[LETTERS[letter]], taken[letter]) for letter in works]


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


def environment_rows(num_windows: int) -> Iterator[dict[str, Any]]:
    """One row for each kind of rewards."""
    kinds = {"plain": TradingConfig(reward="plain", risk_aversion=0.0), "training": TradingConfig()}
    for name, trading in kinds.items():
        rates = environment_rate(trading_task(trading=trading), NUM_ENVS, num_windows)
        middle = [round(value) for value in median_interval(rates)]
        yield {"work": f"trading environment alone, {name} rewards", "steps_per_s": middle}


def against_last(rows: list[dict[str, Any]], folder: Path) -> list[str]:
    """Lines that compare each row with the same work in the folder's last file."""
    files = sorted(folder.glob("*.json"))
    if not files:
        return [f"nothing in {folder} to compare with: this is the first"]
    last = json.loads(files[-1].read_text(encoding="utf-8"))
    before = {row["work"]: row["part_of_product"] for row in last["rows"]}
    lines = []
    for row in rows:
        if old := before.get(row["work"]):
            new = row["part_of_product"]
            sure = "" if new[1] > old[2] or new[2] < old[1] else ", intervals overlap"
            lines.append(f"{row['work']}: {new[0] / old[0]:.2f}x {files[-1].name}{sure}")
    return lines


def main() -> None:
    """Measure, print, compare, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", nargs="+", default=list(LETTERS), choices=LETTERS)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": args.threads,
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(machine))
    rows = measure(args.work, args.turns, args.threads)
    for row in rows:
        print(json.dumps(row))
    for row in environment_rows(args.turns):
        print(json.dumps(row))
    for line in against_last(rows, args.folder):
        print(line)
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / f"{datetime.now():%Y-%m-%d_%H-%M-%S}.json"
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1), encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
