"""Predicted against measured, at the end of a run on several ranks.

The prediction is the model's: from what the ranks' own work took, how much that varied, and what a
reduction takes once all ranks are there. What it cannot explain is in the difference.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_dist.run_dir import RunDir
from rl_dist.speedup.model import Communication, predict
from rl_dist.speedup.rank_cost import rank_cost_of_rows, seconds_of_rank

logger = logging.getLogger(__name__)

WARM_UP, LATEST = 2, 200  # iterations left out at the beginning, and at most looked at


def outcome_of(run_dir: Path) -> dict[str, Any] | None:
    """Predicted and measured steps/s of a run; None: one rank, or few iterations.

    Never fails: what cannot be read is logged.
    """
    try:
        records = RunDir(run_dir).records()
        ranks = len(records[-1]["ranks"]) if records else 1
        same = [record for record in records if len(record["ranks"]) == ranks][WARM_UP:][-LATEST:]
        return outcome(same) if ranks > 1 and same else None
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {error}"
        logger.warning("no comparison of predicted and measured throughput: %s", what)
        return None


def outcome(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The comparison, from metrics of several ranks."""
    entries = [entry for record in records for entry in record["ranks"]]
    ranks, last = len(records[0]["ranks"]), records[-1]
    before = records[0] if len(records) > 1 else {"global_step": 0, "iteration": 0}
    iterations = last["iteration"] - before["iteration"]
    work = rank_cost_of_rows(
        [seconds_of_rank(entry, entry["time/update_own_s"]) for entry in entries],
        env_steps=round((last["global_step"] - before["global_step"]) / iterations) // ranks,
        gradient_steps=round(statistics.fmean(record["optim/steps"] for record in records)),
        step_spread_s=statistics.fmean(entry["time/step_spread_s"] for entry in entries),
    )
    reductions = [min(entry["time/reduction_s"] for entry in record["ranks"]) for record in records]
    communication = Communication(
        gradient_s=statistics.median(reductions),
        # of the iteration in which nobody waited for others
        small_s=min(record["time/sync_s"] for record in records),
    )
    prediction = predict(work, ranks, communication)
    # steps over time
    measured = statistics.harmonic_mean([record["time/sps"] for record in records])
    return {
        "ranks": ranks,
        "iterations": len(records),
        "measured_steps_per_s": measured,
        "predicted_steps_per_s": prediction.steps_per_s,
        "error": prediction.steps_per_s / measured - 1.0,
        "busy": min(1.0, work.seconds * measured / prediction.env_steps),
        "predicted_shares": prediction.shares,
    }


def describe(found: dict[str, Any]) -> str:
    """One line for the user."""
    trained = f"{found['ranks']} ranks trained {found['measured_steps_per_s']:,.0f} steps/s"
    model = f"{found['predicted_steps_per_s']:,.0f} ({found['error']:+.1%})"
    return (
        f"scaling: {trained}; the model of rl_dist.speedup, given their own times, says {model}; "
        f"each worked {found['busy']:.0%} of the time"
    )
