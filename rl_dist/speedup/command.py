"""Predict speedup, time and cost of training on more GPUs.

Run it as `python -m rl_dist.speedup [RUN_DIR] [--gpus 1 2 4 8] [training flags]`. It measures a
rank's share of the job in short runs on this machine and puts them into `rl_dist.speedup.model`;
nothing is trained on several ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from rl_dist.checkpoint.own_modules import check_module
from rl_dist.errors import CommandParser, UserError, explains_errors, unwritable
from rl_dist.launch.all_reduce_bench import BenchError
from rl_dist.launch.short_run import ShortRunError, without
from rl_dist.speedup.calibration import (
    ITERATIONS,
    QUICK_ITERATIONS,
    QUICK_S,
    SCALINGS,
    Calibration,
    calibrate,
)
from rl_dist.speedup.job_of_run import (
    blame_config,
    budget_of,
    flags_of_run,
    measured_of,
    read_config,
)
from rl_dist.speedup.machines import GPUS, LINKS, default_ranks_per_machine, find_gpus, find_link
from rl_dist.speedup.model import MODEL_ERROR
from rl_dist.speedup.report import CARDS_PER_MACHINE, Budget, SpeedupReport, report_of, table
from rl_dist.telemetry.progress import Stages

DESCRIPTION = "Predict speedup, time and cost of training on more GPUs, within a minute."
EPILOG = """Other flags are those of train_distributed.py; RUN_DIR stands for those of a run.

examples:
  python -m rl_dist.speedup                             the main job, on this machine
  python -m rl_dist.speedup --gpus 1 2 4 8 --out DIR    more ranks; table, JSON and a picture in DIR
  python -m rl_dist.speedup RUN_DIR --thorough          the job of a run, every N measured
  python -m rl_dist.speedup --env CartPole-v1 --gpus 2 --scaling weak --num_episodes 10000
  python -m rl_dist.speedup --gpus 8 --power_watts 700 --power_price 0.30
  python -m rl_dist.speedup --gpus 8 --gpu "H100 SXM" --gpu "RTX 4090" --json
                                                        cards one does not own: estimates
  python -m rl_dist.speedup --gpus 2 --gpu "H100 SXM + RTX 4090"
                                                        unequal cards: the slowest sets the pace

how it works:
  First, one rank trains the whole job for a moment: the first figures. Then copies of one rank's
  share train side by side without communicating, at most one per core, and ranks that only reduce
  show the cost of a reduction. After {quick_s:.0f} s of measuring the rest is modelled: sizes by
  interpolation, cores by dividing them. The column `source` says which is which. --thorough
  measures every number of ranks with as many copies (minutes; at most 4 copies per core).
reading the table:
  theoretical is N; predicted is environment steps/s relative to one rank. The interval (95 %) is
  from the spread of the iterations, and at least a standard error of {error:.0%} for what is
  modelled; a machine that is busier later is not in it. Strong scaling: --num_envs and --batch_size
  are totals, each rank does less; weak: they are per rank. Cards one does not own are estimated
  from one copy alone, each rank with cores of its own. Times are of training alone, without start,
  validation and checkpoints.
names for --gpu: {gpus}
names for --link and --between:
  {links}
