"""The state of a run, read from its directory alone; imports nothing slow.

A run holds a lock on its config.json while it trains (rl_dist/checkpoint/run_lock.py), and its
state.json says what it does. Of metrics and logs, what is torn or foreign is left out.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from rl_dist.files import plain_file, read_plain
from rl_dist.telemetry.state_file import STATE_FILE, JobState, read_state, runs_below

RECENT = 20  # iterations that figures are taken over
NUM_MESSAGES = 5  # the last warnings and errors
TAIL_BYTES = 2**20  # of files that grow
# an iteration that takes so many times longer than usual, and at least so long
HUNG_FACTOR, HUNG_S = 20.0, 60.0
LARGE = 1e18  # larger numbers are rubbish
OVER = ("finished", "stopped", "failed", "dead")
# the state by the phase of a run whose lock is free; any other phase: dead
ENDED = {"done": "finished", "stopped": "stopped", "failed": "failed"}
UNREADABLE = (OSError, ValueError, LookupError, TypeError, RecursionError)  # by json
Record = dict[str, Any]


class NoRunError(ValueError):
    """There is no run here; the message is one line for the user."""


class RunState(SimpleNamespace):
    """A run at one instant, see `read_run`; None: not known."""

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        return self.state in OVER

    def to_json(self) -> str:
        """Return all fields as one JSON object."""
        return json.dumps(vars(self), allow_nan=False)


def newest_run(runs: Path) -> Path:
    """Return the run below `runs` that was written to last."""
    found = list(runs.glob(f"*/{STATE_FILE}"))
    if not found:
        raise NoRunError(f"there is no run in {runs}/: name a run directory")
    return min(found, key=lambda path: _age_s(path) or 0.0).parent


def read_run(run_dir: Path) -> RunState:
    """Read a run directory."""
    job = read_state(run_dir) if run_dir.is_dir() else None
    if job is None:
        fix = runs_below(run_dir) or "give the directory of a run"
        raise NoRunError(f"{run_dir} has no {STATE_FILE}: {fix}")
    records = _read_records(run_dir / "metrics.jsonl")
    recent = records[-RECENT:]
    last = recent[-1] if recent else {"iteration": 0, "global_step": 0}
    counter = "global_step" if job.unit == "steps" else "episode/total"
    steps_per_s, iteration_s, eta_s = _pace(recent, counter, job.target)
    age_s = _age_s(run_dir / "metrics.jsonl")
    if is_locked(run_dir):
        state, reason = _running(job, last["iteration"], age_s, iteration_s)
    else:
        state, reason = _ended(job, (run_dir / "summary.json").is_file())

    # returns, of iterations in which episodes ended
    ended = [record for record in recent if record.get("episode/count", 0) > 0]
    ended = [record for record in ended if "episode/return" in record]
    num_ended = sum(record["episode/count"] for record in ended)
    sums = [record["episode/return"] * record["episode/count"] for record in ended]
    valid = [{k: v for k, v in each.items() if k.startswith("valid/")} for each in records]
    saved = job.checkpoint
    return RunState(
        run_dir=str(run_dir),
        state=state,  # starting, running, restarting, or one of OVER
        phase=job.phase,
        reason=reason,  # more about the state, "" if there is nothing to say
        env=_env(run_dir),
        strategy=job.strategy,
        device=", ".join(sorted({rank.device for rank in job.ranks})),
        num_ranks=job.num_ranks,
        iteration=last["iteration"],
        global_step=last["global_step"],
        done=int(last.get(counter, 0)),  # episodes or steps
        total=job.target,
        unit=job.unit,
        steps_per_s=steps_per_s,  # median of recent iterations
        iteration_s=iteration_s,
        eta_s=eta_s if state == "running" else None,  # without validation and checkpoints
        metrics_age_s=age_s,  # since metrics.jsonl was written last
        last_return=ended[-1]["episode/return"] if ended else None,
        mean_return=sum(sums) / num_ended if ended else None,  # of episodes of recent iterations
        validation=next((each for each in reversed(valid) if each), {}),  # the last one
        checkpoint=Path(saved.path).name if saved else None,  # the last one
        checkpoint_age_s=_age_s(run_dir / saved.path) if saved else None,
        use=_use(recent),
        messages=_last_messages(run_dir),
    )


# ---- files


def _env(run_dir: Path) -> str:
    try:
        return str(json.loads(read_plain(run_dir / "config.json"))["task"]["env"])
    except UNREADABLE:
        return ""


def _json_lines(path: Path) -> list[Record]:
    """Return the JSON objects in a file's last lines; none of a file that is no plain one."""
    found = []
    try:
        with open(path, "rb", opener=plain_file) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            found.append(json.loads(line))
        except UNREADABLE:
            continue
    return [value for value in found if isinstance(value, dict)]


