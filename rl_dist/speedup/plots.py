"""Pictures of predictions and measurements over the number of GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from rl_dist.speedup.report import Report

COLORS = ("#1f5fbf", "#d2691e", "#2e8b57", "#8b3fa0", "#c0392b", "#b8860b", "#555555")
PARTS = {"rollouts": "#1f5fbf", "update": "#8fb3e6", "communication": "#d2691e", "waiting": "#c9c9c9"}
MOST_INSIDE = 4  # lines whose names fit into the picture; more stand beside it
GROUP, GAP = 3.0, 0.6  # least width of a group of bars, so that its name fits, and between groups
Rows = Sequence[dict[str, Any]]


def plot_report(report: Report, folder: Path) -> list[Path]:
    """Training time, speedup, efficiency, time split, utilisation; cost if priced."""
    rows = [row for row in report.rows if not row["problem"]]
    title = report.title
    names = ("time", "speedup", "efficiency", "time_split", "utilisation", "cost")
    files = {name: folder / f"{name}.png" for name in names}
    _plot_time(rows, files["time"], title)
    plot_speedup(rows, files["speedup"], title)
    plot_efficiency(rows, files["efficiency"], title)
    plot_split(rows, files["time_split"], title)
    _plot_utilisation(rows, files["utilisation"], title)
    priced = [row for row in rows if row["cost"]]
    if priced:
        _plot_cost(priced, files["cost"], title, report.cost_unit)
    else:
        files.pop("cost").unlink(missing_ok=True)  # of an earlier call
    return list(files.values())


def lines_of(rows: Rows) -> dict[str, list[dict[str, Any]]]:
    """Rows by what they are a line of: machine and scaling, sorted by GPUs."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["gpus"]):
        star = " (estimate)" if row["estimate"] else ""
        lines.setdefault(f"{row['machine']}{star}, {row['scaling']}", []).append(row)
    return lines


