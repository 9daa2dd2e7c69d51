"""Predictions as rows and as a table; time and cost if a rate is known."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.benchmark import Timer

from rl_dist.machine import duration
from rl_dist.speedup.machines import AS_OF, CARDS_PER_MACHINE, LINKS, GpuModel, gpu_named
from rl_dist.speedup.measure import Measurements
from rl_dist.speedup.model import UPDATE, Link, Network, Prediction, bottleneck, predict

COLUMNS = ("machine", "ranks", "scaling", "theoretical", "predicted (95 %)", "efficiency",
           "lost most in", "source", "steps/s", "time", "cost")  # fmt: skip


@dataclass(frozen=True)
class SpeedupReport:
    """All predictions of one call, as JSON values; unknown ones are None."""

    title: str  # job, machine, date
    rows: list[dict[str, Any]]
    notes: list[str]


def report_of(
    measured: Measurements,
    cards: Sequence[GpuModel],
    between: Link,
    *,
    sps: float = 0.0,
    env_steps: float = math.nan,
    price_per_hour: float = 0.0,
) -> SpeedupReport:
    """Return rows for this machine, then for every card.

    Args:
        between: link between machines.
        sps: steps/s of one of the cards, or without cards of one rank here; 0: unknown.
        env_steps: length of the training; nan: unknown.
        price_per_hour: of one GPU; 0: the cards' list prices.
    """
    rows, notes, unknown = [], [*measured.notes], []
    for card in (None, *cards):
        name = card.name if card else "this machine"
        rate = sps if card or not cards else 0.0
        predictions = _predict_points(measured, card, between, rate)
        one = predictions[measured.points[0]]
        prices = (price_per_hour, price_per_hour)
        if card and not price_per_hour:
            prices = card.usd_per_hour
        known = bool(rate) or measured.is_steady and card in (None, gpu_named(measured.hardware))
        unknown += [] if known else [name]
        for point, prediction in predictions.items():
            source = "measured" if measured.is_measured(*point) else "modelled"
            row = {"machine": name, "scaling": point[1], "source": "estimate" if card else source}
            rows.append(
                row | _speedup(prediction, one) | _time(prediction, known, env_steps, prices)
            )
    if cards:
        notes.append(
            f"cards are estimates by {AS_OF} data sheets and list prices in US dollars: rollouts "
            f"as measured here, the rest scaled by peak fp32 rates, {CARDS_PER_MACHINE} cards to a "
            f"machine, {between.name} between"
        )
    if unknown:
        fix = "give --sps N, the steps/s of a run on one such card"
        notes.append(f"no time or cost for {', '.join(unknown)}: no rate is known; {fix}")
    if math.isnan(env_steps):
        notes.append("no time or cost: no episode ended in the short runs; give --total_steps")
    job = f"{measured.config['task']['env']}, {measured.sizes['num_envs']} environments"
    title = f"{job}; {measured.hardware}"
    return SpeedupReport(f"{title}, {time.strftime('%Y-%m-%d')}", rows, notes)


def _predict_points(
    measured: Measurements, card: GpuModel | None, between: Link, rate: float
) -> dict[tuple[int, str], Prediction]:
    """Predict all numbers of ranks here or on cards, at a rate of one rank unless it is 0."""
    network = Network(measured.link, between, measured.ranks_per_machine)
    if card:
        per_machine = min(CARDS_PER_MACHINE, measured.ranks_per_machine)
        network = Network(LINKS[card.link], between, per_machine)
        tflops = _fp32_tflops(measured)
    predictions: dict[tuple[int, str], Prediction] = {}
    slower = 1.0
    for ranks, scaling in measured.points:
        work, crowding = measured.work(ranks, scaling), measured.crowding(ranks)
        if card:  # which has cores of its own
            threads = measured.threads(ranks) if measured.on_cpu else 1
            work, crowding = work.times(tflops * threads / card.fp32_tflops, UPDATE), 1.0
        if rate and not predictions:
            slower = work.env_steps / rate / work.seconds
        talk_s = network.iteration_s(work.gradient_steps, measured.gradient_bytes, ranks)
        work = work.times(crowding * slower)
        predictions[ranks, scaling] = predict(work, ranks, talk_s * crowding)
    return predictions


def _fp32_tflops(measured: Measurements) -> float:
    """Return the fp32 rate of one thread here, or of the GPU by its data sheet, else measured."""
    if card := gpu_named(measured.hardware):
        return card.fp32_tflops
    matrix = torch.randn(768, 768, device=measured.device_type)
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=1)
    return 2 * 768**3 / timer.timeit(8).median / 1e12


def _speedup(prediction: Prediction, one: Prediction) -> dict[str, Any]:
    speedup = prediction.steps_per_s / one.steps_per_s
    where, fix, margin = "", "", 0.0
    if prediction.ranks > 1:
        where, fix = bottleneck(one, prediction)
        margin = min(0.9, 1.96 * math.hypot(one.relative_error, prediction.relative_error))
    return {
        "gpus": prediction.ranks,
        "speedup": speedup,
        "speedup_interval": [speedup * (1 - margin), speedup * (1 + margin)],
        "efficiency": speedup / prediction.ranks,
        "bottleneck": where,
        "fix": fix,
        "shares": {name: s / prediction.iteration_s for name, s in prediction.parts_s.items()},
    }


def _time(
    prediction: Prediction, known: bool, env_steps: float, prices: Sequence[float]
) -> dict[str, Any]:
    """Return rate, time and cost of a training; None: unknown."""
    hours = env_steps / prediction.steps_per_s / 3600
    timed = known and not math.isnan(hours)
    cost = [hours * prediction.ranks * price for price in prices] if any(prices) else None
    return {
        "steps_per_s": prediction.steps_per_s if known else None,
        "iteration_s": prediction.iteration_s if known else None,
        "hours": hours if timed else None,
        "cost": cost if timed else None,
    }


def table(report: SpeedupReport) -> str:
    """Return title, table, fixes and notes.

    At most 25 lines for 4 numbers of GPUs and a card.
    """
    # One rank is the same job for all ways of scaling.
    rows = [
        row for row in report.rows if row["gpus"] > 1 or row["scaling"] == report.rows[0]["scaling"]
    ]
    cells = [COLUMNS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"| {' | '.join(map(str.rjust, row, widths))} |" for row in cells]
    lines.insert(1, f"|{'|'.join('-' * (width + 1) + ':' for width in widths)}|")
    fixes = dict.fromkeys(row["fix"] for row in rows if row["fix"])
    notes = [f"to lose less: {'; '.join(fixes)}"] if fixes else []
    notes += [f"note: {note}" for note in report.notes]
    return "\n".join([report.title, "", *lines, "", *notes])


def _cells(row: dict[str, Any]) -> Sequence[str]:
    cost = row["cost"] or []
    return (
        row["machine"],
        str(row["gpus"]),
        row["scaling"] if row["gpus"] > 1 else "-",
        f"{row['gpus']}x",
        "{:.2f}x ({:.2f}-{:.2f})".format(row["speedup"], *row["speedup_interval"]),
        f"{row['efficiency']:.0%}",
        row["bottleneck"] or "-",
        row["source"],
        f"{row['steps_per_s']:,.0f}" if row["steps_per_s"] else "-",
        duration(row["hours"] * 3600) if row["hours"] else "-",
        "-".join(dict.fromkeys(f"{price:,.2f}" for price in cost)) or "-",
    )
