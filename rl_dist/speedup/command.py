"""Predict speedup on more GPUs, and time and cost where a rate is known.

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
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from rl_dist.checkpoint.trust import check_named
from rl_dist.errors import CommandParser, UserError, explains_errors
from rl_dist.launch.bench import BenchError
from rl_dist.launch.short_run import DROPPED, ShortRunError, without
from rl_dist.speedup.calibration import OF_RANKS, SCALINGS, calibrate
from rl_dist.speedup.job_of_run import budget_of, flags_of_run, read_config
from rl_dist.speedup.machines import GPUS, LINKS, NETWORK, find
from rl_dist.speedup.model import MODEL_ERROR
from rl_dist.speedup.report import Budget, SpeedupReport, report_of, table

DESCRIPTION = "Predict the speedup of training on more GPUs, within a minute."
EPILOG = """Other flags are those of train_distributed.py; RUN_DIR stands for those of a run.

examples:
  python -m rl_dist.speedup                             the main job, on this machine
  python -m rl_dist.speedup --gpus 1 2 4 8 --out DIR    more ranks; table and JSON in DIR
  python -m rl_dist.speedup RUN_DIR --thorough          the job of a run, every N measured
  python -m rl_dist.speedup --gpus 8 --gpu "H100 SXM" --json    cards one does not own: speedup
  python -m rl_dist.speedup --gpus 8 --gpu "H100 SXM" --sps 90000    ... and time and cost
predicted: environment steps/s relative to one rank, with a 95 % interval: of the spread of the
iterations, and at least a standard error of {error:.0%} for what is modelled. Strong scaling:
--num_envs and --batch_size are totals; weak: per rank. Time and cost are shown for hardware whose
rate is measured here or given by --sps. docs/planning.md says how it works.
names for --gpu: {gpus}
names for --between:
  {links}
