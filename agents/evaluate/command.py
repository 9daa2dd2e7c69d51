"""Judge a trained policy on data it never saw, always beside equal weight.

    python -m agents.evaluate RUN_DIR_OR_CHECKPOINT [--data FILE --start DATE --end DATE] ...
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from agents.evaluate.comparison import EQUAL_WEIGHT, Judgement, text_table
from agents.evaluate.evaluation import MAX_EPISODE_STEPS, Controller, PolicyController, judge_episodes, judge_markets
from agents.evaluate.statistics import performance
from agents.normalize import Normalizer
from agents.policy import Policy
from agents.run.config import LoadedAgent, RunConfig, load_agent
from envs.task import GymTask
from envs.trading.baselines import EqualWeight, MemorylessRule, ReferencePolicy
from envs.trading.environment import first_tradable_day
from envs.trading.market_data import DataConfig, Market, Span
from envs.trading.task import TradingTask, prepare_task
from envs.vector.faults import EnvironmentFault
from rl_dist.checkpoint.own_modules import check_module
from rl_dist.checkpoint.run_layout import check_layout
from rl_dist.errors import CommandParser, UserError, explained, explains_errors
from rl_dist.launch.launcher import launch
from rl_dist.process_group.watchdog import end_rank
from rl_dist.process_group.world import World, end_at_signals, open_world

TAKEN_NAMES = (EQUAL_WEIGHT, "equal weight, order limit", "reference", "memoryless rule", "policy, state zeroed")


def _rule(rule: Callable[[Any], Tensor]) -> Controller:
    return lambda env, obs, episode_start: rule(env)


def judge_trading(
    task: TradingTask,
    markets: Sequence[Market],
    span: Span,
    agents: dict[str, tuple[Policy, Normalizer, bool]],  # name: policy, normaliser, state zeroed
    world: World,
    baselines: bool = True,
) -> Judgement:
    """Run policies and baselines over a span of markets they never saw.

    All ranks share the work.
    """
    made = {
        name: (lambda parts=parts: PolicyController(parts[0], parts[1], zero_state=parts[2]))
        for name, parts in agents.items()
    }
    limited: dict[str, Callable[[], Controller]] = dict(made)
    held: dict[str, Callable[[], Controller]] = {}
    if baselines:
        held["equal weight, order limit"] = lambda: _rule(EqualWeight())
        if task.real is None and task.trading.order_unit == "value":
            limited["reference"] = lambda: _rule(ReferencePolicy(task.simulated))
            limited["memoryless rule"] = lambda: _rule(MemorylessRule(task.simulated))
    device = world.device
    records = judge_markets(markets, lambda m: task.judging_env(m, span, device=device), limited, world)
    at_once = judge_markets(
        markets,
        lambda m: task.judging_env(m, span, max_order=1.0, held=True, device=device),
        {EQUAL_WEIGHT: lambda: _rule(EqualWeight())},
        world,
    )
    at_once |= judge_markets(markets, lambda m: task.judging_env(m, span, held=True, device=device), held, world)
    ordered = {name: records[name] for name in made} | at_once | records
    dates = markets[0].dates[span.first : span.last + 1]
    return Judgement(ordered, dates, simulated=task.real is None)


def validation(task: TradingTask | GymTask, config: RunConfig, world: World) -> Callable | None:
    """What training calls now and then: figures of validation days or episodes."""
    if isinstance(task, GymTask):
        return lambda policy, normalizer: _episode_figures(task, config, policy, normalizer, world, "valid/")
    span = task.spans.valid
    if span is None:
        return None
    markets = task.markets("valid")

    def validate(policy: Policy, normalizer: Normalizer) -> dict[str, float]:
        agents = {"policy": (policy, normalizer, False)}
        judged = judge_trading(task, markets, span, agents, world, baselines=False)
        figures = performance(judged.records["policy"])
        base = performance(judged.records[EQUAL_WEIGHT])
        return {
            "valid/sharpe": float(figures["sharpe"].mean()),
            "valid/equal_weight_sharpe": float(base["sharpe"].mean()),
            "valid/annual_return": float(figures["annual_return"].mean()),
            "valid/exposure": float(figures["exposure"].mean()),
        }

    return validate


def _episode_figures(
    task: GymTask, config: RunConfig, policy: Policy, normalizer: Normalizer, world: World, prefix: str
) -> dict[str, float]:
    episodes = judge_episodes(
        lambda count, first: task.judging_env(count, first, str(world.device)),
        PolicyController(policy, normalizer),
        config.task.eval_episodes,
        config.train.seed,
        world,
    )
    returns = np.array(episodes["return"])
    return {
        f"{prefix}return": float(returns.mean()),
        f"{prefix}return_std": float(returns.std()),
        f"{prefix}return_min": float(returns.min()),
        f"{prefix}length": float(np.mean(episodes["length"])),
        f"{prefix}episodes_cut": float(np.sum(np.array(episodes["length"]) >= MAX_EPISODE_STEPS)),
        f"{prefix}episodes": float(len(returns)),
        f"{prefix}env_restarts": float(np.sum(episodes["restarts"])),
    }


def judge_run(
    task: TradingTask | GymTask,
    config: RunConfig,
    policy: Policy,
    normalizer: Normalizer,
    world: World,
    plots: Path,
) -> tuple[dict[str, Any], str]:
    """The judgement at the end of a training run: a summary and its text.

    It covers the test span, once, or evaluation episodes of a Gymnasium task.
    """
    if isinstance(task, GymTask):
        figures = _episode_figures(task, config, policy, normalizer, world, "")
        return figures, _episode_text(figures)
    agents = {"policy": (policy, normalizer, False)}
    if config.policy.policy == "clstm":
        agents["policy, state zeroed"] = (policy, normalizer, True)
    judged = judge_trading(task, task.markets("test"), task.spans.test, agents, world)
    summary = judged.summary()
    if world.main:
        plot_judgement(judged, plots / "equity.png")
    return summary, text_table(summary)


def _episode_text(figures: dict[str, float]) -> str:
    cut = f", {figures['episodes_cut']:.0f} cut after {MAX_EPISODE_STEPS} steps" if figures["episodes_cut"] else ""
    anew = f", {figures['env_restarts']:.0f} restarts of environments" if figures["env_restarts"] else ""
    return (
        f"{figures['episodes']:.0f} episodes without noise: mean return {figures['return']:.2f} (sd "
        f"{figures['return_std']:.2f}, min {figures['return_min']:.2f}), mean length {figures['length']:.1f}{cut}{anew}"
    )


def plot_judgement(judged: Judgement, path: Path) -> None:
    """Equity curves of all policies."""
    from agents.evaluate.plots import plot_equity  # matplotlib: half a second, needed at the end only

    what = "SIMULATED markets never trained on" if judged.simulated else "real prices"
    title = f"Test span {judged.dates[0]} to {judged.dates[-1]}, {what}"
    plot_equity(judged.records, judged.dates, path, title, judged.simulated)


def _asked_task(config: RunConfig, args: argparse.Namespace) -> tuple[TradingTask, Span]:
    """The run's trading task with other worlds, data or days, as the command line asks."""
    asked = {name: getattr(args, name) for name in ("market_seed", "market_edge") if getattr(args, name) is not None}
    elsewhere = bool(args.data) and not _same_data(args.data, config.data.data)
    # The run's own dates may not exist in other data, of which every day is unseen.
    data = DataConfig(data=args.data) if elsewhere else config.data
    if data.data != "simulated":
        _refuse_useless(args, ("num_worlds", "market_seed", "market_edge"), f"data {data.data}")
    task = prepare_task(data, replace(config.market, **asked), config.trading)
    if not (args.start or args.end or elsewhere):
        return task, task.spans.test
    market = task.markets("test", 1)[0]
    first_day = first_tradable_day(market, task.trading)
    first = args.start or str(market.dates[first_day if elsewhere else task.spans.test.first])
    last = args.end or str(market.dates[-1])
    days = np.flatnonzero((market.dates >= np.datetime64(first)) & (market.dates <= np.datetime64(last)))
    days = days[days >= first_day]
    if len(days) < 2:
        raise UserError(
            f"--start {first} --end {last} holds fewer than 2 tradable days: the data has "
            f"{market.dates[first_day]} to {market.dates[-1]}"
        )
    return task, Span(int(days[0]), int(days[-1]))


