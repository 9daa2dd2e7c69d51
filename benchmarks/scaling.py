"""Throughput of 1..N ranks, measured: weak and strong scaling, strategies side by side.

    python benchmarks/scaling.py [--gpus 1 2 4] [--strategies ddp hybrid] [training flags]

The variants take turns, so that other work on the machine falls on all of them. Speedups are
relative to one rank without a strategy. Prints one JSON line for each variant; `shares` shows where
the time goes (own work by phase, reductions, waiting for others).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from any directory

import torch

from rl_dist.errors import UserError
from rl_dist.launch.child import ChildError, as_flags, measure_short_runs, without
from rl_dist.process_group.world import threads_per_rank

Variant = tuple[int, str, str]  # ranks, scaling, strategy


def measure(variant: Variant, flags: list[str], iterations: int) -> list[dict[str, Any]]:
    """Train a variant for one turn and return its metrics."""
    ranks, scaling, strategy = variant
    chosen = {"scaling": scaling, "strategy": strategy}
    runs = measure_short_runs(
        [*without(flags, list(chosen)), *as_flags(chosen)],
        threads=threads_per_rank(1),
        iterations=iterations,
        num_gpus=ranks,
        device_type="cuda" if torch.cuda.is_available() else "cpu",
    )
    return runs.records[0]


def seconds_of(record: dict[str, Any]) -> float:
    """Return the mean seconds of an iteration so far."""
    return record["global_step"] / record["iteration"] / record["time/sps"]


def row_of(variant: Variant, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of a variant, and the shares of a rank's time."""

    def share(key: str) -> float:
        return median(
            fmean(rank[key] for rank in record["ranks"]) / seconds_of(record) for record in records
        )

    # the rank that waits least for a reduction shows its duration
    reduction_s = median(min(r["time/reduction_s"] for r in x["ranks"]) for x in records)
    iteration_s = median(map(seconds_of, records))
    shares = {
        "rollouts": share("time/collect_s"),
        "update": share("time/update_own_s"),
        "communication": records[0]["optim/steps"] * reduction_s / iteration_s,
    }
    ranks, scaling, strategy = variant
    return {
        "gpus": ranks,
        "scaling": scaling,
        "strategy": strategy,
        "steps_per_s": median(record["time/sps"] for record in records),
        "iteration_s": iteration_s,
        "iterations": len(records),
        "shares": shares | {"waiting": max(0.0, 1.0 - sum(shares.values()))},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[2], help="numbers of ranks")
    parser.add_argument("--strategies", nargs="+", default=["ddp"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=10, help="of each turn")
    args, flags = parser.parse_known_args()
    variants = [(1, "strong", "none")] + [
        (ranks, scaling, strategy)
        for ranks in args.gpus
        if ranks > 1
        for scaling in ("strong", "weak")
        for strategy in args.strategies
    ]
    records: dict[Variant, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for number in range(args.rounds):
        for variant in variants if number % 2 == 0 else variants[::-1]:
            try:
                records[variant] += measure(variant, flags, args.iterations)
            except (UserError, ChildError) as error:
                parser.error(f"{variant} cannot run: {error}")
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    rows = [row_of(variant, records[variant]) for variant in variants]
    for row in rows:
        speedup = row["steps_per_s"] / rows[0]["steps_per_s"]
        print(json.dumps(row | {"speedup": speedup, "efficiency": speedup / row["gpus"]}))


if __name__ == "__main__":
    main()