exit codes: 0 done, 1 a short run failed or its rate kept changing, 2 bad usage"""
# Flags of training that mean nothing here, and what stands for them.
IDLE = {
    **dict.fromkeys((*OF_RANKS, *DROPPED, "interactive"), "leave it out: short runs choose it"),
    **dict.fromkeys(("run_dir", "resume"), "RUN_DIR, the first word, stands for a run's flags"),
    **dict.fromkeys(("num_gpus", "gpu_ids"), "use --gpus"),
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
    device: str = "auto",
    gpus_per_machine: int = 0,
    between: str = NETWORK,
    sps: float = 0.0,
    quiet: bool = True,
    **measuring: Any,
) -> SpeedupReport:
    """Measure short runs and predict training on each number of GPUs.

        report = estimate_training_speedup(["--env", "CartPole-v1"], gpus=[1, 2])
        report.rows[-1]["speedup"]

    Args:
        flags: of train_distributed.py, on top of those of `run_dir` if there is one.
        num_episodes: to be trained (default: the run's, or 5000), or total_steps.
        gpu: names of cards one does not own (rl_dist.speedup.machines).
        price_per_hour: of one GPU.
        sps: environment steps/s of one of `gpu`, or without it of one rank here; 0: unknown.
        measuring: scalings and thorough of `rl_dist.speedup.calibration.calibrate`.

    Raises:
        UserError: impossible arguments, in one line.
        ShortRunError, BenchError: a short run failed, or its rate kept changing.
    """
    for name, fix in IDLE.items():
        if without(flags, [name]) != list(flags):
            raise UserError(f"--{name} does nothing here: {fix}")
    cards = [find(name, GPUS, "--gpu") for name in gpu]
    if sps and len(cards) > 1:
        raise UserError(
            f"--sps {sps:g} is the rate of one kind of card: give one --gpu, not {len(cards)}"
        )
    network = find(between, LINKS, "--between")
    folder = Path(run_dir) if run_dir else None
    base = _flags_of_run(folder, flags) if folder else []
    episodes, steps = budget_of(folder, num_episodes, total_steps)
    budget = Budget(num_episodes=episodes, total_steps=steps, price_per_hour=price_per_hour)

    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device_type = automatic if device == "auto" else device
    calibration = calibrate(
        [*base, *flags],
        gpus,
        device_type=device_type,
        ranks_per_machine=gpus_per_machine,
        between=network,
        steps_per_s=sps,
        say=lambda line: None if quiet else print(line, file=sys.stderr, flush=True),
        **measuring,
    )
    budget = replace(budget, steps_per_episode=calibration.steps_per_episode)
    return report_of(calibration, budget, cards)


def _flags_of_run(folder: Path, flags: Sequence[str]) -> list[str]:
    """The flags of a run, whose modules of the user's own were looked at."""
    config = read_config(folder)
    task, core = config["task"], config.get("policy", {}).get("core", "")
    named = None if without(flags, ["env"]) == list(flags) else task["env"]
    saved = {"env": task["env"], "env_kwargs": task.get("env_kwargs", "")}
    check_named(folder, "task", saved, named)
    named = None if without(flags, ["core"]) == list(flags) else core
    check_named(folder, "policy", {"core": core}, named)
    return without(flags_of_run(folder), ("device",))


def print_training_speedup_estimates(flags: Sequence[str] = (), **options: Any) -> None:
    """Print the table of `estimate_training_speedup`, which takes the same arguments.

    print_training_speedup_estimates(["--env", "CartPole-v1"], gpus=[1, 2])
    """
    print(table(estimate_training_speedup(flags, **options)))


def _within(kind: type[int] | type[float], least: int) -> dict[str, Any]:
    """Return options of a flag that refuses what is out of range."""

    def convert(word: str) -> float:
        value = kind(word)
        if not least <= value <= 10**12:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {word}")
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
        epilog=EPILOG.format(error=MODEL_ERROR, **names),
    )

    def add(name: str, what: str, **options: Any) -> None:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, help=what, **options)

    several: dict[str, Any] = {"nargs": "+", "default": [1, 2]}
    add("gpus", "numbers of GPUs (ranks) (default: 1 2)", **several, **_within(int, 1))
    add("scaling", "(default: both)", choices=(*SCALINGS, "both"), default="both")
    add("thorough", "measure every number of ranks: minutes", action="store_true")
    add("gpu", "also estimate this card; may repeat", action="append", default=[], metavar="NAME")
    sps = "steps/s of one of --gpu, or without it of one rank here, from a run"
    add("sps", sps, default=0.0, **_within(float, 0))
    add("num_episodes", "to be trained (default: the run's, or 5000)", **_within(int, 1))
    add("total_steps", "environment steps instead", default=0, **_within(int, 0))
    add("price_per_hour", "of one GPU", **_within(float, 0))
    add("device", "(default: auto)", choices=("auto", "cpu", "cuda"), default="auto")
    here = "GPUs of one machine (default: those here; on the CPU all ranks share this one)"
    add("gpus_per_machine", here, default=0, **_within(int, 0))
    add("between", f"machines (default: {NETWORK})", default=NETWORK, metavar="NAME")
    add("json", "print one JSON object instead of tables", action="store_true")
    add("out", "write speedup.json and speedup.md there", default="", metavar="DIR")
    named = bool(argv) and not argv[0].startswith("-")
    args, flags = parser.parse_known_args(argv)
    args.run_dir = flags.pop(0) if named else ""
    if flags and not flags[0].startswith("-"):
        fix = "RUN_DIR comes first, values follow their flag"
        raise UserError(f"unexpected argument {flags[0]!r}: {fix}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA GPU on this machine; use --device cpu")
    return args, flags


def write(report: SpeedupReport, folder: Path) -> list[Path]:
    """Write JSON and Markdown; returns the files."""
    files = [folder / f"speedup.{kind}" for kind in ("json", "md")]
    files[0].write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    files[1].write_text(table(report) + "\n", encoding="utf-8")
    return files


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the command; returns the exit code."""
    args, flags = parse(sys.argv[1:] if argv is None else argv)
    options = vars(args)
    as_json, out, scaling = (options.pop(name) for name in ("json", "out", "scaling"))
    try:
        if out:  # before anything is measured
            Path(out).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=out).close()
        report = estimate_training_speedup(
            flags,
            **options,
            scalings=SCALINGS if scaling == "both" else (scaling,),
            quiet=as_json and not sys.stderr.isatty(),
        )
        print(json.dumps(asdict(report), indent=2) if as_json else table(report))
        if out:
            files = write(report, Path(out))
            print("written: " + ", ".join(map(os.fspath, files)), file=sys.stderr)
    except (ShortRunError, BenchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
