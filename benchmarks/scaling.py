"""Throughput of 1..N ranks, measured: weak and strong scaling, strategies side by side.

    python benchmarks/scaling.py [--gpus 1 2 4] [--rounds 3] [--out FOLDER] [training flags]

The combinations take turns, as in strategies.py. Speedups are relative to one rank with strategy
none. Prints one JSON line for each, and draws speedup and efficiency; `shares` are where the time
goes (own work by phase, reductions, waiting for others).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

from main_job import command_line
from strategies import measure, seconds_of

from rl_dist.speedup.plots import plot_speedup

Combination = tuple[int, str, str]  # ranks, scaling, strategy


def combinations(gpus: list[int], strategies: list[str]) -> list[Combination]:
    """One rank is the same job for both scalings, and needs no ddp."""
    found = [(1, "strong", strategy) for strategy in strategies if 1 in gpus or strategy == "none"]
    return found + [
        (ranks, scaling, strategy)
        for ranks in gpus
        if ranks > 1
        for scaling in ("strong", "weak")
        for strategy in strategies
        if strategy != "none"
    ]


def row_of(which: Combination, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of one combination, and where a rank's time goes."""
    ranks, scaling, strategy = which

    def share(key: str) -> float:
        return median(
            fmean(rank[key] for rank in record["ranks"]) / seconds_of(record) for record in records
        )

    # the rank that waits least for a reduction shows what it takes
    reduction_s = median(min(r["time/reduction_s"] for r in x["ranks"]) for x in records)
    iteration_s = median(map(seconds_of, records))
    steps = median(record["optim/steps"] for record in records)
    shares = {
        "rollouts": share("time/collect_s"),
        "update": share("time/update_own_s"),
        "communication": steps * reduction_s / iteration_s,
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
    """Measure, print, draw."""
    parser = command_line(__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--strategies", nargs="+", default=["none", "ddp"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn_s", type=float, default=5.0, help="seconds of each turn")
    parser.add_argument("--out", type=Path, help="where to draw (default: nowhere)")
    args, flags = parser.parse_known_args()
    todo = combinations(sorted(set(args.gpus)), list(dict.fromkeys(["none", *args.strategies])))
    variants = {
        which: (which[0], [f"--scaling={which[1]}", f"--strategy={which[2]}"]) for which in todo
    }
    rows = []
    for which, turns in measure(variants, flags, args.rounds, args.turn_s).items():
        if isinstance(turns, str):
            parser.error(f"{which} cannot run: {turns}")
        rows.append(row_of(which, [record for turn in turns for record in turn]))
    for row in rows:
        row["speedup"] = row["steps_per_s"] / rows[0]["steps_per_s"]
        row["efficiency"] = row["speedup"] / row["gpus"]
        print(json.dumps(row), flush=True)
    if args.out:
        # where both lines begin
        ones = [row | {"scaling": "weak"} for row in rows if row["gpus"] == 1]
        plot_speedup([*rows, *ones], args.out / "scaling_speedup.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
