"""What became of a run, read from its directory alone; imports nothing slow.

A run holds a lock on its config.json while it trains (rl_dist/checkpoint/run_lock.py). Files may be torn, missing
or foreign: what cannot be read is left out, and `notes` says so.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rl_dist.checkpoint.seal import CheckpointError, open_sealed, read_sealed
from rl_dist.hardware.plain_files import plain_file, read_plain
from rl_dist.telemetry.rank_logs import Message, RankLog, last_messages, read_logs, tail

STARTING_S = 120.0  # from the configuration to the first sign of life of a rank, or from one life to the next
RECENT = 20  # iterations that figures are taken over
LARGE_BYTES = 256 * 2**20  # of checkpoints above only the ends are read: the rest would take long
HUNG_FACTOR, HUNG_S = 20.0, 60.0  # an iteration that takes so many times longer than usual, and at least so long
LARGE = 1e18  # larger numbers are rubbish
UNREADABLE = (ValueError, OverflowError, RecursionError)  # what json and int raise at rubbish
OVER = ("finished", "stopped", "failed", "dead")


class NoRunError(ValueError):
    """There is no run here; the message is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run at one instant; None: not known."""

    run_dir: str
    state: str  # starting, running, restarting, or one of OVER
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def newest_run(runs: Path) -> Path:
    """The run below `runs` that was written to last.

    Raises:
        NoRunError: there is none.
    """
    found = _runs_below(runs)
    if not found:
        raise NoRunError(f"there is no run in {runs}/: name a run directory")
    return found[-1]


def _runs_below(folder: Path) -> list[Path]:
    """Run directories in a folder, that written to last at the end."""
    found = [config.parent for config in folder.glob("*/config.json")]
    return sorted(found, key=lambda run: max(_mtime(run / "metrics.jsonl") or 0, _mtime(run / "config.json") or 0))


def read_run(run_dir: Path, num_messages: int = 5) -> RunState:
    """Look at a run directory.

    Raises:
        NoRunError: it is none.
    """
    config, notes = _read_config(run_dir), list[str]()
    records = _read_records(run_dir / "metrics.jsonl", notes)
    logs = read_logs(run_dir)
    summary = _read_summary(run_dir / "summary.json", notes)
    train, last = config["train"], records[-1] if records else {}
    by_steps = bool(train.get("total_steps"))
    seconds = _iteration_seconds(records)
    facts = {
        "iteration": last.get("iteration", 0),
        "global_step": last.get("global_step", 0),
        "done": int(_number(last.get("global_step" if by_steps else "episode/total")) or 0),
        "total": train["total_steps" if by_steps else "num_episodes"],
        "unit": "steps" if by_steps else "episodes",
        "iteration_s": median(seconds) if seconds else None,
        "metrics_age_s": _age(run_dir / "metrics.jsonl"),
    }
    saved = _newest_checkpoint(run_dir / "checkpoints", notes)
    state, reason = _state(run_dir, facts, summary, logs, config["launch"].get("max_restarts", 0))
    if state == "dead":
        reason += "; --resume goes on from its checkpoint" if saved else "; it has no checkpoint to go on from"
    num_ranks, device = _began(logs, last)
    strategy = config["launch"].get("chosen_strategy") or config["launch"].get("strategy", "")
    if strategy == "hybrid" and config["launch"].get("hybrid_form") == "pipeline":
        strategy = "hybrid (pipeline)"
    if strategy == "default" and num_ranks:
        strategy = "ddp" if num_ranks > 1 else "none"  # as rl_dist.parallel.strategy, which loads torch
    return RunState(
        run_dir=str(run_dir),
        state=state,
        reason=reason,
        env=_env(config),
        strategy=strategy,
        device=device,
        num_ranks=num_ranks,
        **facts,
        **_figures(records, facts, state),
        **saved,
        use=_use(records),
        messages=last_messages(logs, num_messages),
        notes=notes,
    )


# ---- files


def _read_config(run_dir: Path) -> dict[str, Any]:
    if not run_dir.is_dir():
        raise NoRunError(f"{run_dir} is {'a file' if run_dir.exists() else 'not there'}: give a run directory")
    path = run_dir / "config.json"
    try:
        config = json.loads(read_plain(path))
    except FileNotFoundError:
        below = _runs_below(run_dir)
        cure = f"it holds {len(below)} run(s), such as {below[-1]}: name one" if below else "give a run directory"
        raise NoRunError(f"{run_dir} is no run directory, for it has no config.json; {cure}") from None
    except OSError as error:
        raise NoRunError(f"{path} cannot be read: {error.strerror or error}; is this a run directory?") from None
    except UNREADABLE:
        raise NoRunError(f"{path} is torn or not ours: it is no JSON; is this a run directory?") from None
    train = config.get("train") if isinstance(config, dict) else None
    totals = [train.get(name) for name in ("total_steps", "num_episodes")] if isinstance(train, dict) else [None]
    if not all(isinstance(total, int) and _number(total) is not None for total in totals) or not isinstance(
        config.get("launch"), dict
    ):
        raise NoRunError(f"{path} is not ours: it does not say how long to train; is this a run directory?")
    return config


def _read_records(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The last records of metrics.jsonl, without those that are torn."""
    found, torn = [], 0
    for line in tail(path).splitlines():
        try:
            record = json.loads(line)
            found.append(record | {name: _count(record[name]) for name in ("iteration", "global_step")})
        except (KeyError, TypeError, *UNREADABLE):
            torn += 1
    if torn:
        notes.append(f"{path.name} has {torn} torn line(s)")
    return found[-2 * RECENT :]