def _read_records(path: Path) -> list[Record]:
    """Return the last records of metrics.jsonl, with only those values that are numbers."""
    records = []
    for line in _json_lines(path):
        record = _numbers(line)
        if {"iteration", "global_step"} <= record.keys():
            record |= {name: int(record[name]) for name in ("iteration", "global_step")}
            entries = line["ranks"] if isinstance(line.get("ranks"), list) else []
            record["ranks"] = [_numbers(entry) for entry in entries if isinstance(entry, dict)]
            records.append(record)
    return records[-2 * RECENT :]


def _numbers(record: Record) -> Record:
    numbers = {name: value for name, value in record.items() if type(value) in (int, float)}
    return {name: value for name, value in numbers.items() if abs(value) < LARGE}


def _last_messages(run_dir: Path) -> list[Record]:
    """Return the last warnings and errors of all ranks, oldest first."""
    lines = [line for path in run_dir.glob("logs/rank_*.jsonl") for line in _json_lines(path)]
    types = {"time": str, "level": str, "rank": int, "text": str}
    ours = [line for line in lines if {name: type(line[name]) for name in line} == types]
    return sorted(ours, key=lambda line: line["time"])[-NUM_MESSAGES:]


def _age_s(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


# ---- what they mean


def is_locked(run_dir: Path) -> bool:
    """Return True if a training holds the run directory."""
    try:
        with open(run_dir / "config.json", "rb", opener=plain_file) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False  # closing lets it go: a training that begins just now tries again
    except BlockingIOError:
        return True
    except OSError:
        return False


def _running(
    job: JobState, iteration: int, age_s: float | None, usual_s: float | None
) -> tuple[str, str]:
    """Return state and reason of a run that holds its lock."""
    if job.phase in ("starting", "restarting"):
        return job.phase, f"restart {job.restarts}" if job.restarts else ""
    if job.phase != "training":
        return "running", f"it is in {job.phase}"
    if age_s is None or not iteration:
        return "running", "in its first iteration"
    if usual_s and age_s > max(HUNG_S, HUNG_FACTOR * usual_s):
        usual = f"and one takes {usual_s:.2g} s: it may hang"
        return "running", f"no iteration has ended for {age_s:.0f} s, {usual}"
    return "running", ""


def _ended(job: JobState, has_summary: bool) -> tuple[str, str]:
    """Return state and reason of a run whose lock is free."""
    if has_summary:  # exactly while it is finished
        return "finished", ""
    if job.phase in ENDED:
        reason = job.exit.error if job.exit else ""
        return ENDED[job.phase], reason or ("--resume goes on" if job.phase == "stopped" else "")
    if job.phase == "restarting" and job.exit:
        return "stopped", "torchrun ended its ranks and did not start them again; --resume goes on"
    fix = "--resume goes on from its checkpoint" if job.checkpoint else "it has no checkpoint"
    why = "without a report: killed, or the machine went down"
    return "dead", f"it ended during {job.phase} {why}; {fix}"


def _pace(
    recent: list[Record], counter: str, total: int
) -> tuple[float | None, float | None, float | None]:
    """Return steps per second, seconds an iteration, and seconds until `counter` is `total`."""
    speeds = [record["time/sps"] for record in recent if record.get("time/sps", 0) > 1e-9]
    if not speeds:
        return None, None, None
    first, last, speed = recent[0], recent[-1], median(speeds)
    seconds = (last["global_step"] - first["global_step"]) / speed
    iterations = last["iteration"] - first["iteration"]
    done = last.get(counter, 0)
    gained = done - first.get(counter, 0)
    iteration_s = seconds / iterations if iterations > 0 < seconds else None
    eta_s = max(0.0, total - done) * seconds / gained if gained > 0 < seconds else None
    return speed, iteration_s, eta_s


def _use(recent: list[Record]) -> list[Record]:
    """Return by rank the last values of GPU, CPU, memory and waiting."""
    found: dict[int, Record] = {}
    for entry in (entry for record in recent for entry in record["ranks"]):
        if isinstance(entry.get("rank"), int):
            names = ("gpu/", "cpu/", "ram/", "time/idle_share", "rank")
            use = {name: value for name, value in entry.items() if name.startswith(names)}
            found.setdefault(entry["rank"], {}).update(use)
    return [found[rank] for rank in sorted(found)]
