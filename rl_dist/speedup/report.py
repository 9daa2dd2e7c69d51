"""Predictions as rows: speedup, time and cost; as a table and as Markdown."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rl_dist.speedup.calibration import Calibration, Point, modelled_communication
from rl_dist.speedup.machines import AS_OF, LINKS, Gpu, gpu_named, slowest
from rl_dist.speedup.model import Link, Prediction, Scaled, bottleneck

HERE = "this machine"
CARDS_PER_MACHINE, ASSUMED_NETWORK = 8, "InfiniBand NDR"  # of cards that one does not own
COLUMNS = ("scaling", "theoretical", "predicted", "efficiency", "steps/s", "iteration", "time")  # and ranks, cost


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much is to be trained, and what an hour costs."""

    num_episodes: int
    total_steps: int = 0  # instead of episodes
    steps_per_episode: float = math.nan
    price_per_hour: float | None = None  # of one GPU
    power_watts: float | None = None  # of one GPU
    power_price: float | None = None  # per kWh

    @property
    def env_steps(self) -> float:
        """Environment steps of the whole run; nan: unknown."""
        return float(self.total_steps) if self.total_steps else self.num_episodes * self.steps_per_episode

    @property
    def words(self) -> str:
        """What the columns of time and cost are about."""
        if self.total_steps:
            return f"{self.total_steps:,} environment steps"
        if math.isnan(self.steps_per_episode):
            return f"{self.num_episodes:,} episodes: no episode ended in the short runs, so neither time nor cost"
        return f"{self.num_episodes:,} episodes of {self.steps_per_episode:.0f} steps"

    @property
    def cost_unit(self) -> str:
        """What cost is in; prices of cards are in US dollars."""
        if self.power_price is not None:
            return "as --power_price"
        return "USD" if self.price_per_hour is None else "as --price_per_hour"

    def hourly(self, cards: Sequence[Gpu]) -> tuple[float, float] | None:
        """Lowest and highest cost of one GPU for an hour; of unequal cards the mean."""
        if self.power_watts is not None and self.power_price is not None:
            price = self.power_watts / 1000.0 * self.power_price
            return price, price
        if self.price_per_hour is not None:
            return self.price_per_hour, self.price_per_hour
        prices = [card.usd_per_hour for card in cards]
        if not prices or None in prices:
            return None
        low, high = zip(*(price for price in prices if price), strict=True)
        return sum(low) / len(low), sum(high) / len(high)


@dataclass(frozen=True)
class Report:
    """All predictions of one call."""

    rows: list[dict[str, Any]]
    calibration: dict[str, Any]
    budget: str
    notes: list[str] = field(default_factory=list)
    cost_unit: str = "USD"

    @property
    def title(self) -> str:
        """What was trained, when and on what."""
        facts = self.calibration
        return f"{facts['env']}, {facts['num_envs']} environments; {facts['hardware']}, {facts['date']}"

    def to_dict(self) -> dict[str, Any]:
        """JSON values; what is not known is null."""
        budget = {"budget": self.budget, "cost_unit": self.cost_unit}
        return budget | {"rows": self.rows, "calibration": self.calibration, "notes": self.notes}


def report_of(
    calibration: Calibration,
    budget: Budget,
    cards: Sequence[list[Gpu]],
    measured: Mapping[tuple[int, str], float],
) -> Report:
    """Rows for this machine, then for every card or mixture of cards.

    Args:
        measured: steps/s of a real run, by number of ranks and scaling.
    """
    rows = [_row(point, calibration, budget, HERE, [], measured) for point in calibration.points]
    notes = []
    if calibration.was_busy:
        notes.append(
            f"{HERE} was busy: {calibration.load:.1f} processes wanted its {calibration.cores} core(s) before anything "
            "was measured; times are too long and may not scale alike: measure again when nothing else runs"
        )
    copies = max((point.copies for point in calibration.points if point.work), default=1)
    if copies > calibration.cores:
        notes.append(
            f"{HERE} has {calibration.cores} core(s), which up to {copies} copies shared: its figures for more than "
            f"{calibration.cores} ranks are those of ranks that compete for cores"
        )
    if cards:
        here_tflops = device_tflops(calibration.device_type)
        notes.append(
            f"cards not owned are estimates ({AS_OF} data sheets and list prices): rollouts as measured here by one "
            f"copy with nothing beside it, so each rank needs {calibration.one.threads} such core(s) of its own; the "
            f"rest scaled by peak fp32 rates from {here_tflops:.3g} TFLOP/s per thread or GPU here; small networks "
            "reach a smaller share of a large card's peak"
        )
        if note := _network_note(calibration):
            notes.append(note)
        for names in cards:
            rows += _card_rows(calibration, budget, names, here_tflops)
    return Report(rows, _facts(calibration), budget.words, notes, budget.cost_unit)


