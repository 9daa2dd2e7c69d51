"""The state of a run, read from its directory alone; imports nothing slow.

A run holds a lock on its config.json while it trains (rl_dist/checkpoint/run_lock.py), and its
state.json says what it does. What is torn, missing or foreign is left out, and `notes` says so.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rl_dist.checkpoint.seal import CheckpointError, open_sealed, read_sealed
from rl_dist.hardware.plain_files import plain_file, read_plain
from rl_dist.telemetry.state_file import JobState, StateFileError, read_state

RECENT = 20  # iterations that figures are taken over
NUM_MESSAGES = 5  # the last warnings and errors
TAIL_BYTES = 2**20  # of files that grow
LARGE_BYTES = 256 * 2**20  # of checkpoints above only the ends are read: the rest would take long
# an iteration that takes so many times longer than usual, and at least so long
HUNG_FACTOR, HUNG_S = 20.0, 60.0
LARGE = 1e18  # larger numbers are rubbish
OVER = ("finished", "stopped", "failed", "dead")
# the state by the phase of a run whose lock is free; any other phase: dead
ENDED = {"done": "finished", "stopped": "stopped", "failed": "failed"}
UNREADABLE = (ValueError, RecursionError)  # by json
Record = dict[str, Any]


class NoRunError(ValueError):
    """There is no run here; the message is one line for the user."""


@dataclass(frozen=True)
class Message:
    """A warning or error that a rank logged."""

    time: str
    level: str
    rank: int
    text: str


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run at one instant; None: not known."""

    run_dir: str
    state: str  # starting, running, restarting, or one of OVER
    phase: str = ""  # of state.json
    reason: str  # more about the state, "" if there is nothing to say
    env: str = ""
    strategy: str = ""
    device: str = ""
    num_ranks: int | None = None
    iteration: int = 0
    global_step: int = 0
    done: int = 0  # episodes or steps
    total: int = 0
    unit: str = "episodes"
    steps_per_s: float | None = None  # median of recent iterations
    iteration_s: float | None = None
    eta_s: float | None = None  # of a run that goes on, without validation and checkpoints
    metrics_age_s: float | None = None  # since metrics.jsonl was written last
    last_return: float | None = None
    mean_return: float | None = None  # of the episodes of recent iterations
    validation: dict[str, float] = field(default_factory=dict)  # the last one
    checkpoint: str | None = None  # the newest valid one
    checkpoint_age_s: float | None = None
    checkpoint_checked: bool = False  # its checksum is right; False: too large to be read for this
    use: list[dict[str, Any]] = field(default_factory=list)  # by rank: GPU, CPU, memory, idle share
    messages: list[Message] = field(default_factory=list)  # last warnings and errors, oldest first
    notes: list[str] = field(default_factory=list)  # what is wrong with the directory

    @property
    def over(self) -> bool:
        """Whether nothing more is to come."""
        return self.state in OVER

    def to_json(self) -> str:
        """Return all fields as one JSON object."""
        return json.dumps(asdict(self), allow_nan=False)


def newest_run(runs: Path) -> Path:
    """Return the run below `runs` that was written to last.

    Raises:
        NoRunError: there is none.
    """
    found = _runs_below(runs)
    if not found:
        raise NoRunError(f"there is no run in {runs}/: name a run directory")
    return found[-1]


def _runs_below(folder: Path) -> list[Path]:
    """Run directories in a folder, that written to last at the end."""

    def age_s(run: Path) -> float:
        ages = [_age(run / name) for name in ("metrics.jsonl", "config.json")]
        return min((age for age in ages if age is not None), default=0.0)

    return sorted((path.parent for path in folder.glob("*/config.json")), key=age_s, reverse=True)


