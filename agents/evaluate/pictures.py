"""Pictures of a run: learning curve and equity curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from agents.evaluate.statistics import Record
from rl_dist.run_dir import RunDir

COLORS = {"policy": "#1f5fbf", "equal weight": "#555555", "reference": "#2ca02c"}
ORANGE = "#d2691e"


def plot_learning_curve(run_dir: Path, path: Path, title: str, simulated: bool) -> None:
    """Draw training return (and validation figures, if any) over environment steps."""
    records = RunDir(run_dir).records()
    steps, returns = _points(records, "episode/return")
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    window = len(steps) // 20
    axis.plot(steps, returns, ".-", color="#b9c9e2", label="each iteration")
    if window > 1:
        smooth = np.convolve(returns, np.ones(window) / window, "valid")
        label = f"mean of {window} iterations"
        axis.plot(steps[window - 1 :], smooth, color=COLORS["policy"], label=label)
    axis.set(xlabel="environment steps, all ranks", ylabel="return of training episodes")
    axis.set_title(title)

    # validation: returns are comparable, a Sharpe ratio has an axis of its own
    steps, valid = _points(records, "valid/return")
    if len(steps):
        axis.plot(steps, valid, "o-", color=ORANGE, label="evaluation, without noise")
    steps, sharpe = _points(records, "valid/sharpe")
    if len(steps):
        twin = axis.twinx()
        twin.plot(steps, sharpe, "o-", color=ORANGE)
        equal = _points(records, "valid/equal_weight_sharpe")
        twin.plot(*equal, "--", color=ORANGE)
        twin.set_ylabel("Sharpe ratio, validation span (dashed: equal weight)")
    axis.legend(loc="center right")
    _save(figure, axis, path, simulated)


def _points(records: list[dict[str, Any]], name: str) -> np.ndarray:
    """Return steps and values [2, n] of a metric where it has one."""
    points = [(record["global_step"], record.get(name)) for record in records]
    return np.array([point for point in points if point[1] is not None]).reshape(-1, 2).T


def plot_equity(
    records: dict[str, Record], dates: np.ndarray, path: Path, *, span: str, simulated: bool
) -> None:
    """Draw portfolio values; of several markets the median and a middle half."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, record in records.items():
        growth = record.values / record.values[:, :1]
        axis.plot(dates, np.median(growth, axis=0), color=COLORS.get(name), label=name)
        if name == "policy" and len(growth) > 1:
            low, high = np.quantile(growth, [0.25, 0.75], axis=0)
            axis.fill_between(dates, low, high, color=COLORS[name], alpha=0.15)
    axis.set_title(f"{span}: {dates[0]} to {dates[-1]}")
    axis.set_ylabel("value / initial cash, median over markets")
    axis.legend(loc="upper left")
    figure.autofmt_xdate()
    _save(figure, axis, path, simulated)


def _save(figure: Any, axis: Any, path: Path, simulated: bool) -> None:
    axis.grid()
    if simulated:
        place = {"transform": axis.transAxes, "ha": "right"}
        axis.text(0.99, 0.03, "SIMULATED", fontsize=20, color="#c0392b", alpha=0.45, **place)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
