"""Measure our speed relative to a fixed matrix product (`make bench`).

    python benchmarks/throughput.py [--turns 8] [--threads 2] [--folder runs/bench]

Three jobs take turns of one iteration each:

- A: CartPole-v1 with one LSTM of size 128;
- B: a market-like task (181 inputs, 30 continuous actions) with one LSTM of size 256;
- C: the main job with 30 stocks.

A and B use 64 environments for 128 steps and 4 epochs of 4 minibatches. Before each turn a fixed
matrix product is timed. The output has steps per second, seconds per phase, GFLOP/s of the whole
iteration, this rate as a fraction of the product's rate, and steps per GFLOP: the number of steps
trained in the time in which the product does a billion operations. Steps per GFLOP are compared
with the newest file in the folder that has the same job, processor, torch and threads. Thus two
days can be compared even if the machine was faster on one of them. The results are written to a new
file.
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
from turns import KIND, STEPS, TASKS, describe, median_interval, product_gflops

WORKS = {"A": "cartpole", "B": "stocks", "C": "main"}


def measure(works: list[str], num_turns: int, threads: int) -> list[dict[str, Any]]:
    """Let all jobs take turns; return a row of results with intervals for each job."""
    turns: dict[str, list[dict[str, Any]]] = {work: [] for work in works}
    with ExitStack() as held:
        trainers = {
            work: Trainer(held, sys.executable, "ours", WORKS[work], "--threads", threads)
            for work in works
        }
        for trainer in trainers.values():
            trainer.report()
            trainer.turn()
        for _ in range(num_turns):
            for work, trainer in trainers.items():
                product = product_gflops()
                turns[work].append(trainer.turn() | {"product": product})
    rows = []
    for work in works:
        rates = [STEPS / turn["seconds"] for turn in turns[work]]
        products = [turn["product"] for turn in turns[work]]
        compared = median_interval(r / p for r, p in zip(rates, products, strict=True))
        step_gflops = TASKS[WORKS[work]].train_flops / STEPS / 1e9
        row = {
            "work": work,
            "task": WORKS[work],
            "turns": num_turns,
            "steps_per_s": median_interval(rates, 0),
            "steps_per_gflop": compared,
            "gflops": round(step_gflops * median(rates), 1),
            "part_of_product": round(step_gflops * compared[0], 3),
        }
        for phase in ("collect_s", "update_s"):
            row[phase] = round(median(turn[phase] for turn in turns[work]), 3)
        rows.append(row)
    return rows


def compare(row: dict[str, Any], machine: dict[str, Any], folder: Path) -> str:
    """Compare with the newest file that has this job on the same kind of machine."""
    for path in sorted(folder.glob("*.json"), reverse=True):
        stored = json.loads(path.read_text(encoding="utf-8"))
        earlier = [other for other in stored["rows"] if other["work"] == row["work"]]
        if earlier and all(stored["machine"].get(name) == machine[name] for name in KIND):
            middle, low, high = row["steps_per_gflop"]
            old_middle, old_low, old_high = earlier[0]["steps_per_gflop"]
            overlap = "" if low > old_high or high < old_low else ", intervals overlap"
            return f"{row['work']}: {middle / old_middle:.2f}x {path.name}{overlap}"
    return f"{row['work']}: no result in {folder} with this processor, torch and threads"


def main() -> None:
    """Measure the jobs; print, compare and store the results."""
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
    rows = measure(args.work, args.turns, args.threads)
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
