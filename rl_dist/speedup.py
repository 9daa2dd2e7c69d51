"""How much faster would more GPUs train, how long and at what cost?

Run it as `python -m rl_dist.speedup [RUN_DIR] [--gpus 1 2 4 8] [training flags]`. It measures a rank's share of the job
in short runs on this machine and puts them into `rl_dist.scaling_model`; nothing is trained on several ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from rl_dist.all_reduce_bench import BenchFailed
from rl_dist.calibration import SCALINGS, Calibration, calibrate, flags_of_run, read_records
from rl_dist.launch import UserError
from rl_dist.machines import find_gpus, find_link
from rl_dist.speedup_report import Budget, Report, markdown, report_of, table
from rl_dist.trial import TrialFailed, without

DESCRIPTION = "Predict speedup, time and cost of training on more GPUs, from short measured runs of one rank's share."
EPILOG = """Other flags are those of train_distributed.py and say what is trained; RUN_DIR stands for those of a run.

examples:
  python -m rl_dist.speedup                                        the main job, on this machine
  python -m rl_dist.speedup runs/2026-01-31_12-00-00 --gpus 1 2 4 8
  python -m rl_dist.speedup --env CartPole-v1 --gpus 2 --scaling weak --num_episodes 10000
  python -m rl_dist.speedup --gpus 8 --gpu "H100 SXM" --gpu "RTX 4090" --json      cards one does not own: estimates
  python -m rl_dist.speedup --gpus 2 --gpu "H100 SXM + RTX 4090"   unequal cards together: the slowest sets the pace
  python -m rl_dist.speedup --gpus 8 --power_watts 700 --power_price 0.30

