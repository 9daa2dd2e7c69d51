"""Let policies and rules trade; compare them with an equal-weight portfolio."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy import ndarray
from torch import Tensor

from envs.intervals import RESAMPLES, Interval, interval, mean_interval
from envs.task import Agent, Record, Records, TrainedAgent
from envs.trading.environment import TradingVectorEnv
from envs.trading.market_data import TRADING_DAYS, Market, days_per_year
from rl_dist.files import write_whole

MIN_ANNUAL_DAYS = 60  # results on shorter spans are not annualised
# The bootstrap resamples blocks of one month, because volatility is autocorrelated for that long.
BLOCK_DAYS = 21
NO_RISK = 1e-12  # a standard deviation below this value is a rounding error
EQUAL_WEIGHT = "equal weight"  # buy and hold with equal weights: the baseline
AGAINST = "against_equal_weight"
# values per day; the last two are those of `concentration`
ACCOUNTS = (
    "traded_usd", "fees_usd", "num_trades", "exposure", "largest_weight", "effective_stocks",
)  # fmt: skip
# Values per day and stock: key in the environment's info, and prefix of the CSV column.
STOCKS = {"weights": "weight", "trades_usd": "usd"}
# Lines of the printed table: statistic, its name there, and its format
ON_ALL_MARKETS = (
    ("sharpe", "Sharpe ratio", "{:.2f}"),
    ("max_drawdown", "largest loss from a peak", "{:.1%}"),
    ("turnover", "turnover a year", "{:.1f}"),
    ("exposure", "share invested", "{:.1%}"),
    ("largest_weight", "largest weight of a stock", "{:.1%}"),
    ("effective_stocks", "effective number of stocks", "{:.1f}"),
)
ON_SIMULATED_MARKETS = (("gap_closed", "share of the gap closed", "{:.0%}"),)
# Returns on simulated markets depend mainly on the simulated drift, so their table omits them.
ON_REAL_PRICES = (
    ("cumulative_return", "return", "{:.1%}"),
    ("annual_return", "annual return", "{:.1%}"),
    ("annual_volatility", "annual volatility", "{:.1%}"),
    ("fees_usd", "fees", "${:,.0f}"),
)

# The record of one pass over M markets of D + 1 days has these arrays:
# - "values" [M, D+1]: portfolio values in USD;
# - each key in ACCOUNTS, [M, D];
# - each key in STOCKS, [M, D, n] for n stocks, only in records of policies, not of rules.


# ---- one pass over markets


def run_markets(
    env: TradingVectorEnv, agent: Agent, heartbeat: Callable[[], None]
) -> dict[str, list]:
    """Trade once through all markets; ruined portfolios keep their last value.

    Returns:
        The record described above, with lists in place of arrays.
    """
    obs, _ = env.reset(seed=[0] * env.num_envs)
    start = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    alive = start
    names = [*ACCOUNTS, *(STOCKS if isinstance(agent, TrainedAgent) else ())]
    values = [env.value.squeeze(1)]
    days: dict[str, list[Tensor]] = {name: [] for name in names}
    for _ in range(env.num_days - 1):
        obs, _, terminated, truncated, info = env.step(agent(env, obs, start))
        info |= concentration(info["weights"])
        heartbeat()
        values.append(torch.where(alive, info["portfolio_value"], values[-1]))
        for name in names:
            days[name].append(info[name] * (alive if name in ACCOUNTS else alive[:, None]))
        start = terminated | truncated
        alive = alive & ~start
    days["values"] = values
    return {name: torch.stack(column, dim=1).tolist() for name, column in days.items()}


# ---- statistics and intervals


def concentration(weights: Tensor) -> dict[str, Tensor]:
    """Return how concentrated portfolios are.

    Args:
        weights: [M, n] fractions of the portfolio's value, of n stocks.

    Returns:
        largest_weight: [M] weight of the largest position.
        effective_stocks: [M] number of stocks, of equal weight, with the same concentration: the
            square of the sum of the weights, divided by the sum of their squares; 0 without stocks.
    """
    squares = weights.square().sum(1)
    return {
        "largest_weight": weights.amax(1),
        "effective_stocks": weights.sum(1).square() / squares.clamp(min=NO_RISK),
    }


def period_days(num_days: int, year: int) -> int:
    """Return the length, in days, of the period to which results are scaled.

    The period is a year of `year` days; for a span shorter than MIN_ANNUAL_DAYS, it is the span.
    """
    return year if num_days >= MIN_ANNUAL_DAYS else num_days


def growth_figures(returns: ndarray, year: int) -> dict[str, ndarray]:
    """Compute statistics of daily returns over the last axis, which is time.

    The statistics are scaled to the period that `period_days` returns. The risk-free rate is 0, and
    the Sharpe ratio is 0 if returns do not vary.
    """
    num_days = returns.shape[-1]
    period = period_days(num_days, year)
    growth = np.maximum(np.prod(1.0 + returns, axis=-1), 0.0)
    deviation = returns.std(axis=-1, ddof=min(1, num_days - 1))  # 0 if there is only 1 day
    gain = returns.mean(-1) * np.sqrt(period)
    return {
        "annual_return": growth ** (period / num_days) - 1.0,
        "annual_volatility": deviation * np.sqrt(period),
        "sharpe": np.where(deviation < NO_RISK, 0.0, gain / np.maximum(deviation, NO_RISK)),
    }


def daily_returns(record: Record) -> ndarray:
    """Return simple (not logarithmic) daily returns [M, D]."""
    return record["values"][:, 1:] / record["values"][:, :-1] - 1.0


def performance(record: Record, year: int = TRADING_DAYS) -> dict[str, ndarray]:
    """Compute performance statistics for each market; each statistic has shape [M].

    Turnover is the amount traded per `period_days`, divided by the mean portfolio value.
    """
    values, returns = record["values"], daily_returns(record)
    traded_usd = record["traded_usd"].mean(1) * period_days(returns.shape[1], year)
    return growth_figures(returns, year) | {
        "cumulative_return": values[:, -1] / values[:, 0] - 1.0,
        "max_drawdown": (1.0 - values / np.maximum.accumulate(values, axis=1)).max(1),
        "turnover": traded_usd / values.mean(1),
        "num_trades": record["num_trades"].sum(1),
        "fees_usd": record["fees_usd"].sum(1),
        "exposure": record["exposure"].mean(1),
        "largest_weight": record["largest_weight"].mean(1),
        "effective_stocks": record["effective_stocks"].mean(1),
    }


def difference(record: Record, baseline: Record, name: str, year: int = TRADING_DAYS) -> Interval:
    """Return a statistic's difference from the baseline, with a 95 % interval.

    Several markets are treated as independent samples. For a single market, blocks of days are
    resampled.

    Source: circular block bootstrap, Politis and Romano (1992).
    """
    samples = performance(record, year)[name] - performance(baseline, year)[name]
    if len(samples) > 1:
        return mean_interval(samples)
    days = len(record["values"][0]) - 1
    starts = np.random.default_rng(0).integers(0, days, (RESAMPLES, -(-days // BLOCK_DAYS), 1))
    index = ((starts + np.arange(BLOCK_DAYS)) % days).reshape(RESAMPLES, -1)[:, :days]
    draws, baseline_draws = (
        growth_figures(daily_returns(part)[0][index], year)[name] for part in (record, baseline)
    )
    return interval(samples[0], draws - baseline_draws)


def summarize(records: Records, dates: ndarray) -> dict:
    """Average statistics over markets; compare with the equal-weight portfolio."""
    policies: dict[str, dict] = {}
    year = days_per_year(dates)
    for name, record in records.items():
        figures = performance(record, year)
        policies[name] = {key: float(value.mean()) for key, value in figures.items()}
        if name != EQUAL_WEIGHT:
            policies[name][AGAINST] = {
                figure: difference(record, records[EQUAL_WEIGHT], figure, year)
                for figure in ("sharpe", "annual_return")
            }

    # gap_closed is a trader's gain in Sharpe ratio over the equal-weight portfolio, divided by the
    # reference rule's gain. It is None unless the 95 % interval of the rule's gain lies above 0.1.
    if rule := policies.get("reference"):
        baseline = policies[EQUAL_WEIGHT]["sharpe"]
        rule_gain = rule[AGAINST]["sharpe"]
        for entry in policies.values():
            gain = entry["sharpe"] - baseline
            entry["gap_closed"] = gain / rule_gain["mean"] if rule_gain["low"] > 0.1 else None
    return {
        "markets": len(records[EQUAL_WEIGHT]["values"]),
        "days": [str(dates[0]), str(dates[-1])],
        "num_days": len(dates) - 1,  # the first date has no return
        "policies": policies,
    }


# ---- report


def text_table(summary: dict, simulated: bool) -> str:
    """Format the summary of a span as a table to print."""
    entries = summary["policies"]
    is_short = summary["num_days"] < MIN_ANNUAL_DAYS
    own = ON_SIMULATED_MARKETS if simulated else ON_REAL_PRICES
    lines = {
        re.sub("annual | a year", "", heading) if is_short else heading: [
            "-" if entry.get(name) is None else form.format(entry[name])
            for entry in entries.values()
        ]
        for name, heading, form in (*own, *ON_ALL_MARKETS)
    }
    form = "{mean:+.2f} [{low:+.2f}, {high:+.2f}]"
    lines["Sharpe ratio above equal weight"] = [
        form.format(**entry[AGAINST]["sharpe"]) if AGAINST in entry else "-"
        for entry in entries.values()
    ]
    heading = f"{' to '.join(summary['days'])}, {summary['num_days']} days"
    if is_short:
        heading += f"; fewer than {MIN_ANNUAL_DAYS} days, so nothing is annualised"
    return f"{heading}\n{pd.DataFrame.from_dict(lines, 'index', columns=[*entries]).to_string()}"


def write_daily(
    path: Path,
    records: Records,
    markets: Sequence[Market],
    dates: ndarray,  # [D+1], one date for each portfolio value
) -> None:
    """Write a CSV row per strategy, market and date, except for the first date.

    docs/data.md describes the columns.
    """
    index = pd.MultiIndex.from_product(
        [[market.name for market in markets], dates[1:]], names=["market", "date"]
    )
    tables = {}
    for name, record in records.items():
        tables[name] = pd.DataFrame({"return": daily_returns(record).ravel()}, index)
        for figure in [name for name in STOCKS if name in record]:
            columns = [f"{STOCKS[figure]}:{ticker}" for ticker in markets[0].tickers]
            # Adding 0.0 turns -0.0 into 0.0.
            tables[name][columns] = record[figure].reshape(len(index), -1) + 0.0
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, pd.concat(tables, names=["strategy"]).to_csv(float_format="%.8g"))


def plot_equity(
    records: Records,
    dates: ndarray,  # [D+1]
    path: Path,
    span: str,
    watermark: str,
) -> None:
    """For each strategy, plot the median growth of the portfolio over all markets."""
    from envs.pictures import save_plot  # imported late: importing matplotlib takes 0.5 s

    medians = {
        name: np.median(record["values"] / record["values"][:, :1], axis=0)
        for name, record in records.items()
    }
    title = f"{span}: {dates[0]} to {dates[-1]}"
    pd.DataFrame(medians, dates).plot(title=title, grid=True, ylabel="median value / initial cash")
    save_plot(path, watermark)
