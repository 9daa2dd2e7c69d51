"""Measure our training speed relative to a matrix product (`make bench`).

    python benchmarks/throughput.py [--device cuda] [--turns 8] [--threads 2]

Three tasks take turns of one iteration each:

- cartpole: CartPole-v1 with one LSTM of size 128;
- stocks: a market-like task (181 inputs, 30 continuous actions) with one LSTM of size 256;
- main: the default training job, with 30 stocks.

In the first two tasks, an iteration has 128 steps of 64 environments and 4 epochs of 4 minibatches.
Before each turn, a fixed matrix product is timed on the same device. The output has steps per
second, seconds per phase, GFLOP/s of the whole iteration, these GFLOP/s divided by those of the
matrix product, and steps per GFLOP: how many steps are trained in the time that the matrix product
needs for a billion operations. Steps per GFLOP are comparable even if the machine was faster on one
day than on another. For each task they are compared with the newest stored result that had the same
processor, torch version, number of threads and device. The results are then stored in a new file in
the folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from against_peers import Trainer
from turns import KIND, TASKS, describe, median_interval, parser_of, product_gflops


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Let all tasks take turns; return a row of results for each task."""
    turns: dict[str, list[dict[str, Any]]] = {task: [] for task in args.tasks}
    flags = ("--threads", args.threads, "--device", args.device)
    with ExitStack() as held:
        trainers = {task: Trainer(held, sys.executable, "ours", task, *flags) for task in turns}
        for trainer in trainers.values():
            trainer.report()
            trainer.turn()
        for _ in range(args.turns):
            for task, trainer in trainers.items():
                product = product_gflops(args.device)
                turns[task].append(trainer.turn() | {"product": product})
    rows = []
    for task in turns:
        rates = [TASKS[task].steps / turn["seconds"] for turn in turns[task]]
        products = [turn["product"] for turn in turns[task]]
        compared = median_interval(r / p for r, p in zip(rates, products, strict=True))
        step_gflops = TASKS[task].train_flops / TASKS[task].steps / 1e9
        row = {
            "task": task,
            "turns": args.turns,
            "steps_per_s": median_interval(rates, 0),
            "steps_per_gflop": compared,
            "gflops": round(step_gflops * median(rates), 1),
            "part_of_product": round(step_gflops * compared[0], 3),
        }
        for phase in ("collect_s", "update_s"):
            row[phase] = round(median(turn[phase] for turn in turns[task]), 3)
        rows.append(row)
    return rows


def compare(row: dict[str, Any], machine: dict[str, Any], folder: Path) -> str:
    """Compare a row with the newest stored row of this task and kind of machine."""
    for path in sorted(folder.glob("*.json"), reverse=True):
        stored = json.loads(path.read_text(encoding="utf-8"))
        earlier = [other for other in stored["rows"] if other["task"] == row["task"]]
        if earlier and all(stored["machine"].get(name, "cpu") == machine[name] for name in KIND):
            middle, low, high = row["steps_per_gflop"]
            old_middle, old_low, old_high = earlier[0]["steps_per_gflop"]
            overlap = "" if low > old_high or high < old_low else ", intervals overlap"
            return f"{row['task']}: {middle / old_middle:.2f}x the speed in {path.name}{overlap}"
    return f"{row['task']}: no earlier result in {folder} for this device, torch and threads"


def main() -> None:
    """Measure the tasks; print, compare and store the results."""
    parser = parser_of(__doc__)
    names = ["cartpole", "stocks", "main"]
    parser.add_argument("--tasks", nargs="+", default=names, choices=TASKS)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine = describe(args.threads, args.device)
    rows = measure(args)
    for line in (machine, *rows):
        print(json.dumps(line))
    for row in rows:
        print(compare(row, machine, args.folder))
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / f"{datetime.now():%Y-%m-%d_%H-%M-%S}.json"
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1), encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
