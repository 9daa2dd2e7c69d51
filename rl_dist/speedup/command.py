"""Predict speedup, time and cost of training on more GPUs.

Run it as `python -m rl_dist.speedup [RUN_DIR] [--gpus 1 2 4 8] [training flags]`. It measures a
rank's share of the job in short runs on this machine and puts them into `rl_dist.speedup.model`;
nothing is trained on several ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rl_dist.checkpoint.own_modules import check_module
from rl_dist.errors import CommandParser, UserError, explains_errors
from rl_dist.launch.all_reduce_bench import BenchError
from rl_dist.launch.short_run import DROPPED, ShortRunError, without
from rl_dist.speedup.calibration import (
    ITERATIONS,
    OF_RANKS,
    QUICK_ITERATIONS,
    QUICK_S,
    SCALINGS,
    Calibration,
    calibrate,
)
from rl_dist.speedup.job_of_run import budget_of, flags_of_run, read_config
from rl_dist.speedup.machines import GPUS, LINKS, find_gpus, find_link
from rl_dist.speedup.model import MODEL_ERROR
from rl_dist.speedup.report import Budget, SpeedupReport, report_of, table
from rl_dist.telemetry.progress import Stages

DESCRIPTION = "Predict speedup, time and cost of training on more GPUs, within a minute."
EPILOG = """Other flags are those of train_distributed.py; RUN_DIR stands for those of a run.

examples:
  python -m rl_dist.speedup                             the main job, on this machine
  python -m rl_dist.speedup --gpus 1 2 4 8 --out DIR    more ranks; table, JSON and a picture in DIR
  python -m rl_dist.speedup RUN_DIR --thorough          the job of a run, every N measured
  python -m rl_dist.speedup --env CartPole-v1 --gpus 2 --scaling weak --num_episodes 10000
  python -m rl_dist.speedup --gpus 8 --gpu "H100 SXM" --gpu "A100 + RTX 4090" --json
                                        cards one does not own; the slowest sets the pace
how it works:
  One rank trains the job for a moment, then copies of one rank's share train side by side, and
  ranks only reduce. After {quick_s:.0f} s the rest is modelled: the column `source` says which.
  --thorough measures every number of ranks. docs/planning.md says more.
reading the table:
  predicted is environment steps/s relative to one rank, with a 95 % interval: of the spread of the
  iterations, and at least a standard error of {error:.0%} for what is modelled. Strong scaling:
  --num_envs and --batch_size are totals; weak: per rank. Times are of training alone.
names for --gpu: {gpus}
names for --link and --between:
  {links}