def _card_machines(calibration: Calibration) -> tuple[int, Link]:
    """Cards in one machine, and the network between machines."""
    between = calibration.between or LINKS[ASSUMED_NETWORK]
    return max(1, min(CARDS_PER_MACHINE, calibration.ranks_per_machine)), between


def _network_note(calibration: Calibration) -> str:
    per_machine, between = _card_machines(calibration)
    if all(point.ranks <= per_machine for point in calibration.points):
        return ""
    assumed = "" if between is calibration.between else " is assumed, --between names another"
    return f"cards not owned: {per_machine} in a machine; between machines {between.name}{assumed}"


def _card_rows(calibration: Calibration, budget: Budget, cards: list[Gpu], here_tflops: float) -> list[dict[str, Any]]:
    pace = slowest(cards)
    link = min((LINKS[card.link] for card in cards), key=lambda link: link.bytes_per_s)
    per_machine, between = _card_machines(calibration)

    def moved(point: Point) -> Point:
        if point.work is None:
            return point
        measured, copies, threads = point.work, point.copies, point.threads
        if point.alone is not None:
            measured, copies, threads = point.alone, 1, calibration.one.threads
        rate = here_tflops * (threads if calibration.device_type == "cpu" else 1)
        return replace(
            point,
            work=measured.scaled(update=rate / pace.fp32_tflops),
            communication=modelled_communication(calibration.gradient_bytes, point.ranks, per_machine, link, between),
            copies=copies,
            threads=threads,
        )

    name = " + ".join(card.name for card in cards)
    there = replace(calibration, one=moved(calibration.one))
    return [_row(moved(point), there, budget, name, cards, {}) for point in calibration.points]


def device_tflops(device_type: str) -> float:
    """fp32 rate of one thread here, or of the GPU by its data sheet, else measured."""
    if device_type == "cuda":
        gpu = gpu_named(torch.cuda.get_device_name(0))
        if gpu:
            return gpu.fp32_tflops
    threads = torch.get_num_threads()
    if device_type == "cpu":
        torch.set_num_threads(1)
    matrix = torch.randn(768, 768, device=device_type)
    best_s = math.inf
    for _ in range(8):
        started_s = time.perf_counter()
        float((matrix @ matrix).sum())
        best_s = min(best_s, time.perf_counter() - started_s)
    torch.set_num_threads(threads)
    return 2 * 768**3 / best_s / 1e12


def _row(
    point: Point,
    calibration: Calibration,
    budget: Budget,
    machine: str,
    cards: list[Gpu],
    measured: Mapping[tuple[int, str], float],
) -> dict[str, Any]:
    told, cure = "one rank alone", ""
    unit = "ranks" if calibration.device_type == "cpu" and not cards else "GPUs"
    head = {"machine": machine, "estimate": bool(cards), "gpus": point.ranks, "unit": unit, "scaling": point.scaling}
    if point.work is None:
        return head | {"problem": point.problem}
    scaled = calibration.scaled(point)
    prediction = scaled.many
    if point.ranks > 1:
        told, cure = bottleneck(scaled, point.scaling, unit)
    return head | {
        "problem": None,
        "theoretical": point.ranks,
        "speedup": scaled.speedup,
        "efficiency": scaled.efficiency,
        "speedup_interval": _speedup_interval(scaled),
        "copies": point.copies,
        "threads": point.threads,
        "bottleneck": told,
        "cure": cure,
        "measured_steps_per_s": measured.get((point.ranks, point.scaling)),
        **prediction.to_dict(),
        **_bill(prediction, budget, cards),
    }


def _speedup_interval(scaled: Scaled) -> list[float]:
    """95 %, both predictions being uncertain."""
    if scaled.many.ranks == 1:
        return [1.0, 1.0]
    error = min(0.9, 1.96 * math.hypot(scaled.one.relative_error, scaled.many.relative_error))
    return [scaled.speedup * (1 - error), scaled.speedup * (1 + error)]


def _bill(prediction: Prediction, budget: Budget, cards: list[Gpu]) -> dict[str, Any]:
    """Hours and cost of the whole run; None: unknown."""
    if math.isnan(budget.env_steps):
        return {"hours": None, "hours_interval": None, "cost": None, "gpu_hours": None}
    iterations = budget.env_steps / prediction.env_steps
    hours, low, high = (s * iterations / 3600 for s in (prediction.iteration_s, *prediction.interval_s))
    price = budget.hourly(cards)
    cost = [price[0] * prediction.ranks * hours, price[1] * prediction.ranks * hours] if price else None
    return {"hours": hours, "hours_interval": [low, high], "cost": cost, "gpu_hours": hours * prediction.ranks}


