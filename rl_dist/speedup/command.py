"""How much faster would more GPUs train, how long and at what cost?

Run it as `python -m rl_dist.speedup [RUN_DIR] [--gpus 1 2 4 8] [training flags]`. It measures a rank's share of the job
in short runs on this machine and puts them into `rl_dist.speedup.model`; nothing is trained on several ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from rl_dist.checkpoint.own_modules import check_module
from rl_dist.errors import CommandParser, UserError, explains_errors
from rl_dist.launch.all_reduce_bench import BenchFailed
from rl_dist.launch.short_run import TrialFailed, without
from rl_dist.speedup.calibration import SCALINGS, calibrate, default_ranks_per_machine
from rl_dist.speedup.job_of_run import blame_config, budget_of, flags_of_run, measured_of, read_config
from rl_dist.speedup.machines import GPUS, LINKS, Gpu, find_gpus, find_link
from rl_dist.speedup.model import Link
from rl_dist.speedup.report import CARDS_PER_MACHINE, Budget, Report, markdown, report_of, table
from rl_dist.telemetry.progress import Stages

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
memory as N ranks do; at most 4 per core, and what fits in memory); ranks that only reduce tell what a reduction
costs; what waiting for the slowest of N costs follows from the measured spread. Cards one does not own are estimated
from one copy alone, as if every rank there had cores of its own. Weak: --num_envs and --batch_size are per rank, so
each step is taken from a larger batch; strong: they are totals, so each rank does less. Theoretical is N. The
interval (95 %) is from the spread of the measured iterations; a machine that is busier later is not in it. Times are
of training alone, without start, validation and checkpoints.
names for --gpu: {gpus}
names for --link and --between: {links}
exit codes: 0 done, 1 a short run failed, 2 bad usage"""

_OWN, _ALONE = "it is an argument of its own", "leave it out: short runs train alone, without saving or judging"
# Flags of training that mean nothing here, and what to do instead.
IDLE = {
    "run_dir": "RUN_DIR, the first word, stands for the flags of a run",
    "resume": "RUN_DIR, the first word, stands for the flags of a run",
    "interactive": "leave it out: nothing is asked",
    "num_gpus": "use --gpus",
    "gpu_ids": "use --gpus; CUDA_VISIBLE_DEVICES says which",
    **dict.fromkeys(("strategy", "hybrid_form", "shard_size", "fallback"), "leave it out: several ranks have ddp"),
    "gradient_compression": "leave it out: reductions are measured without",
    "lr_scaling": "leave it out: the learning rate changes no speed",
    "seed": "leave it out: every short run has its own",
    "validate_every": _ALONE,
    "checkpoint_every": _ALONE,
    "keep_best": _ALONE,
    "max_restarts": _ALONE,
    "on_event": _ALONE,
    **dict.fromkeys(("scaling", "device", "num_episodes", "total_steps"), _OWN),
}