exit codes: 0 done, 1 a short run failed, 2 bad usage"""

_OWN = "it is an argument of its own"
_ALONE = "leave it out: short runs train alone, without saving or evaluating"
# Flags of training that mean nothing here, and what to do instead.
IDLE = {
    **dict.fromkeys(
        ("run_dir", "resume"), "RUN_DIR, the first word, stands for the flags of a run"
    ),
    "interactive": "leave it out: nothing is asked",
    "num_gpus": "use --gpus",
    "gpu_ids": "use --gpus; CUDA_VISIBLE_DEVICES says which",
    **dict.fromkeys(
        ("strategy", "hybrid_form", "shard_size", "fallback"),
        "leave it out: several ranks have ddp",
    ),
    "gradient_compression": "leave it out: reductions are measured without",
    "lr_scaling": "leave it out: the learning rate changes no speed",
    "seed": "leave it out: every short run has its own",
    **dict.fromkeys(
        ("validate_every", "checkpoint_every", "keep_best", "max_restarts", "on_event"), _ALONE
    ),
    **dict.fromkeys(("scaling", "device", "num_episodes", "total_steps"), _OWN),
}


class _SpeedupParser(CommandParser):
    """Errors are raised."""

    def error(self, message: str) -> NoReturn:
        raise UserError(" ".join(message.split()))


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
        measuring: scalings, iterations and thorough of `rl_dist.speedup.calibration.Bench`.

    Raises:
        UserError: impossible arguments, in one line.
        ShortRunError, BenchError: a short run failed.
    """
    for name, fix in IDLE.items():
        if without(flags, [name]) != list(flags):
            raise UserError(f"--{name} does nothing here: {fix}")
    cards = [find_gpus(name) for name in gpu]
    folder = Path(run_dir) if run_dir else None
    base = without(flags_of_run(folder), ("device",)) if folder else []
    if folder:
        _check_environment(folder, flags)
    episodes, steps = budget_of(folder, num_episodes, total_steps)
    measured = measured_of(folder)
    device_type = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    per_machine = gpus_per_machine or default_ranks_per_machine(device_type, max(gpus))
    check_links(max(gpus), per_machine, link, between, bool(cards))

    def report(calibration: Calibration) -> SpeedupReport:
        budget = Budget(
            num_episodes=episodes,
            total_steps=steps,
            steps_per_episode=calibration.steps_per_episode,
            price_per_hour=price_per_hour,
            power_watts=power_watts,
            power_price=power_price,
        )
        return report_of(calibration, budget, cards, measured)

    stages = Stages(shown=not quiet)
    try:
        calibration = calibrate(
            [*base, *flags],
            gpus,
            device_type=device_type,
            ranks_per_machine=gpus_per_machine,
            link=find_link(link) if link else None,
            between=find_link(between) if between else None,
            uncontended=bool(cards),
            on_first=lambda first: on_first(report(first)),
            stages=stages,
            **measuring,
        )
    except UserError as error:
        raise (blame_config(error, folder, base) if folder else error) from None
    finally:
        stages.close()
    return report(calibration)


def _check_environment(run_dir: Path, flags: Sequence[str]) -> None:
    """Check that the module of a run's environment may be imported; raises UserError."""
    task = read_config(run_dir)["task"]
    named = None if without(flags, ["env"]) == list(flags) else task["env"]
    check_module(task["env"], task.get("env_kwargs", ""), run_dir, named)


def print_training_speedup_estimates(flags: Sequence[str] = (), **options: Any) -> None:
    """Print the table of `estimate_training_speedup`, which takes the same arguments.

    print_training_speedup_estimates(["--env", "CartPole-v1"], gpus=[1, 2])
    """
    print(table(estimate_training_speedup(flags, **options)))


