"""Evaluate a trained policy; the test span of real prices only on demand.

python -m agents.evaluate RUN_DIR_OR_CHECKPOINT [--open_test] ...
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from agents.evaluate.evaluation import Stopped, episode_figures, episode_text, stoppable
from agents.run.config import data_digest
from agents.run.saved import LoadedAgent, load_agent
from envs.task import GymTask
from envs.trading_config import DataConfig
from envs.vector.guards import EnvironmentFaultError
from rl_dist.checkpoint.trust import check_named
from rl_dist.errors import UserError, explained, explains_errors
from rl_dist.files import path_to_write, plain_file, read_plain
from rl_dist.flags import Field, Text, configuration, parse_flags
from rl_dist.launch.ranks import launch
from rl_dist.process_group.process_ends import stopped_in_evaluation
from rl_dist.process_group.watchdog import end_rank
from rl_dist.process_group.world import World, open_world

if TYPE_CHECKING:  # other tasks do without pandas and talib
    from envs.trading.market_data import Span
    from envs.trading.task import TradingTask

LOOKS = "test_looks.jsonl"  # in a run directory: every look at days that stay closed
EPILOG = """examples:
  python -m agents.evaluate runs/my_run --which last
  python -m agents.evaluate runs/my_cartpole --episodes 200 --num_gpus 2
  python -m agents.evaluate runs/my_cartpole --video videos
  python -m agents.evaluate runs/my_run --compare runs/my_mlp --num_worlds 50
  python -m agents.evaluate runs/my_prices --open_test
exit codes: 0 done, 1 failed, 2 bad usage, 130 and 143 stopped by Ctrl-C and SIGTERM"""


@configuration
class EvaluateConfig:
    """What the command evaluates, on which days or episodes, and where it writes."""

    which: Literal["auto", "best", "last"] = "auto"
    """Checkpoint of a run directory; auto: the last on real prices, else the best if there is
    one."""
    open_test: bool = False
    """Evaluate real prices on days that are closed: the test span, or --data of other days. Every
    look is recorded in RUN_DIR/test_looks.jsonl."""
    data: Text = ""
    """CSV file of daily bars, or 'simulated'; none: the run's data."""
    start: Text = ""
    """First day, YYYY-MM-DD; none: the span's."""
    end: Text = ""
    """Last day, YYYY-MM-DD; none: the last of the data."""
    num_worlds: int = Field(50, ge=1, le=100_000)
    """Simulated markets to evaluate on."""
    market_seed: int = -1
    """Seed of the simulated markets; -1: the run's."""
    market_edge: float = -1.0
    """Planted drift a day, in basis points; -1: the run's."""
    env: Text = ""
    """The run's module:id, to import it though config.json is not yours."""
    core: Text = ""
    """The run's own core, to import it likewise."""
    episodes: int = Field(0, ge=0, le=10**7)
    """Episodes of other environments; 0: the run's."""
    seed: int = -1
    """Another seed chooses other episodes; -1: the run's."""
    num_gpus: int = Field(1, ge=1, le=1024)
    """CPU ranks that share the work."""
    plot: Text = ""
    """PNG file of the equity curves; none: RUN_DIR/plots/evaluation.png."""
    video: Text = ""
    """Draw the first 3 episodes of another environment as GIFs into this folder."""
    json: Text = ""
    """Write all figures to this file."""


def _days_of(task: TradingTask, asked: EvaluateConfig, elsewhere: bool) -> dict[str, Span]:
    """Return the days to evaluate: spans of the run, or those asked for that can be traded."""
    from agents.evaluate.markets import open_spans
    from envs.trading.features import first_tradable_day
    from envs.trading.market_data import Span

    if not (asked.start or asked.end or elsewhere):
        return {"test": task.spans.test} if asked.open_test else open_spans(task)
    sample = task.markets("test", 1)[0]
    dates, tradable = sample.dates, first_tradable_day(sample, task.trading)
    first = asked.start or str(dates[tradable if elsewhere else task.spans.test.first])
    last = asked.end or str(dates[-1])
    limits = [np.datetime64(date.fromisoformat(day)) for day in (first, last)]
    days = np.flatnonzero((dates >= limits[0]) & (dates <= limits[1]))
    days = days[days >= tradable]
    if len(days) < 2:
        raise UserError(
            f"--start {first} --end {last} holds fewer than 2 tradable days: the data has "
            f"{dates[tradable]} to {dates[-1]}"
        )
    span = Span(int(days[0]), int(days[-1]))
    is_closed = task.real is not None and (elsewhere or span.last >= task.spans.test.first)
    if is_closed and not asked.open_test:
        raise UserError(
            f"{dates[span.first]} to {dates[span.last]} holds days that stay closed until all "
            "choices are made: add --open_test, which records the look"
        )
    return {"days": span}


def _evaluate_episodes(
    agents: dict[str, LoadedAgent], asked: EvaluateConfig, world: World
) -> tuple[dict[str, Any], str]:
    """Evaluate all agents over episodes of the first one's environment."""
    first = agents["policy"]
    config = first.config
    if asked.env not in ("", config.task.env):
        raise UserError(f"--env {asked.env} differs from the run's, {config.task.env}: drop it")
    saved = {"env": config.task.env, "env_kwargs": config.task.env_kwargs}
    check_named(first.run_dir, "task", saved, asked.env)
    task_config = replace(config.task, eval_episodes=asked.episodes or config.task.eval_episodes)
    train = replace(config.train, seed=asked.seed if asked.seed >= 0 else config.train.seed)
    config = replace(config, task=task_config, train=train)
    task = GymTask(task_config, end_rank, world.heartbeat)
    lines = []
    if asked.video:  # first: not every environment draws itself
        from agents.evaluate.video import film

        lines.append(film(first, task, Path(asked.video), train.seed, world))
    figures = {
        name: episode_figures(task, config, agent.policy, agent.normalizer, world, sampled=True)
        for name, agent in agents.items()
    }
    lines += [f"{name}: {episode_text(values)}" for name, values in figures.items()]
    return figures, "\n".join(lines)


