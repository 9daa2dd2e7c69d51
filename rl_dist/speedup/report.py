"""Predictions as rows: speedup, time and cost; as a table."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rl_dist.speedup.calibration import Calibration, Point
from rl_dist.speedup.machines import AS_OF, LINKS, GpuModel, gpu_named, slowest
from rl_dist.speedup.model import Link, Prediction, Scaled, bottleneck, modelled_communication

HERE = "this machine"
CARDS_PER_MACHINE, ASSUMED_NETWORK = 8, "InfiniBand NDR"  # of cards that one does not own
# beside ranks or GPUs, and cost
COLUMNS = ("scaling", "theoretical", "predicted", "efficiency", "steps/s", "iteration", "time",
           "source")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The length of training, and the price of an hour."""

    num_episodes: int
    total_steps: int = 0  # instead of episodes
    steps_per_episode: float = math.nan
    price_per_hour: float | None = None  # of one GPU
    power_watts: float | None = None  # of one GPU
    power_price: float | None = None  # per kWh

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

    @property
    def cost_unit(self) -> str:
        """The unit of cost; prices of cards are in US dollars."""
        if self.power_price is not None:
            return "as --power_price"
        return "USD" if self.price_per_hour is None else "as --price_per_hour"

    def hourly(self, cards: Sequence[GpuModel]) -> tuple[float, float] | None:
        """Lowest and highest cost of one GPU for an hour; of unequal cards the mean."""
        if self.power_watts is not None and self.power_price is not None:
            price = self.power_watts / 1000.0 * self.power_price
            return price, price
        if self.price_per_hour is not None:
            return self.price_per_hour, self.price_per_hour
        prices = [card.usd_per_hour for card in cards if card.usd_per_hour]
        if not prices or len(prices) < len(cards):
            return None
        low, high = zip(*prices, strict=True)
        return sum(low) / len(low), sum(high) / len(high)


@dataclass(frozen=True)
class SpeedupReport:
    """All predictions of one call."""

    rows: list[dict[str, Any]]
    calibration: dict[str, Any]
    budget: str
    notes: list[str] = field(default_factory=list)
    cost_unit: str = "USD"

    @property
    def title(self) -> str:
        """Job, date and machine."""
        facts = self.calibration
        machine = f"{facts['hardware']}, {facts['date']}"
        return f"{facts['env']}, {facts['num_envs']} environments; {machine}"

    def to_dict(self) -> dict[str, Any]:
        """JSON values; what is not known is null."""
        budget = {"budget": self.budget, "cost_unit": self.cost_unit}
        return budget | {"rows": self.rows, "calibration": self.calibration, "notes": self.notes}


def report_of(
    calibration: Calibration,
    budget: Budget,
    cards: Sequence[list[GpuModel]],
    measured: Mapping[tuple[int, str], float],
) -> SpeedupReport:
    """Rows for this machine, then for every card or mixture of cards.

    Args:
        measured: steps/s of a real run, by number of ranks and scaling.
    """
    rows = [_row(point, calibration, budget, HERE, [], measured) for point in calibration.points]
    notes = [calibration.sources] if calibration.sources else []
    cores = calibration.cores
    if calibration.was_busy:
        wanted = f"{calibration.load:.1f} processes wanted its {cores} core(s)"
        notes.append(f"{HERE} was busy, {wanted}: times are too long, measure again later")
    trained = [point.ranks for point in calibration.points if point.work]
    if calibration.device_type == "cpu" and cores < min(
        max(trained), calibration.ranks_per_machine
    ):
        notes.append(f"{HERE} has {cores} core(s): more than {cores} ranks compete for them")
    if cards:
        here_tflops = device_tflops(calibration.device_type)
        per_machine, between = _card_machines(calibration)
        notes.append(
            f"cards not owned are estimates ({AS_OF} data sheets and list prices): rollouts as "
            "measured here by one copy with nothing beside it, so each rank needs "
            f"{calibration.one.threads} such core(s) of its own; the rest scaled by peak fp32 "
            f"rates from {here_tflops:.3g} TFLOP/s per thread or GPU here; small networks reach a "
            "smaller share of a large card's peak"
        )
        if max(point.ranks for point in calibration.points) > per_machine:
            assumed = "" if calibration.between else " is assumed, --between names another"
            where = f"{per_machine} in a machine; between machines {between.name}{assumed}"
            notes.append(f"cards not owned: {where}")
        for names in cards:
            rows += _card_rows(calibration, budget, names, here_tflops)
    return SpeedupReport(rows, _facts(calibration), budget.words, notes, budget.cost_unit)


