"""Pictures of predictions and measurements over the number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = ("#1f5fbf", "#d2691e", "#2e8b57", "#8b3fa0", "#c0392b", "#b8860b", "#555555")
PARTS = {"rollouts": "#1f5fbf", "update": "#8fb3e6", "communication": "#d2691e", "waiting": "#c9c9c9"}
Rows = Sequence[dict[str, Any]]


def plot_report(rows: Rows, folder: Path) -> list[Path]:
    """Training time, speedup, efficiency, split of the time and utilisation."""
    rows = [row for row in rows if not row["problem"]]
    files = [folder / f"{name}.png" for name in ("time", "speedup", "efficiency", "time_split", "utilisation")]
    _plot_time(rows, files[0])
    plot_speedup(rows, files[1])
    plot_efficiency(rows, files[2])
    plot_split(rows, files[3])
    _plot_utilisation(rows, files[4])
    return files


def lines_of(rows: Rows) -> dict[str, list[dict[str, Any]]]:
    """Rows by what they are a line of: machine and scaling, sorted by GPUs."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["gpus"]):
        star = " (estimate)" if row["estimate"] else ""
        lines.setdefault(f"{row['machine']}{star}, {row['scaling']}", []).append(row)
    return lines


def _plot_time(rows: Rows, path: Path) -> None:
    figure, axis = _axis("training time, hours" if _timed(rows) else "seconds for a million steps", rows)
    for color, (name, line) in zip(COLORS * 9, lines_of(rows).items(), strict=False):
        values = [row["hours"] if _timed(rows) else 1e6 / row["steps_per_s"] for row in line]
        axis.plot([row["gpus"] for row in line], values, "o-", color=color, label=name)
        if _timed(rows):
            low, high = zip(*(row["hours_interval"] for row in line), strict=True)
            axis.fill_between([row["gpus"] for row in line], low, high, color=color, alpha=0.15, linewidth=0)
    axis.set_ylim(bottom=0)
    _finish(figure, axis, path)


def _timed(rows: Rows) -> bool:
    return all(row["hours"] is not None for row in rows)


def plot_speedup(rows: Rows, path: Path) -> None:
    """Speedup with its interval, the ideal dashed."""
    figure, axis = _axis("speedup", rows)
    most = max(row["gpus"] for row in rows)
    axis.plot([1, most], [1, most], "--", color="#999999", label="ideal")
    for color, (name, line) in zip(COLORS * 9, lines_of(rows).items(), strict=False):
        gpus = [row["gpus"] for row in line]
        axis.plot(gpus, [row["speedup"] for row in line], "o-", color=color, label=name)
        if all(row.get("speedup_interval") for row in line):
            low, high = zip(*(row["speedup_interval"] for row in line), strict=True)
            axis.fill_between(gpus, low, high, color=color, alpha=0.15, linewidth=0)
    axis.set_ylim(bottom=0)
    _finish(figure, axis, path)


def plot_efficiency(rows: Rows, path: Path) -> None:
    """Speedup per GPU."""
    figure, axis = _axis("efficiency, speedup / GPUs", rows)
    for color, (name, line) in zip(COLORS * 9, lines_of(rows).items(), strict=False):
        axis.plot([row["gpus"] for row in line], [row["efficiency"] for row in line], "o-", color=color, label=name)
    axis.axhline(1.0, color="#999999", linestyle="--")
    axis.set_ylim(0, max(1.1, 1.05 * max(row["efficiency"] for row in rows)))
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    _finish(figure, axis, path)


def plot_split(rows: Rows, path: Path) -> None:
    """Where an iteration's seconds go, a bar for each number of GPUs."""
    lines = lines_of(rows)
    width = max(6.0, 1.6 + 0.55 * len(rows) + 0.5 * len(lines))
    figure, axis = plt.subplots(figsize=(min(width, 14), 4.6), layout="constrained")
    position, ticks, labels = 0.0, [], []
    for line in lines.values():
        for row in line:
            bottom = 0.0
            for part, color in PARTS.items():
                height = row["shares"][part] * row["iteration_s"]
                axis.bar(position, height, bottom=bottom, color=color, width=0.8)
                bottom += height
            ticks.append(position)
            labels.append(f"{row['gpus']}\n{row['scaling']}" + ("" if len(lines) <= 2 else f"\n{row['machine']}"))
            position += 1
        position += 0.6
    axis.set_xticks(ticks, labels, fontsize=8, rotation=0 if len(lines) <= 2 else 90)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in PARTS.values()]
    axis.set(ylabel="seconds per iteration", xlabel="GPUs (ranks)")
    axis.legend(handles, list(PARTS), frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(figure, axis, path)


def _plot_utilisation(rows: Rows, path: Path) -> None:
    """The share of the time in which a rank works, neither waiting nor reducing."""
    figure, axis = _axis("share of the time that a rank works", rows)
    for color, (name, line) in zip(COLORS * 9, lines_of(rows).items(), strict=False):
        busy = [row["shares"]["rollouts"] + row["shares"]["update"] for row in line]
        axis.plot([row["gpus"] for row in line], busy, "o-", color=color, label=name)
    axis.set_ylim(0, 1.05)
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    _finish(figure, axis, path)


def _axis(label: str, rows: Rows) -> tuple[Any, Any]:
    figure, axis = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    axis.set(xlabel="GPUs (ranks)", ylabel=label)
    axis.set_xscale("log", base=2)
    gpus = sorted({row["gpus"] for row in rows})
    axis.set_xticks(gpus, [str(number) for number in gpus])
    axis.minorticks_off()
    return figure, axis


def _finish(figure: Any, axis: Any, path: Path) -> None:
    axis.legend(frameon=False, fontsize=8)
    _save(figure, axis, path)


def _save(figure: Any, axis: Any, path: Path) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
