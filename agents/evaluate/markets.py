"""Policies and rules over whole markets, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from agents.evaluate.evaluation import Controller, PolicyController, shard
from agents.evaluate.statistics import (
    EQUAL_WEIGHT,
    ZEROED,
    Record,
    performance,
    summarize,
    text_table,
)
from agents.network.normalize import Normalizer
from agents.policy import Policy
from envs.trading.baselines import MemorylessRule, ReferencePolicy, buy_equal_weight
from envs.trading.market_data import Market, Span
from envs.trading.task import TradingTask
from rl_dist.files import path_to_write, write_whole
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World

ACCOUNTS = ("traded_usd", "fees_usd", "num_trades", "exposure")  # of a step, as in Record
NO_VALIDATION = (
    "\nThere is no validation span: all figures are of days that the policy has learned. Give "
    "--test_start alone, and a fifth of the days before it validates; or --valid_start."
)


class DiaryController(PolicyController):
    """A policy whose record holds the weights and trades of every stock."""


def run_markets(
    env: Any, controller: Controller, on_step: Callable[[], None] = lambda: None
) -> Record:
    """Make one pass over all markets; a ruined portfolio keeps its last value."""
    obs, _ = env.reset(seed=[0] * env.num_envs)
    start = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    alive = start.clone()
    values, accounts, stocks = [env.portfolio_value], [], []
    for _ in range(env.num_days - 1):
        obs, _, terminated, truncated, info = env.step(controller(env, obs, start))
        on_step()
        values.append(torch.where(alive, info["portfolio_value"], values[-1]))
        accounts.append(torch.stack([info[name] * alive for name in ACCOUNTS]))
        if isinstance(controller, DiaryController):
            both = torch.cat([info["weights"], info["trades_usd"]], dim=1)
            stocks.append(both * alive[:, None])
        start = terminated | truncated
        alive = alive & ~start
    columns = [torch.stack(values, dim=1), *torch.stack(accounts, dim=2)]  # each [M, D]
    if stocks:
        columns.append(torch.stack(stocks, dim=1))  # [M, D, 2n]
    return Record(*(column.cpu().numpy() for column in columns))


def evaluate_markets(
    markets: Sequence[Any],
    make_env: Callable[[Sequence[Any]], Any],
    controllers: dict[str, Controller],  # fresh ones: each makes one pass
    world: World,
) -> dict[str, Record]:
    """Run every controller over all markets, which the ranks share out.

    Returns the records of all M markets, in order, the same on every rank.
    """
    mine = [markets[index] for index in shard(len(markets), world)]
    own: dict[str, list[list]] = {}
    if mine:
        env = make_env(mine)  # once: its tables cost more than a pass
        for name, controller in controllers.items():
            record = run_markets(env, controller, on_step=world.heartbeat)
            own[name] = [column.tolist() for column in vars(record).values()]
    ranks = [rank for rank in all_gather_json(own, world) if rank]
    columns = {name: zip(*(rank[name] for rank in ranks), strict=True) for name in controllers}
    return {name: Record(*map(np.concatenate, of_ranks)) for name, of_ranks in columns.items()}


def equal_weight(
    task: TradingTask, markets: Sequence[Market], span: Span, world: World
) -> dict[str, Record]:
    """Buy equal weight at once and hold it."""
    make_env = partial(task.evaluation_env, span=span, device=world.device, held=True)
    return evaluate_markets(markets, make_env, {EQUAL_WEIGHT: buy_equal_weight}, world)


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
    """Compare agents on some spans; return a summary of each and a table of all.

    Writes the daily figures of every span, and the equity curves of the last one. A cascade called
    "policy" is run without its memory, too.
    """
    summaries: dict[str, Any] = {}
    paths = [path_to_write(run_dir, f"evaluation/{name}.csv") for name in spans]
    for path, (name, span) in zip(paths, spans.items(), strict=True):
        # policies and rules that trade every day, as in training
        daily: dict[str, Controller] = {n: DiaryController(*agent) for n, agent in agents.items()}
        if agents["policy"][0].config.policy == "clstm":
            daily[ZEROED] = PolicyController(*agents["policy"], zero_state=True)
        if task.real is None and task.trading.order_unit == "value":
            daily["reference"] = ReferencePolicy(task.simulated)
            daily["memoryless rule"] = MemorylessRule()
        make_env = partial(task.evaluation_env, span=span, device=world.device)
        records = evaluate_markets(markets, make_env, daily, world)
        records |= equal_weight(task, markets, span, world)
        dates = markets[0].dates[span.first : span.last + 1]
        summaries[name] = summarize(records, dates)
        records.pop(ZEROED, None)  # an ablation, and no strategy
        if world.is_main_process:
            from agents.evaluate.pictures import plot_equity  # matplotlib: half a second

            write_daily(path, records, markets, dates)
            plot_equity(records, dates, picture, span=name, simulated=task.real is None)
    text = (
        f"{text_table(summaries, simulated=task.real is None)}\n\n"
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


def write_daily(
    path: Path,
    records: dict[str, Record],
    markets: Sequence[Market],
    dates: np.ndarray,  # [D + 1] of the values
) -> None:
    """Write one row per strategy, market and date, from the second date on.

    Columns: "strategy", "market" and "date"; "return", simple, from the close before to this one;
    and of policies for every ticker "weight:", the share of the portfolio's value in this stock at
    this close (the rest is cash), and "usd:", what was bought of it since the close before in USD,
    without fees, negative where sold.
    """
    names = [market.name for market in markets]
    index = pd.MultiIndex.from_product([names, dates[1:]], names=["market", "date"])
    heads = [f"{kind}:{ticker}" for kind in ("weight", "usd") for ticker in markets[0].tickers]
    tables = {}
    for name, record in records.items():
        columns = {"return": record.returns.ravel()}
        if record.stocks.size:
            rows = record.stocks.reshape(len(index), -1).T + 0.0  # no -0
            columns |= dict(zip(heads, rows, strict=True))
        tables[name] = pd.DataFrame(columns, index)
    text = pd.concat(tables, names=["strategy"]).to_csv(float_format="%.8g")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def market_validation(
    task: TradingTask, world: World
) -> Callable[[Policy, Normalizer], dict[str, float]] | None:
    """Return what training calls for `valid/` figures; None without such days."""
    span = task.spans.valid
    if span is None:
        return None
    markets = task.markets("valid")
    make_env = partial(task.evaluation_env, span=span, device=world.device)
    # the same at every validation
    base = performance(equal_weight(task, markets, span, world)[EQUAL_WEIGHT])["sharpe"]

    def validate(policy: Policy, normalizer: Normalizer) -> dict[str, float]:
        policies: dict[str, Controller] = {"policy": PolicyController(policy, normalizer)}
        own = performance(evaluate_markets(markets, make_env, policies, world)["policy"])
        figures = {name: own[name] for name in ("sharpe", "annual_return", "exposure")}
        figures["equal_weight_sharpe"] = base
        return {f"valid/{name}": float(each.mean()) for name, each in figures.items()}

    return validate
