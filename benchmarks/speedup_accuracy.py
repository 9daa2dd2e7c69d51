"""Measure the speed of N ranks; compare the speed with rl_dist.speedup's prediction.

    python benchmarks/speedup_accuracy.py [--ranks 2] [--jobs main slow_env]

As in `python -m rl_dist.speedup`, the prediction is computed from two timings: one of processes
that each train one rank's share of the job without communication, and one of ranks that only reduce
gradients. The measured run trains on all ranks. Timings of separate processes alternate with
measured runs, so that other work on the machine slows both down equally. Both must last many
seconds: on a shared host, the speed of a core can change by a factor of 1.7 from one second to the
next. In runs of 2 s, such changes caused errors of up to 40 %. The output is one JSON line per job
and scaling, with the error of each round's prediction and the median error. Run nothing else on the
machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from statistics import harmonic_mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # can be started from any directory

from turns import describe, parser_of

from rl_dist.launch.bench import time_reductions
from rl_dist.launch.child import as_flags, measure_short_runs
from rl_dist.process_group.world import threads_per_rank
from rl_dist.speedup.model import SMALL_COLLECTIVES, predict, rank_cost

TOTALS = ("num_envs", "batch_size")  # sizes that strong scaling divides among the ranks
JOBS: dict[str, dict[str, Any]] = {
    "main": {"num_envs": 64, "batch_size": 128},
    "slow_env": {
        "env": "benchmarks.slow_env:SlowSteps-v0",
        "num_envs": 8,
        "num_steps": 64,
        "bptt_steps": 16,
        "batch_size": 16,
        "hidden_size": 64,
    },
}


def compare(name: str, scaling: str, args: argparse.Namespace) -> dict[str, Any]:
    """Predict and measure the steps/s of a job; return both, and the relative errors."""
    job, ranks = JOBS[name] | {"device": args.device}, args.ranks
    divisor = ranks if scaling == "strong" else 1
    share = job | {size: job[size] // divisor for size in TOTALS} | {"strategy": "ddp"}
    share |= {"num_gpus": 1, "threads": threads_per_rank(ranks)}
    whole = {"num_gpus": ranks, "threads": threads_per_rank(1), "scaling": scaling}
    gpu_ids = [None] * ranks if args.device == "cpu" else range(ranks)
    copies = [as_flags(share | {"gpu_ids": gpu_id}) for gpu_id in gpu_ids]
    alone = partial(measure_short_runs, copies)
    together = partial(measure_short_runs, [as_flags(job | whole)])
    num_bytes = alone().gradient_bytes
    small_bytes = 64  # number of bytes that the ranks reduce to sum their metrics
    reduction_s = time_reductions(ranks, [num_bytes, small_bytes], args.device)
    predictions, measured = [], []
    for number in range(args.rounds):
        runs = {
            side: side().records
            for side in ((alone, together) if number % 2 else (together, alone))
        }
        work = rank_cost([record for copy in runs[alone] for record in copy])
        all_s = work.gradient_steps * reduction_s[num_bytes]
        all_s += SMALL_COLLECTIVES * reduction_s[small_bytes]
        predictions.append(predict(work, ranks, all_s))
        measured.append(harmonic_mean([record["time/sps"] for record in runs[together][0]]))
    predicted = [prediction.steps_per_s for prediction in predictions]
    errors = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
    return {
        "job": name,
        "scaling": scaling,
        "ranks": ranks,
        "median_error": round(median(errors), 4),
        "errors": [round(error, 4) for error in errors],
        "predicted": round(median(predicted)),
        "measured": round(median(measured)),
        "predicted_parts_s": predictions[-1].parts_s,
    }


def main() -> None:
    """Predict and measure each job with each scaling; print the errors."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--scalings", nargs="+", default=["strong", "weak"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    machine = describe(threads_per_rank(args.ranks), args.device)
    print(json.dumps(machine | {"date": time.strftime("%Y-%m-%d")}))
    for job in args.jobs:
        for scaling in args.scalings:
            print(json.dumps(compare(job, scaling, args)), flush=True)


if __name__ == "__main__":
    main()
