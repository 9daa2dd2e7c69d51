"""Predictions as rows: speedup, time and cost; as a table."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from rl_dist.hardware.report import duration
from rl_dist.speedup.calibration import Calibration, Point
from rl_dist.speedup.failures import COLUMNS as NODE_COLUMNS
from rl_dist.speedup.failures import node_cells
from rl_dist.speedup.machines import AS_OF, CARDS_PER_MACHINE, LINKS, GpuModel, gpu_named
from rl_dist.speedup.model import OF_UPDATE, Prediction, bottleneck, modelled_communication

HERE = "this machine"
# beside ranks or GPUs, and cost
COLUMNS = ("scaling", "theoretical", "predicted", "efficiency", "steps/s", "iteration", "time",
           "source")  # fmt: skip


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
    """Rows for this machine, then for every card."""
    here, cores = calibration.points, calibration.cores
    rows = [_row(point, here[0], budget, calibration.device_type) for point in here]
    notes = [calibration.sources] if calibration.sources else []
    if calibration.was_busy:
        wanted = f"{calibration.load:.1f} processes wanted its {cores} core(s)"
        notes.append(f"{HERE} was busy, {wanted}: times are too long, measure again later")
    most = max(point.ranks for point in here if point.work)
    if calibration.device_type == "cpu" and cores < min(most, calibration.ranks_per_machine):
        notes.append(f"{HERE} has {cores} core(s): more than {cores} ranks compete for them")
    if most > calibration.ranks_per_machine or (cards and most > CARDS_PER_MACHINE):
        notes.append(f"machines are connected by {calibration.between.name}, if --between is right")
    if cards:
        tflops = device_tflops(calibration.device_type)
        notes.append(
            f"cards not owned are estimates ({AS_OF} data sheets and list prices): rollouts as "
            f"measured here, the rest scaled by peak fp32 rates from {tflops:.3g} TFLOP/s per "
            f"thread or GPU here; up to {CARDS_PER_MACHINE} in a machine"
        )
        for card in cards:
            moved = [_moved(point, calibration, card, tflops) for point in here]
            rows += [_row(point, moved[0], budget, "cuda", card) for point in moved]
    facts = _facts(calibration)
    title = "{env}, {num_envs} environments; {hardware}, {date}".format(**facts)
    unit = "USD" if budget.price_per_hour is None else "as asked"
    return SpeedupReport(title, rows, facts, budget.words, notes, unit)


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


def device_tflops(device_type: str) -> float:
    """fp32 rate of one thread here, or of the GPU by its data sheet, else measured."""
    if device_type == "cuda" and (gpu := gpu_named(torch.cuda.get_device_name(0))):
        return gpu.fp32_tflops
    threads = torch.get_num_threads()
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
    point: Point, one: Point, budget: Budget, device_type: str, card: GpuModel | None = None
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
    reason, fix, margin = "one rank alone", "", 0.0
    if point.ranks > 1:
        reason, fix = bottleneck(alone, found, unit)
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
        return dict.fromkeys(("hours", "hours_interval", "cost", "gpu_hours"))
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
    names = ("env", "load", "device_type", "gradient_bytes", "num_envs", "batch_size", "cores")
    return {name: getattr(calibration, name) for name in names} | {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{calibration.cores} CPU core(s)" if on_cpu else torch.cuda.get_device_name(0),
        "link": link.name,
        "latency_s": link.all_reduce_s(0, 2),
        "bytes_per_s": link.bytes_per_s if math.isfinite(link.bytes_per_s) else None,
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
        lines += _aligned([names, *map(_cells, rows)])
        lines += ["", *(f"- {text}" for text in _remarks(rows)), ""]
    return "\n".join([*lines, *(f"note: {note}\n" for note in report.notes)]).rstrip()


def node_table(report: SpeedupReport) -> str:
    """Return a Markdown table of machines and failures; "": none asked for."""
    if "failures" not in report.calibration:
        return ""
    lines = []
    for machine in dict.fromkeys(row["machine"] for row in report.rows):
        rows = [row for row in report.rows if row["machine"] == machine and not row["problem"]]
        lines += [f"{machine}, many of it: what lasts when machines fail", ""]
        lines += [*_aligned([NODE_COLUMNS, *map(node_cells, rows)]), ""]
    costs = report.calibration["failures"]
    note = (
        f"note: a machine fails every {costs['node_mtbf_days']:g} days; a restart takes "
        f"{duration(costs['restart_s'])}, a checkpoint {duration(costs['checkpoint_s'])}; "
        "steps/s and speedup count work that lasts"
    )
    return "\n".join([*lines, note])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row's cells: ranks, COLUMNS, cost."""
    head = (str(row["gpus"]), row["scaling"], f"{row['gpus']}x")
    if row["problem"]:
        return (*head, *"-------")
    low, high = row["speedup_interval"]
    hours = cost = "-"
    if row["hours"] is not None:
        middle, *ends = (duration(h * 3600) for h in (row["hours"], *row["hours_interval"]))
        hours = f"{middle} ({' to '.join(ends)})"
    if row["cost"] is not None:
        cost = "-".join(dict.fromkeys(f"{price:,.2f}" for price in row["cost"]))
    return (
        *head,
        f"{row['speedup']:.2f}x ({low:.2f}-{high:.2f})",
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
        elif row["gpus"] > 1:
            found.append(f"{row['scaling']}: {row['bottleneck']}")
    return [*found, *dict.fromkeys(f"-> {row['fix']}" for row in rows if row.get("fix"))]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = f"|{'|'.join('-' * (width + 1) + ':' for width in widths)}|"
    lines = [f"| {' | '.join(map(str.rjust, row, widths))} |" for row in rows]
    return [lines[0], rule, *lines[1:]]
