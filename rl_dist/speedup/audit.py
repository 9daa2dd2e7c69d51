"""Compare prediction and measurement at the end of a run on several ranks.

The model predicts from the run's own figures: the times of the ranks, how much they varied, and the
duration of a reduction once all ranks are there. The difference is what the model cannot explain.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_dist.run_dir import RunDir
from rl_dist.speedup.model import predict, rank_cost

logger = logging.getLogger(__name__)

WARM_UP, LATEST = 2, 200  # iterations that are skipped at first, and at most compared


def audit(run_dir: Path) -> dict[str, Any] | None:
    """Compare predicted and measured steps/s of a run.

    None: one rank, or few iterations.

    Never fails: an unreadable file is logged.
    """
    try:
        records = RunDir(run_dir).records()
        ranks = len(records[-1]["ranks"]) if records else 1
        same = [record for record in records if len(record["ranks"]) == ranks][WARM_UP:][-LATEST:]
        return compare(same) if ranks > 1 and same else None
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        problem = f"{type(error).__name__}: {error}"
        logger.warning("no comparison of predicted and measured throughput: %s", problem)
        return None


def compare(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare over records of metrics.jsonl on the same several ranks."""
    work, ranks = rank_cost(records), len(records[0]["ranks"])
    # The rank that comes last to a reduction waits for the transfer only.
    reductions = [min(entry["time/reduction_s"] for entry in record["ranks"]) for record in records]
    gradients_s = work.gradient_steps * statistics.median(reductions)
    small_s = min(record["time/sync_s"] for record in records)
    prediction = predict(work, ranks, gradients_s + small_s)
    measured = statistics.harmonic_mean([record["time/sps"] for record in records])
    return {
        "ranks": ranks,
        "iterations": len(records),
        "measured_steps_per_s": measured,
        "predicted_steps_per_s": prediction.steps_per_s,
        "error": prediction.steps_per_s / measured - 1.0,
        "busy": min(1.0, work.seconds * measured / prediction.env_steps),
    }


def describe(found: Mapping[str, Any]) -> str:
    """Return the comparison in one line."""
    return (
        "scaling: {ranks} ranks trained {measured_steps_per_s:,.0f} steps/s; the model of "
        "rl_dist.speedup, given their own times, says {predicted_steps_per_s:,.0f} ({error:+.1%}); "
        "each worked {busy:.0%} of the time"
    ).format(**found)
