"""Figures of trading over markets, with intervals, side by side in a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

TRADING_DAYS = 252  # per year
MIN_ANNUAL_DAYS = 60  # fewer days say nothing about a year
BLOCK_DAYS = 21  # of the block bootstrap: about a month, longer than volatility's short memory
RESAMPLES = 2000
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
# simulated returns are planted: they are no results in percent and dollars
OF_THE_BENCHMARK = ("gap closed %", "Sharpe", "max DD %", "turnover", "exposure %")
HEADINGS = {
    "train": "training span, in sample: the policy has learned from these days",
    "valid": "validation span: choose on these days",
    "test": "test span",
    "days": "days asked for: held out only if the policy was neither trained nor chosen on them",
}
Interval = tuple[float, float, float]  # a value, and the ends of its 95 % interval


@dataclass(frozen=True)
class Record:
    """Account of one policy over one pass of M markets of D + 1 days."""

    values: np.ndarray  # [M, D+1] portfolio value, USD
    traded_usd: np.ndarray  # [M, D]
    fees_usd: np.ndarray  # [M, D]
    num_trades: np.ndarray  # [M, D]
    exposure: np.ndarray  # [M, D] share of the value held in stocks
    # [M, D, 2n], empty if not kept: of each stock the share of the value after the day, then of
    # each stock the USD for which it was bought, negative where sold
    stocks: np.ndarray = field(default_factory=lambda: np.empty(0))

    @property
    def returns(self) -> np.ndarray:
        """Simple daily returns, [M, D]."""
        return self.values[:, 1:] / self.values[:, :-1] - 1.0


def period_days(num_days: int) -> int:
    """Return the days that figures are scaled to: a year, or a short span itself."""
    return TRADING_DAYS if num_days >= MIN_ANNUAL_DAYS else num_days


def sharpe_ratio(returns: np.ndarray) -> np.ndarray:
    """Return the Sharpe ratio of a period (risk-free rate 0); 0 without risk."""
    days = period_days(returns.shape[-1])
    return _ratio(returns.mean(-1) * np.sqrt(days), _deviation(returns))


def _ratio(gain: np.ndarray, risk: np.ndarray) -> np.ndarray:
    return np.divide(gain, risk, out=np.zeros_like(gain), where=risk >= 1e-12)


def _deviation(returns: np.ndarray) -> np.ndarray:
    return returns.std(axis=-1, ddof=min(1, returns.shape[-1] - 1))  # 0 for a single day


def annual_growth(returns: np.ndarray) -> np.ndarray:
    """Return the compound return per period of daily returns along the last axis."""
    growth = np.maximum(np.prod(1.0 + returns, axis=-1), 0.0)
    num_days = returns.shape[-1]
    return growth ** (period_days(num_days) / num_days) - 1.0


def performance(record: Record) -> dict[str, np.ndarray]:
    """Return figures of each market, each [M].

    Turnover is per period, relative to the mean value. A period is a year, or the whole span where
    that is too short to be annualised.
    """
    returns, values = record.returns, record.values
    growth = values[:, -1] / values[:, 0]
    period = period_days(returns.shape[1])
    periods = returns.shape[1] / period
    downside = np.sqrt(np.square(np.minimum(returns, 0.0)).mean(1) * period)
    peaks = np.maximum.accumulate(values, axis=1)
    return {
        "cumulative_return": growth - 1.0,
        "annual_return": np.maximum(growth, 0.0) ** (1.0 / periods) - 1.0,
        "annual_volatility": _deviation(returns) * np.sqrt(period),
        "sharpe": sharpe_ratio(returns),
        "sortino": _ratio(returns.mean(1) * period, downside),
        "max_drawdown": (1.0 - values / peaks).max(1),
        "turnover": record.traded_usd.sum(1) / values.mean(1) / periods,
        "num_trades": record.num_trades.sum(1),
        "fees_usd": record.fees_usd.sum(1),
        "exposure": record.exposure.mean(1),
    }


# ---- intervals


def mean_interval(samples: np.ndarray) -> Interval:
    """Return the mean of independent samples [M] and its normal interval."""
    mean, half = samples.mean(), 1.96 * samples.std(ddof=1) / np.sqrt(len(samples))
    return float(mean), float(mean - half), float(mean + half)


def _quantiles(value: np.ndarray, draws: np.ndarray) -> Interval:
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(value), float(low), float(high)


def bootstrap_interval(
    returns: np.ndarray,  # [D] daily returns of the policy
    baseline: np.ndarray,  # [D] of the baseline on the same days
    seed: int = 0,
) -> dict[str, Interval]:
    """Return differences to the baseline on one market, by resampled blocks.

    They are those of "sharpe" and of "annual_return" (compound). Source: circular block bootstrap,
    Politis and Romano (1992).
    """
    days = len(returns)
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, days, (RESAMPLES, -(-days // BLOCK_DAYS)))
    index = ((starts[:, :, None] + np.arange(BLOCK_DAYS)) % days).reshape(RESAMPLES, -1)[:, :days]
    return {
        name: _quantiles(
            figure(returns) - figure(baseline), figure(returns[index]) - figure(baseline[index])
        )
        for name, figure in (("sharpe", sharpe_ratio), ("annual_return", annual_growth))
    }


# ---- side by side


def summarize(records: dict[str, Record], dates: np.ndarray) -> dict[str, Any]:
    """Return mean figures of each record; differences to equal weight with intervals."""
    figures = {name: performance(record) for name, record in records.items()}
    base = figures[EQUAL_WEIGHT]
    num_markets = len(base["sharpe"])
    policies: dict[str, dict[str, Any]] = {}
    for name, own in figures.items():
        entry = policies[name] = {key: float(value.mean()) for key, value in own.items()}
        if name == EQUAL_WEIGHT:
            continue
        # over pairs of markets, or over resampled blocks of days of one market
        if num_markets > 1:
            keys = ("sharpe", "annual_return")
            differences = {key: mean_interval(own[key] - base[key]) for key in keys}
        else:
            both = (records[which].returns[0] for which in (name, EQUAL_WEIGHT))
            differences = bootstrap_interval(*both)
        entry["against_equal_weight"] = {key: list(value) for key, value in differences.items()}

    # share of the gap to the reference that each closes, if there is one beyond chance
    if reference := policies.get("reference"):
        sharpe = policies[EQUAL_WEIGHT]["sharpe"]
        gap = reference["sharpe"] - sharpe
        is_gap = reference["against_equal_weight"]["sharpe"][1] > 0.1
        for entry in policies.values():
            entry["gap_closed"] = (entry["sharpe"] - sharpe) / gap if is_gap else None
    return {
        "markets": num_markets,
        "days": [str(dates[0]), str(dates[-1])],
        "num_days": len(dates) - 1,  # with a return
        "ablation": {name: policies.pop(name) for name in {ZEROED} & policies.keys()},
        "policies": policies,
    }


def text_table(summaries: dict[str, dict[str, Any]], *, simulated: bool) -> str:
    """Return the summaries of spans as one table, with ablations below it."""
    heads = OF_THE_BENCHMARK if simulated else tuple(COLUMNS)[1:]
    lines = [f"{'':{WIDTH}}" + "".join(f"{head:>13}" for head in heads)]
    below = []
    for span, summary in summaries.items():
        heading, num_days, markets = HEADINGS[span], summary["num_days"], summary["markets"]
        how = f"mean over {markets} markets" if markets > 1 else "blocks of days resampled"
        if simulated:
            heading = f"memory benchmark, {markets} SIMULATED markets never trained on"
        lines.append(f"{heading} ({' to '.join(summary['days'])}, {num_days} days)")
        below.append(f"\n{span}, against equal weight bought at once ({how}, 95 % interval):")
        for name, entry in summary["policies"].items():
            cells = "".join(f"{_cell(entry, head):>13}" for head in heads)
            lines.append(f"  {name:<{WIDTH - 2}}{cells}")
        for name, entry in (summary["policies"] | summary["ablation"]).items():
            if against := entry.get("against_equal_weight"):
                text = "Sharpe {:+.2f} [{:+.2f}, {:+.2f}]   ".format(*against["sharpe"])
                if simulated:
                    text += f"gap closed: {_cell(entry, 'gap closed %')}%"
                else:
                    annual = against["annual_return"]
                    text += "annual return {:+.1%} [{:+.1%}, {:+.1%}]".format(*annual)
                below.append(f"  {name:<{WIDTH - 2}}{text}")
        if num_days < MIN_ANNUAL_DAYS:
            few = f"  fewer than {MIN_ANNUAL_DAYS} days: nothing is annualised"
            below.append(f"{few}, all figures are those of the {num_days} days")
    return "\n".join(lines + below)


def _cell(entry: dict[str, Any], head: str) -> str:
    statistic, form, factor = COLUMNS[head]
    value = entry.get(statistic)
    return "-" if value is None else form.format(value * factor)
