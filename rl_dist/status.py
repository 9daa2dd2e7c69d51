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
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rl_dist.errors import CommandParser, UserError, explains_errors, printable
from rl_dist.run_dir import STATE_FILE, JobState, Record, RunDir, runs_below

RUNS = Path("runs")
EVERY_S = 2.0
PATIENCE_S = 30.0  # for the directory of a training that has just been started
TEXT_WIDTH = 200  # characters of a message that are shown
RECENT = 20  # iterations that figures are taken over
NUM_MESSAGES = 5  # the last warnings and errors
# an iteration that takes so many times longer than usual, and at least so long
HUNG_FACTOR, HUNG_S = 20.0, 60.0
OVER = ("finished", "stopped", "failed", "dead")
# the state by the phase of a run whose lock is free; any other phase: dead
ENDED = {"done": "finished", "stopped": "stopped", "failed": "failed"}
# how figures are shown
SPEED = {
    "steps_per_s": "{:,.1f} steps/s",
    "iteration_s": "{:.3g} s an iteration",
    "metrics_age_s": "the last {:,.0f} s ago",
}
RETURNS = {
    "last_return": "return {:.4g}",
    "mean_return": "mean of recent ones {:.4g}",
    "valid/return": "valid/return {:.4g}",
    "valid/sharpe": "valid/sharpe {:.4g}",
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
  python -m rl_dist.status runs/my_run --follow     until it ends; to a file, a line per change
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
    counter = "global_step" if job.unit == "steps" else "episode/total"
    ended = [r for r in records if r.get("episode/count") and r.get("episode/return") is not None]
    returns = [record["episode/return"] for record in ended]
    counts = [record["episode/count"] for record in ended]
    fields = {
        "run_dir": str(run_dir),
        "phase": job.phase,
        "env": _env(run),
        "strategy": job.strategy,
        "device": ", ".join(sorted({rank.device for rank in job.ranks})),
        "num_ranks": job.num_ranks,
        "iteration": last["iteration"],
        "global_step": last["global_step"],
        "done": int(last.get(counter) or 0),  # episodes or steps
        "total": job.target,
        "unit": job.unit,
        "metrics_age_s": _age_s(run.metrics_path),  # since metrics.jsonl was written last
        "last_return": returns[-1] if ended else None,
        "mean_return": fmean(returns, counts) if ended else None,  # of recent episodes
        "validation": _latest(records, ("valid/",)),
        "checkpoint": Path(job.checkpoint.path).name if job.checkpoint else None,
        "use": [  # by rank
            {"rank": rank} | _latest(_entries(records, rank), tuple(USE))
            for rank in sorted({rank.rank for rank in job.ranks})
        ],
        "messages": run.messages()[-NUM_MESSAGES:],  # warnings and errors of all ranks
    }
    fields |= _pace(records, counter, job.target)
    state, reason = _state_of(run, job, fields)
    if state != "running":
        fields["eta_s"] = None
    return fields | {"state": state, "reason": reason}


def newest_run(runs: Path) -> Path:
    """Return the run below `runs` that was written to last."""
    states = list(runs.glob(f"*/{STATE_FILE}"))
    if not states:
        raise UserError(f"there is no run in {runs}/: name a run directory")
    return min(states, key=lambda path: _age_s(path) or 0.0).parent


def _env(run: RunDir) -> str:
    try:
        return str(run.config()["task"]["env"])
    except (UserError, LookupError, TypeError):
        return ""


def _age_s(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _state_of(run: RunDir, job: JobState, figures: Status) -> tuple[str, str]:
    """Return a run's state (starting, running, restarting or one of OVER) and the reason."""
    if run.is_locked():
        if job.phase in ("starting", "restarting"):
            return job.phase, f"restart {job.restarts}" if job.restarts else ""
        if job.phase != "training":
            return "running", f"it is in {job.phase}"
        age_s, usual_s = figures["metrics_age_s"], figures["iteration_s"]
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


def _pace(records: list[Record], counter: str, target: int) -> Status:
    """Return steps per second, seconds an iteration, and seconds until `counter` is `target`.

    The last one leaves out validation and checkpoints.
    """
    speeds = [speed for record in records if (speed := record.get("time/sps") or 0) > 1e-9]
    pace: Status = {"steps_per_s": None, "iteration_s": None, "eta_s": None}
    if speeds:
        first, last = records[0], records[-1]
        pace["steps_per_s"] = median(speeds)
        seconds = (last["global_step"] - first["global_step"]) / pace["steps_per_s"]
        iterations = last["iteration"] - first["iteration"]
        done = last.get(counter) or 0
        gained = done - (first.get(counter) or 0)
        if iterations > 0 < seconds:
            pace["iteration_s"] = seconds / iterations
        if gained > 0 < seconds:
            pace["eta_s"] = max(0.0, target - done) * seconds / gained
    return pace


def _entries(records: list[Record], rank: int) -> Iterable[Record]:
    """Return the entries of a rank."""
    entries = (entry for record in records for entry in record.get("ranks", ()))
    return (entry for entry in entries if entry.get("rank") == rank)


def _latest(records: Iterable[Record], names: tuple[str, ...]) -> Record:
    """Return the last number of every metric whose name begins so."""
    items = (item for record in records for item in record.items())
    return {name: value for name, value in items if name.startswith(names) and value is not None}


# ---- showing it


def describe(run: Status) -> list[tuple[str, str]]:
    """Return rows of a name and a text for people."""
    share = min(1.0, run["done"] / run["total"]) if run["total"] else 0.0
    budget = f"{run['done']:,} of {run['total']:,} {run['unit']} ({share:.0%})"
    eta_s = run["eta_s"]
    left = timedelta(seconds=min(round(eta_s), 10**10)) if eta_s is not None else ""
    rows = [
        ("run", run["run_dir"]),
        ("state", ": ".join(filter(None, (run["state"], _cut(run["reason"]))))),
        (
            "job",
            f"{run['env']}, {run['num_ranks']} ranks on {run['device']}, "
            f"strategy {run['strategy']}",
        ),
        ("progress", f"iteration {run['iteration']:,}, {budget}"),
        ("to go", f"{left} without validation and checkpoints" if left else ""),
        ("speed", _shown(run, SPEED)),
        ("return", _shown(run | run["validation"], RETURNS)),
        ("checkpoint", run["checkpoint"] or "none"),
        *((f"rank {entry['rank']}", _shown(entry, USE)) for entry in run["use"]),
    ]
    for message in run["messages"]:
        where = f"{message['time']} {message['level'].lower()}, rank {message['rank']}"
        rows.append(("logged", f"{where}: {_cut(message['text'])}"))
    return [(name, printable(text)) for name, text in rows if text]


def _shown(values: Mapping[str, Any], patterns: Mapping[str, str]) -> str:
    """Return what is known of these figures."""
    known = {name: values[name] for name in patterns if values.get(name) is not None}
    return ", ".join(patterns[name].format(value) for name, value in known.items())


def _cut(text: str) -> str:
    """Shorten a message; it is whole in --json and in the logs."""
    return textwrap.shorten(text, TEXT_WIDTH, placeholder=" ...")


def show(run: Status, *, as_json: bool, as_line: bool = False) -> None:
    """Print a run: as rows, as one JSON object, or as a line for logs."""
    rows = describe(run)
    text = "\n".join(f"{name:<11} {text}" for name, text in rows)
    if as_json:
        text = json.dumps(run)
    elif as_line:
        wanted = ("state", "progress", "to go", "speed", "return")
        text = " | ".join([time.strftime("%H:%M:%S"), *(t for name, t in rows if name in wanted)])
    print(text, flush=True)


# ---- the command


def follow(run_dir: Path, every_s: float, as_json: bool) -> Status:
    """Show the run until it is over."""
    on_terminal = sys.stdout.isatty() and not as_json
    before = None
    while True:
        run = read_status(run_dir)
        over = run["state"] in OVER
        now = [run[name] for name in ("state", "reason", "iteration", "checkpoint", "messages")]
        if on_terminal:
            print("\x1b[H\x1b[2J", end="")  # from the top of an empty terminal
        if on_terminal or now != before:
            show(run, as_json=as_json, as_line=not (on_terminal or over))
        if over:
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
    add("--every", type=float, default=EVERY_S, metavar="S", help=interval)
    add("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if not 0.1 <= args.every <= 86_400:
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
            run = follow(run_dir, args.every, args.json)
        else:
            run = read_status(run_dir)
            show(run, as_json=args.json)
    except KeyboardInterrupt:
        return 130
    return 1 if run["state"] in ("failed", "dead") else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main())
