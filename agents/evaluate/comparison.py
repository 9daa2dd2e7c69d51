"""Trading policies side by side: figures, differences, a table."""

from __future__ import annotations

from typing import Any

import numpy as np

from agents.evaluate.statistics import Record, bootstrap_interval, mean_interval, performance

EQUAL_WEIGHT = "equal weight"  # bought at once: the baseline of every comparison
LIMITED = "equal weight, order limit"
ZEROED = "policy, state zeroed"
TAKEN_NAMES = (EQUAL_WEIGHT, LIMITED, "reference", "memoryless rule", ZEROED)
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


def summarize(records: dict[str, Record], dates: np.ndarray) -> dict[str, Any]:
    """Mean figures of each record; differences to equal weight, 95 % intervals."""
    base_record = records[EQUAL_WEIGHT]
    base = performance(base_record)
    policies: dict[str, dict[str, Any]] = {}
    for name, record in records.items():
        own = performance(record)
        policies[name] = {key: float(value.mean()) for key, value in own.items()}
        if name == EQUAL_WEIGHT:
            continue
        # over pairs of markets, or over resampled blocks of days of one market
        if len(record.values) > 1:
            keys = ("sharpe", "annual_return")
            found = {key: mean_interval(own[key] - base[key]) for key in keys}
        else:
            found = bootstrap_interval(record.returns[0], base_record.returns[0])
        policies[name]["against_equal_weight"] = {key: list(v) for key, v in found.items()}

    # share of the gap to the reference that each closes, if there is one beyond chance
    if "reference" in policies:
        sharpe = policies[EQUAL_WEIGHT]["sharpe"]
        gap = policies["reference"]["sharpe"] - sharpe
        is_gap = policies["reference"]["against_equal_weight"]["sharpe"][1] > 0.1
        for name, entry in policies.items():
            closed = (entry["sharpe"] - sharpe) / gap if is_gap else None
            entry["gap_closed"] = None if name == EQUAL_WEIGHT else closed
    days = [str(dates[0]), str(dates[-1])]
    return {"markets": len(base_record.values), "policies": policies, "days": days}


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
        if "against_equal_weight" not in entry:
            continue
        sharpe = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*entry["against_equal_weight"]["sharpe"])
        annual = entry["against_equal_weight"]["annual_return"]
        line = f"{name:<{width}}Sharpe {sharpe}   annual return "
        line += "{:+.1%} [{:+.1%}, {:+.1%}]".format(*annual)
        if entry.get("gap_closed") is not None:
            line += f"   closes {entry['gap_closed']:.0%} of the gap to the reference"
        lines.append(line)
    return "\n".join(lines)
