"""Show how a run is doing, now or until it ends: `python -m rl_dist.status`."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rl_dist.errors import CommandParser, explains_errors, printable
from rl_dist.status.run_state import RunState, newest_run, read_run
from rl_dist.telemetry.state_file import STATE_FILE

RUNS = Path("runs")
EVERY_S = 2.0
PATIENCE_S = 30.0  # for the directory of a training that has just been started
TEXT_WIDTH = 200  # characters of a message that are shown
BAD = ("failed", "dead")
EPILOG = """examples:
  python -m rl_dist.status                          the newest run below runs/
  python -m rl_dist.status runs/my_run --follow     until it ends; to a file, a line per change
  python -m rl_dist.status runs/my_run --json       one JSON object; with --follow one per change
states: starting, running, restarting, finished (evaluated), stopped (on request, saved; also once
its launcher is killed), failed (with an error), dead (without a report, such as by SIGKILL)
Nothing is changed, and torch is not loaded. A run of another machine on a shared disk is seen as
running only where the disk passes file locks on.
exit codes: 0 it goes on, has finished or was stopped; 1 failed or dead; 2 no run there"""
USE = {  # of each rank: how its values are shown
    "cpu/percent": "CPU {:.0f} % of a core",
    "ram/used_gib": "memory {:.2f} GiB",
    "gpu/utilization_percent": "GPU {:.0f} %",
    "gpu/memory_allocated_gib": "{:.2f} GiB in use",
    "gpu/memory_peak_gib": "peak {:.2f} GiB",
    "gpu/memory_free_gib": "{:.2f} GiB free",
    "gpu/temperature_c": "{:.0f} C",
    "gpu/power_w": "{:.0f} W",
    "time/idle_share": "waits {:.0%} of the time",
}


def describe(run: RunState) -> list[str]:
    """Return the lines for people."""
    done = f"{min(run.done, run.total):,} of {run.total:,} {run.unit} ({_share(run):.0%})"
    rows = [
        ("run", run.run_dir),
        ("state", f"{run.state}: {_cut(run.reason)}" if run.reason else run.state),
        ("job", f"{run.env}, {run.num_ranks} ranks on {run.device}, strategy {run.strategy}"),
        ("progress", f"{done}, {run.iteration:,} iterations"),
        ("speed", _speed(run)),
        ("return", _returns(run)),
        ("checkpoint", run.checkpoint or "none"),
    ]
    for one in run.use:
        values = [pattern.format(one[name]) for name, pattern in USE.items() if name in one]
        rows.append((f"rank {one['rank']}", ", ".join(values)))
    for one in run.messages:
        where = f"{one['time']} {one['level'].lower()}, rank {one['rank']}"
        rows.append(("logged", f"{where}: {_cut(one['text'])}"))
    return [printable(f"{name:<11} {text}") for name, text in rows if text]


def one_line(run: RunState) -> str:
    """Return the same in a line, for logs."""
    now = time.strftime("%H:%M:%S")
    parts = [now, run.state, f"iteration {run.iteration}", f"{_share(run):.0%}"]
    parts += [text for text in (_speed(run), _returns(run), _cut(run.reason)) if text]
    return printable(" | ".join(parts))


def _share(run: RunState) -> float:
    return min(1.0, run.done / run.total) if run.total > 0 else 0.0


def _speed(run: RunState) -> str:
    parts = []
    if run.steps_per_s is not None:
        parts.append(f"{run.steps_per_s:,.1f} steps/s")
    if run.iteration_s is not None:
        parts.append(f"{run.iteration_s:.3g} s an iteration")
    if run.metrics_age_s is not None:
        parts.append(f"the last {_duration(run.metrics_age_s)} ago")
    if run.eta_s is not None:
        parts.append(f"{_duration(run.eta_s)} to go without validation and checkpoints")
    return ", ".join(parts)


def _returns(run: RunState) -> str:
    parts = []
    if run.last_return is not None:
        parts.append(f"return {run.last_return:.4g}, mean of recent ones {run.mean_return:.4g}")
    names = [name for name in ("valid/return", "valid/sharpe") if name in run.validation]
    parts += [f"{name} {run.validation[name]:.4g}" for name in names]
    return ", ".join(parts)


def _cut(text: str) -> str:
    """Shorten a message; it is whole in --json and in the logs."""
    return textwrap.shorten(text, TEXT_WIDTH, placeholder=" ...")


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=min(round(seconds), 10**10)))


# ---- the command


def follow(run_dir: Path, every_s: float, as_json: bool) -> RunState:
    """Show the run until it is over."""
    on_terminal = sys.stdout.isatty() and not as_json
    before = None
    while True:
        run = read_run(run_dir)
        now = (run.state, run.reason, run.iteration, run.checkpoint, len(run.messages))
        if on_terminal or (run.over and not as_json):
            # from the top of an empty terminal
            clear = "\x1b[H\x1b[2J" if on_terminal else ""
            print(clear + "\n".join(describe(run)), flush=True)
        elif now != before:
            print(run.to_json() if as_json else one_line(run), flush=True)
        if run.over:
            return run
        before = now
        time.sleep(every_s)


def wait_for(run_dir: Path) -> None:
    """Give a training that has just been started the time to begin its directory."""
    deadline_s = time.monotonic() + PATIENCE_S
    # a file in its place is for the reader to refuse
    while not (run_dir.is_file() or (run_dir / STATE_FILE).exists()):
        if time.monotonic() > deadline_s:
            return
        time.sleep(0.2)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m rl_dist.status",
        description="Show a run's state, progress, speed, checkpoint, use of each rank, warnings.",
        epilog=EPILOG,
    )
    where = "default: the run below runs/ that was written last"
    interval = f"seconds between two looks of --follow (default: {EVERY_S:g})"
    add = parser.add_argument
    add("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help=where)
    add("--follow", action="store_true", help="look again and again until the run is over")
    add("--every", type=float, metavar="S", help=interval)
    add("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.every is not None and not args.follow:
        parser.error(f"--every {args.every:g} does nothing without --follow: add it")
    if args.every is not None and not 0.1 <= args.every <= 86_400:
        parser.error(f"--every must be 0.1..86400 seconds, got {args.every:g}")
    return args


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parse(argv)
    try:
        run_dir = args.run_dir or newest_run(RUNS)
        if args.follow:
            wait_for(run_dir)
            run = follow(run_dir, args.every or EVERY_S, args.json)
        else:
            run = read_run(run_dir)
            print(run.to_json() if args.json else "\n".join(describe(run)))
    except KeyboardInterrupt:
        return 130
    return 1 if run.state in BAD else 0
