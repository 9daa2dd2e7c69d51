"""Run policies and trading rules on markets; compare them with equal weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from agents.evaluate.episodes import Controller, PolicyController, shard
from agents.network.inputs import Normalizer
from agents.policy import Policy
from envs.trading.baselines import buy_equal_weight, follow, memoryless, reference
from envs.trading.market_data import Market, Span
from envs.trading.task import TradingTask
from rl_dist.files import path_to_write, write_whole
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World

TRADING_DAYS = 252  # per year
MIN_ANNUAL_DAYS = 60  # results on shorter spans are not annualised
# Block length of the bootstrap: a month. The autocorrelation of volatility is small beyond it.
BLOCK_DAYS = 21
RESAMPLES = 2000
NO_RISK = 1e-12  # a standard deviation below this is rounding error
EQUAL_WEIGHT = "equal weight"  # buy and hold with equal weights: the baseline
ZEROED = "ablation: policy, state zeroed"
AGAINST = "against_equal_weight"
ACCOUNTS = ("traded_usd", "fees_usd", "num_trades", "exposure")  # per day
# Per day and stock: name in the environment's info, and prefix of the CSV columns.
STOCKS = {"weights": "weight", "trades_usd": "usd"}
COLUMNS = (  # columns of the printed table; for simulated markets only the first five
    "gap_closed", "sharpe", "max_drawdown", "turnover", "exposure",
    "cumulative_return", "annual_return", "annual_volatility", "fees_usd",
)  # fmt: skip
SIMULATED = "memory benchmark: SIMULATED markets never trained on"
SPANS = {
    "train": "training span, in sample: the policy was trained on these days",
    "valid": "validation span: make choices on these days",
    "test": "test span",
}
NO_VALIDATION = (
    "\nThere is no validation span: the policy was trained on all these days. For a validation "
    "span, train with --valid_start, or with --test_start alone, which takes a fifth of the days "
    "before it."
)

# Result of one pass over M markets of D + 1 days. "values": the portfolio's value in USD [M, D+1];
# names in ACCOUNTS: [M, D]; for policies also names in STOCKS: [M, D, n] for n stocks.
Record = dict[str, np.ndarray]


# ---- one pass over markets


def run_markets(env: Any, controller: Controller, world: World) -> Record:
    """Trade once through all markets; a ruined portfolio keeps its last value."""
    obs, _ = env.reset(seed=[0] * env.num_envs)
    start = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    alive = start.clone()
    names = [*ACCOUNTS, *(STOCKS if isinstance(controller, PolicyController) else ())]
    values = [env.portfolio_value]
    days: dict[str, list[Tensor]] = {name: [] for name in names}
    for _ in range(env.num_days - 1):
        obs, _, terminated, truncated, info = env.step(controller(env, obs, start))
        world.heartbeat()
        values.append(torch.where(alive, info["portfolio_value"], values[-1]))
        for name in names:
            days[name].append(info[name] * (alive if name in ACCOUNTS else alive[:, None]))
        start = terminated | truncated
        alive = alive & ~start
    days["values"] = values
    return {name: torch.stack(column, dim=1).cpu().numpy() for name, column in days.items()}


def evaluate_markets(
    task: TradingTask,
    markets: Sequence[Market],
    span: Span,
    traders: dict[str, Controller],
    world: World,
) -> dict[str, Record]:
    """Let each trader trade once through all markets; divide these among the ranks.

    Returns:
        For each trader, the record of all M markets in their order; the same on every rank.
    """
    local_markets = [markets[index] for index in shard(len(markets), world)]

    @cache  # traders share an environment: building its tables takes longer than one pass
    def make_env(held: bool) -> Any:
        return task.evaluation_env(local_markets, span, held=held, device=world.device)

    local_records: dict[str, dict[str, list]] = {}
    for name, trader in traders.items() if local_markets else ():
        record = run_markets(make_env(trader is buy_equal_weight), trader, world)
        local_records[name] = {key: column.tolist() for key, column in record.items()}
    ranks = [rank for rank in all_gather_json(local_records, world) if rank]
    return {
        name: {key: np.concatenate([rank[name][key] for rank in ranks]) for key in record}
        for name, record in ranks[0].items()
    }


def market_validation(
    task: TradingTask, world: World
) -> Callable[[Policy, Normalizer], dict[str, float]] | None:
    """Return a function that validates a policy; None if there is no validation span."""
    span = task.spans.valid
    if span is None:
        return None
    markets = task.markets("valid")

    def figures_of(trader: Controller) -> dict[str, np.ndarray]:
        return performance(evaluate_markets(task, markets, span, {"": trader}, world)[""])

    baseline = figures_of(buy_equal_weight)["sharpe"]  # does not change between validations

    def validate(policy: Policy, normalizer: Normalizer) -> dict[str, float]:
        figures = figures_of(PolicyController(policy, normalizer))
        figures["equal_weight_sharpe"] = baseline
        names = ("sharpe", "annual_return", "exposure", "equal_weight_sharpe")
        return {f"valid/{name}": float(figures[name].mean()) for name in names}

    return validate


# ---- statistics and intervals


def period_days(num_days: int) -> int:
    """Return the length of the period to which results are scaled, in days.

    It is a year, or the whole span if the span has fewer than MIN_ANNUAL_DAYS.
    """
    return TRADING_DAYS if num_days >= MIN_ANNUAL_DAYS else num_days


def sharpe_ratio(returns: np.ndarray) -> np.ndarray:
    """Compute Sharpe ratios from daily returns along the last axis.

    They are scaled to the period that `period_days` returns. The risk-free rate is 0. If
    returns do not vary, the ratio is 0.
    """
    days = period_days(returns.shape[-1])
    return _ratio(returns.mean(-1) * np.sqrt(days), _deviation(returns))


def _ratio(gain: np.ndarray, risk: np.ndarray) -> np.ndarray:
    return np.where(risk >= NO_RISK, gain / np.maximum(risk, NO_RISK), 0.0)


def _deviation(returns: np.ndarray) -> np.ndarray:
    return returns.std(axis=-1, ddof=min(1, returns.shape[-1] - 1))  # 0 for a single day


def annual_growth(returns: np.ndarray) -> np.ndarray:
    """Compute the compound return per period from daily returns along the last axis.

    `period_days` defines the period.
    """
    growth = np.maximum(np.prod(1.0 + returns, axis=-1), 0.0)
    num_days = returns.shape[-1]
    return growth ** (period_days(num_days) / num_days) - 1.0


def daily_returns(record: Record) -> np.ndarray:
    """Return simple (not logarithmic) daily returns [M, D]."""
    return record["values"][:, 1:] / record["values"][:, :-1] - 1.0


def performance(record: Record) -> dict[str, np.ndarray]:
    """Compute performance statistics for each market; each statistic has shape [M].

    Turnover is per period (see `period_days`), relative to the mean portfolio value.
    """
    values, returns = record["values"], daily_returns(record)
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
        "turnover": record["traded_usd"].sum(1) / values.mean(1) / periods,
        "num_trades": record["num_trades"].sum(1),
        "fees_usd": record["fees_usd"].sum(1),
        "exposure": record["exposure"].mean(1),
    }


def difference(record: Record, baseline: Record, name: str) -> list[float]:
    """Compare a statistic with the baseline: the difference and its 95 % interval.

    Several markets count as independent samples. For a single market, blocks of days are resampled.

    Returns: the difference, then the lower and the upper end of the interval.
    Source: circular block bootstrap, Politis and Romano (1992).
    """
    if len(record["values"]) > 1:
        samples = performance(record)[name] - performance(baseline)[name]
        value, half = samples.mean(), 1.96 * samples.std(ddof=1) / np.sqrt(len(samples))
        return [float(value), float(value - half), float(value + half)]
    figure = {"sharpe": sharpe_ratio, "annual_return": annual_growth}[name]
    returns, held = daily_returns(record)[0], daily_returns(baseline)[0]
    days = len(returns)
    starts = np.random.default_rng(0).integers(0, days, (RESAMPLES, -(-days // BLOCK_DAYS), 1))
    index = ((starts + np.arange(BLOCK_DAYS)) % days).reshape(RESAMPLES, -1)[:, :days]
    ends = np.quantile(figure(returns[index]) - figure(held[index]), [0.025, 0.975])
    return [float(figure(returns) - figure(held)), *ends.tolist()]


def summarize(records: dict[str, Record], dates: np.ndarray) -> dict[str, Any]:
    """Average each record's statistics over markets; compare them with equal weight."""
    policies: dict[str, dict[str, Any]] = {}
    for name, record in records.items():
        policies[name] = {key: float(value.mean()) for key, value in performance(record).items()}
        if name != EQUAL_WEIGHT:
            policies[name][AGAINST] = {
                figure: difference(record, records[EQUAL_WEIGHT], figure)
                for figure in ("sharpe", "annual_return")
            }

    # Gap closed: share of the Sharpe difference between equal weight and the reference rule that a
    # trader reaches. It is None unless the interval of this difference lies above 0.1.
    if best := policies.get("reference"):
        sharpe = policies[EQUAL_WEIGHT]["sharpe"]
        gap = best["sharpe"] - sharpe
        is_gap = best[AGAINST]["sharpe"][1] > 0.1
        for entry in policies.values():
            entry["gap_closed"] = (entry["sharpe"] - sharpe) / gap if is_gap else None
    return {
        "markets": len(records[EQUAL_WEIGHT]["values"]),
        "days": [str(dates[0]), str(dates[-1])],
        "num_days": len(dates) - 1,  # the first date has no return
        "ablation": {name: policies.pop(name) for name in {ZEROED} & policies.keys()},
        "policies": policies,
    }