def _same_data(left: str, right: str) -> bool:
    """Whether two --data name the same file, however they are spelled."""
    return left == right or ("simulated" not in (left, right) and Path(left).resolve() == Path(right).resolve())


def _overlap_warning(config: RunConfig, task: TradingTask, span: Span) -> str:
    """One line if days of the run's own training or validation are judged."""
    train, valid = task.spans.train, task.spans.valid
    last = max(train.last, valid.last if valid else 0)
    if task.real is None or not _same_data(task.data.data, config.data.data) or span.first > last:
        return ""
    return "WARNING: these days INCLUDE days the policy was trained or chosen on; this is no held-out result\n"


def _refuse_useless(args: argparse.Namespace, names: Sequence[str], what: str) -> None:
    for name in names:
        if getattr(args, name) not in ("", None):
            raise UserError(f"--{name} does nothing with {what}: leave it out")


def _judge_loaded(agents: dict[str, LoadedAgent], args: argparse.Namespace, world: World) -> tuple[dict, str]:
    """Judge the first agent's task with all agents."""
    first = next(iter(agents.values()))
    own = first.config.task
    config = replace(first.config, task=replace(own, eval_episodes=args.episodes or own.eval_episodes))
    _check_shapes(agents)
    if not config.task.is_trading:
        others = ("data", "start", "end", "num_worlds", "market_seed", "market_edge", "plot")
        _refuse_useless(args, others, config.task.env)
        if args.env not in ("", own.env):
            raise UserError(f"--env {args.env} differs from the run's, {own.env}: leave it out")
        check_module(own.env, own.env_kwargs, first.run_dir, args.env)
        task = GymTask(config.task, end_rank, world.beat)
        found = {
            name: _episode_figures(task, config, agent.policy, agent.normalizer, world, "")
            for name, agent in agents.items()
        }
        return found, "\n".join(f"{name}: {_episode_text(figures)}" for name, figures in found.items())
    _refuse_useless(args, ("episodes", "env"), config.task.env)
    check_layout(first.run_dir)
    trading, span = _asked_task(config, args)
    plot = Path(args.plot or first.run_dir / "plots" / "evaluation.png")
    contenders = {name: (agent.policy, agent.normalizer, False) for name, agent in agents.items()}
    if first.config.policy.policy == "clstm":
        contenders["policy, state zeroed"] = (first.policy, first.normalizer, True)
    markets = trading.markets("test", args.num_worlds or 50)
    if (num_stocks := len(markets[0].tickers)) != first.policy.num_actions:
        raise UserError(
            f"the policy trades {first.policy.num_actions} stocks and the data has {num_stocks}: a policy can only be "
            "judged on as many stocks as it was trained with"
        )
    judged = judge_trading(trading, markets, span, contenders, world)
    warning = _overlap_warning(config, trading, span)
    if world.main:
        print(f"{warning}{trading.describe()}\njudged from {judged.dates[0]} to {judged.dates[-1]}\n")
        plot_judgement(judged, plot)
    summary = judged.summary()
    return summary, f"{text_table(summary)}\n\nequity curves: {plot}"