def read_run(run_dir: Path) -> RunState:
    """Read a run directory.

    Raises:
        NoRunError: it is none.
    """
    # the files
    notes: list[str] = []
    config, total_steps, num_episodes = _read_config(run_dir)
    records = _read_records(run_dir / "metrics.jsonl", notes)
    job = None
    try:
        job = read_state(run_dir)
    except StateFileError as error:
        notes.append(str(error))
    saved = _newest_checkpoint(run_dir / "checkpoints", notes)
    evaluated = _evaluated_iteration(run_dir / "summary.json", notes)

    # how far and how fast
    last: Record = records[-1] if records else {"iteration": 0, "global_step": 0}
    counter = "global_step" if total_steps else "episode/total"
    total = total_steps or num_episodes
    recent = records[-RECENT:]
    steps_per_s, iteration_s, eta_s = _pace(recent, counter, total)
    age_s = _age(run_dir / "metrics.jsonl")

    # what it does
    iteration = last["iteration"]
    if is_locked(run_dir):
        state, reason = _running(job, iteration, age_s, iteration_s)
    else:
        state, reason = _ended(job, iteration, evaluated, saved.get("checkpoint"))

    # returns, of iterations in which episodes ended
    ended = [record for record in recent if {"episode/return", "episode/count"} <= record.keys()]
    ended = [record for record in ended if record["episode/count"]]
    num_ended = sum(record["episode/count"] for record in ended)
    sums = [record["episode/return"] * record["episode/count"] for record in ended]
    valid = [{k: v for k, v in each.items() if k.startswith("valid/")} for each in records]

    task = config.get("task")
    return RunState(
        run_dir=str(run_dir),
        state=state,
        phase=job.phase if job else "",
        reason=reason,
        env=str(task.get("env", "")) if isinstance(task, dict) else "",
        strategy=job.strategy if job else str(config["launch"].get("strategy", "")),
        device=", ".join(sorted({rank.device for rank in job.ranks})) if job else "",
        num_ranks=job.num_ranks if job else len(last["ranks"]) if "ranks" in last else None,
        iteration=iteration,
        global_step=last["global_step"],
        done=int(last.get(counter, 0)),
        total=total,
        unit="steps" if total_steps else "episodes",
        steps_per_s=steps_per_s,
        iteration_s=iteration_s,
        eta_s=eta_s if state == "running" else None,
        metrics_age_s=age_s,
        last_return=ended[-1]["episode/return"] if ended else None,
        mean_return=sum(sums) / num_ended if num_ended else None,
        validation=next((each for each in reversed(valid) if each), {}),
        **saved,
        use=_use(recent),
        messages=_last_messages(run_dir),
        notes=notes,
    )


# ---- files


def _read_config(run_dir: Path) -> tuple[dict[str, Any], int, int]:
    """Return the configuration with its total_steps and num_episodes."""
    if not run_dir.is_dir():
        what = "a file" if run_dir.exists() else "not there"
        raise NoRunError(f"{run_dir} is {what}: give a run directory")
    path = run_dir / "config.json"
    try:
        config = json.loads(read_plain(path))
        lengths = [_number(config["train"][name]) for name in ("total_steps", "num_episodes")]
        if not all(type(length) is int for length in lengths):
            raise TypeError("no numbers")
        config["launch"].items()
        return config, *lengths
    except FileNotFoundError:
        below = _runs_below(run_dir)
        fix = f"name one of its runs, such as {below[-1]}" if below else "give a run directory"
        raise NoRunError(f"{run_dir} is no run directory, it has no config.json; {fix}") from None
    except OSError as error:
        raise NoRunError(f"{path} cannot be read: {error.strerror or error}") from None
    except (*UNREADABLE, LookupError, TypeError, AttributeError):
        raise NoRunError(f"{path} is torn or foreign: it does not say how long to train") from None


def _json_lines(path: Path) -> tuple[list[Record], int]:
    """Return the JSON objects in a file's last lines, and the number of others.

    A file that is missing or no plain file holds none; its very last line may be torn.
    """
    try:
        with open(path, "rb", opener=plain_file) as file:
            start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(start)
            data = file.read(TAIL_BYTES)
    except OSError:
        return [], 0
    lines = (data.partition(b"\n")[2] if start else data).decode(errors="replace").splitlines()
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except UNREADABLE:
            continue
    objects = [value for value in found if isinstance(value, dict)]
    return objects, len(lines) - len(objects)


def _read_records(path: Path, notes: list[str]) -> list[Record]:
    """Return the last records of metrics.jsonl, with only those values that are numbers."""
    lines, torn = _json_lines(path)
    records = []
    for line in lines:
        record = _numbers(line)
        if not {"iteration", "global_step"} <= record.keys():
            torn += 1
            continue
        record |= {name: int(record[name]) for name in ("iteration", "global_step")}
        if isinstance(ranks := line.get("ranks"), list):
            record["ranks"] = [_numbers(entry) for entry in ranks if isinstance(entry, dict)]
        records.append(record)
    if torn:
        notes.append(f"{path.name} has {torn} torn line(s)")
    return records[-2 * RECENT :]


def _numbers(record: Record) -> Record:
    return {name: value for name, value in record.items() if _number(value) is not None}


