"""Pictures of a run: learning curve and equity curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from agents.statistics import Record
from rl_dist.run_files import read_plain

COLORS = {"policy": "#1f5fbf", "policy, state zeroed": "#8fb3e6", "equal weight": "#555555"}
SPARE_COLORS = ("#2e8b57", "#d2691e", "#8b3fa0", "#c0392b", "#b8860b")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, oldest first."""
    lines = read_plain(run_dir / "metrics.jsonl", None).splitlines()
    return [json.loads(line) for line in lines]


def plot_learning_curve(run_dir: Path, path: Path, title: str, simulated: bool) -> None:
    """Training return (and validation figures, if any) over environment steps."""
    records = read_metrics(run_dir)
    points = [(r["global_step"], r["episode/return"]) for r in records if r["episode/return"] is not None]
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    if points:
        steps, values = np.array(points).T
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
        found = [(r["global_step"], r["valid/sharpe"]) for r in records if r.get("valid/sharpe") is not None]
        twin.plot(*np.array(found).T, "o-", color=SPARE_COLORS[1], label="validation Sharpe ratio", markersize=4)
        equal = [(r["global_step"], r.get("valid/equal_weight_sharpe")) for r in records if "valid/sharpe" in r]
        twin.plot(*np.array(equal).T, "--", color=SPARE_COLORS[1], linewidth=0.8)
        twin.set_ylabel("Sharpe ratio, validation span (dashed: equal weight)", color=SPARE_COLORS[1])
        twin.set_ylim(bottom=min(0.0, *(value for _, value in found)))
    if points:
        axis.legend(loc="center right", frameon=False)
    _finish(figure, axis, path, simulated)


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