def _card_machines(calibration: Calibration) -> tuple[int, Link]:
    """Cards in one machine, and the network between machines."""
    between = calibration.between or LINKS[ASSUMED_NETWORK]
    return max(1, min(CARDS_PER_MACHINE, calibration.ranks_per_machine)), between


def _card_rows(
    calibration: Calibration, budget: Budget, cards: list[GpuModel], here_tflops: float
) -> list[dict[str, Any]]:
    pace = slowest(cards)
    link = min((LINKS[card.link] for card in cards), key=lambda link: link.bytes_per_s)
    per_machine, between = _card_machines(calibration)

    def moved(point: Point) -> Point:
        if point.work is None:
            return point
        alone = point.alone is not None
        threads = calibration.one.threads if alone else point.threads
        rate = here_tflops * (threads if calibration.device_type == "cpu" else 1)
        return replace(
            point,
            work=(point.alone or point.work).scaled(update=rate / pace.fp32_tflops),
            communication=modelled_communication(
                calibration.gradient_bytes, point.ranks, per_machine, link, between
            ),
            copies=1 if alone else point.copies,
            threads=threads,
            measured=False,
        )

    name = " + ".join(card.name for card in cards)
    there = replace(calibration, one=moved(calibration.one))
    return [_row(moved(point), there, budget, name, cards, {}) for point in calibration.points]


def device_tflops(device_type: str) -> float:
    """fp32 rate of one thread here, or of the GPU by its data sheet, else measured."""
    if device_type == "cuda" and (gpu := gpu_named(torch.cuda.get_device_name(0))):
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
    cards: list[GpuModel],
    measured: Mapping[tuple[int, str], float],
) -> dict[str, Any]:
    unit = "ranks" if calibration.device_type == "cpu" and not cards else "GPUs"
    head = {
        "machine": machine,
        "estimate": bool(cards),
        "gpus": point.ranks,
        "unit": unit,
        "scaling": point.scaling,
        "problem": point.problem or None,
    }
    if point.work is None:
        return head
    scaled = Scaled(calibration.one.prediction, point.prediction)
    reason, fix, interval = "one rank alone", "", [1.0, 1.0]
    if point.ranks > 1:
        reason, fix = bottleneck(scaled, point.scaling, unit)
        # 95 %, both predictions being uncertain
        error = math.hypot(scaled.one.relative_error, scaled.many.relative_error)
        margin = min(0.9, 1.96 * error)
        interval = [scaled.speedup * (1 - margin), scaled.speedup * (1 + margin)]
    return head | {
        "theoretical": point.ranks,
        "speedup": scaled.speedup,
        "efficiency": scaled.efficiency,
        "speedup_interval": interval,
        "source": "estimate" if cards else "measured" if point.measured else "modelled",
        "copies": point.copies,
        "threads": point.threads,
        "bottleneck": reason,
        "cure": fix,
        "measured_steps_per_s": measured.get((point.ranks, point.scaling)),
        **scaled.many.to_dict(),
        **_bill(scaled.many, budget, cards),
    }


def _bill(prediction: Prediction, budget: Budget, cards: list[GpuModel]) -> dict[str, Any]:
    """Hours and cost of the whole run; None: unknown."""
    if math.isnan(budget.env_steps):
        return {"hours": None, "hours_interval": None, "cost": None, "gpu_hours": None}
    hours_per_s = budget.env_steps / prediction.env_steps / 3600
    hours = prediction.iteration_s * hours_per_s
    gpu_hours = hours * prediction.ranks
    price = budget.hourly(cards)
    return {
        "hours": hours,
        "hours_interval": [seconds * hours_per_s for seconds in prediction.interval_s],
        "cost": [rate * gpu_hours for rate in price] if price else None,
        "gpu_hours": gpu_hours,
    }


