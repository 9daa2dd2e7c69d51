"""Evaluate a trained policy, trading ones on data that they never saw.

python -m agents.evaluate RUN_DIR_OR_CHECKPOINT [--data FILE --start DATE --end DATE] ...
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agents.evaluate.comparison import TAKEN_NAMES
from agents.evaluate.evaluation import Stopped, episode_figures, episode_text, stoppable
from agents.run.config import RunConfig
from agents.run.saved import LoadedAgent, load_agent
from envs.task import GymTask
from envs.trading_config import DataConfig
from envs.vector.faults import EnvironmentFaultError
from rl_dist.checkpoint.own_modules import check_module
from rl_dist.errors import CommandParser, UserError, explained, explains_errors
from rl_dist.hardware.plain_files import path_to_write
from rl_dist.launch.launcher import launch
from rl_dist.process_group.process_ends import stopped_in_evaluation
from rl_dist.process_group.watchdog import end_rank
from rl_dist.process_group.world import World, open_world

if TYPE_CHECKING:  # other tasks do without pandas and talib
    from envs.trading.market_data import Span
    from envs.trading.task import TradingTask

TRADING_ONLY = ("data", "start", "end", "num_worlds", "market_seed", "market_edge", "plot")
EPILOG = """examples:
  python -m agents.evaluate runs/my_run --which last
  python -m agents.evaluate runs/my_cartpole --episodes 200 --num_gpus 2
  python -m agents.evaluate runs/my_cartpole --video videos
  python -m agents.evaluate runs/my_run --compare runs/my_mlp --num_worlds 50
  python -m agents.evaluate runs/my_run --data prices.csv --start 2016-01-04 --end 2020-07-07
exit codes: 0 done, 1 failed, 2 bad usage, 130 and 143 stopped by Ctrl-C and SIGTERM"""


def _asked_task(config: RunConfig, args: argparse.Namespace) -> tuple[TradingTask, Span, str]:
    """The run's trading task with other worlds, data or days, as asked; the days; a warning."""
    from envs.trading.features import first_tradable_day
    from envs.trading.market_data import Span
    from envs.trading.task import prepare_task

    # the run's own dates may not exist in other data, of which every day is unseen
    own = config.data.data
    elsewhere = Path(args.data or own).resolve() != Path(own).resolve()
    data = DataConfig(data=args.data) if elsewhere else config.data
    if data.data != "simulated":
        worlds = ("num_worlds", "market_seed", "market_edge")
        _refuse_useless(args, worlds, f"data {data.data}")
    asked = {name: getattr(args, name) for name in ("market_seed", "market_edge")}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    task = prepare_task(data, replace(config.market, **given), config.trading)
    if not (args.start or args.end or elsewhere):
        return task, task.spans.test, ""

    # the days asked for, as far as they can be traded
    sample = task.markets("test", 1)[0]
    dates, tradable = sample.dates, first_tradable_day(sample, task.trading)
    first = args.start or str(dates[tradable if elsewhere else task.spans.test.first])
    last = args.end or str(dates[-1])
    days = np.flatnonzero((dates >= np.datetime64(first)) & (dates <= np.datetime64(last)))
    days = days[days >= tradable]
    if len(days) < 2:
        raise UserError(
            f"--start {first} --end {last} holds fewer than 2 tradable days: the data has "
            f"{dates[tradable]} to {dates[-1]}"
        )
    chosen_on = task.spans.valid or task.spans.train
    warning = "WARNING: the policy was trained or chosen on some of these days: no held-out result"
    is_seen = task.real is not None and not elsewhere and days[0] <= chosen_on.last
    return task, Span(int(days[0]), int(days[-1])), f"{warning}\n" if is_seen else ""


