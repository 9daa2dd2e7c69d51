"""Predict the speedup of training on more GPUs.

All flags of train_distributed.py are accepted.

examples:
  python -m rl_dist.speedup                             the default job on this machine
  python -m rl_dist.speedup --gpus 1 2 4 8 --json       more ranks, as JSON
  python -m rl_dist.speedup --gpus 8 --gpu "H100 SXM"   speedup on a GPU that this machine lacks
  python -m rl_dist.speedup --gpus 8 --gpu "H100 SXM" --sps 90000    also time and cost
speedup: environment steps/s relative to one rank. Time and cost need steps/s, either measured
on this machine or given by --sps. Each measurement takes about 15 s. docs/planning.md explains the
model.
exit codes: 0 done, 1 a short run failed or its speed kept changing, 2 wrong usage
"""

import json
import logging
import math
import os
import sys
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch

from rl_dist.errors import CommandParser, explains_errors, table
from rl_dist.files import Record
from rl_dist.flags import Field, configuration, fields_of
from rl_dist.launch.child import ChildError, leave_at_signals
from rl_dist.machine import available_cores
from rl_dist.speedup.measure import Share, measure_job
from rl_dist.speedup.model import CARDS, Prediction, bottleneck, predict, steps_per_episode
from rl_dist.telemetry.metrics import without_nan

LEAST_EFFICIENCY = 0.6  # the advice is a number of ranks with at least this efficiency
CARD_ESTIMATE = (
    "this estimate uses data sheets and the lowest list price of 2026-11 in US dollars. It uses "
    "rollout times from this machine, scales the other times by peak fp32 rates, and assumes 8 "
    "cards per machine and InfiniBand NDR between machines"
)
NO_COST = (
    "no time or cost can be given: pass --sps N (the steps/s of a run on one such GPU) and, if no "
    "episode ended in the short runs, --total_steps"
)


@configuration
class SpeedupOptions:
    """Options of `estimate_training_speedup`."""

    gpus: tuple[Annotated[int, Field(ge=1)], ...] = (1, 2)
    """Numbers of GPUs (ranks) for which to predict the speed."""
    scaling: Literal["strong", "weak", "both"] = "both"
    """strong: num_envs and batch_size are totals over all ranks; weak: they are per rank; both:
    predict both."""
    gpu: Literal["", *CARDS] = ""  # type: ignore[valid-type]
    """GPU model for which to predict the speed; without it, predict the speed of this machine."""
    sps: float = Field(0.0, ge=0)
    """Steps/s of an earlier run on one rank, on this machine or on `gpu`; 0: measure them now."""
    num_episodes: int = Field(5000, ge=1)
    """Length of the training run in episodes (default: 5000)."""
    total_steps: int = Field(0, ge=0)
    """Length of the training run in environment steps; 0: use num_episodes."""
    price_per_hour: float = Field(0.0, ge=0)
    """Price of one GPU hour; 0: the lowest list price of `gpu` in US dollars."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device on which the short runs train."""


@dataclass(frozen=True)
class SpeedupReport:
    """The result of `estimate_training_speedup`, as JSON values; an unknown value is None."""

    title: str  # name of the job and of the device
    rows: list[Record]  # one for each scaling and number of ranks
    notes: list[str]
    advice: str  # one sentence


def estimate_training_speedup(flags: Sequence[str] = (), **options: Any) -> SpeedupReport:
    """Measure short runs and predict the training speed on each number of GPUs.

        report = estimate_training_speedup(["--env", "CartPole-v1"], gpus=[1, 2])
        report.rows[-1]["speedup"]

    Args:
        flags: flags of train_distributed.py.
        options: gpus, scaling, gpu, sps, num_episodes, total_steps, price_per_hour and device.
            These are options of `python -m rl_dist.speedup`; its help text explains them.

    Raises:
        UserError: wrong arguments, or flags that training refuses.
        ChildError: a short run failed, or its speed kept changing.
    """
    load = os.getloadavg()[0]  # read it now, because the short runs will increase it
    cores = available_cores()
    chosen = SpeedupOptions(**options)
    device = chosen.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    scalings = ("strong", "weak") if chosen.scaling == "both" else (chosen.scaling,)
    card = CARDS.get(chosen.gpu)
    job = measure_job(
        flags,
        device,
        chosen.gpus,
        scalings,
        steady=not chosen.sps,
        card=card,
    )
    length = chosen.total_steps or chosen.num_episodes * steps_per_episode(job.records)
    usd_per_hour = chosen.price_per_hour or (card.usd_per_hour if card else 0.0)
    rows = _rows(job.shares, chosen, usd_per_hour, length)
    notes = [f"{chosen.gpu}: {CARD_ESTIMATE}"] if chosen.gpu else []
    notes += [NO_COST] if rows[0]["hours"] is None else []
    notes.append(f"load of this machine before the short runs: {load:.1f} on {cores} core(s)")
    title = f"{job.title}; {chosen.gpu or device}"
    return SpeedupReport(title, rows, job.notes + notes, _advice(rows, load > 0.5 * cores))