def _within(kind: type[int] | type[float], least: int, most: float = 10**12) -> Any:
    """Return a type of argparse that refuses what is out of range."""

    def convert(word: str) -> float:
        value = kind(word)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {least}..{most:.9g}, got {word}")
        return value

    convert.__name__ = kind.__name__
    return convert


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and those of training.

    Raises:
        UserError: names the flag and the fix.
    """
    parser = _SpeedupParser(
        prog="python -m rl_dist.speedup",
        usage="%(prog)s [RUN_DIR] [--gpus N [N ...]] [--thorough] [training flags]",
        description=DESCRIPTION,
        epilog=EPILOG.format(
            gpus=", ".join(GPUS), links=", ".join(LINKS), quick_s=QUICK_S, error=MODEL_ERROR
        ),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(name: str, what: str, **options: Any) -> None:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, help=what, **options)

    def count(least: int) -> dict[str, Any]:
        return {"type": _within(int, least), "metavar": "N"}

    number: dict[str, Any] = {"type": _within(float, 0), "metavar": "X"}
    name: dict[str, Any] = {"default": "", "metavar": "NAME"}
    ranks: dict[str, Any] = {"type": _within(int, 1, 100_000), "metavar": "N"}
    add("gpus", "numbers of GPUs (ranks) (default: 1 2)", nargs="+", default=[1, 2], **ranks)
    add("scaling", "(default: both)", choices=(*SCALINGS, "both"), default="both")
    add("thorough", "measure every number of ranks: minutes", action="store_true")
    add("gpu", "also estimate this card; may repeat", action="append", default=[], metavar="NAME")
    add("num_episodes", "to be trained (default: the run's, or 5000)", **count(1))
    add("total_steps", "environment steps instead", default=0, **count(0))
    add("price_per_hour", "of one GPU", **number)
    add("power_watts", "of one GPU; with --power_price", **number)
    add("power_price", "per kWh; with --power_watts", **number)
    few = f"measured of every short run (default: {QUICK_ITERATIONS}, thorough {ITERATIONS})"
    add("iterations", few, **count(1))
    add("device", "(default: auto)", choices=("auto", "cpu", "cuda"), default="auto")
    here = "GPUs of one machine (default: those here; on the CPU all ranks share this one)"
    add("gpus_per_machine", here, default=0, **count(0))
    add("link", "between GPUs of one machine (default: measured here)", **name)
    add("between", "between machines, needed where there are several", **name)
    add("json", "print one JSON object instead of tables", action="store_true")
    add("out", "write speedup.json, speedup.md and speedup.png there", default="", metavar="DIR")
    named = bool(argv) and not argv[0].startswith("-")
    args, flags = parser.parse_known_args(argv)
    args.run_dir = flags.pop(0) if named else ""
    # what contradicts itself
    if flags and not flags[0].startswith("-"):
        fix = "RUN_DIR comes first, values follow their flag"
        raise UserError(f"unexpected argument {flags[0]!r}: {fix}")
    if (args.power_watts is None) != (args.power_price is None):
        raise UserError("--power_watts and --power_price go together: give both or neither")
    if args.power_watts is not None and args.price_per_hour is not None:
        raise UserError("--price_per_hour and --power_watts are two ways to pay: leave one out")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA GPU on this machine; use --device cpu")
    return args, flags


def check_links(most: int, per_machine: int, link: str, between: str, cards: bool) -> None:
    """Refuse links that do not exist or that nothing would go over (UserError)."""
    for name in filter(None, (link, between)):
        find_link(name)
    if link and min(most, per_machine) == 1:
        raise UserError(f"--link {link} does nothing: no machine has two GPUs (ranks)")
    least = min(per_machine, CARDS_PER_MACHINE) if cards else per_machine
    if between and most <= least:
        why = f"{most} GPUs (ranks) are in one machine, but for a smaller --gpus_per_machine"
        raise UserError(f"--between {between} does nothing: {why}")


def write(report: SpeedupReport, folder: Path) -> list[Path]:
    """Write JSON, Markdown and the picture; returns the files.

    Raises:
        UserError: they cannot be written.
    """
    from rl_dist.speedup.plots import plot_speedup  # slow to import

    texts = {"speedup.json": json.dumps(report.to_dict(), indent=2), "speedup.md": table(report)}
    rows = [row for row in report.rows if not row["problem"]]
    try:
        for name, text in texts.items():
            (folder / name).write_text(text + "\n", encoding="utf-8")
        picture = plot_speedup(rows, folder / "speedup.png", report.title)
    except OSError as error:
        raise unwritable(f"--out {folder}", error) from None
    return [*(folder / name for name in texts), picture]


def leave_at_signals() -> None:
    """Let SIGINT and SIGTERM end the command in one line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)


def _leave(signum: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)  # through all `finally`: short runs are ended, files removed


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the command; returns the exit code."""
    try:
        args, flags = parse(sys.argv[1:] if argv is None else argv)
        options = vars(args)
        as_json, out, scaling = (options.pop(name) for name in ("json", "out", "scaling"))
        if out:  # before anything is measured
            try:
                Path(out).mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=out).close()
            except OSError as error:
                raise unwritable(f"--out {out}", error) from None

        def show_first(first: SpeedupReport) -> None:
            if not as_json:
                print(f"FIRST FIGURES, being refined\n{table(first)}\n", flush=True)
                print("REFINED FIGURES", flush=True)

        report = estimate_training_speedup(
            flags,
            **options | {"iterations": args.iterations or 0},
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
