"""Strategies and speed options side by side on one job: steps per second, relative to ddp.

    python benchmarks/strategies.py [--only ddp ...] [--ranks 2] [--rounds 5] [training flags]

The variants take turns, all others being halted, so that what the machine does meanwhile hits all
alike; a round's ratio is to ddp in the same round. A variant that
cannot run here is named with the reason that training gives. Prints one JSON line for each and a
table in Markdown at the end.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, harmonic_mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

import torch
from main_job import command_line

from rl_dist.errors import UserError
from rl_dist.hardware.memory import available_cores
from rl_dist.launch.short_run import ShortRunError, SideBySide, without
from rl_dist.process_group.world import threads_per_rank
from rl_dist.speedup.calibration import OF_RANKS

MANY = 0  # stands for --ranks
VARIANTS: dict[str, tuple[int, list[str]]] = {
    "none": (1, ["--strategy=none"]),
    "ddp": (MANY, ["--strategy=ddp"]),
    "dp": (1, ["--strategy=dp"]),
    "hybrid, sharded": (MANY, ["--strategy=hybrid"]),
    "hybrid, two stages": (MANY, ["--strategy=hybrid", "--hybrid_form=pipeline"]),
    "ddp, bf16": (MANY, ["--strategy=ddp", "--precision=bf16"]),
    "ddp, bf16 gradients": (MANY, ["--strategy=ddp", "--gradient_compression=bf16"]),
    "ddp, batch in 4 microbatches": (
        MANY,
        ["--strategy=ddp", "--grad_accumulation=4", "--batch_size=32", "--num_envs=64"],
    ),
}
BASE = "ddp"


def seconds_of(record: dict[str, Any]) -> float:
    """Of one iteration."""
    return record["global_step"] / record["iteration"] / record["time/sps"]


def measure(
    variants: dict[Any, tuple[int, list[str]]], flags: list[str], rounds: int, turn_s: float
) -> dict[Any, Any]:
    """By variant (ranks, flags): its turns, each a list of metrics records; or why it cannot run.

    Each is started once and then they take turns, all others being halted.
    """
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[Any, Any] = {}
    with ExitStack() as stack:
        sides: dict[Any, tuple[SideBySide, int]] = {}
        for name, (ranks, own) in variants.items():
            given = [flag[2:].partition("=")[0] for flag in own]
            words = [*without(flags, [*OF_RANKS, *given]), *own]
            threads = threads_per_rank(1)
            side = SideBySide(words, 1, threads, num_gpus=ranks, device_type=device_type)
            try:
                stack.enter_context(side)
                first = side.measure(1)[0][0]
            except (UserError, ShortRunError) as error:
                found[name] = str(error)
                continue
            side.halt()
            sides[name] = (side, max(2, round(turn_s / seconds_of(first))))
            found[name] = []
            print(f"started: {name}", file=sys.stderr, flush=True)
        for turn in range(rounds):
            for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                side, iterations = sides[name]
                side.go_on()
                found[name].append(side.measure(iterations)[0])
                side.halt()
            print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


def row_of(name: str, ranks: int, turns: Any, base: Any) -> dict[str, Any]:
    """Figures of one variant; ratios are medians over the rounds."""
    row: dict[str, Any] = {"variant": name, "ranks": ranks}
    if isinstance(turns, str):
        return row | {"not_measured": turns}

    def rate(records: list[dict[str, Any]]) -> float:
        return harmonic_mean([record["time/sps"] for record in records])

    records = [record for turn in turns for record in turn]
    total_s = sum(map(seconds_of, records))

    def share(key: str) -> float:
        return sum(fmean(rank[key] for rank in record["ranks"]) for record in records) / total_s

    ratios = [rate(own) / rate(other) for own, other in zip(turns, base, strict=True)]
    figures = {"median": median(ratios), "least": min(ratios), "most": max(ratios)}
    return row | {
        "steps_per_s": round(median(map(rate, turns))),
        "iterations": len(records),
        "relative": {name: round(value, 3) for name, value in figures.items()},
        "rollouts": round(share("time/collect_s"), 3),
        "own_update": round(share("time/update_own_s"), 3),
        "gradient_wait": round(share("time/gradient_wait_s"), 3),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        f"| variant | ranks | steps/s | relative to {BASE} (least to most) "
        "| rollouts | own update | gradient wait |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {row['variant']} | {row['ranks']} |"
        if "not_measured" in row:
            lines.append(f"{head} not measured | {row['not_measured']} | | | |")
            continue
        shown = "{median:.2f} ({least:.2f} to {most:.2f})".format(**row["relative"])
        keys = ("rollouts", "own_update", "gradient_wait")
        shares = " | ".join(f"{row[key]:.0%}" for key in keys)
        lines.append(f"{head} {row['steps_per_s']:,} | {shown} | {shares} |")
    return "\n".join(lines)


def main() -> int:
    """Entry of the command."""
    parser = command_line(__doc__)
    known = f"of: {'; '.join(VARIANTS)}"
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="VARIANT", help=known)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn_s", type=float, default=5.0, help="seconds of each turn")
    args, flags = parser.parse_known_args()
    names = list(dict.fromkeys([BASE, *(args.only or VARIANTS)]))
    place = f"{available_cores()} cores, no GPU"
    if torch.cuda.is_available():
        place = torch.cuda.get_device_name(0)
    today = time.strftime("%Y-%m-%d")
    print(json.dumps({"torch": torch.__version__, "machine": place, "date": today}), flush=True)
    chosen = {name: (VARIANTS[name][0] or args.ranks, VARIANTS[name][1]) for name in names}
    measured = measure(chosen, flags, args.rounds, args.turn_s)
    if isinstance(measured[BASE], str):
        parser.error(f"{BASE}, which all others are compared with, cannot run: {measured[BASE]}")
    rows = [row_of(name, chosen[name][0], measured[name], measured[BASE]) for name in names]
    for row in rows:
        print(json.dumps(row), flush=True)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
