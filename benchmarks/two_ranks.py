"""What two ranks lose: one run of N ranks against N runs side by side that share nothing.

    python benchmarks/two_ranks.py [--ranks 2] [--rounds 5] [--turn_s 20] [training flags]

All take one thread each and the sizes of one rank (scaling weak), so only reductions and waiting
for each other differ. They take turns while the others are halted. Prints one JSON line; the
efficiency is the ratio of environment steps per second, median over rounds. "limit" is what
processes that share nothing would reach in the same round if each waited for the slowest after
every piece of work as long as a gradient step: what the machine's jitter alone costs.
"""

from __future__ import annotations

import json
import multiprocessing.pool
import sys
import time
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

import torch
from main_job import command_line
from strategies import seconds_of

from rl_dist.launch.short_run import SideBySide, without
from rl_dist.speedup.calibration import OF_RANKS

STEP = 32, 64, 181, 128  # steps, sequences, inputs and units of an LSTM: forward and backward some
# 40 ms on a core, a third of a gradient step's work in the main job


def time_steps(seconds: float) -> list[float]:
    """Return the seconds of each of as many gradient steps as fit."""
    torch.set_num_threads(1)
    steps, sequences, inputs, units = STEP
    lstm, obs = torch.nn.LSTM(inputs, units), torch.randn(steps, sequences, inputs)
    times = [time.perf_counter()]
    while times[-1] < times[0] + seconds:
        lstm(obs)[0].sum().backward()
        times.append(time.perf_counter())
    return [after - before for before, after in zip(times, times[1:], strict=False)][3:]


def lockstep_limit(pool: multiprocessing.pool.Pool, ranks: int, seconds: float) -> float:
    """Return the efficiency of processes that only wait for the slowest after every step."""
    of_ranks = pool.map(time_steps, [seconds] * ranks, chunksize=1)
    together = list(zip(*of_ranks, strict=False))
    return sum(fmean(times) for times in together) / sum(max(times) for times in together)


def main() -> int:
    """Measure, and print the line."""
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn_s", type=float, default=20.0)
    args, flags = parser.parse_known_args()
    words = without(flags, OF_RANKS)
    together = ["--scaling=weak", "--strategy=ddp"]
    rates: dict[str, list[float]] = {"apart": [], "together": []}
    idle: list[float] = []
    limits: list[float] = []
    with (
        multiprocessing.get_context("spawn").Pool(args.ranks) as pool,
        SideBySide(words, args.ranks, 1) as apart,
        SideBySide([*words, *together], 1, 1, num_gpus=args.ranks) as joined,
    ):
        apart.halt()
        first = joined.measure(1)[0][0]
        joined.halt()
        iterations = max(2, round(args.turn_s / seconds_of(first)))
        for _ in range(args.rounds):
            for name, side in (("apart", apart), ("together", joined)):
                side.go_on()
                runs = side.measure(iterations)
                side.halt()
                rates[name].append(sum(median(r["time/sps"] for r in run) for run in runs))
            limits.append(lockstep_limit(pool, args.ranks, args.turn_s))
            idle += [record["time/idle_share"] for record in runs[0]]
    ratios = [b / a for a, b in zip(rates["apart"], rates["together"], strict=True)]
    line = {"ranks": args.ranks, "efficiency": median(ratios), "of_rounds": ratios}
    line |= {"limit": median(limits), "limit_of_rounds": limits}
    line |= {"idle_share": median(idle)} | {f"sps_{k}": median(v) for k, v in rates.items()}
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