def _check_shapes(agents: dict[str, LoadedAgent]) -> None:
    """Refuse to compare policies that cannot act in the first one's environment."""
    policy = agents["policy"].policy
    for name, other in ((name, agent.policy) for name, agent in agents.items()):
        if (other.num_obs, other.num_actions, other.discrete) != (policy.num_obs, policy.num_actions, policy.discrete):
            raise UserError(
                f"{name} cannot be compared: it maps {other.num_obs} observations to {other.num_actions} actions, the "
                f"policy {policy.num_obs} to {policy.num_actions}; compare runs of one environment and --observation"
            )


def _load_agents(args: argparse.Namespace) -> dict[str, LoadedAgent]:
    agents = {"policy": load_agent(args.path)}
    for path in args.compare:
        name = Path(path).resolve().name
        taken = name in agents or name in TAKEN_NAMES or Path(path).is_file()
        agents[str(path) if taken else name] = load_agent(path)
    return agents


def _rank_main(args: argparse.Namespace) -> int:
    """What every rank of the command does."""
    world = open_world("cpu")
    end_at_signals()
    try:
        agents = _load_agents(args)
        if world.main:
            print(f"{agents['policy'].path}, iteration {agents['policy'].iteration}")
        summary, text = _judge_loaded(agents, args, world)
        if world.main:
            print(text, flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    except EnvironmentFault as fault:
        raise UserError(f"rank {world.rank}: {fault}", exit_code=1) from fault
    except OSError as error:
        message, code = explained(error)
        raise UserError(message, exit_code=code) from error
    return 0


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of `python -m agents.evaluate`."""
    parser = CommandParser(
        prog="python -m agents.evaluate",
        description="Judge a trained policy, without noise, beside equal weight under the same costs.",
        epilog="examples:\n  python -m agents.evaluate runs/my_run\n"
        "  python -m agents.evaluate runs/my_run --compare runs/my_mlp --num_worlds 50\n"
        "  python -m agents.evaluate runs/my_run --data prices.csv --start 2016-01-04 --end 2020-07-07\n"
        "exit codes: 0 done, 1 failed, 2 bad usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="RUN_DIR_OR_CHECKPOINT")
    parser.add_argument("--compare", nargs="+", default=[], metavar="RUN_DIR", help="more policies for the table")
    parser.add_argument(
        "--data", default="", metavar="FILE", help="CSV of daily bars, or 'simulated' (default: the run's data)"
    )
    parser.add_argument(
        "--start", default="", metavar="DATE", help="first day, YYYY-MM-DD (default: the run's test span)"
    )
    parser.add_argument("--end", default="", metavar="DATE", help="last day, YYYY-MM-DD (default: the data's last)")
    parser.add_argument("--num_worlds", type=int, metavar="N", help="simulated worlds to judge on (default: 50)")
    parser.add_argument(
        "--market_seed", type=int, metavar="N", help="seed of the simulated worlds (default: the run's)"
    )
    parser.add_argument(
        "--market_edge", type=float, metavar="BPS", help="planted drift, bps per day (default: the run's)"
    )
    what = "the run's module:id, to have its module imported though config.json is not yours"
    parser.add_argument("--env", default="", metavar="MODULE:ID", help=what)
    parser.add_argument("--episodes", type=int, metavar="N", help="episodes of other environments (default: the run's)")
    parser.add_argument(
        "--num_gpus", type=int, default=1, metavar="N", help="CPU ranks that share the work (default: 1)"
    )
    parser.add_argument(
        "--plot", default="", metavar="FILE", help="equity picture (default: RUN_DIR/plots/evaluation.png)"
    )
    parser.add_argument("--json", default="", metavar="FILE", help="write all figures to this file")
    args = parser.parse_args([_underscored(token) for token in (sys.argv[1:] if argv is None else argv)])
    for name in ("num_worlds", "episodes", "num_gpus"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"{name} must be at least 1, got {getattr(args, name)}")
    for name in ("start", "end"):
        if not _is_date(getattr(args, name) or "2000-01-01"):
            parser.error(f"--{name} must be a date YYYY-MM-DD, got {getattr(args, name)!r}")
    for name in ("plot", "json"):
        if getattr(args, name) and not Path(getattr(args, name)).absolute().parent.is_dir():
            parser.error(f"--{name} {getattr(args, name)}: its folder does not exist")
    if args.plot and not Path(args.plot).suffix:
        parser.error(f"--plot {args.plot} must name a picture, such as equity.png")
    return args


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _underscored(token: str) -> str:
    name, equals, value = token.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if token.startswith("--") else token


@explains_errors
def main() -> int:
    """Entry of the command."""
    args = parse_args()
    return launch(_rank_main, (args,), args.num_gpus)