def _evaluate_trading(
    agents: dict[str, LoadedAgent], asked: EvaluateConfig, world: World
) -> tuple[dict[str, Any], str]:
    """Evaluate all agents on markets; a look at closed days is recorded."""
    from agents.evaluate.markets import report
    from envs.trading.task import prepare_task

    first = agents["policy"]
    run_dir, config = first.run_dir, first.config
    plot = Path(asked.plot or path_to_write(run_dir, "plots/evaluation.png"))
    # the run's own dates may not exist in other data
    data = config.data
    elsewhere = Path(asked.data or data.data).resolve() != Path(data.data).resolve()
    if elsewhere:
        data = DataConfig(data=asked.data)
    given = {"market_seed": asked.market_seed, "market_edge": asked.market_edge}
    market = replace(config.market, **{name: v for name, v in given.items() if v >= 0})  # type: ignore[arg-type]
    task = prepare_task(data, market, config.trading)
    spans = _days_of(task, asked, elsewhere)
    markets = task.markets("test", asked.num_worlds)
    if (num_stocks := len(markets[0].tickers)) != first.policy.num_actions:
        raise UserError(
            f"the policy trades {first.policy.num_actions} stocks and the data has {num_stocks}: "
            "a policy can only be evaluated on as many stocks as it was trained with"
        )
    if world.is_main_process:
        print(f"{task.describe()}\n")
    pairs = {name: (agent.policy, agent.normalizer) for name, agent in agents.items()}
    if not (task.real and asked.open_test and world.is_main_process):
        return report(task, markets, spans, pairs, world, run_dir, plot)

    # days that are closed
    (span,) = spans.values()
    for agent in agents.values():
        _append_look(agent.run_dir, "")  # before the days are seen: it may not be writable
    results: dict[str, Any] = {}
    text = ""
    try:
        results, text = report(task, markets, spans, pairs, world, run_dir, plot)
    finally:  # an interrupted look may have left figures
        for name, agent in agents.items():
            saved = json.dumps(agent.config.to_dict(), sort_keys=True).encode()
            sharpes = [result["policies"][name]["sharpe"] for result in results.values()]
            look = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "data_digest": data_digest(data),
                "span": [str(markets[0].dates[day]) for day in (span.first, span.last)],
                "config_digest": hashlib.sha256(saved).hexdigest()[:16],
                "iteration": agent.iteration,
                "sharpe": next(iter(sharpes), None),
            }
            _append_look(agent.run_dir, json.dumps(look) + "\n")
    looks = len(read_plain(run_dir / LOOKS).splitlines())
    return results, f"{text}\nlook number {looks} at closed days of this run: {run_dir / LOOKS}"


def _append_look(run_dir: Path, line: str) -> None:
    with open(path_to_write(run_dir, LOOKS), "a", encoding="utf-8", opener=plain_file) as file:
        file.write(line)


def _rank_main(path: str, others: list[str], asked: EvaluateConfig) -> int:
    """Evaluate on this rank; the main process prints."""
    world = open_world("cpu")
    which: Any = asked.which.replace("auto", "")
    load = partial(load_agent, which=which, core=asked.core)
    try:
        with stoppable(world):
            first = load(path)
            # a step of an evaluation is no larger than one of its training
            threads = first.config.launch.threads or 1
            torch.set_num_threads(min(threads, torch.get_num_threads()))
            agents = {"policy": first} | {other: load(other) for other in others}
            if world.is_main_process:
                print(f"{first.path}, iteration {first.iteration}{first.chosen_by}")
            evaluate = _evaluate_trading if first.config.task.is_trading else _evaluate_episodes
            figures, text = evaluate(agents, asked, world)
            if world.is_main_process:
                print(text, flush=True)
                if asked.json:
                    text = json.dumps(figures, indent=2) + "\n"
                    Path(asked.json).write_text(text, encoding="utf-8")
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


def add_paths(parser: argparse.ArgumentParser) -> None:
    """Add the words that no section of flags holds."""
    parser.add_argument("path", metavar="RUN_DIR_OR_CHECKPOINT")
    more = "more policies for the table"
    parser.add_argument("--compare", nargs="+", default=[], metavar="RUN_DIR", help=more)


@explains_errors
def main() -> int:
    """Entry of the command."""
    parsed = parse_flags(
        {"evaluation": EvaluateConfig()},
        prog="python -m agents.evaluate RUN_DIR_OR_CHECKPOINT",
        description="Evaluate a trained policy: on markets beside equal weight at equal costs, on "
        "real prices without the test span unless it is opened; of another task over whole "
        "episodes, without noise and with it.",
        epilog=EPILOG,
        extra=add_paths,
    )
    asked = parsed.configs["evaluation"]
    words = parsed.extra.path, parsed.extra.compare, asked
    return launch(_rank_main, words, asked.num_gpus, copies=True)
