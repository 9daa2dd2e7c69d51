"""List the metrics of a training run, which metrics.csv describes.

The reference page of the documentation is generated from this table. A test compares the table
with the metrics of real runs.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rl_dist.errors import UserError, did_you_mean


class Metric(NamedTuple):
    """One key of a record in metrics.jsonl; the fields are columns of metrics.csv."""

    unit: str
    when: str  # kind of run that writes this metric; "": every run
    # record: one value for all ranks; ranks: one value per rank, in the record's list `ranks`;
    # both: a value for all ranks and one per rank
    place: str
    meaning: str


_LINES = Path(__file__).with_name("metrics.csv").read_text(encoding="utf-8").splitlines()
METRIC_TABLE = {name: Metric(*fields) for name, *fields in csv.reader(_LINES[1:])}


def check_metric(flag: str, name: str, validated: Sequence[str], precision: str) -> None:
    """Raise a UserError if this run will not record a metric.

    All names that start with env/ are accepted, because environments define these metrics during
    training.

    Args:
        validated: names of the metrics of the task's validation.
    """
    # Omit the metrics of validation, which are added below, and those of fp16 for other precisions.
    omitted = {"StockTrading-v0", "other environments", "fp16"} - {precision}
    known = [
        key
        for key, metric in METRIC_TABLE.items()
        if metric.place != "ranks" and metric.when not in omitted
    ]
    known.remove("ranks")
    known += [f"valid/{metric}" for metric in validated]
    if name not in known and not name.startswith("env/"):
        fix = did_you_mean(name, known) or "docs/reference.md lists all"
        raise UserError(f"{flag} {name} is not a metric of this run: {fix}")
