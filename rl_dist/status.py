"""Show how a run is doing, now or until it ends: `python -m rl_dist.status`.

Everything is read from the run's directory (`rl_dist.run_dir`): a run holds the lock on it while it
trains, and its state.json says what it does. Nothing is changed, and torch is not imported.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from rl_dist.errors import CommandParser, UserError, explains_errors, printable
from rl_dist.files import Record, read_messages
from rl_dist.run_dir import STATE_FILE, JobState, RunDir, runs_below

RUNS = Path("runs")
EVERY_S = 2.0  # between two looks of --follow
TEXT_WIDTH = 200  # characters of a message that are shown
RECENT = 20  # iterations that figures are taken over
NUM_MESSAGES = 5  # the last warnings and errors
# An iteration that takes this many times longer than usual, and at least this long, may hang.
HUNG_FACTOR, HUNG_S = 20.0, 60.0
LINE = ("state", "progress", "to go", "speed", "return")  # rows that --follow shows
OVER = ("finished", "stopped", "failed", "dead")
# the state by the phase of a run that nobody locks; any other phase: dead
ENDED = {"done": "finished", "stopped": "stopped", "failed": "failed"}
# figures by the row that shows them
SPEED = {
    "steps_per_s": "{:,.1f} steps/s",
    "iteration_s": "{:.3g} s an iteration",
    "metrics_age_s": "the last {:,.0f} s ago",
}
RETURNS = {
    "episode/return": "return {:.4g}",
    "valid/return": "in validation {:.4g}",
    "valid/sharpe": "with Sharpe ratio {:.4g}",
}
USE = {
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
EPILOG = """examples:
  python -m rl_dist.status                          the newest run below runs/
  python -m rl_dist.status runs/my_run --follow     a line per change, until it ends
  python -m rl_dist.status runs/my_run --json       one JSON object; with --follow one per change
states: starting, running, restarting, finished (evaluated), stopped (on request, saved; also once
its launcher is killed), failed (with an error), dead (without a report, such as by SIGKILL)
Nothing is changed, and torch is not loaded. A run of another machine on a shared disk is seen as
running only where the disk passes file locks on.
exit codes: 0 it trains, has finished or was stopped; 1 failed or dead; 2 no run there"""
Status = dict[str, Any]


# ---- reading a run


def read_status(run_dir: Path) -> Status:
    """Return what state.json, metrics, logs and the lock say; None: not known.

    Raises:
        UserError: there is no run here, or its state.json is torn or foreign.
    """
    run = RunDir(run_dir)
    job = run.state() if run_dir.is_dir() else None
    if job is None:
        fix = runs_below(run_dir) or "give the directory of a run"
        raise UserError(f"{run_dir} has no {STATE_FILE}: {fix}")
    records = run.records(last=RECENT)
    last = records[-1] if records else {"iteration": 0, "global_step": 0}
    entries = [entry for record in records for entry in record.get("ranks", ())]
    metrics_age_s = None
    with suppress(OSError):
        metrics_age_s = max(0.0, time.time() - run.metrics_path.stat().st_mtime)
    status: Status = {
        "run_dir": str(run_dir),
        "phase": job.phase,
        "env": _env(run),
        "strategy": job.strategy,
        "device": ", ".join(sorted({rank.device for rank in job.ranks})),
        "num_ranks": job.num_ranks,
        "iteration": last["iteration"],
        "global_step": last["global_step"],
        "done": last["global_step"] if job.unit == "steps" else int(last.get("episode/total") or 0),
        "total": job.target,
        "unit": job.unit,
        "metrics_age_s": metrics_age_s,
        "returns": _latest(records, tuple(RETURNS)),
        "checkpoint": Path(job.checkpoint.path).name if job.checkpoint else None,
        "use": [
            {"rank": rank} | _latest((e for e in entries if e.get("rank") == rank), tuple(USE))
            for rank in sorted({rank.rank for rank in job.ranks})
        ],
        "messages": read_messages(run.logs)[-NUM_MESSAGES:],  # warnings and errors of all ranks
    }
    status |= _pace(status, records)
    state, reason = _state_of(run, job, status)
    if state != "running":
        status["eta_s"] = None
    return status | {"state": state, "reason": reason}


def _env(run: RunDir) -> str:
    try:
        return str(run.config()["task"]["env"])
    except (UserError, LookupError, TypeError):
        return ""


def _latest(records: Iterable[Record], names: tuple[str, ...]) -> Record:
    """Return the last number of every metric with such a beginning of its name."""
    items = (item for record in records for item in record.items())
    return {name: value for name, value in items if name.startswith(names) and value is not None}


def _pace(status: Status, records: Sequence[Record]) -> Status:
    """Return steps per second, seconds an iteration, and seconds to the end.

    The last one omits validation and checkpoints.
    """
    speeds = [speed for record in records if (speed := record.get("time/sps") or 0) > 1e-9]
    if not speeds or status["iteration"] <= 0:
        return dict.fromkeys(("steps_per_s", "iteration_s", "eta_s"))
    steps_per_s = median(speeds)
    seconds = status["global_step"] / steps_per_s
    left = max(0.0, status["total"] / status["done"] - 1.0) if status["done"] > 0 else None
    return {
        "steps_per_s": steps_per_s,
        "iteration_s": seconds / status["iteration"],
        "eta_s": None if left is None else left * seconds,
    }


def _state_of(run: RunDir, job: JobState, status: Status) -> tuple[str, str]:
    """Return a run's state (starting, running, restarting or one of OVER) and the reason."""
    if run.is_locked():
        if job.phase in ("starting", "restarting"):
            return job.phase, f"restart {job.restarts}" if job.restarts else ""
        if job.phase != "training":
            return "running", f"it is in {job.phase}"
        age_s, usual_s = status["metrics_age_s"], status["iteration_s"]
        if usual_s and age_s > max(HUNG_S, HUNG_FACTOR * usual_s):
            usual = f"and one takes {usual_s:.2g} s: it may hang"
            return "running", f"no iteration has ended for {age_s:.0f} s, {usual}"
        return "running", ""
    if run.summary_path.is_file():
        return "finished", ""
    if job.phase in ENDED:
        reason = job.exit.error if job.exit else ""
        return ENDED[job.phase], reason or "--resume continues it" * (job.phase == "stopped")
    if job.phase == "restarting" and job.exit:
        return "stopped", "torchrun ended its ranks and did not restart them; --resume continues it"
    fix = "--resume continues from its checkpoint" if job.checkpoint else "it has no checkpoint"
    why = "without a report: killed, or the machine went down"
    return "dead", f"it ended during {job.phase} {why}; {fix}"