def _facts(calibration: Calibration) -> dict[str, Any]:
    """What was measured, for JSON."""
    link = {"name": calibration.link.name, "latency_s": calibration.link.base_s}
    if math.isfinite(calibration.link.bytes_per_s):
        link["bytes_per_s"] = calibration.link.bytes_per_s
    points = [
        {"gpus": p.ranks, "scaling": p.scaling, "work": p.work.__dict__, "communication": p.communication.__dict__}
        for p in calibration.points
        if p.work
    ]
    on_cpu = calibration.device_type == "cpu"
    cores = f"{calibration.cores} CPU core{'s' * (calibration.cores > 1)}"
    return {
        "env": calibration.env,
        "date": time.strftime("%Y-%m-%d"),
        "hardware": cores if on_cpu else torch.cuda.get_device_name(0),
        "load": calibration.load,
        "device_type": calibration.device_type,
        "gradient_bytes": calibration.gradient_bytes,
        "num_envs": calibration.num_envs,
        "batch_size": calibration.batch_size,
        "cores": calibration.cores,
        "link": link,
        "points": points,
    }


# ---- words


def table(report: Report) -> str:
    """For the console: a table of each machine, then what limits it."""
    lines = []
    for machine, rows in _machines(report):
        kind = ", an estimate" if rows[0]["estimate"] else ""
        lines.append(f"{machine}{kind}; time and cost of {report.budget}")
        lines += _aligned([columns(rows[0]["unit"], report.cost_unit), *map(cells, rows)])
        lines += [f"  {text}" for text in _remarks(rows)]
        lines.append("")
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)]).rstrip()


def markdown(report: Report) -> str:
    """The same as Markdown."""
    lines = [f"Time and cost of {report.budget}."]
    for machine, rows in _machines(report):
        names = columns(rows[0]["unit"], report.cost_unit)
        lines += ["", f"**{machine}**{' (estimate)' if rows[0]['estimate'] else ''}", ""]
        lines += [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
        lines += [f"| {' | '.join(cells(row))} |" for row in rows]
        lines += ["", *(f"- {text}" for text in _remarks(rows))]
    return "\n".join([*lines, *(f"\n{note}" for note in report.notes)])


def _machines(report: Report) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The rows of each machine; one rank, the same job for all ways of scaling, stands there once."""
    for machine in dict.fromkeys(row["machine"] for row in report.rows):
        rows = [row for row in report.rows if row["machine"] == machine]
        ones = [row for row in rows if row["gpus"] == 1]
        yield machine, [*ones[:1], *(row for row in rows if row["gpus"] > 1)]


def columns(unit: str, cost_unit: str) -> tuple[str, ...]:
    """Names over `cells`."""
    return (unit, *COLUMNS, f"cost ({cost_unit})")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row's cells in the order of `columns`."""
    if row["problem"]:
        return (str(row["gpus"]), row["scaling"], f"{row['gpus']}x", "-", "-", "-", "-", "-", "-")
    low, high = row["speedup_interval"]
    return (
        str(row["gpus"]),
        row["scaling"] if row["gpus"] > 1 else "-",
        f"{row['theoretical']}x",
        f"{row['speedup']:.2f}x" + (f" ({low:.2f}-{high:.2f})" if row["gpus"] > 1 else ""),
        f"{row['efficiency']:.0%}",
        f"{row['steps_per_s']:,.0f}",
        duration(row["iteration_s"]),
        _time(row),
        _money(row["cost"]),
    )


def _time(row: dict[str, Any]) -> str:
    """The whole training and its interval, the unit once if it is the same."""
    if row["hours"] is None:
        return "-"
    middle, low, high = (duration(hours * 3600) for hours in (row["hours"], *row["hours_interval"]))
    (_, unit), (least, least_unit), (most, most_unit) = (text.split() for text in (middle, low, high))
    if middle == low == high:
        return middle
    return f"{middle} ({least}-{most})" if unit == least_unit == most_unit else f"{middle} ({low} to {high})"


def _remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What limits each row, then every cure once."""
    cures = dict.fromkeys(row["cure"] for row in rows if row.get("cure"))
    return [*(text for row in rows if (text := _remark(row))), *(f"-> {cure}" for cure in cures)]


def _remark(row: dict[str, Any]) -> str:
    if row["problem"]:
        return f"{row['gpus']} {row['scaling']}: cannot be, {row['problem']}"
    measured = row["measured_steps_per_s"]
    told = f"; the run itself measured {measured:,.0f} steps/s" if measured else ""
    return f"{row['scaling']}: {row['bottleneck']}{told}" if row["gpus"] > 1 or told else ""


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for size, unit in ((1e-3, "us"), (1.0, "ms")):
        if seconds < size:
            return f"{seconds / size * 1000:.3g} {unit}"
    for size, unit in ((60.0, "s"), (3600.0, "min"), (48 * 3600.0, "h")):
        if seconds < size:
            return f"{seconds / {'s': 1.0, 'min': 60.0, 'h': 3600.0}[unit]:.3g} {unit}"
    return f"{seconds / 86400:.3g} days"


def _money(cost: list[float] | None) -> str:
    if cost is None:
        return "-"
    low, high = cost
    return f"{low:,.2f}" if high - low < 0.005 else f"{low:,.2f}-{high:,.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