# ---- report


def report(
    task: TradingTask,
    agents: dict[str, PolicyController],
    world: World,
    run_dir: Path,
    picture: Path,
    *,
    open_test: bool = False,
    num_worlds: int | None = None,
) -> tuple[dict[str, Any], str]:
    """Compare agents on the open spans; return a summary for each span and a text.

    Daily results of every span and the equity curves of the last span are written to files. If the
    agent "policy" is a cascaded LSTM, it is also evaluated without memory.

    Args:
        picture: file for the equity curves.
        open_test: for real prices, evaluate only on the test span.
        num_worlds: number of simulated markets; None: the default number.
    """
    simulated = task.real is None
    spans = {name: span for name, span in vars(task.spans).items() if span and name != "test"}
    if simulated or open_test:
        spans = {"test": task.spans.test}
    markets = task.markets("test", num_worlds)
    traders: dict[str, Controller] = {**agents}
    if agents["policy"].policy.config.policy == "clstm":
        traders[ZEROED] = replace(agents["policy"], zero_state=True)
    if simulated and task.trading.order_unit == "value":
        edge = task.simulated.market_edge
        traders["reference"] = follow(partial(reference, market_edge=edge))
        traders["memoryless rule"] = follow(memoryless)
    traders[EQUAL_WEIGHT] = buy_equal_weight
    summaries: dict[str, Any] = {}
    text = ""
    for name, span in spans.items():
        path = path_to_write(run_dir, f"evaluation/{name}.csv")
        dates = markets[0].dates[span.first : span.last + 1]
        records = evaluate_markets(task, markets, span, traders, world)
        summaries[name] = summarize(records, dates)
        title = SIMULATED if simulated else SPANS[name]
        text += f"{title}\n{text_table(summaries[name], simulated)}\n\n"
        records.pop(ZEROED, None)  # the ablation is not a strategy: leave it out of the files
        if world.is_main_process:
            # Imported late, because matplotlib takes 0.5 s to load.
            from agents.evaluate.pictures import plot_equity

            write_daily(path, records, markets, dates)
            plot_equity(records, dates, picture, name, simulated)
    text += (
        "[95 % interval] over markets, or over resampled blocks of days of one market\n"
        "risk-free rate and interest on cash: 0; turnover: purchases and sales a year, relative to "
        f"the mean value; costs: {task.trading.fee_bps:g} bps of every purchase and sale; "
        f"fills: whole shares at the {task.trading.execution.replace('_', ' ')}\n"
        f"daily figures: {run_dir / 'evaluation'}\nequity curves: {picture}"
    )
    if "test" not in spans:
        text += "" if task.spans.valid else NO_VALIDATION
        text += "\nThe test span stays closed until all choices are made. To open it:\n"
        text += f"  python -m agents.evaluate {run_dir} --open_test"
    return summaries, text