def _styled(rows: Rows) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Each line and how it is drawn: a colour for every machine, weak scaling dashed."""
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    for name, line in lines_of(rows).items():
        color = COLORS[machines.index(line[0]["machine"]) % len(COLORS)]
        dashes = "--" if line[0]["scaling"] == "weak" else "-"
        yield line, {"color": color, "linestyle": dashes, "marker": "o", "label": name}


def _plot_time(rows: Rows, path: Path, title: str) -> None:
    timed = all(row["hours"] is not None for row in rows)
    unit, hours = _unit_of_time(rows) if timed else ("", 1.0)
    figure, axis = _axis(f"training time, {unit}" if timed else "seconds for a million steps", rows, title)
    for line, style in _styled(rows):
        values = [row["hours"] / hours if timed else 1e6 / row["steps_per_s"] for row in line]
        axis.plot([row["gpus"] for row in line], values, **style)
        if timed:
            low, high = ([row["hours_interval"][end] / hours for row in line] for end in (0, 1))
            axis.fill_between([row["gpus"] for row in line], low, high, color=style["color"], alpha=0.15, linewidth=0)
    axis.set_ylim(bottom=0)
    _finish(figure, axis, path)


def _unit_of_time(rows: Rows) -> tuple[str, float]:
    """The unit that suits the longest, and how many hours it has."""
    longest = max(row["hours"] for row in rows)
    units = (("days", 24.0), ("hours", 1.0), ("minutes", 1 / 60), ("seconds", 1 / 3600))
    return next((unit for unit in units if longest >= 2 * unit[1]), units[-1])


def _plot_cost(rows: Rows, path: Path, title: str, unit: str) -> None:
    figure, axis = _axis(f"cost ({unit}), shaded: lowest to highest price", rows, title)
    for line, style in _styled(rows):
        gpus, (low, high) = [row["gpus"] for row in line], zip(*(row["cost"] for row in line), strict=True)
        axis.plot(gpus, [(a + b) / 2 for a, b in zip(low, high, strict=True)], **style)
        axis.fill_between(gpus, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axis.set_ylim(bottom=0)
    _finish(figure, axis, path)


def plot_speedup(rows: Rows, path: Path, title: str = "") -> None:
    """Speedup with its interval, the ideal dotted: straight, as both axes double."""
    figure, axis = _axis("speedup", rows, title)
    most = max(row["gpus"] for row in rows)
    axis.plot([1, most], [1, most], ":", color="#999999", label="ideal")
    for line, style in _styled(rows):
        gpus = [row["gpus"] for row in line]
        axis.plot(gpus, [row["speedup"] for row in line], **style)
        if all(row.get("speedup_interval") for row in line):
            low, high = zip(*(row["speedup_interval"] for row in line), strict=True)
            axis.fill_between(gpus, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    _finish(figure, axis, path)


def plot_efficiency(rows: Rows, path: Path, title: str = "") -> None:
    """Speedup per GPU."""
    figure, axis = _axis(f"efficiency: speedup / number of {_unit(rows)}", rows, title)
    for line, style in _styled(rows):
        axis.plot([row["gpus"] for row in line], [row["efficiency"] for row in line], **style)
    axis.axhline(1.0, color="#999999", linestyle=":")
    axis.set_ylim(0, max(1.1, 1.05 * max(row["efficiency"] for row in rows)))
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    _finish(figure, axis, path)


def plot_split(rows: Rows, path: Path, title: str = "") -> None:
    """Where an iteration's seconds go, a bar for each number of GPUs."""
    lines = lines_of(rows)
    units = sum(max(GROUP, len(line)) + GAP for line in lines.values())
    figure, axis = plt.subplots(figsize=(min(max(6.0, 2.2 + 0.42 * units), 40.0), 4.6), layout="constrained")
    position, ticks, labels, middles = 0.0, [], [], []
    for line in lines.values():
        for number, row in enumerate(line):
            bottom = 0.0
            for part, color in PARTS.items():
                height = row["shares"][part] * row["iteration_s"]
                axis.bar(position + number, height, bottom=bottom, color=color, width=0.8)
                bottom += height
            ticks.append(position + number)
            labels.append(str(row["gpus"]))
        middles.append(position + (len(line) - 1) / 2)
        position += max(GROUP, len(line)) + GAP
    axis.set_xticks(ticks, labels, fontsize=8)
    axis.margins(x=0.02)
    names = axis.secondary_xaxis(location=0)  # a second row, below the numbers
    rows_of_words = [re.sub(r" \+ |, | (?=\()", lambda found: found[0].rstrip(", ") + "\n", name) for name in lines]
    names.set_xticks(middles, rows_of_words, fontsize=8)
    names.tick_params("x", length=0, pad=18)
    names.spines[:].set_visible(False)
    names.set_xlabel(_unit(rows))
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in PARTS.values()]
    axis.set(ylabel="seconds per iteration")
    axis.set_title(title, fontsize=9)
    axis.legend(handles, list(PARTS), frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(figure, axis, path)


def _plot_utilisation(rows: Rows, path: Path, title: str) -> None:
    """The share of the time in which a rank works, neither waiting nor reducing."""
    figure, axis = _axis("share of the time that a rank works", rows, title)
    for line, style in _styled(rows):
        busy = [row["shares"]["rollouts"] + row["shares"]["update"] for row in line]
        axis.plot([row["gpus"] for row in line], busy, **style)
    axis.set_ylim(0, 1.05)
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    _finish(figure, axis, path)


def _unit(rows: Rows) -> str:
    """What ranks are called: on the CPU they are no GPUs."""
    return " or ".join(dict.fromkeys(row.get("unit", "GPUs (ranks)") for row in rows))


def _axis(label: str, rows: Rows, title: str) -> tuple[Any, Any]:
    width = 9.5 if len(lines_of(rows)) > MOST_INSIDE else 6.5
    figure, axis = plt.subplots(figsize=(width, 4.2), layout="constrained")
    axis.set(xlabel=_unit(rows), ylabel=label)
    axis.set_title(title, fontsize=9)
    axis.set_xscale("log", base=2)
    gpus = sorted({row["gpus"] for row in rows})
    axis.set_xticks(gpus, [str(number) for number in gpus])
    axis.minorticks_off()
    return figure, axis


def _finish(figure: Any, axis: Any, path: Path) -> None:
    crowded = len(set(axis.get_legend_handles_labels()[1]) - {"ideal"}) > MOST_INSIDE
    beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    axis.legend(frameon=False, fontsize=8, handlelength=3.5, **(beside if crowded else {}))  # dashes are seen
    _save(figure, axis, path)


def _save(figure: Any, axis: Any, path: Path) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)  # no grid over bars
    axis.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
