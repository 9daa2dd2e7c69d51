"""Accuracy of predictions: throughput of 2 ranks, predicted from one-rank runs and measured.

    python benchmarks/speedup_accuracy.py [--job default|slow_env|both] [--scaling strong|weak|both]

The prediction is made as `python -m rl_dist.speedup` makes it: two copies of one rank's share that
do not communicate, and ranks that only reduce. The measured run trains on two ranks. Both take
turns: other work on the machine hits both, if turns are long (a core of a shared host may change
its speed by 1.7 every second; turns of 2 s missed by up to 40 % for that alone). One JSON line per
job and scaling: the error of each round's prediction and their median. Run it with nothing beside.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from statistics import fmean, harmonic_mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

import torch

from rl_dist.launch.bench import time_reductions
from rl_dist.launch.child import measure_short_runs
from rl_dist.machine import available_cores
from rl_dist.process_group.world import threads_per_rank
from rl_dist.speedup.model import predict, rank_cost

# The copies find benchmarks.slow_env wherever this was started.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [sys.path[0], os.environ.get("PYTHONPATH", "")])
)
RANKS = 2
JOBS = {
    "default": [],
    "slow_env": [
        "--env", "benchmarks.slow_env:SlowSteps-v0", "--num_envs", "8", "--num_steps", "64",
        "--bptt_steps", "16", "--batch_size", "16", "--hidden_size", "64",
    ],
}  # fmt: skip
# sizes that one rank alone has
SIZES = {
    "default": {"num_envs": 64, "batch_size": 128},
    "slow_env": {"num_envs": 8, "batch_size": 16},
}


def say(text: str) -> None:
    """Progress, beside the results."""
    print(text, file=sys.stderr, flush=True)


def compare(name: str, scaling: str, rounds: int, iterations: int) -> dict[str, Any]:
    """Errors of predicted against measured steps/s, by round."""
    flags, sizes = JOBS[name], SIZES[name]
    divisor = RANKS if scaling == "strong" else 1
    share = [f"--{size}={value // divisor}" for size, value in sizes.items()]
    threads = threads_per_rank(RANKS)
    alone = partial(
        measure_short_runs, [*flags, *share, "--strategy=ddp"], copies=RANKS, threads=threads
    )
    together = partial(
        measure_short_runs,
        [*flags, f"--scaling={scaling}"],
        threads=threads_per_rank(1),
        num_gpus=RANKS,
    )
    found: list[dict[str, float]] = []
    num_bytes = alone(iterations=1).gradient_bytes
    talk = time_reductions(RANKS, [num_bytes])
    reduction_s = talk.gradients_s[num_bytes]
    for number in range(rounds):
        records = {}
        for side in (alone, together) if number % 2 else (together, alone):
            records[side] = side(iterations=iterations).records
        work = rank_cost([record for copy in records[alone] for record in copy])
        talk_s = work.gradient_steps * reduction_s + talk.small_s
        prediction = predict(work, RANKS, talk_s)
        # steps over time
        measured = harmonic_mean([record["time/sps"] for record in records[together][0]])
        error = prediction.steps_per_s / measured - 1
        found.append({"predicted": prediction.steps_per_s, "measured": measured, "error": error})
        say(
            f"  {name}, {scaling}: predicted {prediction.steps_per_s:,.0f} steps/s, measured "
            f"{measured:,.0f} ({error:+.1%}); {split(prediction.parts_s)}; "
            f"{own(records[together][0])}"
        )
    errors = [entry["error"] for entry in found]
    return {
        "job": name, "scaling": scaling, "ranks": RANKS, "threads": threads, "rounds": rounds,
        "iterations": iterations, "median_error": round(median(errors), 4),
        "errors": [round(error, 4) for error in errors],
        "predicted": round(median(entry["predicted"] for entry in found)),
        "measured": round(median(entry["measured"] for entry in found)),
        "gradient_bytes": num_bytes, "reduction_s": round(reduction_s, 6),
        "small_s": round(talk.small_s, 6),
    }  # fmt: skip


def seconds_of(record: dict[str, Any]) -> float:
    """Of one iteration."""
    return record["global_step"] / record["iteration"] / record["time/sps"]


def split(parts_s: dict[str, float]) -> str:
    """Parts of the predicted time."""
    return "predicted " + ", ".join(f"{name} {s:.3g} s" for name, s in parts_s.items())


def own(records: list[dict[str, Any]]) -> str:
    """Parts of the measured time, of the mean rank."""
    parts = {
        "collect": "time/collect_s",
        "own update": "time/update_own_s",
        "gradient wait": "time/gradient_wait_s",
    }
    total = fmean(map(seconds_of, records))
    means = {
        name: fmean(
            sum(rank[key] for rank in record["ranks"]) / len(record["ranks"]) for record in records
        )
        for name, key in parts.items()
    }
    return "measured " + ", ".join(
        f"{name} {seconds / total:.0%}" for name, seconds in means.items()
    )


def main() -> int:
    """Entry of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", choices=(*JOBS, "both"), default="both")
    parser.add_argument("--scaling", choices=("strong", "weak", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20, help="of each turn (default: 20)")
    args = parser.parse_args()
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "cores": available_cores(),
                "date": time.strftime("%Y-%m-%d"),
            }
        )
    )
    for job in JOBS if args.job == "both" else (args.job,):
        for scaling in ("strong", "weak") if args.scaling == "both" else (args.scaling,):
            started_s = time.monotonic()
            found = compare(job, scaling, args.rounds, args.iterations)
            print(json.dumps(found | {"seconds": round(time.monotonic() - started_s)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