def text_table(summary: dict[str, Any], simulated: bool) -> str:
    """Format the summary of a span as a table to print."""
    entries = summary["policies"] | summary["ablation"]
    # Returns on simulated markets come from a planted drift, so the table does not show them.
    columns = COLUMNS[:5] if simulated else COLUMNS[1:]
    table = pd.DataFrame.from_dict(entries, orient="index").reindex(columns=columns)
    table["Sharpe above equal weight"] = [
        "{:+.2f} [{:+.2f}, {:+.2f}]".format(*entry[AGAINST]["sharpe"]) if AGAINST in entry else "-"
        for entry in entries.values()
    ]
    heading = f"{' to '.join(summary['days'])}, {summary['num_days']} days"
    if summary["num_days"] < MIN_ANNUAL_DAYS:
        heading += f"; fewer than {MIN_ANNUAL_DAYS}: nothing is annualised"
    return f"{heading}\n{table.to_string(float_format='{:.2f}'.format, na_rep='-')}"


def write_daily(
    path: Path,
    records: dict[str, Record],
    markets: Sequence[Market],
    dates: np.ndarray,  # [D+1], one for each value
) -> None:
    """Write a CSV row for each strategy, market and date except the first date.

    docs/data.md describes the columns.
    """
    names = [market.name for market in markets]
    index = pd.MultiIndex.from_product([names, dates[1:]], names=["market", "date"])
    tables = {}
    for name, record in records.items():
        tables[name] = pd.DataFrame({"return": daily_returns(record).ravel()}, index)
        for figure, heading in STOCKS.items():
            if figure in record:
                columns = [f"{heading}:{ticker}" for ticker in markets[0].tickers]
                # Adding 0.0 turns -0.0 into 0.0.
                tables[name][columns] = record[figure].reshape(len(index), -1) + 0.0
    text = pd.concat(tables, names=["strategy"]).to_csv(float_format="%.8g")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