How it is made: N copies of one rank's share train side by side without communicating (so they compete for cores and
memory as N ranks do); ranks that only reduce tell what a reduction costs; what waiting for the slowest of N costs
follows from the measured spread. Weak: --num_envs and --batch_size are per rank, so each step is taken from a larger
batch; strong: they are totals, so each rank does less. Theoretical is N. The interval (95 %) is from the spread of
the measured iterations; a machine that is busier later is not in it. Times are of training alone, without start,
validation and checkpoints.
exit codes: 0 done, 1 a short run failed, 2 bad usage"""


class _Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(" ".join(message.split()))


def estimate_training_speedup(
    flags: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    gpus: Sequence[int] = (1, 2),
    scalings: Sequence[str] = SCALINGS,
    gpu: Sequence[str] = (),
    num_episodes: int | None = None,
    total_steps: int = 0,
    price_per_hour: float | None = None,
    power_watts: float | None = None,
    power_price: float | None = None,
    iterations: int = 6,
    device: str = "auto",
    gpus_per_machine: int = 0,
    link: str = "",
    between: str = "",
    quiet: bool = True,
) -> Report:
    """Measure short runs and predict training on each number of GPUs.

        report = estimate_training_speedup(["--env", "CartPole-v1"], gpus=[1, 2])
        report.rows[-1]["speedup"]

    Args:
        flags: of train_distributed.py, on top of those of `run_dir` if there is one.
        num_episodes, total_steps: to be trained; by default what the run has, or 5000 episodes.
        gpu: names of cards one does not own, see rl_dist.machines; "A + B" for unequal ones together.
        price_per_hour: of one GPU; power_watts of one GPU and power_price per kWh: by electricity instead.

    Raises:
        UserError: what cannot be, in one line.
        TrialFailed, BenchFailed: a short run failed.
    """
    cards = [find_gpus(name) for name in gpu]
    inside, outside = (find_link(name) if name else None for name in (link, between))
    base = flags_of_run(Path(run_dir)) if run_dir else []
    device_type = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    calibration = calibrate(
        [*without(base, ("device",)), *flags],
        gpus,
        scalings=scalings,
        iterations=iterations,
        device_type=device_type,
        ranks_per_machine=gpus_per_machine,
        link=inside,
        between=outside,
        say=(lambda text: None) if quiet else _progress,
    )
    episodes, steps = budget_of(run_dir, num_episodes, total_steps)
    budget = Budget(
        num_episodes=episodes,
        total_steps=steps,
        steps_per_episode=calibration.steps_per_episode,
        price_per_hour=price_per_hour,
        power_watts=power_watts,
        power_price=power_price,
    )
    return report_of(calibration, budget, cards, measured_of(run_dir, calibration))


def print_training_speedup_estimates(flags: Sequence[str] = (), **options: Any) -> None:
    """Print the table of `estimate_training_speedup`, which takes the same arguments.

    print_training_speedup_estimates(["--env", "CartPole-v1"], gpus=[1, 2])
    """
    print(table(estimate_training_speedup(flags, **options)))


def measured_of(run_dir: str | Path | None, calibration: Calibration) -> dict[int, float]:
    """Steps/s that the run itself measured, by its number of ranks."""
    records = read_records(Path(run_dir)) if run_dir else []
    rates = sorted(record["time/sps"] for record in records[2:] or records)
    return {len(records[-1]["ranks"]): rates[len(rates) // 2]} if rates else {}


def _progress(text: str) -> None:
    print(f"measuring: {text} ...", file=sys.stderr, flush=True)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and those of training."""
    parser = _Parser(
        prog="python -m rl_dist.speedup",
        usage="%(prog)s [RUN_DIR] [--gpus N [N ...]] [training flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--gpus", type=int, nargs="+", default=[1, 2], metavar="N", help="numbers of GPUs (ranks) (default: 1 2)")
    add("--scaling", choices=(*SCALINGS, "both"), default="both", help="(default: both)")
    add("--gpu", action="append", default=[], metavar="NAME", help="also estimate this card; may be repeated")
    add("--num_episodes", "--num-episodes", type=int, metavar="N", help="to be trained (default: the run's, or 5000)")
    add("--total_steps", "--total-steps", type=int, default=0, metavar="N", help="environment steps instead")
    add("--price_per_hour", "--price-per-hour", type=float, metavar="X", help="of one GPU")
    add("--power_watts", "--power-watts", type=float, metavar="W", help="of one GPU; with --power_price")
    add("--power_price", "--power-price", type=float, metavar="X", help="per kWh; with --power_watts")
    add("--iterations", type=int, default=6, metavar="K", help="measured of every short run (default: 6)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    what = "GPUs of one machine (default: those here; on the CPU all ranks share this one)"
    add("--gpus_per_machine", "--gpus-per-machine", type=int, default=0, metavar="N", help=what)
    add("--link", default="", metavar="NAME", help="between GPUs of one machine (default: measured)")
    add("--between", default="", metavar="NAME", help="between machines (needed for more than one machine)")
    add("--json", action="store_true", help="print JSON instead of the table")
    add("--out", default="", metavar="DIR", help="write speedup.json, speedup.md and plots there")
    words = list(argv)
    run_dir = words.pop(0) if words and not words[0].startswith("-") else ""
    args, flags = parser.parse_known_args(words)
    args.run_dir = run_dir
    check(args, flags)
    return args, flags


def check(args: argparse.Namespace, flags: list[str]) -> None:
    """Refuse what cannot be meant.

    Raises:
        UserError: names the flag and the cure.
    """
    if flags and not flags[0].startswith("-"):
        raise UserError(f"unexpected argument {flags[0]!r}: RUN_DIR comes first, values follow their flag")
    for name in ("run_dir", "resume"):
        if without(flags, [name]) != flags:
            raise UserError(f"--{name} does nothing here: RUN_DIR, the first word, stands for the flags of a run")
    for name in ("price_per_hour", "power_watts", "power_price"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            raise UserError(f"--{name} must be a number from 0, got {value}")
    if (args.power_watts is None) != (args.power_price is None):
        raise UserError("--power_watts and --power_price go together: give both or neither")
    if args.power_watts is not None and args.price_per_hour is not None:
        raise UserError("--price_per_hour and --power_watts are two ways to pay: leave one out")
    if not all(1 <= number <= 100_000 for number in args.gpus):
        raise UserError(f"--gpus must be 1..100000, got {min(args.gpus)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA GPU on this machine; use --device cpu")
    for name in ("gpus_per_machine", "total_steps"):
        if getattr(args, name) < 0:
            raise UserError(f"--{name} must be at least 0, got {getattr(args, name)}")
    for name in ("iterations", "num_episodes"):
        if getattr(args, name) is not None and not 1 <= getattr(args, name) <= 10**12:
            raise UserError(f"--{name} must be at least 1, got {getattr(args, name)}")


def budget_of(run_dir: str | Path | None, num_episodes: int | None, total_steps: int) -> tuple[int, int]:
    """Episodes and steps to train: as given, or as the run's configuration has them."""
    config: dict[str, Any] = {}
    if run_dir:
        config = json.loads(Path(run_dir, "config.json").read_text(encoding="utf-8"))["train"]
    steps = total_steps or (0 if num_episodes else config.get("total_steps", 0))
    return num_episodes or config.get("num_episodes", 5000), steps


def write(report: Report, folder: Path) -> list[Path]:
    """Write JSON, Markdown and plots; returns the files."""
    from rl_dist.speedup_plots import plot_report  # slow to import

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "speedup.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
        (folder / "speedup.md").write_text(markdown(report) + "\n", encoding="utf-8")
        return [folder / "speedup.json", folder / "speedup.md", *plot_report(report.rows, folder)]
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written: {error.strerror or error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the command; returns the exit code."""
    try:
        args, flags = parse(sys.argv[1:] if argv is None else argv)
        report = estimate_training_speedup(
            flags,
            run_dir=args.run_dir or None,
            gpus=args.gpus,
            scalings=SCALINGS if args.scaling == "both" else (args.scaling,),
            gpu=args.gpu,
            num_episodes=args.num_episodes,
            total_steps=args.total_steps,
            price_per_hour=args.price_per_hour,
            power_watts=args.power_watts,
            power_price=args.power_price,
            iterations=args.iterations,
            device=args.device,
            gpus_per_machine=args.gpus_per_machine,
            link=args.link,
            between=args.between,
            quiet=args.json and not sys.stderr.isatty(),
        )
        print(json.dumps(report.to_dict(), indent=2) if args.json else table(report))
        if args.out:
            files = write(report, Path(args.out))
            print("written: " + ", ".join(os.fspath(path) for path in files), file=sys.stderr)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (TrialFailed, BenchFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