# ---- showing it


def describe(run: Status) -> dict[str, str]:
    """Return texts for people by the name of their row."""
    share = min(1.0, run["done"] / run["total"]) if run["total"] else 0.0
    eta_s = run["eta_s"]
    left = timedelta(seconds=min(round(eta_s), 10**10)) if eta_s is not None else ""
    rows = {
        "run": run["run_dir"],
        "state": ": ".join(filter(None, (run["state"], _cut(run["reason"])))),
        "job": f"{run['env']}, {run['num_ranks']} rank(s) on {run['device']}, strategy "
        f"{run['strategy']}",
        "progress": f"iteration {run['iteration']:,}, {run['done']:,} of {run['total']:,} "
        f"{run['unit']} ({share:.0%})",
        "to go": f"{left} without validation and checkpoints" if left else "",
        "speed": _shown(run, SPEED),
        "return": _shown(run["returns"], RETURNS),
        "checkpoint": run["checkpoint"] or "none",
    }
    rows |= {f"rank {entry['rank']}": _shown(entry, USE) for entry in run["use"]}
    for number, message in enumerate(run["messages"], 1):
        where = f"{message['time']} {message['level'].lower()}, rank {message['rank']}"
        rows[f"message {number}"] = f"{where}: {_cut(message['text'])}"
    return {name: printable(text) for name, text in rows.items() if text}


def _shown(values: Mapping[str, Any], patterns: Mapping[str, str]) -> str:
    """Return the known ones of these figures."""
    known = {name: values[name] for name in patterns if values.get(name) is not None}
    return ", ".join(patterns[name].format(value) for name, value in known.items())


def _cut(text: str) -> str:
    """Shorten a message; it is whole in --json and in the logs."""
    return textwrap.shorten(text, TEXT_WIDTH, placeholder=" ...")


def show(run: Status, *, as_json: bool, as_line: bool = False) -> None:
    """Print a run: as rows, as one JSON object, or as a line for logs."""
    rows = describe(run)
    if as_json:
        text = json.dumps(run)
    elif as_line:
        shown = [text for name, text in rows.items() if name in LINE]
        text = " | ".join([time.strftime("%H:%M:%S"), *shown])
    else:
        text = "\n".join(f"{name:<11} {text}" for name, text in rows.items())
    print(text, flush=True)


def follow(run_dir: Path, as_json: bool) -> Status:
    """Show each change of the run until it is over."""
    before = None
    while True:
        run = read_status(run_dir)
        now = [run[name] for name in ("state", "reason", "iteration", "checkpoint", "messages")]
        if now != before:
            show(run, as_json=as_json, as_line=True)
        if run["state"] in OVER:
            return run
        before = now
        time.sleep(EVERY_S)


# ---- the command


def newest_run(runs: Path) -> Path:
    """Return the run below `runs` that was written to last."""
    states = list(runs.glob(f"*/{STATE_FILE}"))
    if not states:
        raise UserError(f"there is no run in {runs}/: name a run directory")
    return max(states, key=lambda path: path.stat().st_mtime).parent


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m rl_dist.status",
        description="Show a run's state, progress, speed, checkpoint, use of each rank, warnings.",
        epilog=EPILOG,
    )
    where = "default: the run below runs/ that was written last"
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help=where)
    parser.add_argument("--follow", action="store_true", help="show changes until the run is over")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    args = _parse(argv)
    run_dir = args.run_dir or newest_run(RUNS)
    try:
        if args.follow:
            run = follow(run_dir, args.json)
        else:
            run = read_status(run_dir)
            show(run, as_json=args.json)
    except KeyboardInterrupt:
        return 130
    return 1 if run["state"] in ("failed", "dead") else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main())
