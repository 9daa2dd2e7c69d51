"""Run policies and rules over whole markets, and compare them with equal weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from agents.evaluate.episodes import Controller, PolicyController, shard
from agents.network.inputs import Normalizer
from agents.policy import Policy
from envs.trading.baselines import MemorylessRule, ReferencePolicy, buy_equal_weight
from envs.trading.market_data import Market, Span
from envs.trading.task import TradingTask
from rl_dist.files import path_to_write, write_whole
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World

TRADING_DAYS = 252  # per year
MIN_ANNUAL_DAYS = 60  # fewer days say nothing about a year
BLOCK_DAYS = 21  # of the block bootstrap: about a month, longer than volatility's short memory
RESAMPLES = 2000
EQUAL_WEIGHT = "equal weight"  # bought on the first day: the baseline of every comparison
ZEROED = "ablation: policy, state zeroed"
ACCOUNTS = ("traded_usd", "fees_usd", "num_trades", "exposure")  # of a day
NAME_WIDTH = 34
COLUMNS = {  # heading: (figure, format)
    "gap closed": ("gap_closed", "{:.0%}"),
    "Sharpe": ("sharpe", "{:.2f}"),
    "return": ("cumulative_return", "{:.1%}"),
    "annual": ("annual_return", "{:.1%}"),
    "volatility": ("annual_volatility", "{:.1%}"),
    "Sortino": ("sortino", "{:.2f}"),
    "max DD": ("max_drawdown", "{:.1%}"),
    "turnover": ("turnover", "{:.1f}"),
    "trades": ("num_trades", "{:.0f}"),
    "fees $": ("fees_usd", "{:.0f}"),
    "exposure": ("exposure", "{:.0%}"),
}
# simulated returns are planted, so none of them is shown in percent or dollars
SIMULATED_HEADINGS = ("gap closed", "Sharpe", "max DD", "turnover", "exposure")
REAL_HEADINGS = tuple(COLUMNS)[1:]
SPANS = {
    "train": "training span, in sample: the policy has learned from these days",
    "valid": "validation span: choose on these days",
    "test": "test span",
    "days": "other data: held out only if the policy was neither trained nor chosen on it",
}
NO_VALIDATION = (
    "\nThere is no validation span: all figures are of days that the policy has learned. Give "
    "--test_start alone, and a fifth of the days before it validates; or --valid_start."
)
Interval = tuple[float, float, float]  # a value, and the ends of its 95 % interval


# ---- one pass over markets


# One policy's pass over M markets of D + 1 days: "values" [M, D+1] of the portfolio in USD and
# ACCOUNTS [M, D]; with a DiaryController also "weights" and "trades_usd" of the stocks [M, D, n]
Record = dict[str, np.ndarray]


class DiaryController(PolicyController):
    """A policy for which the weights and trades of every stock are recorded."""


def run_markets(
    env: Any, controller: Controller, on_step: Callable[[], None] = lambda: None
) -> Record:
    """Make one pass over all markets; a ruined portfolio keeps its last value."""
    obs, _ = env.reset(seed=[0] * env.num_envs)
    start = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    alive = start.clone()
    days = {"values": [env.portfolio_value]}
    for _ in range(env.num_days - 1):
        obs, _, terminated, truncated, info = env.step(controller(env, obs, start))
        on_step()
        day = {name: info[name] * alive for name in ACCOUNTS}
        day["values"] = torch.where(alive, info["portfolio_value"], days["values"][-1])
        if isinstance(controller, DiaryController):
            day |= {name: info[name] * alive[:, None] for name in ("weights", "trades_usd")}
        for name, value in day.items():
            days.setdefault(name, []).append(value)
        start = terminated | truncated
        alive = alive & ~start
    return {name: torch.stack(values, dim=1).cpu().numpy() for name, values in days.items()}


def evaluate_markets(
    markets: Sequence[Any],
    make_env: Callable[[Sequence[Any]], Any],
    controllers: dict[str, Controller],  # fresh ones: each makes one pass
    world: World,
) -> dict[str, Record]:
    """Run every controller over all markets, which the ranks divide among themselves.

    Returns the records of all M markets, in order, the same on every rank.
    """
    local_markets = [markets[index] for index in shard(len(markets), world)]
    local_records: dict[str, dict[str, list]] = {}
    if local_markets:
        env = make_env(local_markets)  # shared: its tables cost more than a pass
        for name, controller in controllers.items():
            record = run_markets(env, controller, on_step=world.heartbeat)
            local_records[name] = {key: column.tolist() for key, column in record.items()}
    ranks = [rank for rank in all_gather_json(local_records, world) if rank]
    return {
        name: {key: np.concatenate([rank[name][key] for rank in ranks]) for key in record}
        for name, record in ranks[0].items()
    }


def equal_weight(
    task: TradingTask, markets: Sequence[Market], span: Span, world: World
) -> dict[str, Record]:
    """Buy equal weight on the first day and hold it."""
    make_env = partial(task.evaluation_env, span=span, device=world.device, held=True)
    return evaluate_markets(markets, make_env, {EQUAL_WEIGHT: buy_equal_weight}, world)


def market_validation(
    task: TradingTask, world: World
) -> Callable[[Policy, Normalizer], dict[str, float]] | None:
    """Return the source of `valid/` figures in a training; None without such days."""
    span = task.spans.valid
    if span is None:
        return None
    markets = task.markets("valid")
    make_env = partial(task.evaluation_env, span=span, device=world.device)
    # the same at every validation
    baseline = performance(equal_weight(task, markets, span, world)[EQUAL_WEIGHT])["sharpe"]

    def validate(policy: Policy, normalizer: Normalizer) -> dict[str, float]:
        policies: dict[str, Controller] = {"policy": PolicyController(policy, normalizer)}
        measured = performance(evaluate_markets(markets, make_env, policies, world)["policy"])
        figures = {name: measured[name] for name in ("sharpe", "annual_return", "exposure")}
        figures["equal_weight_sharpe"] = baseline
        return {f"valid/{name}": float(value.mean()) for name, value in figures.items()}

    return validate


# ---- figures and intervals


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


def daily_returns(record: Record) -> np.ndarray:
    """Return simple daily returns, [M, D]."""
    return record["values"][:, 1:] / record["values"][:, :-1] - 1.0


def performance(record: Record) -> dict[str, np.ndarray]:
    """Return figures of each market, each [M].

    Turnover is per period, relative to the mean value. A period is a year, or the whole span if it
    is too short to be annualised.
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


