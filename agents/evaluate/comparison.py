"""Trading policies side by side: figures, differences, a table."""

from __future__ import annotations

from typing import Any

import numpy as np

from agents.evaluate.statistics import (
    MIN_ANNUAL_DAYS,
    Record,
    bootstrap_interval,
    mean_interval,
    performance,
)

EQUAL_WEIGHT = "equal weight"  # bought at once: the baseline of every comparison
ZEROED = "ablation: policy, state zeroed"
WIDTH = 34  # of the column of names
COLUMNS = {  # column head: (statistic, format, factor)
    "gap closed %": ("gap_closed", "{:.0f}", 100),
    "Sharpe": ("sharpe", "{:.2f}", 1),
    "return %": ("cumulative_return", "{:.1f}", 100),
    "annual %": ("annual_return", "{:.1f}", 100),
    "vol %": ("annual_volatility", "{:.1f}", 100),
    "Sortino": ("sortino", "{:.2f}", 1),
    "max DD %": ("max_drawdown", "{:.1f}", 100),
    "turnover": ("turnover", "{:.1f}", 1),
    "trades": ("num_trades", "{:.0f}", 1),
    "fees $": ("fees_usd", "{:.0f}", 1),
    "exposure %": ("exposure", "{:.0f}", 100),
}
# the memory benchmark's returns are planted: they are no results in percent and dollars
OF_REAL_PRICES = tuple(COLUMNS)[1:]
OF_THE_BENCHMARK = ("gap closed %", "Sharpe", "max DD %", "turnover", "exposure %")
HEADINGS = {
    "train": "training span, in sample: the policy has learned from these days",
    "valid": "validation span: choose on these days",
    "test": "test span",
    "days": "days asked for: held out only if the policy was neither trained nor chosen on them",
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
        for entry in policies.values():
            entry["gap_closed"] = (entry["sharpe"] - sharpe) / gap if is_gap else None
    return {
        "markets": len(base_record.values),
        "days": [str(dates[0]), str(dates[-1])],
        "num_days": len(dates) - 1,  # with a return
        "ablation": {name: policies.pop(name) for name in {ZEROED} & policies.keys()},
        "policies": policies,
    }


def text_table(summaries: dict[str, dict[str, Any]], *, simulated: bool) -> str:
    """Return the summaries of spans as one table, with ablations below it."""
    columns = {name: COLUMNS[name] for name in (OF_THE_BENCHMARK if simulated else OF_REAL_PRICES)}
    lines = [f"{'':{WIDTH}}" + "".join(f"{head:>13}" for head in columns)]
    below = []
    for span, summary in summaries.items():
        heading, num_days = HEADINGS[span], summary["num_days"]
        how = "blocks of days resampled"
        if summary["markets"] > 1:
            how = f"mean over {summary['markets']} markets"
        if simulated:
            heading = f"memory benchmark, {summary['markets']} SIMULATED markets never trained on"
        lines.append(f"{heading} ({' to '.join(summary['days'])}, {num_days} days)")
        below.append(f"\n{span}, against equal weight bought at once ({how}, 95 % interval):")
        for name, entry in summary["policies"].items():
            cells = (_cell(entry.get(key), form, factor) for key, form, factor in columns.values())
            lines.append(f"  {name:<{WIDTH - 2}}" + "".join(f"{cell:>13}" for cell in cells))
        for name, entry in (summary["policies"] | summary["ablation"]).items():
            if against := entry.get("against_equal_weight"):
                text = "Sharpe {:+.2f} [{:+.2f}, {:+.2f}]".format(*against["sharpe"])
                if simulated:
                    text += f"   gap closed: {_cell(entry.get('gap_closed'), '{:.0%}', 1)}"
                else:
                    interval = "{:+.1%} [{:+.1%}, {:+.1%}]".format(*against["annual_return"])
                    text += f"   annual return {interval}"
                below.append(f"  {name:<{WIDTH - 2}}{text}")
        if num_days < MIN_ANNUAL_DAYS:
            few = f"  fewer than {MIN_ANNUAL_DAYS} days: nothing is annualised"
            below.append(f"{few}, all figures are those of the {num_days} days")
    return "\n".join(lines + below)


def _cell(value: float | None, form: str, factor: float) -> str:
    return "-" if value is None else form.format(value * factor)
