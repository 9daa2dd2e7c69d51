"""What a comparison of trading policies found: figures, differences, a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from agents.evaluate.statistics import Record, bootstrap_interval, mean_interval, performance

EQUAL_WEIGHT = "equal weight"  # bought at once: the baseline of every comparison
COLUMNS = {  # column head: (statistic, format, factor)
    "return %": ("cumulative_return", "{:.1f}", 100),
    "annual %": ("annual_return", "{:.1f}", 100),
    "vol %": ("annual_volatility", "{:.1f}", 100),
    "Sharpe": ("sharpe", "{:.2f}", 1),
    "Sortino": ("sortino", "{:.2f}", 1),
    "max DD %": ("max_drawdown", "{:.1f}", 100),
    "turnover": ("turnover", "{:.1f}", 1),
    "trades": ("num_trades", "{:.0f}", 1),
    "fees $": ("fees_usd", "{:.0f}", 1),
    "exposure %": ("exposure", "{:.0f}", 100),
}


@dataclass(frozen=True)
class Judgement:
    """Records of all controllers over the same markets and days."""

    records: dict[str, Record]
    dates: np.ndarray  # [D+1]
    simulated: bool

    def summary(self) -> dict[str, Any]:
        """Mean figures per controller; differences to equal weight, 95 % intervals."""
        found: dict[str, Any] = {"markets": len(self.records[EQUAL_WEIGHT].values), "policies": {}}
        found["days"] = [str(self.dates[0]), str(self.dates[-1])]
        base = performance(self.records[EQUAL_WEIGHT])
        for name, record in self.records.items():
            own = performance(record)
            entry: dict[str, Any] = {key: float(value.mean()) for key, value in own.items()}
            if name != EQUAL_WEIGHT:
                entry["against_equal_weight"] = self._differences(record, own, base)
            found["policies"][name] = entry
        if "reference" in self.records:
            gap = found["policies"]["reference"]["sharpe"] - found["policies"][EQUAL_WEIGHT]["sharpe"]
            is_gap = found["policies"]["reference"]["against_equal_weight"]["sharpe"][1] > 0.1  # beyond chance
            for name, entry in found["policies"].items():
                gain = entry["sharpe"] - found["policies"][EQUAL_WEIGHT]["sharpe"]
                entry["gap_closed"] = gain / gap if name != EQUAL_WEIGHT and is_gap else None
        return found

    def _differences(self, record: Record, own: dict, base: dict) -> dict[str, list[float]]:
        """(estimate, low, high): over pairs of markets, or over resampled blocks of days of one market."""
        if len(record.values) > 1:
            return {key: list(mean_interval(own[key] - base[key])) for key in ("sharpe", "annual_return")}
        baseline = self.records[EQUAL_WEIGHT].returns[0]
        return {key: list(value) for key, value in bootstrap_interval(record.returns[0], baseline).items()}


def text_table(summary: dict[str, Any]) -> str:
    """The summary as a table for a terminal."""
    width = max(len(name) for name in summary["policies"]) + 2
    lines = [" " * width + "".join(f"{head:>11}" for head in COLUMNS)]
    for name, entry in summary["policies"].items():
        cells = (form.format(entry[key] * factor) for key, form, factor in COLUMNS.values())
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>11}" for cell in cells))
    many = summary["markets"] > 1
    how = f"mean over {summary['markets']} markets" if many else "block bootstrap of days"
    lines.append(f"\nagainst equal weight bought at once ({how}, 95 % interval):")
    for name, entry in summary["policies"].items():
        if "against_equal_weight" in entry:
            sharpe, annual = (entry["against_equal_weight"][key] for key in ("sharpe", "annual_return"))
            closed = entry.get("gap_closed")
            tail = f"   closes {closed:.0%} of the gap to the reference" if closed is not None else ""
            lines.append(
                f"{name:<{width}}Sharpe {sharpe[0]:+.2f} [{sharpe[1]:+.2f}, {sharpe[2]:+.2f}]   annual return "
                f"{annual[0]:+.1%} [{annual[1]:+.1%}, {annual[2]:+.1%}]{tail}"
            )
    return "\n".join(lines)