def _read_summary(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        summary = json.loads(read_plain(path))
        return summary if isinstance(summary, dict) else {}
    except FileNotFoundError:
        return {}
    except (OSError, *UNREADABLE):
        notes.append(f"{path.name} is torn")
        return {}


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _age(path: Path) -> float | None:
    modified = _mtime(path)
    return None if modified is None else max(0.0, time.time() - modified)


def _env(config: dict[str, Any]) -> str:
    task = config.get("task")
    return str(task.get("env", "")) if isinstance(task, dict) else ""


# ---- what they mean


def is_locked(run_dir: Path) -> bool:
    """Whether a training holds the run directory."""
    try:
        with open(run_dir / "config.json", "rb", opener=plain_file) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False  # closing lets it go: a training that begins just now tries again
    except BlockingIOError:
        return True
    except OSError:
        return False


def _state(
    run_dir: Path, facts: dict[str, Any], summary: dict[str, Any], logs: Sequence[RankLog], max_restarts: int
) -> tuple[str, str]:
    """State and reason."""
    complete = bool(facts["done"]) and facts["done"] >= facts["total"]
    if is_locked(run_dir):
        return "running", _running_reason(facts, logs, complete)
    config_at, metrics_at = (_mtime(run_dir / name) or 0.0 for name in ("config.json", "metrics.jsonl"))
    logged_at = max((log.modified for log in logs), default=0.0)
    now = time.time()
    if not summary and config_at > logged_at and abs(now - config_at) < STARTING_S:  # clocks can be set back
        return "starting", f"begun {max(0.0, now - config_at):.0f} s ago, its ranks have not come yet"
    if (_number(summary.get("iteration")) or 0) >= max(1, facts["iteration"]):  # the last line of metrics may be torn
        return "finished", ""
    if not logs and not facts["iteration"]:
        return "dead", "no rank has ever started"
    state, reason = _how_it_ended(logs, complete)
    if state != "stopped" and max_restarts and abs(now - max(logged_at, metrics_at)) < STARTING_S:
        return "restarting", f"no rank lives, and --max_restarts is {max_restarts}: {reason}"
    return state, reason


def _how_it_ended(logs: Sequence[RankLog], complete: bool) -> tuple[str, str]:
    errors = [log.error for log in logs if log.error]
    if errors:
        first = min(errors, key=lambda error: error.time)
        return "failed", f"rank {first.rank}, {first.time}: {first.text}"
    trained = any(log.trained for log in logs)
    if trained and not complete:
        return "stopped", "it was asked to stop, or its launcher was killed, and it saved; --resume goes on"
    where = "while it was judged" if trained else "without a word: killed, or the machine went down"
    return "dead", f"it ended {where}"


def _running_reason(facts: dict[str, Any], logs: Sequence[RankLog], complete: bool) -> str:
    if any(log.trained for log in logs):
        return "training is over, it is judged" if complete else "it was asked to stop"
    age_s, usual_s = facts["metrics_age_s"], facts["iteration_s"]
    if age_s is None or not facts["iteration"]:
        return "in its first iteration"
    if usual_s and age_s > max(HUNG_S, HUNG_FACTOR * usual_s):
        return f"no iteration has ended for {age_s:.0f} s, and one takes {usual_s:.2g} s: it validates, saves or hangs"
    return ""


def _began(logs: Sequence[RankLog], last: dict[str, Any]) -> tuple[int | None, str]:
    """Number of ranks and their device."""
    for log in logs:
        if log.began:
            return log.began
    ranks = last.get("ranks")
    return (len(ranks) if isinstance(ranks, list) else None), ""


def _iteration_seconds(records: Sequence[dict[str, Any]]) -> list[float]:
    """Of recent iterations, by their steps and speed: the records hold no clock."""
    found = []
    for before, record in zip(records, records[1:], strict=False):
        speed = _number(record.get("time/sps"))
        steps = record["global_step"] - before["global_step"]
        if speed and steps > 0 and record["iteration"] == before["iteration"] + 1:
            found.append(steps / speed)
    return found[-RECENT:]


def _figures(records: Sequence[dict[str, Any]], facts: dict[str, Any], state: str) -> dict[str, Any]:
    """Speed, time left, returns."""
    recent = records[-RECENT:]
    speeds = [speed for record in recent if (speed := _number(record.get("time/sps")))]
    ended = [
        (value, count)
        for record in recent
        if (value := _number(record.get("episode/return"))) is not None
        and (count := _number(record.get("episode/count")))
    ]
    validations = [{k: v for k, v in r.items() if k.startswith("valid/") and _number(v) is not None} for r in records]
    return {
        "steps_per_s": median(speeds) if speeds else None,
        "eta_s": _time_left(recent, facts) if state == "running" else None,
        "last_return": ended[-1][0] if ended else None,
        "mean_return": sum(v * n for v, n in ended) / sum(n for _, n in ended) if ended else None,
        "validation": next((found for found in reversed(validations) if found), {}),
    }


def _time_left(recent: Sequence[dict[str, Any]], facts: dict[str, Any]) -> float | None:
    if len(recent) < 2 or facts["iteration_s"] is None:
        return None
    key = "global_step" if facts["unit"] == "steps" else "episode/total"
    first, last = _number(recent[0].get(key)), _number(recent[-1].get(key))
    if first is None or last is None or last <= first:
        return None
    return max(0.0, facts["total"] - last) * facts["iteration_s"] * (len(recent) - 1) / (last - first)


def _number(value: Any) -> float | None:
    """A number that can be reckoned with; else None."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and -LARGE < value < LARGE
    return value if good else None


def _count(value: Any) -> int:
    if (number := _number(value)) is None:
        raise ValueError(f"{value} counts nothing")
    return int(number)


def _use(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By rank the last known values of GPU, CPU and memory, and the mean share of waiting."""
    found: dict[int, dict[str, Any]] = {}
    idle: dict[int, list[float]] = {}
    for record in records[-RECENT:]:
        ranks = record.get("ranks")
        for entry in ranks if isinstance(ranks, list) else []:
            if not isinstance(entry, dict) or not isinstance(entry.get("rank"), int):
                continue
            values = {
                k: v for k, v in entry.items() if k.startswith(("gpu/", "cpu/", "ram/")) and _number(v) is not None
            }
            found[entry["rank"]] = found.get(entry["rank"], {}) | values
            if (share := _number(entry.get("time/idle_share"))) is not None:
                idle.setdefault(entry["rank"], []).append(share)
    means = {rank: {"time/idle_share": sum(shares) / len(shares)} for rank, shares in idle.items()}
    return [{"rank": rank} | found[rank] | means.get(rank, {}) for rank in sorted(found)]


def _newest_checkpoint(folder: Path, notes: list[str]) -> dict[str, Any]:
    """The newest checkpoint that is whole; notes name newer ones that are not."""
    numbered = [path for path in folder.glob("iteration_*.pt") if path.stem[10:].isdecimal()]
    for path in sorted(numbered, key=lambda path: int(path.stem[10:]), reverse=True):
        try:
            about = path.lstat()  # it may be a link to nowhere
            problem = _damage(path, about.st_mtime_ns, about.st_size)
        except FileNotFoundError:
            continue  # a newer one has just taken its place
        if not problem:
            age_s, checked = max(0.0, time.time() - about.st_mtime), about.st_size <= LARGE_BYTES
            return {"checkpoint": path.name, "checkpoint_age_s": age_s, "checkpoint_checked": checked}
        notes.append(problem)
    return {}


@functools.lru_cache(maxsize=64)
def _damage(path: Path, modified_ns: int, size: int) -> str:
    """What is wrong with a checkpoint file, "" if nothing; remembered while the file stays as it is."""
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
