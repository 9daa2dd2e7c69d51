"""Pictures of a run: learning curve and equity curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from agents.evaluate.statistics import Record
from rl_dist.hardware.plain_files import read_plain

COLORS = {"policy": "#1f5fbf", "policy, state zeroed": "#8fb3e6", "equal weight": "#555555"}
SPARE_COLORS = ("#2e8b57", "#d2691e", "#8b3fa0", "#c0392b", "#b8860b")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, oldest first."""
    lines = read_plain(run_dir / "metrics.jsonl", None).splitlines()
    return [json.loads(line) for line in lines]


def plot_learning_curve(run_dir: Path, path: Path, title: str, simulated: bool) -> None:
    """Training return (and validation figures, if any) over environment steps."""
    records = read_metrics(run_dir)
    points = _points(records, "episode/return")
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    if points:
        steps, values = _axes(points)
        window = max(1, len(values) // 20)
        if window > 1:
            axis.plot(steps, values, color="#b9c9e2", linewidth=0.8, label="each iteration")
            smooth = np.convolve(values, np.ones(window) / window, "valid")
            axis.plot(steps[window - 1 :], smooth, color=COLORS["policy"], label=f"mean of {window} iterations")
        else:  # too few to smooth; a single one is a dot
            axis.plot(steps, values, "o-", color=COLORS["policy"], markersize=3, label="each iteration")
    axis.set(xlabel="environment steps, all ranks", ylabel="return of training episodes", title=title)
    names = sorted({key for record in records for key in record if key.startswith("valid/")})
    if "valid/sharpe" in names:
        twin = axis.twinx()
        found, equal = (_points(records, name) for name in ("valid/sharpe", "valid/equal_weight_sharpe"))
        twin.plot(*_axes(found), "o-", color=SPARE_COLORS[1], label="validation Sharpe ratio", markersize=4)
        twin.plot(*_axes(equal), "--", color=SPARE_COLORS[1], linewidth=0.8)
        twin.set_ylabel("Sharpe ratio, validation span (dashed: equal weight)", color=SPARE_COLORS[1])
        twin.set_ylim(bottom=min([0.0, *_axes(found)[1]]))
    if points:
        axis.legend(loc="center right", frameon=False)
    _finish(figure, axis, path, simulated)


def _points(records: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Steps and values of a metric where it has one: files may hold anything."""
    found = [(record.get("global_step"), record.get(name)) for record in records]
    return [(step, value) for step, value in found if isinstance(step, int) and isinstance(value, int | float)]


def _axes(points: list[tuple[float, float]]) -> np.ndarray:
    """Steps and values apart, [2, n]."""
    return np.array(points).reshape(-1, 2).T


def plot_equity(records: dict[str, Record], dates: np.ndarray, path: Path, title: str, simulated: bool) -> None:
    """Portfolio value over time; with several markets the median.

    The middle half of the policy's markets is then shaded.
    """
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    spare = iter(SPARE_COLORS * 3)
    for name, record in records.items():
        growth = record.values / record.values[:, :1]
        color = COLORS.get(name) or next(spare)
        axis.plot(dates, np.median(growth, axis=0), color=color, label=name, linewidth=1.6)
        if name == "policy" and len(growth) > 1:
            low, high = np.quantile(growth, [0.25, 0.75], axis=0)
            axis.fill_between(dates, low, high, color=color, alpha=0.15, linewidth=0)
    several = len(next(iter(records.values())).values) > 1
    axis.set(ylabel="value / initial cash" + (", median over markets" if several else ""), title=title)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(matplotlib.ticker.LogLocator(base=10, subs=(1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axis.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axis.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axis.axhline(1.0, color="black", linewidth=0.5)
    axis.legend(loc="upper left", frameon=False)
    figure.autofmt_xdate()
    _finish(figure, axis, path, simulated)


def _finish(figure: Any, axis: Any, path: Path, simulated: bool) -> None:
    axis.spines[["top"]].set_visible(False)
    axis.grid(alpha=0.25)
    if simulated:
        axis.text(
            0.99, 0.03, "SIMULATED", transform=axis.transAxes, ha="right", va="bottom",
            fontsize=20, color="#c0392b", alpha=0.45, weight="bold",
        )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