def mean_interval(samples: np.ndarray) -> Interval:
    """Return the mean of independent samples [M] and its normal interval."""
    mean, half = samples.mean(), 1.96 * samples.std(ddof=1) / np.sqrt(len(samples))
    return float(mean), float(mean - half), float(mean + half)


def bootstrap_interval(
    returns: np.ndarray,  # [D] daily returns of the policy
    baseline: np.ndarray,  # [D] of the baseline on the same days
    seed: int = 0,
) -> dict[str, Interval]:
    """Return differences to the baseline on one market, by resampled blocks of days.

    Source: circular block bootstrap, Politis and Romano (1992).
    """
    days = len(returns)
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, days, (RESAMPLES, -(-days // BLOCK_DAYS)))
    index = ((starts[:, :, None] + np.arange(BLOCK_DAYS)) % days).reshape(RESAMPLES, -1)[:, :days]
    intervals = {}
    for name, figure in (("sharpe", sharpe_ratio), ("annual_return", annual_growth)):
        value = figure(returns) - figure(baseline)
        low, high = np.quantile(figure(returns[index]) - figure(baseline[index]), [0.025, 0.975])
        intervals[name] = (float(value), float(low), float(high))
    return intervals


def summarize(records: dict[str, Record], dates: np.ndarray) -> dict[str, Any]:
    """Return mean figures of records, and intervals against equal weight."""
    figures = {name: performance(record) for name, record in records.items()}
    baseline = figures[EQUAL_WEIGHT]
    num_markets = len(baseline["sharpe"])
    policies: dict[str, dict[str, Any]] = {}
    for name, values in figures.items():
        policies[name] = {key: float(value.mean()) for key, value in values.items()}
        if name == EQUAL_WEIGHT:
            continue
        if num_markets > 1:
            differences = {
                key: mean_interval(values[key] - baseline[key])
                for key in ("sharpe", "annual_return")
            }
        else:
            returns = [daily_returns(records[which])[0] for which in (name, EQUAL_WEIGHT)]
            differences = bootstrap_interval(returns[0], returns[1])
        policies[name]["against_equal_weight"] = {
            key: list(interval) for key, interval in differences.items()
        }

    # share of the gap to the reference that each closes, if there is a gap beyond chance
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


# ---- report


def open_spans(task: TradingTask) -> dict[str, Span]:
    """Return the spans that are open: on real prices all but the test span."""
    if task.real is None:
        return {"test": task.spans.test}
    return {name: span for name, span in vars(task.spans).items() if span and name != "test"}


def report(
    task: TradingTask,
    markets: Sequence[Market],
    spans: dict[str, Span],
    agents: dict[str, tuple[Policy, Normalizer]],
    world: World,
    run_dir: Path,
    picture: Path,
) -> tuple[dict[str, Any], str]:
    """Compare agents on some spans; return a summary of each span and a table of all.

    Writes the daily figures of every span, and the equity curves of the last one. A cascade named
    "policy" also runs without its memory.
    """
    simulated = task.real is None
    summaries: dict[str, Any] = {}
    paths = [path_to_write(run_dir, f"evaluation/{name}.csv") for name in spans]
    for path, (name, span) in zip(paths, spans.items(), strict=True):
        # policies and rules that trade every day, as in training
        traders: dict[str, Controller] = {n: DiaryController(*agent) for n, agent in agents.items()}
        if agents["policy"][0].config.policy == "clstm":
            traders[ZEROED] = PolicyController(*agents["policy"], zero_state=True)
        if simulated and task.trading.order_unit == "value":
            traders["reference"] = ReferencePolicy(task.simulated)
            traders["memoryless rule"] = MemorylessRule()
        make_env = partial(task.evaluation_env, span=span, device=world.device)
        records = evaluate_markets(markets, make_env, traders, world)
        records |= equal_weight(task, markets, span, world)
        dates = markets[0].dates[span.first : span.last + 1]
        summaries[name] = summarize(records, dates)
        records.pop(ZEROED, None)  # an ablation is no strategy
        if world.is_main_process:
            from agents.evaluate.pictures import plot_equity  # matplotlib: half a second

            write_daily(path, records, markets, dates)
            plot_equity(records, dates, picture, name, simulated)
    text = (
        f"{text_table(summaries, simulated)}\n\n"
        "[95 % interval] over markets, or over resampled blocks of days of one market\n"
        "risk-free rate 0, no interest on cash; turnover: purchases plus sales (two-sided) a year, "
        f"by the mean value; costs: {task.trading.fee_bps:g} bps of every purchase and sale; "
        f"fills: whole shares at the {task.trading.execution.replace('_', ' ')}\n"
        f"daily returns, weights and trades: {', '.join(map(str, paths))}"
        f"\nequity curves: {picture}"
    )
    if task.real and spans == open_spans(task):
        text += "" if task.spans.valid else NO_VALIDATION
        text += "\nThe test span stays closed until all choices are made. To open it:\n"
        text += f"  python -m agents.evaluate {run_dir} --open_test"
    return summaries, text


def text_table(summaries: dict[str, dict[str, Any]], simulated: bool) -> str:
    """Return the summaries of all spans as one table."""
    headings = SIMULATED_HEADINGS if simulated else REAL_HEADINGS
    titles = "".join(f"{heading:>11}" for heading in headings)
    lines = [f"{'':{NAME_WIDTH}}{titles}   difference to equal weight"]
    for span, summary in summaries.items():
        about, num_days = SPANS[span], summary["num_days"]
        if simulated:
            about = f"memory benchmark, {summary['markets']} SIMULATED markets never trained on"
        lines.append(f"{about} ({' to '.join(summary['days'])}, {num_days} days)")
        for name, entry in (summary["policies"] | summary["ablation"]).items():
            line = f"  {name:<{NAME_WIDTH - 2}}"
            for key, form in (COLUMNS[heading] for heading in headings):
                value = entry.get(key)
                line += f"{'-' if value is None else form.format(value):>11}"
            if differences := entry.get("against_equal_weight"):
                line += "   Sharpe {:+.2f} [{:+.2f}, {:+.2f}]".format(*differences["sharpe"])
                if not simulated:
                    annual_return = differences["annual_return"]
                    line += ", annual return {:+.1%} [{:+.1%}, {:+.1%}]".format(*annual_return)
            lines.append(line)
        if num_days < MIN_ANNUAL_DAYS:
            lines.append(f"  fewer than {MIN_ANNUAL_DAYS} days: nothing is annualised")
    return "\n".join(lines)


def write_daily(
    path: Path,
    records: dict[str, Record],
    markets: Sequence[Market],
    dates: np.ndarray,  # [D + 1] of the values
) -> None:
    """Write one row per strategy, market and date, from the second date on.

    docs/data.md explains the columns.
    """
    names = [market.name for market in markets]
    index = pd.MultiIndex.from_product([names, dates[1:]], names=["market", "date"])
    tables = {}
    for name, record in records.items():
        columns = {"return": daily_returns(record).ravel()}
        for head, key in {"weight": "weights", "usd": "trades_usd"}.items():
            if key in record:
                rows = record[key].reshape(len(index), -1).T + 0.0  # no -0
                tickers = [f"{head}:{ticker}" for ticker in markets[0].tickers]
                columns |= dict(zip(tickers, rows, strict=True))
        tables[name] = pd.DataFrame(columns, index)
    text = pd.concat(tables, names=["strategy"]).to_csv(float_format="%.8g")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
