"""Predictions as rows and as a table; time and cost where a rate is known."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from rl_dist.machine import duration
from rl_dist.speedup.calibration import Calibration, Point
from rl_dist.speedup.machines import AS_OF, CARDS_PER_MACHINE, LINKS, GpuModel
from rl_dist.speedup.model import (
    MODEL_ERROR,
    OF_UPDATE,
    Prediction,
    bottleneck,
    modelled_communication,
)

HERE = "this machine"
COLUMNS = ("machine", "ranks", "scaling", "theoretical", "predicted (95 %)", "efficiency",
           "lost most in", "source")  # fmt: skip
ABSOLUTE = ("steps_per_s", "iteration_s", "interval_s", "parts_s")  # unknown without a rate
UNBILLED = ("hours", "hours_interval", "cost", "gpu_hours")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The length of training, and the price of an hour of one GPU."""

    num_episodes: int
    total_steps: int = 0  # instead of episodes
    steps_per_episode: float = math.nan
    price_per_hour: float | None = None  # None: that of cards, in US dollars

    @property
    def env_steps(self) -> float:
        """Environment steps of the whole run; nan: unknown."""
        return self.total_steps or self.num_episodes * self.steps_per_episode

    @property
    def words(self) -> str:
        """The subject of the columns of time and cost."""
        if self.total_steps:
            return f"{self.total_steps:,} environment steps"
        if math.isnan(self.steps_per_episode):
            return f"{self.num_episodes:,} episodes: unknown, as no episode ended in the short runs"
        return f"{self.num_episodes:,} episodes of {self.steps_per_episode:.0f} steps"

    def hourly(self, card: GpuModel | None) -> tuple[float, ...]:
        """Lowest and highest cost; empty: unknown."""
        if self.price_per_hour is not None:
            return self.price_per_hour, self.price_per_hour
        return (card and card.usd_per_hour) or ()


@dataclass(frozen=True)
class SpeedupReport:
    """All predictions of one call, as JSON values; what is not known is None."""

    title: str  # job, date and machine
    rows: list[dict[str, Any]]
    calibration: dict[str, Any]
    budget: str
    notes: list[str] = field(default_factory=list)
    cost_unit: str = "USD"


def report_of(calibration: Calibration, budget: Budget, cards: Sequence[GpuModel]) -> SpeedupReport:
    """Rows for this machine, then for every card.

    The rate given with --sps is that of the card, or of this machine if no card is asked for.
    """
    sps, here = calibration.steps_per_s, calibration.points
    if sps and not cards:
        here = _at_rate(here, sps)
    known = bool(sps and not cards) or calibration.is_steady
    rows = _rows(here, budget, calibration.device_type, known)
    unknown = [] if known else [HERE]
    tflops = device_tflops(calibration) if cards else 0.0
    for card in cards:
        moved = [_moved(point, calibration, card, tflops) for point in here]
        moved = _at_rate(moved, sps) if sps else moved
        known = bool(sps) or (calibration.is_steady and card == calibration.card)
        rows += _rows(moved, budget, "cuda", known, card)
        unknown += [] if known else [card.name]
    facts = _facts(calibration)
    title = "{env}, {num_envs} environments; {hardware}, {date}".format(**facts)
    unit = "USD" if budget.price_per_hour is None else "as asked"
    notes = _notes(calibration, cards, unknown)
    given = f", at the {sps:,.0f} steps/s given for one {cards[0].name if cards else 'rank'}"
    length = budget.words + (given if sps else "")
    return SpeedupReport(title, rows, facts, length, notes, unit)


