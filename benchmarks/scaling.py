"""Throughput of 1..N ranks, measured: weak and strong scaling, strategies side by side.

    python benchmarks/scaling.py [--gpus 1 2 4] [--rounds 3] [training flags]

The combinations take turns, so that other work on the machine falls on all of them. Speedups are
relative to one rank with strategy none. Prints one JSON line for each; `shares` are where the time
goes (own work by phase, reductions, waiting for others).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

import torch

from rl_dist.errors import UserError
from rl_dist.launch.child import ChildError, measure_short_runs, without
from rl_dist.process_group.world import threads_per_rank

Combination = tuple[int, str, str]  # ranks, scaling, strategy


def seconds_of(record: dict[str, Any]) -> float:
    """Of one iteration."""
    return record["global_step"] / record["iteration"] / record["time/sps"]


def measure(
    variants: dict[Any, tuple[int, list[str]]], flags: list[str], rounds: int, iterations: int
) -> dict[Any, Any]:
    """Return by variant (ranks, flags) its turns, lists of records; or why it cannot run."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    measured: dict[Any, Any] = {name: [] for name in variants}
    for turn in range(rounds):
        for name in list(variants)[:: 1 if turn % 2 == 0 else -1]:
            if isinstance(measured[name], str):
                continue
            ranks, own_flags = variants[name]
            given = [flag[2:].partition("=")[0] for flag in own_flags]
            try:
                runs = measure_short_runs(
                    [*without(flags, given), *own_flags],
                    threads=threads_per_rank(1),
                    iterations=iterations,
                    num_gpus=ranks,
                    device_type=device_type,
                )
                measured[name].append(runs.records[0])
            except (UserError, ChildError) as error:
                measured[name] = str(error)
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    return measured


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
        "strategy": strategy,
        "steps_per_s": median(record["time/sps"] for record in records),
        "iteration_s": iteration_s,
        "iterations": len(records),
        "shares": shares | {"waiting": max(0.0, 1.0 - sum(shares.values()))},
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2], help="numbers of ranks")
    parser.add_argument("--strategies", nargs="+", default=["none", "ddp"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=10, help="of each turn")
    args, flags = parser.parse_known_args()
    todo = combinations(sorted(set(args.gpus)), list(dict.fromkeys(["none", *args.strategies])))
    variants = {
        which: (which[0], [f"--scaling={which[1]}", f"--strategy={which[2]}"]) for which in todo
    }
    rows = []
    for which, turns in measure(variants, flags, args.rounds, args.iterations).items():
        if isinstance(turns, str):
            parser.error(f"{which} cannot run: {turns}")
        rows.append(row_of(which, [record for turn in turns for record in turn]))
    for row in rows:
        row["speedup"] = row["steps_per_s"] / rows[0]["steps_per_s"]
        row["efficiency"] = row["speedup"] / row["gpus"]
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
