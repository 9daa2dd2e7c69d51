"""Show the state of a run, once or until it ends: `python -m rl_dist.status`.

All information is read from the run directory (`rl_dist.run_dir`). While a run trains, it holds a
lock on its directory and writes its current phase to state.json. This command changes no file and
does not import torch.
"""

import json
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from rl_dist.errors import CommandParser, UserError, explains_errors, printable
from rl_dist.files import Record
from rl_dist.run_dir import ENDED, STATE_FILE, JobState, RunDir

RUNS = Path("runs")
EVERY_S = 2.0  # seconds between two updates of --follow
RECENT = 20  # number of newest iterations from which metrics are read
# names of the rows that --follow prints on one line
LINE = ("state", "progress", "speed", "returns", "checkpoint")
# states of a run that has ended
OVER = ("finished", "stopped", "failed", "dead")
# prefixes of metrics in the row "returns"
RETURNS = ("episode/return", "valid/return", "valid/sharpe")
# prefixes of metrics in the row of each rank
USE = ("cpu/", "ram/", "gpu/", "time/idle_share")
EPILOG = """examples:
  python -m rl_dist.status                          the newest run below runs/
  python -m rl_dist.status runs/my_run --follow     one line per change, until the run ends
  python -m rl_dist.status runs/my_run --json       one JSON object; with --follow, one per change
states: starting, running, restarting, finished (trained and evaluated), stopped (on request, or
because the launcher was killed; a checkpoint was saved), failed (with an error), dead (ended
without recording why, for example by SIGKILL)
This command changes no file and does not load torch. A run on another machine with a shared disk is
shown as running only if the disk supports file locks across machines.
exit codes: 0 in progress, finished or stopped; 1 failed or dead; 2 no run in the directory"""
Status = dict[str, Any]


# ---- reading a run


def read_status(run_dir: Path) -> Status:
    """Read the status of a run from its files and its lock; an unknown value is None.

    Raises:
        UserError: the folder contains no run, or state.json is incomplete or another program wrote
            it.
    """
    run = RunDir(run_dir)
    job = run.state() if run_dir.is_dir() else None
    if job is None:
        raise UserError(f"{run_dir} has no {STATE_FILE}: give a run directory")
    records = run.records(last=RECENT)
    rank_metrics = [entry for record in records for entry in record.get("ranks", ())]
    speeds = [speed for record in records if (speed := record.get("time/sps") or 0) > 1e-9]
    steps_per_s = median(speeds) if speeds else None
    done = job.global_step if job.unit == "steps" else job.episodes
    status: Status = job.model_dump() | {
        "run_dir": str(run_dir),
        "env": "",
        "done": done,
        "steps_per_s": steps_per_s,
        "eta_s": None,
        "returns": _latest(records, RETURNS),
    }
    for rank in status["ranks"]:
        rank |= _latest((entry for entry in rank_metrics if entry.get("rank") == rank["rank"]), USE)
    if steps_per_s and done:
        status["eta_s"] = job.global_step / steps_per_s * max(0.0, job.target / done - 1.0)
    with suppress(OSError, UserError, LookupError, TypeError):
        status["env"] = str(run.config()["task"]["env"])
    state, reason = _state_of(run, job)
    return status | {"state": state, "reason": reason}


def _latest(records: Iterable[Record], names: tuple[str, ...]) -> Record:
    """Return the newest value of each metric whose name begins with an element of `names`."""
    items = (item for record in records for item in record.items())
    return {name: value for name, value in items if name.startswith(names) and value is not None}


def _state_of(run: RunDir, job: JobState) -> tuple[str, str]:
    """Return the state of a run, and the reason for this state.

    The state is "starting", "restarting", "running" or an element of OVER.
    """
    if run.is_locked():
        if job.phase in ("starting", "restarting"):
            return job.phase, f"restart {job.restarts}" if job.restarts else ""
        return "running", f"in phase {job.phase}"
    fix = "--resume continues from its checkpoint" if job.checkpoint else "it has no checkpoint"
    if run.summary_path.is_file() or job.phase == "done":
        return "finished", ""
    if job.phase in ENDED:
        return job.phase, (job.exit and job.exit.error) or fix
    if job.phase == "restarting" and job.exit:
        return "stopped", "torchrun ended all ranks and restarted none; --resume continues the run"
    why = "without recording why: it was killed, or the machine went down"
    return "dead", f"it ended during {job.phase} {why}; {fix}"


# ---- showing a run


def describe(run: Status) -> dict[str, str]:
    """Format a status as rows: name of the row -> text."""
    done = f"{run['done']:,} of {run['target']:,} {run['unit']}"
    reason = f": {run['reason']}" if run["reason"] else ""
    rows = {
        "run": run["run_dir"],
        "state": run["state"] + reason,
        "job": f"{run['env']}, {run['num_ranks']} rank(s), strategy {run['strategy']}",
        "progress": f"iteration {run['iteration']:,}, {done}",
    }
    if run["eta_s"] is not None:
        time_left = timedelta(seconds=min(round(run["eta_s"]), 10**10))
        speed = f"{run['steps_per_s']:,.1f} steps/s"
        rows["speed"] = f"{speed}, {time_left} left, not counting validation and checkpoints"
    rows["returns"] = _listed(run["returns"])
    rows["checkpoint"] = run["checkpoint"]["path"] if run["checkpoint"] else "none"
    for rank in run["ranks"]:
        place = f"process {rank['pid']} of {rank['host']}, {rank['device']}"
        rows[f"rank {rank['rank']}"] = f"{place}, {_listed(rank)}"
    return {name: printable(text) for name, text in rows.items() if text}


def _listed(metrics: Record) -> str:
    """Format the metrics as one text; values whose name has no slash are not metrics."""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if "/" in name)


# ---- the command


def newest_run(runs: Path) -> Path:
    """Return the run in `runs` whose state.json was written last."""
    states = list(runs.glob(f"*/{STATE_FILE}"))
    if not states:
        raise UserError(f"there is no run in {runs}/: give a run directory")
    return max(states, key=lambda path: path.stat().st_mtime).parent


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = CommandParser(
        prog="python -m rl_dist.status",
        description="Show a run's state, progress, speed, checkpoint, and hardware use per rank.",
        epilog=EPILOG,
    )
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR")
    parser.add_argument("--follow", action="store_true", help="print changes until the run ends")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    run_dir = args.run_dir or newest_run(RUNS)
    last_text = ""
    while True:
        run = read_status(run_dir)
        rows = describe(run)
        if args.json:
            text = json.dumps(run)
        elif args.follow:
            text = " | ".join(text for name, text in rows.items() if name in LINE)
        else:
            text = "\n".join(f"{name:<11} {text}" for name, text in rows.items())
        if text != last_text:
            print(text, flush=True)
        if not args.follow or run["state"] in OVER:
            return 1 if run["state"] in ("failed", "dead") else 0
        last_text = text
        time.sleep(EVERY_S)


if __name__ == "__main__":
    for signum in (signal.SIGPIPE, signal.SIGINT):  # exit silently on a closed pipe or Ctrl-C
        signal.signal(signum, signal.SIG_DFL)
    sys.exit(main())
