"""What a rank's own work takes, from metrics of runs without communication."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

from rl_dist.errors import UserError
from rl_dist.parallel.strategy import GRADIENT_BYTES_LOGGED
from rl_dist.speedup.model import Work

PARTS = ("collect", "forward", "backward", "optimizer")  # of an iteration's own seconds, and then the rest


def work_of(copies: Sequence[Sequence[dict[str, Any]]]) -> Work:
    """One rank's own work, from the metrics of independent one-rank runs."""
    records = [record for records in copies for record in records]
    if not records:
        raise UserError("no iteration was measured: give more --iterations")
    rows = [_own_seconds(record) for record in records]
    return work_of_rows(
        rows,
        env_steps=round(records[0]["global_step"] / records[0]["iteration"]),
        gradient_steps=round(statistics.fmean(record["optim/steps"] for record in records)),
        step_spread_s=statistics.fmean(record["time/step_spread_s"] for record in records),
    )


def work_of_rows(
    rows: Sequence[dict[str, float]], *, env_steps: int, gradient_steps: int, step_spread_s: float
) -> Work:
    """Means and deviations of own seconds by part; a row is an iteration of a rank.

    Not medians: cores of shared hosts have two speeds, which take turns; the middle is one of them.
    """
    updates_s = [row["forward"] + row["backward"] + row["optimizer"] for row in rows]
    own_s = [sum(row.values()) for row in rows]
    return Work(
        env_steps=env_steps,
        gradient_steps=gradient_steps,
        **{f"{name}_s": statistics.fmean(row[name] for row in rows) for name in rows[0]},
        collect_spread_s=spread([row["collect"] for row in rows]),
        step_spread_s=step_spread_s,
        update_spread_s=math.sqrt(max(0.0, spread(updates_s) ** 2 - gradient_steps * step_spread_s**2)),
        relative_error=spread(own_s) / statistics.fmean(own_s) / math.sqrt(len(own_s)),
    )


def _own_seconds(record: dict[str, Any]) -> dict[str, float]:
    """An iteration of a one-rank run by part, without its collectives."""
    parts = {name: record[f"time/{name}_s"] for name in PARTS}
    elapsed_s = record["global_step"] / record["iteration"] / record["time/sps"]
    own_s = elapsed_s - record["time/sync_s"] - record["time/gradient_wait_s"]
    return parts | {"rest": max(0.0, own_s - sum(parts.values()))}


def spread(values: Sequence[float]) -> float:
    """Standard deviation; of a single value, 0."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def steps_per_episode(records: Sequence[dict[str, Any]]) -> float:
    """Environment steps per ended episode; nan if none ended.

    Not the mean length: the first episodes begin at a random age, so those that end soon are short.
    """
    ended = sum(record["episode/count"] for record in records)
    steps = sum(record["global_step"] / record["iteration"] for record in records)
    return steps / ended if ended else math.nan


def gradient_bytes_of_log(log: str) -> int:
    """The size of the gradient, as a rank logged it."""
    found = re.findall(GRADIENT_BYTES_LOGGED.replace("%d", r"(\d+)"), log)
    assert found, "rl_dist.parallel.strategy logs it"
    return int(found[-1])