exit codes: 0 done, 1 a short run failed, 2 bad usage"""
# Flags of training that mean nothing here, and what stands for them.
IDLE = {
    **dict.fromkeys((*OF_RANKS, *DROPPED, "interactive"), "leave it out: short runs choose it"),
    **dict.fromkeys(("run_dir", "resume"), "RUN_DIR, the first word, stands for a run's flags"),
    **dict.fromkeys(("num_gpus", "gpu_ids"), "use --gpus"),
    **dict.fromkeys(("scaling", "device", "num_episodes", "total_steps"), "it is our argument"),
}


def estimate_training_speedup(
    flags: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    gpus: Sequence[int] = (1, 2),
    gpu: Sequence[str] = (),
    num_episodes: int | None = None,
    total_steps: int = 0,
    price_per_hour: float | None = None,
    power_watts: float | None = None,
    power_price: float | None = None,
    device: str = "auto",
    gpus_per_machine: int = 0,
    link: str = "",
    between: str = "",
    on_first: Callable[[SpeedupReport], None] = lambda first: None,
    quiet: bool = True,
    **measuring: Any,
) -> SpeedupReport:
    """Measure short runs and predict training on each number of GPUs.

        report = estimate_training_speedup(["--env", "CartPole-v1"], gpus=[1, 2])
        report.rows[-1]["speedup"]

    Args:
        flags: of train_distributed.py, on top of those of `run_dir` if there is one.
        num_episodes: to be trained (default: the run's, or 5000), or total_steps.
        gpu: names of cards one does not own (rl_dist.speedup.machines); "A + B": unequal ones.
        price_per_hour: of one GPU, or power_watts of one GPU and power_price per kWh.
        on_first: called with the first figures, which are then refined; not if thorough.
        measuring: scalings, iterations and thorough of `rl_dist.speedup.calibration.calibrate`.

    Raises:
        UserError: impossible arguments, in one line.
        ShortRunError, BenchError: a short run failed.
    """
    for name, fix in IDLE.items():
        if without(flags, [name]) != list(flags):
            raise UserError(f"--{name} does nothing here: {fix}")
    cards = [find_gpus(name) for name in gpu]
    folder = Path(run_dir) if run_dir else None
    base: list[str] = []
    if folder:
        base = without(flags_of_run(folder), ("device",))
        task = read_config(folder)["task"]
        named = None if without(flags, ["env"]) == list(flags) else task["env"]
        check_module(task["env"], task.get("env_kwargs", ""), folder, named)
    episodes, steps = budget_of(folder, num_episodes, total_steps)
    budget = Budget(num_episodes=episodes, total_steps=steps, price_per_hour=price_per_hour)

    if power_watts is not None and power_price is not None:
        budget = replace(budget, price_per_hour=power_watts / 1000.0 * power_price)

    def report(calibration: Calibration) -> SpeedupReport:
        length = replace(budget, steps_per_episode=calibration.steps_per_episode)
        return report_of(calibration, length, cards)

    stages = Stages(shown=not quiet)
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        calibration = calibrate(
            [*base, *flags],
            gpus,
            device_type=automatic if device == "auto" else device,
            ranks_per_machine=gpus_per_machine,
            named_link=find_link(link) if link else None,
            between=find_link(between) if between else None,
            uncontended=bool(cards),
            on_first=lambda first: on_first(report(first)),
            stages=stages,
            **measuring,
        )
    finally:
        stages.close()
    return report(calibration)


def print_training_speedup_estimates(flags: Sequence[str] = (), **options: Any) -> None:
    """Print the table of `estimate_training_speedup`, which takes the same arguments.

    print_training_speedup_estimates(["--env", "CartPole-v1"], gpus=[1, 2])
    """
    print(table(estimate_training_speedup(flags, **options)))


def _within(kind: type[int] | type[float], least: int, most: float = 10**12) -> dict[str, Any]:
    """Return options of a flag that refuses what is out of range."""

    def convert(word: str) -> float:
        value = kind(word)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {least}..{most:.9g}, got {word}")
        return value

    convert.__name__ = kind.__name__
    return {"type": convert, "metavar": "N" if kind is int else "X"}


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and those of training.

    Raises:
        UserError: names the flag and the fix.
    """
    names = {"gpus": ", ".join(GPUS), "links": ", ".join(LINKS)}
    parser = CommandParser(
        prog="python -m rl_dist.speedup",
        usage="%(prog)s [RUN_DIR] [--gpus N [N ...]] [--thorough] [training flags]",
        description=DESCRIPTION,
        epilog=EPILOG.format(quick_s=QUICK_S, error=MODEL_ERROR, **names),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(name: str, what: str, **options: Any) -> None:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, help=what, **options)

    named_link: dict[str, Any] = {"default": "", "metavar": "NAME"}
    several = _within(int, 1, 100_000)
    add("gpus", "numbers of GPUs (ranks) (default: 1 2)", nargs="+", default=[1, 2], **several)
    add("scaling", "(default: both)", choices=(*SCALINGS, "both"), default="both")
    add("thorough", "measure every number of ranks: minutes", action="store_true")
    add("gpu", "also estimate this card; may repeat", action="append", default=[], metavar="NAME")
    add("num_episodes", "to be trained (default: the run's, or 5000)", **_within(int, 1))
    add("total_steps", "environment steps instead", default=0, **_within(int, 0))
    add("price_per_hour", "of one GPU", **_within(float, 0))
    add("power_watts", "of one GPU; with --power_price", **_within(float, 0))
    add("power_price", "per kWh; with --power_watts", **_within(float, 0))
    few = f"measured of every short run (default: {QUICK_ITERATIONS}, thorough {ITERATIONS})"
    add("iterations", few, default=0, **_within(int, 1))
    add("device", "(default: auto)", choices=("auto", "cpu", "cuda"), default="auto")
    here = "GPUs of one machine (default: those here; on the CPU all ranks share this one)"
    add("gpus_per_machine", here, default=0, **_within(int, 0))
    add("link", "between GPUs of one machine (default: measured here)", **named_link)
    add("between", "between machines, needed where there are several", **named_link)
    add("json", "print one JSON object instead of tables", action="store_true")
    add("out", "write speedup.json, speedup.md and speedup.png there", default="", metavar="DIR")
    named = bool(argv) and not argv[0].startswith("-")
    args, flags = parser.parse_known_args(argv)
    args.run_dir = flags.pop(0) if named else ""
    # what contradicts itself
    if flags and not flags[0].startswith("-"):
        fix = "RUN_DIR comes first, values follow their flag"
        raise UserError(f"unexpected argument {flags[0]!r}: {fix}")
    power = args.power_watts is not None, args.power_price is not None
    if any(power) and (not all(power) or args.price_per_hour is not None):
        fix = "give --price_per_hour, or --power_watts and --power_price"
        raise UserError(f"--power_watts and --power_price go together and alone: {fix}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA GPU on this machine; use --device cpu")
    return args, flags


def write(report: SpeedupReport, folder: Path) -> list[Path]:
    """Write JSON, Markdown and the picture; returns the files."""
    from rl_dist.speedup.plots import plot_speedup  # slow to import

    texts = {"speedup.json": json.dumps(report.to_dict(), indent=2), "speedup.md": table(report)}
    for name, text in texts.items():
        (folder / name).write_text(text + "\n", encoding="utf-8")
    rows = [row for row in report.rows if not row["problem"]]
    picture = plot_speedup(rows, folder / "speedup.png", report.title)
    return [*(folder / name for name in texts), picture]


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the command; returns the exit code."""
    args, flags = parse(sys.argv[1:] if argv is None else argv)
    options = vars(args)
    as_json, out, scaling = (options.pop(name) for name in ("json", "out", "scaling"))

    def show_first(first: SpeedupReport) -> None:
        if not as_json:
            print(f"FIRST FIGURES, being refined\n{table(first)}\n", flush=True)
            print("REFINED FIGURES", flush=True)

    try:
        if out:  # before anything is measured
            Path(out).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=out).close()
        report = estimate_training_speedup(
            flags,
            **options,
            scalings=SCALINGS if scaling == "both" else (scaling,),
            on_first=show_first,
            quiet=as_json and not sys.stderr.isatty(),
        )
        print(json.dumps(report.to_dict(), indent=2) if as_json else table(report))
        if out:
            files = write(report, Path(out))
            print("written: " + ", ".join(map(os.fspath, files)), file=sys.stderr)
    except (ShortRunError, BenchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
