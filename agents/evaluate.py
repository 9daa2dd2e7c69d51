"""Judge a trained policy on data it never saw, always beside equal weight.

    python -m agents.evaluate RUN_DIR_OR_CHECKPOINT [--data FILE --start DATE --end DATE] ...
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from agents.clstm import Policy
from agents.judge import MAX_EPISODE_STEPS, Controller, PolicyController, judge_episodes, judge_markets
from agents.normalize import Normalizer
from agents.report import plot_equity
from agents.run import LoadedAgent, RunConfig, load_agent
from agents.statistics import Record, bootstrap_interval, mean_interval, performance
from envs.faults import EnvironmentFault
from envs.market_data import DataConfig, Market, Span
from envs.market_rules import EqualWeight, MemorylessRule, ReferencePolicy
from envs.task import GymTask
from envs.trading import first_tradable_day
from envs.trading_task import TradingTask, prepare_task
from rl_dist.launch import UserError, launch
from rl_dist.world import World, close_world, open_world

EQUAL_WEIGHT = "equal weight"  # bought at once: the baseline of every comparison
TAKEN_NAMES = (EQUAL_WEIGHT, "equal weight, order limit", "reference", "memoryless rule", "policy, state zeroed")
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
            for name, entry in found["policies"].items():
                gain = entry["sharpe"] - found["policies"][EQUAL_WEIGHT]["sharpe"]
                entry["gap_closed"] = gain / gap if name != EQUAL_WEIGHT and abs(gap) > 1e-9 else None
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
    if baselines:
        limited["equal weight, order limit"] = lambda: _rule(EqualWeight())
        if task.real is None and task.trading.order_unit == "value":
            limited["reference"] = lambda: _rule(ReferencePolicy(task.simulated))
            limited["memoryless rule"] = lambda: _rule(MemorylessRule(task.simulated))
    device = world.device
    records = judge_markets(markets, lambda m: task.judging_env(m, span, device=device), limited, world)
    at_once = judge_markets(
        markets,
        lambda m: task.judging_env(m, span, max_order=1.0, device=device),
        {EQUAL_WEIGHT: lambda: _rule(EqualWeight())},
        world,
    )
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
        lambda count, first: task.training_env(count, first, str(world.device)),
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
    return (
        f"{figures['episodes']:.0f} episodes without noise: mean return {figures['return']:.2f} (sd "
        f"{figures['return_std']:.2f}, min {figures['return_min']:.2f}), mean length {figures['length']:.1f}{cut}"
    )


def plot_judgement(judged: Judgement, path: Path) -> None:
    """Equity curves of all policies."""
    what = "SIMULATED markets never trained on" if judged.simulated else "real prices"
    title = f"Test span {judged.dates[0]} to {judged.dates[-1]}, {what}"
    plot_equity(judged.records, judged.dates, path, title, judged.simulated)


def _asked_task(config: RunConfig, args: argparse.Namespace) -> tuple[TradingTask, Span]:
    """The run's trading task with other worlds, data or days, as the command line asks."""
    asked = {name: getattr(args, name) for name in ("market_seed", "market_edge") if getattr(args, name) is not None}
    elsewhere = args.data not in ("", config.data.data)
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


def _refuse_useless(args: argparse.Namespace, names: Sequence[str], what: str) -> None:
    for name in names:
        if getattr(args, name) not in ("", None):
            raise UserError(f"--{name} does nothing with {what}: leave it out")


def _judge_loaded(agents: dict[str, LoadedAgent], args: argparse.Namespace, world: World) -> tuple[dict, str]:
    """Judge the first agent's task with all agents."""
    first = next(iter(agents.values()))
    config = replace(first.config, task=replace(first.config.task, eval_episodes=args.episodes or 100))
    _check_shapes(agents)
    if not config.task.is_trading:
        others = ("data", "start", "end", "num_worlds", "market_seed", "market_edge", "plot")
        _refuse_useless(args, others, config.task.env)
        task = GymTask(config.task)
        found = {
            name: _episode_figures(task, config, agent.policy, agent.normalizer, world, "")
            for name, agent in agents.items()
        }
        return found, "\n".join(f"{name}: {_episode_text(figures)}" for name, figures in found.items())
    _refuse_useless(args, ("episodes",), config.task.env)
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
    if world.main:
        print(f"{trading.describe()}\njudged from {judged.dates[0]} to {judged.dates[-1]}\n")
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
        raise UserError(str(fault), exit_code=1) from fault
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror or error}", exit_code=1) from error
    finally:
        close_world(world)
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of `python -m agents.evaluate`."""
    parser = _Parser(
        prog="python -m agents.evaluate",
        description="Judge a trained policy, without noise, beside equal weight under the same costs.",
        epilog="examples:\n  python -m agents.evaluate runs/my_run\n"
        "  python -m agents.evaluate runs/my_run --compare runs/my_mlp --num_worlds 50\n"
        "  python -m agents.evaluate runs/my_run --data prices.csv --start 2016-01-04 --end 2020-07-07",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", metavar="RUN_DIR_OR_CHECKPOINT")
    parser.add_argument("--compare", nargs="+", default=[], metavar="RUN_DIR", help="more policies for the table")
    parser.add_argument("--data", default="", help="CSV of daily bars, or 'simulated' (default: the run's data)")
    parser.add_argument("--start", default="", help="first day, YYYY-MM-DD (default: the run's test span)")
    parser.add_argument("--end", default="", help="last day, YYYY-MM-DD (default: the data's last)")
    parser.add_argument("--num_worlds", type=int, help="simulated worlds to judge on (default: 50)")
    parser.add_argument("--market_seed", type=int, help="seed of the simulated worlds (default: the run's)")
    parser.add_argument("--market_edge", type=float, help="planted drift, bps per day (default: the run's)")
    parser.add_argument("--episodes", type=int, help="episodes of other environments (default: 100)")
    parser.add_argument("--num_gpus", type=int, default=1, help="CPU ranks that share the work (default: 1)")
    parser.add_argument("--plot", default="", help="equity picture (default: RUN_DIR/plots/evaluation.png)")
    parser.add_argument("--json", default="", help="write all figures to this file")
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


def main() -> int:
    """Entry of the command."""
    args = parse_args()
    return launch(_rank_main, (args,), args.num_gpus)


if __name__ == "__main__":
    sys.exit(main())