def _notes(
    calibration: Calibration, cards: Sequence[GpuModel], unknown: Sequence[str]
) -> list[str]:
    """List what a reader of the rows must know.

    Args:
        unknown: names of machines whose rate is not known.
    """
    cores, here = calibration.cores, calibration.points
    notes = [calibration.sources] if calibration.sources else []
    if calibration.was_busy:
        wanted = f"{calibration.load:.1f} processes wanted its {cores} core(s)"
        notes.append(f"{HERE} was busy, {wanted}: its times are too long, measure again later")
    most = max(point.ranks for point in here if point.work)
    if calibration.device_type == "cpu" and cores < min(most, calibration.ranks_per_machine):
        notes.append(f"{HERE} has {cores} core(s): more than {cores} ranks compete for them")
    network = calibration.between.name
    if cards:
        notes.append(
            f"cards are estimates by {AS_OF} data sheets: rollouts as measured here, the rest "
            f"scaled by peak fp32 rates; up to {CARDS_PER_MACHINE} in a machine, {network} between"
        )
    elif most > calibration.ranks_per_machine:
        notes.append(f"machines are connected by {network}, if --between is right")
    if unknown:
        notes.append(
            f"no time or cost for {', '.join(unknown)}: no rate is known; give --sps N, the "
            "steps/s of a run on one such card"
        )
    return notes


def _at_rate(points: Sequence[Point], steps_per_s: float) -> list[Point]:
    """Return the points with every rank's work scaled to a rate of one rank alone."""
    one = points[0].work
    assert one is not None
    factor = one.env_steps / steps_per_s / one.seconds

    def scaled(point: Point) -> Point:
        error = MODEL_ERROR if point.ranks > 1 else 0.0
        work = point.work and replace(point.work.times(factor), relative_error=error)
        return replace(point, work=work)

    return [scaled(point) for point in points]


def _moved(point: Point, calibration: Calibration, card: GpuModel, tflops_here: float) -> Point:
    """A point on cards, each with cores of its own."""
    if point.work is None:
        return point
    rate = tflops_here * (point.threads if calibration.device_type == "cpu" else 1)
    communication = modelled_communication(
        calibration.gradient_bytes,
        point.ranks,
        min(CARDS_PER_MACHINE, calibration.ranks_per_machine),
        LINKS[card.link],
        calibration.between,
    )
    own = point.work.times(1 / point.crowding)
    return replace(
        point, work=own.times(rate / card.fp32_tflops, OF_UPDATE), communication=communication
    )


def device_tflops(calibration: Calibration) -> float:
    """fp32 rate of one thread here, or of the GPU by its data sheet, else measured."""
    if calibration.card:
        return calibration.card.fp32_tflops
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    matrix = torch.randn(768, 768, device=calibration.device_type)
    best_s = math.inf
    for _ in range(8):
        started_s = time.perf_counter()
        float((matrix @ matrix).sum())
        best_s = min(best_s, time.perf_counter() - started_s)
    torch.set_num_threads(threads)
    return 2 * 768**3 / best_s / 1e12


def _rows(
    points: Sequence[Point],
    budget: Budget,
    device_type: str,
    known: bool,
    card: GpuModel | None = None,
) -> list[dict[str, Any]]:
    """Return one row for each point, the first of which is of one rank.

    Args:
        known: the rate of one rank is, so that time and cost follow.
    """
    rows = [_row(point, points[0], budget, device_type, card) for point in points]
    for row in rows:
        if not known and not row["problem"]:
            row |= dict.fromkeys((*ABSOLUTE, *UNBILLED))
    return rows


def _row(
    point: Point, one: Point, budget: Budget, device_type: str, card: GpuModel | None
) -> dict[str, Any]:
    unit = "ranks" if device_type == "cpu" else "GPUs"
    row = {
        "machine": card.name if card else HERE,
        "estimate": card is not None,
        "gpus": point.ranks,
        "unit": unit,
        "scaling": point.scaling,
        "problem": point.problem or None,
    }
    if point.work is None:
        return row
    found, alone = point.prediction, one.prediction
    speedup = found.steps_per_s / alone.steps_per_s
    source = "measured" if point.measured else "modelled"
    reason, fix, margin = "", "", 0.0
    if point.ranks > 1:
        reason, fix = bottleneck(alone, found)
        # 95 %, both predictions being uncertain
        margin = min(0.9, 1.96 * math.hypot(alone.relative_error, found.relative_error))
    return row | {
        "theoretical": point.ranks,
        "speedup": speedup,
        "efficiency": speedup / point.ranks,
        "speedup_interval": [speedup * (1 - margin), speedup * (1 + margin)],
        "source": "estimate" if card else source,
        "bottleneck": reason,
        "fix": fix,
        **asdict(found),
        **_bill(found, budget, card),
    }