def _number(value: Any) -> Any:
    """A number that can be calculated with; else None."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and -LARGE < value < LARGE
    return value if good else None


def _evaluated_iteration(path: Path, notes: list[str]) -> float:
    """Return the iteration that summary.json is about; 0: there is none."""
    try:
        return _number(json.loads(read_plain(path))["iteration"]) or 0
    except FileNotFoundError:
        return 0
    except (OSError, LookupError, TypeError, *UNREADABLE):
        notes.append(f"{path.name} is torn")
        return 0


def _last_messages(run_dir: Path) -> list[Message]:
    """Return the last warnings and errors of all ranks, oldest first."""
    found = []
    for path in run_dir.glob("logs/rank_*.jsonl"):
        for line in _json_lines(path)[0]:
            values = [line.get(name) for name in ("time", "level", "rank", "text")]
            if [*map(type, values)] == [str, str, int, str]:
                found.append(Message(*values))  # type: ignore[arg-type]
    return sorted(found, key=lambda message: message.time)[-NUM_MESSAGES:]


def _age(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _newest_checkpoint(folder: Path, notes: list[str]) -> Record:
    """Return the newest checkpoint that is whole; notes name newer ones that are not."""
    numbered = [path for path in folder.glob("iteration_*.pt") if path.stem[10:].isdecimal()]
    for path in sorted(numbered, key=lambda path: int(path.stem[10:]), reverse=True):
        try:
            about = path.lstat()  # it may be a link to nowhere
            problem = _damage(path, about.st_mtime_ns, about.st_size)
        except FileNotFoundError:
            continue  # a newer one has just taken its place
        if not problem:
            return {
                "checkpoint": path.name,
                "checkpoint_age_s": max(0.0, time.time() - about.st_mtime),
                "checkpoint_checked": about.st_size <= LARGE_BYTES,
            }
        notes.append(problem)
    return {}


@functools.lru_cache(maxsize=64)
def _damage(path: Path, modified_ns: int, size: int) -> str:
    """Return the damage of a checkpoint file, "" if none; cached until it changes."""
    try:
        if size > LARGE_BYTES:
            with open_sealed(path):
                return ""
        read_sealed(path)
    except CheckpointError as error:
        if not os.path.lexists(path):
            raise FileNotFoundError(path) from None
        return str(error)
    return ""


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
    job: JobState | None, iteration: int, age_s: float | None, usual_s: float | None
) -> tuple[str, str]:
    """Return state and reason of a run that holds its lock."""
    if job and job.phase in ("starting", "restarting"):
        return job.phase, f"restart {job.restarts}" if job.restarts else ""
    if job and job.phase != "training":
        return "running", f"it is in {job.phase}"
    if age_s is None or not iteration:
        return "running", "in its first iteration"
    if usual_s and age_s > max(HUNG_S, HUNG_FACTOR * usual_s):
        usual = f"and one takes {usual_s:.2g} s: it may hang"
        return "running", f"no iteration has ended for {age_s:.0f} s, {usual}"
    return "running", ""


def _ended(
    job: JobState | None, iteration: int, evaluated: float, checkpoint: str | None
) -> tuple[str, str]:
    """Return state and reason of a run whose lock is free."""
    # the last line of metrics may be torn
    if evaluated >= max(1, iteration):
        return "finished", ""
    if job and job.phase in ENDED:
        reason = job.exit.error if job.exit else ""
        return ENDED[job.phase], reason or ("--resume goes on" if job.phase == "stopped" else "")
    if not job and checkpoint == f"iteration_{iteration:08d}.pt":
        return "stopped", "it has saved its last iteration; --resume goes on"
    phase = f"during {job.phase} " if job else ""
    fix = "--resume goes on from its checkpoint" if checkpoint else "it has no checkpoint"
    return "dead", f"it ended {phase}without a report: killed, or the machine went down; {fix}"


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
    """Return by rank the last values of GPU, CPU and memory, and the mean share of waiting."""
    found: dict[int, Record] = {}
    idle: dict[int, list[float]] = {}
    for entry in (entry for record in recent for entry in record.get("ranks", ())):
        if not isinstance(rank := entry.get("rank"), int):
            continue
        use = {k: v for k, v in entry.items() if k.startswith(("gpu/", "cpu/", "ram/"))}
        found.setdefault(rank, {"rank": rank}).update(use)
        if "time/idle_share" in entry:
            idle.setdefault(rank, []).append(entry["time/idle_share"])
            found[rank]["time/idle_share"] = fmean(idle[rank])
    return [found[rank] for rank in sorted(found)]