def _refuse_useless(args: argparse.Namespace, names: Sequence[str], what: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise UserError(f"--{name} does nothing with {what}: leave it out")


def _evaluate(
    agents: dict[str, LoadedAgent], args: argparse.Namespace, world: World
) -> tuple[dict, str]:
    """Evaluate all agents on the task of the first; a summary and its text."""
    first = agents["policy"]
    own = first.config.task
    if own.is_trading:
        _refuse_useless(args, ("episodes", "seed", "env", "video"), own.env)
        return _evaluate_trading(agents, args, world)

    # episodes of a Gymnasium task
    _refuse_useless(args, TRADING_ONLY, own.env)
    if args.env not in (None, own.env):
        raise UserError(f"--env {args.env} differs from the run's, {own.env}: leave it out")
    check_module(own.env, own.env_kwargs, first.run_dir, args.env or "")
    asked = replace(own, eval_episodes=args.episodes or own.eval_episodes)
    train = first.config.train
    if args.seed is not None:
        train = replace(train, seed=args.seed)
    config = replace(first.config, task=asked, train=train)
    task = GymTask(asked, end_rank, world.heartbeat)
    films = ""
    if args.video:  # first: not every environment draws itself
        from agents.evaluate.video import film

        films = f"\n{film(first, task, args.video, train.seed, world)}"
    found = {
        name: episode_figures(task, config, agent.policy, agent.normalizer, world, sampled=True)
        for name, agent in agents.items()
    }
    text = "\n".join(f"{name}: {episode_text(value)}" for name, value in found.items())
    return found, f"{text}{films}"


def _evaluate_trading(
    agents: dict[str, LoadedAgent], args: argparse.Namespace, world: World
) -> tuple[dict, str]:
    first = agents["policy"]
    plot = Path(args.plot or path_to_write(first.run_dir, "plots/evaluation.png"))
    task, span, warning = _asked_task(first.config, args)
    markets = task.markets("test", args.num_worlds or 50)
    if (num_stocks := len(markets[0].tickers)) != first.policy.num_actions:
        raise UserError(
            f"the policy trades {first.policy.num_actions} stocks and the data has {num_stocks}: "
            "a policy can only be evaluated on as many stocks as it was trained with"
        )
    dates = markets[0].dates
    if world.is_main_process:
        print(f"{warning}{task.describe()}")
        print(f"evaluated from {dates[span.first]} to {dates[span.last]}\n")
    plot = plot if plot.suffix else plot.with_suffix(".png")
    pairs = {name: (agent.policy, agent.normalizer) for name, agent in agents.items()}
    from agents.evaluate.markets import report

    summary, text = report(task, markets, span, pairs, world, plot)
    return summary, f"{text}\n\nequity curves: {plot}"


def _load_agents(args: argparse.Namespace) -> dict[str, LoadedAgent]:
    """Load the policies, which must all be able to act in the first one's environment."""
    agents = {"policy": load_agent(args.path, which=args.which, core=args.core)}
    for path in args.compare:
        name = Path(path).resolve().name
        taken = name in agents or name in TAKEN_NAMES or Path(path).is_file()
        agents[path if taken else name] = load_agent(path, which=args.which, core=args.core)
    shapes = {name: tuple(agent.policy.shapes().values()) for name, agent in agents.items()}
    wanted = shapes["policy"]
    for name, found in shapes.items():
        if found != wanted:
            raise UserError(
                f"{name} cannot be compared: it maps {found[0]} observations to {found[1]} "
                f"actions, the policy {wanted[0]} to {wanted[1]}; compare runs of one environment "
                "and --observation"
            )
    return agents


def _rank_main(args: argparse.Namespace) -> int:
    """Evaluate on this rank; the main process prints."""
    world = open_world("cpu")
    try:
        with stoppable(world):
            _load_and_evaluate(args, world)
    except Stopped as stopped:
        (signum,) = stopped.args
        if world.is_main_process:
            print(stopped_in_evaluation(signum, None))
        return 128 + signum
    except EnvironmentFaultError as fault:
        raise UserError(f"rank {world.rank}: {fault}", exit_code=1) from fault
    except OSError as error:
        message, code = explained(error)
        raise UserError(message, exit_code=code) from error
    return 0


def _load_and_evaluate(args: argparse.Namespace, world: World) -> None:
    agents = _load_agents(args)
    if world.is_main_process:
        first = agents["policy"]
        others = "; --which last takes the newest" if first.chosen_by else ""
        print(f"{first.path}, iteration {first.iteration}{first.chosen_by}{others}")
    summary, text = _evaluate(agents, args, world)
    if world.is_main_process:
        print(text, flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def positive(text: str) -> int:
    """Parse a number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def day(text: str) -> str:
    """Parse a date YYYY-MM-DD."""
    return date.fromisoformat(text).isoformat()


def new_file(text: str) -> str:
    """Refuse what could not be written after all the work."""
    if Path(text).is_dir() or not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no file in a folder that exists")
    return text


def new_folder(text: str) -> Path:
    """Refuse a file where a folder belongs."""
    if Path(text).exists() and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file, and must be a folder")
    return Path(text)


# name: (type, placeholder, help)
OPTIONS: dict[str, tuple[Any, str, str]] = {
    "data": (str, "FILE", "CSV of daily bars, or 'simulated' (default: the run's data)"),
    "start": (day, "DATE", "first day, YYYY-MM-DD (default: the run's test span)"),
    "end": (day, "DATE", "last day, YYYY-MM-DD (default: the data's last)"),
    "num_worlds": (positive, "N", "simulated worlds to evaluate on (default: 50)"),
    "market_seed": (int, "N", "seed of the simulated worlds (default: the run's)"),
    "market_edge": (float, "BPS", "planted drift, bps per day (default: the run's)"),
    "env": (str, "MODULE:ID", "the run's module:id, to import it though config.json is not yours"),
    "core": (str, "MODULE:CLASS", "the run's own core, to import it likewise"),
    "episodes": (positive, "N", "episodes of other environments (default: the run's)"),
    "seed": (int, "N", "another seed chooses other episodes (default: the run's)"),
    "num_gpus": (positive, "N", "CPU ranks that share the work (default: 1)"),
    "plot": (new_file, "FILE", "equity picture (default: RUN_DIR/plots/evaluation.png)"),
    "video": (new_folder, "DIR", "draw the first 3 episodes of another environment as GIFs"),
    "json": (new_file, "FILE", "write all figures to this file"),
}


def parse_args() -> argparse.Namespace:
    """Parse the command line; dashes and underscores both work."""
    parser = CommandParser(
        prog="python -m agents.evaluate",
        description="Evaluate a trained policy: on trading data it never saw, beside equal weight "
        "at equal costs; of another task over whole episodes, without noise and with it.",
        epilog=EPILOG,
    )
    parser.add_argument("path", metavar="RUN_DIR_OR_CHECKPOINT")
    which = "checkpoint of a run directory (default: the best one where there is one)"
    parser.add_argument("--which", choices=("best", "last"), default="", help=which)
    more = "more policies for the table"
    parser.add_argument("--compare", nargs="+", default=[], metavar="RUN_DIR", help=more)
    for name, (kind, metavar, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    flag = re.compile("(?<=^--)[^=]+")
    words = [flag.sub(lambda name: name.group().replace("-", "_"), word) for word in sys.argv[1:]]
    return parser.parse_args(words)


@explains_errors
def main() -> int:
    """Entry of the command."""
    args = parse_args()
    return launch(_rank_main, (args,), args.num_gpus or 1, copies=True)
