"""Throughput of 1..N ranks, measured: weak and strong scaling, strategies side by side.

    python benchmarks/scaling.py [--gpus 1 2 4] [--rounds 3] [--out benchmarks/results] [training flags]

Every combination is started once and then they take turns, all others being halted, so that what the machine does
meanwhile hits all alike. Speedups are relative to one rank with strategy none. Prints one JSON line for each, and
draws speedup, efficiency and where the time goes (measured: own work by phase, reductions, waiting for others).
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

import torch

from rl_dist.launch.short_run import SideBySide, without
from rl_dist.process_group.world import threads_per_rank
from rl_dist.speedup.calibration import OF_RANKS
from rl_dist.speedup.plots import plot_efficiency, plot_speedup, plot_split

SCALINGS = ("strong", "weak")


def combinations(gpus: list[int], strategies: list[str]) -> list[tuple[int, str, str]]:
    """(ranks, scaling, strategy); one rank is the same job for both scalings, and alone can do without ddp."""
    found = [(1, "strong", strategy) for strategy in strategies if 1 in gpus or strategy == "none"]
    many = [strategy for strategy in strategies if strategy != "none"]
    return found + [(n, scaling, strategy) for n in gpus if n > 1 for scaling in SCALINGS for strategy in many]


def measure(
    flags: list[str], todo: list[tuple[int, str, str]], rounds: int, iterations: int, device_type: str
) -> list[list[dict[str, Any]]]:
    """Records of metrics of each combination, from its turns."""
    found: list[list[dict[str, Any]]] = [[] for _ in todo]
    with ExitStack() as stack:
        sides = []
        for ranks, scaling, strategy in todo:
            own = [*without(flags, OF_RANKS), f"--scaling={scaling}", f"--strategy={strategy}"]
            side = SideBySide(own, 1, threads_per_rank(1), num_gpus=ranks, device_type=device_type)
            sides.append(stack.enter_context(side))
            side.measure(1)
            side.halt()
            print(f"started: {ranks} rank(s), {scaling}, {strategy}", file=sys.stderr, flush=True)
        for turn in range(rounds):
            for index in range(len(sides)) if turn % 2 == 0 else reversed(range(len(sides))):
                sides[index].go_on()
                found[index] += sides[index].measure(iterations)[0]
                sides[index].halt()
    return found


def row_of(ranks: int, scaling: str, strategy: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of one combination, and where a rank's time goes."""
    seconds = [record["global_step"] / record["iteration"] / record["time/sps"] for record in records]
    iteration_s = median(seconds)

    def share(part: Any) -> float:
        of_iterations = (mean(part(rank) for rank in record["ranks"]) for record in records)
        return median(part_s / total_s for part_s, total_s in zip(of_iterations, seconds, strict=True))

    steps = median(record["optim/steps"] for record in records)
    shares = {
        "rollouts": share(lambda rank: rank["time/collect_s"]),
        "update": share(lambda rank: rank["time/update_own_s"]),
        "communication": steps * median(min(r["time/reduction_s"] for r in x["ranks"]) for x in records) / iteration_s,
    }
    return {
        "gpus": ranks,
        "scaling": scaling,
        "machine": strategy,
        "estimate": False,
        "problem": None,
        "steps_per_s": median(record["time/sps"] for record in records),
        "iteration_s": iteration_s,
        "iterations": len(records),
        "shares": shares | {"waiting": max(0.0, 1.0 - sum(shares.values()))},
    }


def main() -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--strategies", nargs="+", default=["none", "ddp"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=2, help="of each turn")
    parser.add_argument("--out", type=Path, help="where to draw (default: nowhere)")
    args, flags = parser.parse_known_args()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    todo = combinations(sorted(set(args.gpus)), list(dict.fromkeys(["none", *args.strategies])))
    measured = measure(flags, todo, args.rounds, args.iterations, device_type)
    rows = [row_of(*which, records) for which, records in zip(todo, measured, strict=True)]
    one = rows[0]["steps_per_s"]
    for row in rows:
        row |= {"speedup": row["steps_per_s"] / one, "efficiency": row["steps_per_s"] / one / row["gpus"]}
        print(json.dumps(row), flush=True)
    if args.out:
        ones = [row | {"scaling": "weak"} for row in rows if row["gpus"] == 1]  # where both lines begin
        plot_speedup([*rows, *ones], args.out / "scaling_speedup.png")
        plot_efficiency([*rows, *ones], args.out / "scaling_efficiency.png")
        plot_split(rows, args.out / "scaling_time_split.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
