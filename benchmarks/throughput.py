"""Speed of this checkout, beside a fixed matrix product: what `make bench` runs.

    python benchmarks/throughput.py [--turns 8] [--threads 2] [--folder runs/bench]

Three pieces of work, an iteration each in turn: A, CartPole-v1 with one LSTM of 128; B, a
market-like task (181 inputs, 30 continuous actions) with one LSTM of 256; both 64 environments for
128 steps, 4 epochs of 4 minibatches; C, the main job with 30 stocks. A fixed product of matrices is
timed before each turn. It prints steps per second, seconds of the phases, GFLOP/s of the whole
iteration, its part of the product's, and steps in the time of a billion operations of the product.
That last figure is compared with the newest file of the folder that has the same work, processor,
torch and threads, and the folder gains a new file. So figures of two days can be compared although
the machine was faster on one of them. The trading environment alone, with random actions, is
measured and compared in the same way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

import torch
from against_peers import Trainer, median_interval
from turns import KIND, NUM_ENVS, STEPS, TASKS, describe, product_gflops

from envs.trading.config import DataConfig, SimulatedMarketConfig, TradingConfig
from envs.trading.task import prepare_task

WINDOW = 300  # steps of all environments
WORKS = {"A": "cartpole", "B": "stocks", "C": "main"}


def middle(values: Iterable[float], digits: int = 3) -> list[float]:
    """Return the median and its interval, rounded."""
    return [round(value, digits) for value in median_interval(list(values))]


def training_rows(works: list[str], num_turns: int, threads: int) -> Iterator[dict[str, Any]]:
    """Let all pieces of work take turns; yield one row for each."""
    turns: dict[str, list[dict[str, Any]]] = {work: [] for work in works}
    with ExitStack() as stack:
        flags = ("--threads", threads)
        trainers = {
            work: Trainer(stack, sys.executable, "ours", WORKS[work], *flags) for work in works
        }
        for trainer in trainers.values():
            trainer.report()
            trainer.turn()
        for _ in range(num_turns):
            for work, trainer in trainers.items():
                product = product_gflops()
                turns[work].append(trainer.turn() | {"product": product})
    for work in works:
        step_gflops = TASKS[WORKS[work]].train_flops / STEPS / 1e9
        rates = [STEPS / turn["seconds"] for turn in turns[work]]
        compared = middle(
            rate / turn["product"] for rate, turn in zip(rates, turns[work], strict=True)
        )
        phases = ("collect_s", "update_s")
        yield {
            "work": work,
            "task": WORKS[work],
            "steps_per_s": middle(rates, 0),
            **{name: middle(turn[name] for turn in turns[work])[0] for name in phases},
            "gflops": round(step_gflops * middle(rates)[0], 1),
            "part_of_product": round(step_gflops * compared[0], 3),
            "steps_per_gflop": compared,
            "turns": num_turns,
        }


def environment_rows(num_windows: int) -> Iterator[dict[str, Any]]:
    """Step the trading environment with random actions; yield a row for each kind of rewards."""
    kinds = {"plain": TradingConfig(reward="plain", risk_aversion=0.0), "training": TradingConfig()}
    for name, trading in kinds.items():
        market = SimulatedMarketConfig(num_stocks=30, num_worlds=16)
        env = prepare_task(DataConfig(), market, trading).training_env(NUM_ENVS)
        env.reset(seed=list(range(NUM_ENVS)))
        actions = torch.rand(16, NUM_ENVS, len(env.tickers)) * 2 - 1
        rates, products = [], []
        for _ in range(num_windows + 1):
            products.append(product_gflops())
            started = time.perf_counter()
            for step in range(WINDOW):
                env.step(actions[step % 16])
            rates.append(WINDOW * NUM_ENVS / (time.perf_counter() - started))
        yield {
            "work": f"trading environment alone, {name} rewards",
            "steps_per_s": middle(rates[1:], 0),  # the first window warms up
            "steps_per_gflop": middle(
                rate / product for rate, product in zip(rates[1:], products[1:], strict=True)
            ),
        }


def against_last(
    rows: list[dict[str, Any]], machine: dict[str, Any], folder: Path
) -> Iterator[str]:
    """Compare each row with the newest file of this kind of machine that has the work."""
    before: dict[str, tuple[str, list[float]]] = {}  # by work
    for path in sorted(folder.glob("*.json")):
        old = json.loads(path.read_text(encoding="utf-8"))
        if all(old["machine"].get(name) == machine[name] for name in KIND):
            before |= {row["work"]: (path.name, row["steps_per_gflop"]) for row in old["rows"]}
    for row in rows:
        if row["work"] not in before:
            yield f"{row['work']}: nothing in {folder} with this processor, torch and threads"
            continue
        (name, old), new = before[row["work"]], row["steps_per_gflop"]
        overlap = "" if new[1] > old[2] or new[2] < old[1] else ", intervals overlap"
        yield f"{row['work']}: {new[0] / old[0]:.2f}x {name}{overlap}"


def main() -> None:
    """Measure, print, compare, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", nargs="+", default=list(WORKS), choices=WORKS)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine = describe(args.threads)
    print(json.dumps(machine))
    rows = []
    for row in chain(
        training_rows(args.work, args.turns, args.threads), environment_rows(args.turns)
    ):
        rows.append(row)
        print(json.dumps(row), flush=True)
    for line in against_last(rows, machine, args.folder):
        print(line)
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / f"{datetime.now():%Y-%m-%d_%H-%M-%S}.json"
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1), encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
