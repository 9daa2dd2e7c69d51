"""One rank's share of a job, and its cost by runs without communication."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from rl_dist.speedup.model import RankCost


def share_flags(num_envs: int, batch_size: int, ranks: int, scaling: str) -> tuple[list[str], str]:
    """The sizes of one rank among `ranks` as flags, or why they cannot be divided."""
    if scaling == "weak" or ranks == 1:
        return [f"--num_envs={num_envs}"], ""
    if num_envs % ranks or batch_size % ranks:
        what = f"num_envs {num_envs} and batch_size {batch_size} do not divide over {ranks} ranks"
        return [], f"{what}: choose multiples of {ranks}, or --scaling weak"
    return [f"--num_envs={num_envs // ranks}", f"--batch_size={batch_size // ranks}"], ""


def rank_cost_of(copies: Sequence[Sequence[dict[str, Any]]]) -> RankCost:
    """One rank's own work, from the metrics of independent one-rank runs."""
    records = [record for records in copies for record in records]
    rows = []
    for record in records:
        elapsed_s = record["global_step"] / record["iteration"] / record["time/sps"]
        own_s = elapsed_s - record["time/sync_s"] - record["time/gradient_wait_s"]
        rows.append(seconds_of_rank(record, own_s - record["time/collect_s"]))
    return rank_cost_of_rows(
        rows,
        env_steps=round(records[0]["global_step"] / records[0]["iteration"]),
        gradient_steps=round(statistics.fmean(record["optim/steps"] for record in records)),
        step_spread_s=statistics.fmean(record["time/step_spread_s"] for record in records),
    )


def seconds_of_rank(entry: dict[str, Any], update_own_s: float) -> dict[str, float]:
    """An iteration of a rank by part; the rest is no rollout and no gradient step."""
    steps_s = sum(entry[f"time/{name}_s"] for name in ("forward", "backward", "optimizer"))
    rest_s = max(0.0, update_own_s - steps_s)
    return {"collect_s": entry["time/collect_s"], "update_s": steps_s, "rest_s": rest_s}


def rank_cost_of_rows(
    rows: Sequence[dict[str, float]], *, env_steps: int, gradient_steps: int, step_spread_s: float
) -> RankCost:
    """Means and deviations of own seconds by part; a row is an iteration of a rank.

    Not medians: cores of shared hosts have two speeds, which take turns; the middle is one of them.
    """
    own_s = [sum(row.values()) for row in rows]
    update_spread_s = spread([row["update_s"] for row in rows])
    of_steps = gradient_steps * step_spread_s**2
    return RankCost(
        env_steps=env_steps,
        gradient_steps=gradient_steps,
        **{name: statistics.fmean(row[name] for row in rows) for name in rows[0]},
        collect_spread_s=spread([row["collect_s"] for row in rows]),
        step_spread_s=step_spread_s,
        update_spread_s=math.sqrt(max(0.0, update_spread_s**2 - of_steps)),
        relative_error=spread(own_s) / statistics.fmean(own_s) / math.sqrt(len(own_s)),
    )


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
