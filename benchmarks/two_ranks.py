"""What two ranks lose: one run of N ranks against N runs side by side that share nothing.

    python benchmarks/two_ranks.py [--ranks 2] [--rounds 5] [--turn_s 20] [training flags]

All take one thread each and the sizes of one rank (scaling weak), so only reductions and waiting
for each other differ. They take turns while the others are halted. Prints one JSON line; the
efficiency is the ratio of environment steps per second, median over rounds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

from main_job import command_line
from strategies import seconds_of

from rl_dist.launch.short_run import SideBySide, without
from rl_dist.speedup.calibration import OF_RANKS


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
    with (
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
            idle += [record["time/idle_share"] for record in runs[0]]
    ratios = [b / a for a, b in zip(rates["apart"], rates["together"], strict=True)]
    line = {"ranks": args.ranks, "efficiency": median(ratios), "of_rounds": ratios}
    line |= {"idle_share": median(idle)} | {f"sps_{k}": median(v) for k, v in rates.items()}
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
