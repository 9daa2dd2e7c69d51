"""Policies and rules over whole markets, on all ranks: what trading is judged by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agents.evaluate.comparison import EQUAL_WEIGHT, LIMITED, ZEROED, summarize, text_table
from agents.evaluate.evaluation import Controller, PolicyController, shard
from agents.evaluate.statistics import Record, performance
from agents.network.normalize import Normalizer
from agents.policy import Policy
from envs.trading.baselines import EqualWeight, MemorylessRule, ReferencePolicy
from envs.trading.market_data import Market, Span
from envs.trading.task import TradingTask
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World

ACCOUNTS = ("traded_usd", "fees_usd", "num_trades", "exposure")  # of a step, as in Record


def run_markets(
    env: Any, controller: Controller, on_step: Callable[[], None] = lambda: None
) -> Record:
    """One pass over all markets; one that ruins the policy stays at the value it had."""
    obs, _ = env.reset(seed=[0] * env.num_envs)
    start = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    alive = start.clone()
    values, accounts = [env.portfolio_value], []
    for _ in range(env.num_days - 1):
        obs, _, terminated, truncated, info = env.step(controller(env, obs, start))
        on_step()
        values.append(torch.where(alive, info["portfolio_value"], values[-1]))
        accounts.append(torch.stack([info[name] * alive for name in ACCOUNTS]))
        start = terminated | truncated
        alive = alive & ~start
    columns = torch.stack(accounts, dim=2).cpu().numpy()  # [4, M, D]
    return Record(torch.stack(values, dim=1).cpu().numpy(), *columns)


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


def run(
    task: TradingTask,
    markets: Sequence[Market],
    span: Span,
    controllers: dict[str, Controller],
    world: World,
    **options: Any,  # of `evaluation_env`
) -> dict[str, Record]:
    """Run controllers over markets and days; ranks share the work."""

    def make_env(own: Sequence[Market]) -> Any:
        return task.evaluation_env(own, span, device=world.device, **options)

    return evaluate_markets(markets, make_env, controllers, world)


def rule(look: Callable[[Any], Tensor]) -> Controller:
    """A controller that looks at the environment alone."""
    return lambda env, obs, episode_start: look(env)


def equal_weight(
    task: TradingTask, markets: Sequence[Market], span: Span, world: World
) -> dict[str, Record]:
    """Equal weight, bought at once and held."""
    controllers = {EQUAL_WEIGHT: rule(EqualWeight())}
    return run(task, markets, span, controllers, world, max_order=1.0, held=True)


def compare(
    task: TradingTask,
    markets: Sequence[Market],
    span: Span,
    policies: dict[str, Controller],
    world: World,
) -> dict[str, Record]:
    """Run policies and rules over the same markets and days; ranks share the work."""
    # policies and rules that trade every day, as in training
    daily = dict(policies)
    if task.real is None and task.trading.order_unit == "value":
        daily["reference"] = rule(ReferencePolicy(task.simulated))
        daily["memoryless rule"] = rule(MemorylessRule())
    records = run(task, markets, span, daily, world)
    held = equal_weight(task, markets, span, world)
    limited = {LIMITED: rule(EqualWeight())}
    held |= run(task, markets, span, limited, world, held=True)
    return {name: records[name] for name in policies} | held | records


def report(
    task: TradingTask,
    markets: Sequence[Market],
    span: Span,
    agents: dict[str, tuple[Policy, Normalizer]],
    world: World,
    picture: Path,
) -> tuple[dict[str, Any], str]:
    """Compare agents, draw their equity curves, and return the summary and its table.

    A cascade called "policy" is shown without its memory, too.
    """
    policies: dict[str, Controller] = {n: PolicyController(*agent) for n, agent in agents.items()}
    if agents["policy"][0].config.policy == "clstm":
        policies[ZEROED] = PolicyController(*agents["policy"], zero_state=True)
    records = compare(task, markets, span, policies, world)
    dates = markets[0].dates[span.first : span.last + 1]
    if world.is_main_process:
        from agents.evaluate.plots import plot_equity  # matplotlib: half a second

        plot_equity(records, dates, picture, simulated=task.real is None)
    summary = summarize(records, dates)
    return summary, text_table(summary)


def market_validation(
    task: TradingTask, world: World
) -> Callable[[Policy, Normalizer], dict[str, float]] | None:
    """Return what training calls for `valid/` figures; None without such days."""
    span = task.spans.valid
    if span is None:
        return None
    markets = task.markets("valid")
    kept: dict[str, Record] = {}  # equal weight's: the same at every validation

    def validate(policy: Policy, normalizer: Normalizer) -> dict[str, float]:
        policies: dict[str, Controller] = {"policy": PolicyController(policy, normalizer)}
        own = performance(run(task, markets, span, policies, world)["policy"])
        figures = {name: own[name] for name in ("sharpe", "annual_return", "exposure")}
        if not kept:
            kept.update(equal_weight(task, markets, span, world))
        figures["equal_weight_sharpe"] = performance(kept[EQUAL_WEIGHT])["sharpe"]
        return {f"valid/{name}": float(each.mean()) for name, each in figures.items()}

    return validate