class _Parser(CommandParser):
    """Errors are raised."""

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
        num_episodes: to be trained; by default what the run has, or 5000.
        total_steps: environment steps to be trained instead.
        gpu: names of cards one does not own, see rl_dist.speedup.machines; "A + B" for unequal ones together.
        price_per_hour: of one GPU; power_watts of one GPU and power_price per kWh: by electricity instead.

    Raises:
        UserError: what cannot be, in one line.
        TrialFailed, BenchFailed: a short run failed.
    """
    refuse_idle(flags)
    cards = [find_gpus(name) for name in gpu]
    inside, outside = (find_link(name) if name else None for name in (link, between))
    folder = Path(run_dir) if run_dir else None
    base = without(flags_of_run(folder), ("device",)) if folder else []
    if folder:
        task = read_config(folder)["task"]
        named = None if without(flags, ["env"]) == list(flags) else task["env"]  # it comes after those of the run
        check_module(task["env"], task.get("env_kwargs", ""), folder, named)
    (episodes, steps), measured = budget_of(folder, num_episodes, total_steps), measured_of(folder)
    device_type = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    per_machine = gpus_per_machine or default_ranks_per_machine(device_type, max(gpus))
    refuse_idle_links(max(gpus), per_machine, inside, outside, cards)
    stages = Stages(shown=not quiet)
    try:
        calibration = calibrate(
            [*base, *flags],
            gpus,
            scalings=scalings,
            iterations=iterations,
            device_type=device_type,
            ranks_per_machine=gpus_per_machine,
            link=inside,
            between=outside,
            uncontended=bool(cards),
            stages=stages,
        )
    except UserError as error:
        raise (blame_config(error, folder, base) if folder else error) from None
    finally:
        stages.close()
    budget = Budget(
        num_episodes=episodes,
        total_steps=steps,
        steps_per_episode=calibration.steps_per_episode,
        price_per_hour=price_per_hour,
        power_watts=power_watts,
        power_price=power_price,
    )
    return report_of(calibration, budget, cards, measured)


def print_training_speedup_estimates(flags: Sequence[str] = (), **options: Any) -> None:
    """Print the table of `estimate_training_speedup`, which takes the same arguments.

    print_training_speedup_estimates(["--env", "CartPole-v1"], gpus=[1, 2])
    """
    print(table(estimate_training_speedup(flags, **options)))


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and those of training."""
    parser = _Parser(
        prog="python -m rl_dist.speedup",
        usage="%(prog)s [RUN_DIR] [--gpus N [N ...]] [training flags]",
        description=DESCRIPTION,
        epilog=EPILOG.format(gpus=", ".join(GPUS), links=", ".join(LINKS)),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--gpus", type=int, nargs="+", default=[1, 2], metavar="N", help="numbers of GPUs (ranks) (default: 1 2)")
    add("--scaling", choices=(*SCALINGS, "both"), default="both", help="(default: both)")
    add("--gpu", action="append", default=[], metavar="NAME", help="also estimate this card, see below; may repeat")
    add("--num_episodes", "--num-episodes", type=int, metavar="N", help="to be trained (default: the run's, or 5000)")
    add("--total_steps", "--total-steps", type=int, default=0, metavar="N", help="environment steps instead")
    add("--price_per_hour", "--price-per-hour", type=float, metavar="X", help="of one GPU")
    add("--power_watts", "--power-watts", type=float, metavar="W", help="of one GPU; with --power_price")
    add("--power_price", "--power-price", type=float, metavar="X", help="per kWh; with --power_watts")
    add("--iterations", type=int, default=6, metavar="K", help="measured of every short run (default: 6)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    what = "GPUs of one machine (default: those here; on the CPU all ranks share this one)"
    add("--gpus_per_machine", "--gpus-per-machine", type=int, default=0, metavar="N", help=what)
    add("--link", default="", metavar="NAME", help="between GPUs of one machine (default: measured here)")
    add("--between", default="", metavar="NAME", help="between machines, needed where there are several")
    add("--json", action="store_true", help="print JSON instead of the table")
    add("--out", default="", metavar="DIR", help="write speedup.json, speedup.md and plots there")
    named = bool(argv) and not argv[0].startswith("-")
    args, flags = parser.parse_known_args(argv)
    args.run_dir = flags.pop(0) if named else ""
    check(args, flags)
    return args, flags


def check(args: argparse.Namespace, flags: list[str]) -> None:
    """Refuse what cannot be meant.

    Raises:
        UserError: names the flag and the cure.
    """
    if flags and not flags[0].startswith("-"):
        raise UserError(f"unexpected argument {flags[0]!r}: RUN_DIR comes first, values follow their flag")
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


def refuse_idle(flags: Sequence[str]) -> None:
    """Refuse flags of training that cannot take effect here.

    Raises:
        UserError: names the flag and the cure.
    """
    for name, cure in IDLE.items():
        if without(flags, [name]) != list(flags):
            raise UserError(f"--{name} does nothing here: {cure}")


def refuse_idle_links(
    most: int, per_machine: int, link: Link | None, between: Link | None, cards: Sequence[list[Gpu]]
) -> None:
    """Refuse names of links that nothing would go over.

    Raises:
        UserError: names the flag and the cure.
    """
    if link and min(most, per_machine) == 1:
        raise UserError(f"--link {link.name} does nothing: no machine has two GPUs (ranks); leave it out")
    least = min(per_machine, CARDS_PER_MACHINE) if cards else per_machine
    if between and most <= least:
        cure = "leave it out, or say with --gpus_per_machine how few one machine has"
        raise UserError(f"--between {between.name} does nothing: {most} GPUs (ranks) are in one machine; {cure}")


def make_folder(folder: Path) -> None:
    """Make the folder of --out, before anything is measured.

    Raises:
        UserError: files cannot be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"--out {folder} cannot be written: {error.strerror or error}")


def write(report: Report, folder: Path) -> list[Path]:
    """Write JSON, Markdown and plots; returns the files."""
    from rl_dist.speedup.plots import plot_report  # slow to import

    make_folder(folder)
    try:
        (folder / "speedup.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
        (folder / "speedup.md").write_text(markdown(report) + "\n", encoding="utf-8")
        return [folder / "speedup.json", folder / "speedup.md", *plot_report(report, folder)]
    except OSError as error:
        raise _unwritable(folder, error) from None


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
        if args.out:
            make_folder(Path(args.out))
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
    except (TrialFailed, BenchFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