def _facts(calibration: Calibration) -> dict[str, Any]:
    """The measurements, for JSON."""
    link = {"name": calibration.link.name, "latency_s": calibration.link.all_reduce_s(0, 2)}
    if math.isfinite(calibration.link.bytes_per_s):
        link["bytes_per_s"] = calibration.link.bytes_per_s
    points = [
        {
            "gpus": point.ranks,
            "scaling": point.scaling,
            "work": vars(point.work),
            "communication": vars(point.communication),
        }
        for point in calibration.points
        if point.work
    ]
    on_cpu = calibration.device_type == "cpu"
    cores = f"{calibration.cores} CPU core{'s' * (calibration.cores > 1)}"
    names = ("env", "load", "device_type", "gradient_bytes", "num_envs", "batch_size", "cores")
    return {name: getattr(calibration, name) for name in names} | {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": cores if on_cpu else torch.cuda.get_device_name(0),
        "link": link,
        "points": points,
    }


# ---- words


def table(report: SpeedupReport) -> str:
    """Return a Markdown table of each machine, and what limits it."""
    lines = []
    for machine in dict.fromkeys(row["machine"] for row in report.rows):
        rows = [row for row in report.rows if row["machine"] == machine]
        # one rank, the same job for all ways of scaling, stands there once
        ones = [row for row in rows if row["gpus"] == 1]
        rows = [*ones[:1], *(row for row in rows if row["gpus"] > 1)]
        kind = ", an estimate" if rows[0]["estimate"] else ""
        names = (rows[0]["unit"], *COLUMNS, f"cost ({report.cost_unit})")
        lines += [f"{machine}{kind}; time and cost of {report.budget}", ""]
        lines += _aligned([names, *map(cells, rows)])
        lines += ["", *(f"- {text}" for text in _remarks(rows)), ""]
    return "\n".join([*lines, *(f"note: {note}\n" for note in report.notes)]).rstrip()


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row's cells: ranks, COLUMNS, cost."""
    if row["problem"]:
        return (str(row["gpus"]), row["scaling"], f"{row['gpus']}x", *"-------")
    low, high = row["speedup_interval"]
    several = row["gpus"] > 1
    hours = "-"
    if row["hours"] is not None:
        middle, *ends = (duration(h * 3600) for h in (row["hours"], *row["hours_interval"]))
        hours = f"{middle} ({' to '.join(ends)})" if ends[0] != ends[1] else middle
    cost = "-"
    if row["cost"] is not None:
        cost = "-".join(dict.fromkeys(f"{price:,.2f}" for price in row["cost"]))
    return (
        str(row["gpus"]),
        row["scaling"] if several else "-",
        f"{row['theoretical']}x",
        f"{row['speedup']:.2f}x" + (f" ({low:.2f}-{high:.2f})" if several else ""),
        f"{row['efficiency']:.0%}",
        f"{row['steps_per_s']:,.0f}",
        duration(row["iteration_s"]),
        hours,
        row["source"],
        cost,
    )


def _remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """List the limits of each row, then every fix once."""
    found = []
    for row in rows:
        if row["problem"]:
            found.append(f"{row['gpus']} {row['scaling']}: cannot be, {row['problem']}")
            continue
        measured = row["measured_steps_per_s"]
        run = f"; the run itself measured {measured:,.0f} steps/s" if measured else ""
        if row["gpus"] > 1 or run:
            found.append(f"{row['scaling']}: {row['bottleneck']}{run}")
    return [*found, *dict.fromkeys(f"-> {row['cure']}" for row in rows if row.get("cure"))]


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    units = ((1e-3, 1e-6, "us"), (1, 1e-3, "ms"), (60, 1, "s"), (3600, 60, "min"))
    for most, size, unit in (*units, (48 * 3600, 3600, "h")):
        if seconds < most:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:.3g} days"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = f"|{'|'.join('-' * (width + 1) + ':' for width in widths)}|"
    lines = [f"| {' | '.join(map(str.rjust, row, widths))} |" for row in rows]
    return [lines[0], rule, *lines[1:]]