def _bill(prediction: Prediction, budget: Budget, card: GpuModel | None) -> dict[str, Any]:
    """Hours and cost of the whole run; None: unknown."""
    if math.isnan(budget.env_steps):
        return dict.fromkeys(UNBILLED)
    hours_per_s = budget.env_steps / prediction.env_steps / 3600
    hours = prediction.iteration_s * hours_per_s
    gpu_hours = hours * prediction.ranks
    return {
        "hours": hours,
        "hours_interval": [seconds * hours_per_s for seconds in prediction.interval_s],
        "cost": [price * gpu_hours for price in budget.hourly(card)] or None,
        "gpu_hours": gpu_hours,
    }


def _facts(calibration: Calibration) -> dict[str, Any]:
    """The measurements, for JSON."""
    link = calibration.link
    on_cpu = calibration.device_type == "cpu"
    names = (
        "env",
        "rates",
        "load",
        "device_type",
        "gradient_bytes",
        "num_envs",
        "batch_size",
        "cores",
    )
    return {name: getattr(calibration, name) for name in names} | {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{calibration.cores} CPU core(s)" if on_cpu else torch.cuda.get_device_name(0),
        "link": link.name,
        "latency_s": link.all_reduce_s(0, 2),
        "bytes_per_s": link.bytes_per_s if math.isfinite(link.bytes_per_s) else None,
    }


# ---- words


def table(report: SpeedupReport) -> str:
    """Return title, table, fixes and notes: 25 lines for 4 numbers of GPUs."""
    rows = [row for row in report.rows if not row["problem"]]
    # one rank, the same job for all ways of scaling, stands there once
    rows = [row for row in rows if row["gpus"] > 1 or row["scaling"] == rows[0]["scaling"]]
    timed = any(row["steps_per_s"] is not None for row in rows)
    names = (*COLUMNS, "steps/s", "time", f"cost ({report.cost_unit})") if timed else COLUMNS
    title = report.title + (f"; time and cost of {report.budget}" if timed else "")
    problems = dict.fromkeys(
        f"not possible: {row['gpus']} ranks, {row['problem']}"
        for row in report.rows
        if row["problem"]
    )
    fixes = dict.fromkeys(row["fix"] for row in rows if row["fix"])
    lines = [title, "", *_aligned([names, *(_cells(row, timed) for row in rows)]), "", *problems]
    lines += [f"to lose less: {'; '.join(fixes)}"] if fixes else []
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])


def _cells(row: dict[str, Any], timed: bool) -> tuple[str, ...]:
    """Return a row's cells: COLUMNS, and rate, time and cost if any row has them."""
    low, high = row["speedup_interval"]
    cells = (
        row["machine"],
        str(row["gpus"]),
        row["scaling"] if row["gpus"] > 1 else "-",
        f"{row['theoretical']}x",
        f"{row['speedup']:.2f}x ({low:.2f}-{high:.2f})",
        f"{row['efficiency']:.0%}",
        row["bottleneck"] or "-",
        row["source"],
    )
    rate = hours = cost = "-"
    if row["steps_per_s"] is not None:
        rate = f"{row['steps_per_s']:,.0f}"
    if row["hours"] is not None:
        middle, *ends = (duration(h * 3600) for h in (row["hours"], *row["hours_interval"]))
        hours = f"{middle} ({' to '.join(ends)})"
    if row["cost"] is not None:
        cost = "-".join(dict.fromkeys(f"{price:,.2f}" for price in row["cost"]))
    return (*cells, rate, hours, cost) if timed else cells


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = f"|{'|'.join('-' * (width + 1) + ':' for width in widths)}|"
    lines = [f"| {' | '.join(map(str.rjust, row, widths))} |" for row in rows]
    return [lines[0], rule, *lines[1:]]