def print_training_speedup_estimates(flags: Sequence[str] = (), **options: Any) -> None:
    """Print the result of `estimate_training_speedup` with the same arguments.

    print_training_speedup_estimates(["--env", "CartPole-v1"], gpus=[1, 2])
    """
    print(as_text(estimate_training_speedup(flags, **options)))


# ---- the rows of the report


def _rows(
    shares: Sequence[Share], options: SpeedupOptions, usd_per_hour: float, env_steps: float
) -> list[Record]:
    """Return the rows of the report: one for each scaling and number of ranks.

    Args:
        env_steps: length of the training run in environment steps; NaN if unknown.
    """
    rows = []
    baseline: Prediction | None = None  # the first prediction, which is for one rank
    # time per step according to `sps`, divided by the measured time per step
    sps_factor = 1.0
    for share in shares:
        if options.sps and not baseline:
            sps_factor = share.work.env_steps / options.sps / share.work.seconds
        slowdown = share.crowding * sps_factor
        communication_s = share.communication_s * share.crowding
        prediction = predict(share.work.scaled(slowdown, slowdown), share.ranks, communication_s)
        baseline = baseline or prediction
        speedup = prediction.steps_per_s / baseline.steps_per_s
        # if the rate is unknown (NaN), time and cost become NaN, too
        rate = prediction.steps_per_s if options.sps or not options.gpu else math.nan
        hours = env_steps / rate / 3600
        cost = hours * share.ranks * usd_per_hour or math.nan
        rows.append(
            {
                "gpus": share.ranks,
                "scaling": share.scaling,
                "source": share.source,
                "speedup": speedup,
                "efficiency": speedup / share.ranks,
                "bottleneck": bottleneck(baseline, prediction),
                "steps_per_s": rate,
                "hours": hours,
                "cost": cost,
            }
        )
    return without_nan(rows)


def _advice(rows: list[Record], is_busy: bool) -> str:
    """Return one sentence that recommends a number of ranks."""
    efficient_rows = [row for row in rows if row["efficiency"] >= LEAST_EFFICIENCY]
    best = max(efficient_rows, key=lambda row: row["speedup"])
    ending = "; measure again without other programs" if is_busy else ""
    if best["gpus"] == 1:
        return f"advice: train on one rank, because more ranks would lose too much time{ending}"
    return (
        f"advice: --num_gpus {best['gpus']} trains {best['speedup']:.3g} times as fast as one rank "
        f"({best['scaling']} scaling){ending}"
    )


def as_text(report: SpeedupReport) -> str:
    """Format a report: title, table, notes and advice; omit columns without values."""
    names = [name for name, value in report.rows[0].items() if value is not None]
    shown_rows = [[_shown(row[name]) for name in names] for row in report.rows]
    notes = [f"note: {note}" for note in report.notes]
    return "\n".join([report.title, "", table(names, shown_rows), "", *notes, report.advice])


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = CommandParser(
        prog="python -m rl_dist.speedup",
        usage="%(prog)s [--gpus N [N ...]] [training flags]",
        description=__doc__,
    )
    for name, field in fields_of(SpeedupOptions()).items():
        nargs = "+" if name == "gpus" else None
        parser.add_argument(
            f"--{name}", metavar="X", nargs=nargs, default=SUPPRESS, help=field.description
        )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args, flags = parser.parse_known_args(argv)
    options = vars(args)
    as_json = options.pop("json")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        report = estimate_training_speedup(flags, **options)
    except ChildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(report), indent=2) if as_json else as_text(report))
    return 0


if __name__ == "__main__":
    leave_at_signals()
    sys.exit(main())
