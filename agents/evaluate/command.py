"""Evaluate a trained policy; the test span of real prices only on demand.

examples:
  python -m agents.evaluate runs/my_run --which last
  python -m agents.evaluate runs/my_cartpole --episodes 200 --num_gpus 2
  python -m agents.evaluate runs/my_cartpole --video videos
  python -m agents.evaluate runs/my_run --compare runs/my_mlp --num_worlds 50
  python -m agents.evaluate runs/my_prices --open_test
exit codes: 0 done, 1 failed, 2 bad usage, 130 and 143 stopped by Ctrl-C and SIGTERM
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from agents.config import data_digest
from agents.evaluate.episodes import episode_figures, episode_text, until_stopped
from agents.run.saved import LoadedAgent, load_agent
from envs.task import GymTask
from envs.trading.config import DataConfig
from envs.vector.guards import EnvironmentFaultError
from rl_dist.checkpoint.trust import check_named
from rl_dist.errors import UserError, explained, explains_errors
from rl_dist.files import path_to_write, plain_file, read_plain
from rl_dist.flags import Field, Text, configuration, parse_flags
from rl_dist.launch.ranks import launch
from rl_dist.process_group.watchdog import end_rank
from rl_dist.process_group.world import World, open_world

LOOKS = "test_looks.jsonl"  # in a run directory: every look at days that stay closed
Agents = dict[str, LoadedAgent]
Result = tuple[dict[str, Any], str]  # figures, and a text for the terminal


@configuration
class EvaluateConfig:
    """Choose a checkpoint, days or episodes, and where the results go."""

    which: Literal["auto", "best", "last"] = "auto"
    """Checkpoint of a run directory; auto: the last on real prices, else the best if there is
    one."""
    open_test: bool = False
    """Evaluate real prices on days that are closed: the test span, or --data of other days. Every
    look is recorded in RUN_DIR/test_looks.jsonl."""
    data: Text = ""
    """CSV file of daily bars, or 'simulated'; none: the run's data."""
    num_worlds: int = Field(50, ge=1, le=100_000)
    """Simulated markets to evaluate on."""
    market_seed: int = -1
    """Seed of the simulated markets; -1: the run's."""
    market_edge: float = -1.0
    """Planted drift a day, in basis points; -1: the run's."""
    env: Text = ""
    """The run's module:id; needed to import it if another user owns config.json."""
    core: Text = ""
    """The run's own core; needed to import it if another user owns config.json."""
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


def evaluate_on_episodes(agents: Agents, options: EvaluateConfig, world: World) -> Result:
    """Evaluate all agents over episodes of the first one's environment."""
    agent = agents["policy"]
    config = agent.config
    if options.env not in ("", config.task.env):
        raise UserError(f"--env {options.env} differs from the run's, {config.task.env}: drop it")
    saved = {"env": config.task.env, "env_kwargs": config.task.env_kwargs}
    check_named(agent.run_dir, "task", saved, options.env)
    if options.episodes:
        config = replace(config, task=replace(config.task, eval_episodes=options.episodes))
    if options.seed >= 0:
        config = replace(config, train=replace(config.train, seed=options.seed))
    task = GymTask(config.task, end_rank, world.heartbeat)
    text = ""
    if options.video:  # first, because not every environment can be drawn
        from agents.evaluate.pictures import film

        film(agent, task, Path(options.video), config.train.seed, world)
        text = f"first episodes: {options.video}/episode_*.gif\n"
    figures = {
        name: episode_figures(task, config, agent.policy, agent.normalizer, world)
        for name, agent in agents.items()
    }
    return figures, text + "\n".join(f"{n}: {episode_text(v)}" for n, v in figures.items())


def evaluate_on_markets(agents: Agents, options: EvaluateConfig, world: World) -> Result:
    """Evaluate all agents on markets; record every look at closed days."""
    from agents.evaluate.markets import open_spans, report
    from envs.trading.features import first_tradable_day
    from envs.trading.market_data import Span
    from envs.trading.task import prepare_task

    agent = agents["policy"]
    config, data, market = agent.config, agent.config.data, agent.config.market
    is_other = options.data and Path(options.data).resolve() != Path(data.data).resolve()
    if is_other:  # the dates of the run may not exist there
        data = DataConfig(data=options.data)
    if options.market_seed >= 0:
        market = replace(market, market_seed=options.market_seed)
    if options.market_edge >= 0:
        market = replace(market, market_edge=options.market_edge)
    task = prepare_task(data, market, config.trading)
    markets = task.markets("test", options.num_worlds)
    dates, num_stocks = markets[0].dates, len(markets[0].tickers)
    if num_stocks != agent.policy.num_actions:
        raise UserError(
            f"the policy trades {agent.policy.num_actions} stocks and the data has {num_stocks}"
        )

    spans = open_spans(task)
    if is_other:
        spans = {"days": Span(first_tradable_day(markets[0], task.trading), len(dates) - 1)}
        if task.real and not options.open_test:
            raise UserError(
                f"the days of {options.data} stay closed until all choices are made: add "
                "--open_test, which records the look"
            )
    elif options.open_test:
        spans = {"test": task.spans.test}
    if world.is_main_process:
        print(f"{task.describe()}\n")
    note = ""
    if task.real and options.open_test and world.is_main_process:
        (span,) = spans.values()
        look = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "data_digest": data_digest(data),
            "span": [str(dates[span.first]), str(dates[span.last])],
        }
        for name, looking in agents.items():
            path = path_to_write(looking.run_dir, LOOKS)
            with open(path, "a", encoding="utf-8", opener=plain_file) as file:
                file.write(json.dumps(look | {"iteration": looking.iteration}) + "\n")
            count = len(read_plain(path).splitlines())
            note += f"\n{name}: look number {count} at closed days of this run: {path}"
    picture = Path(options.plot or path_to_write(agent.run_dir, "plots/evaluation.png"))
    pairs = {name: (each.policy, each.normalizer) for name, each in agents.items()}
    figures, text = report(task, markets, spans, pairs, world, agent.run_dir, picture)
    return figures, text + note


def evaluate_saved(path: str, others: list[str], options: EvaluateConfig) -> int:
    """Evaluate saved policies on this rank; the main process prints."""
    world = open_world("cpu")

    def evaluate() -> None:
        load = partial(load_agent, which=options.which.replace("auto", ""), core=options.core)  # type: ignore[arg-type]
        agent = load(path)
        config = agent.config
        # a step of an evaluation is no larger than one of its training
        torch.set_num_threads(min(config.launch.threads or 1, torch.get_num_threads()))
        agents = {"policy": agent} | {other: load(other) for other in others}
        if world.is_main_process:
            print(f"{agent.path}, iteration {agent.iteration}{agent.chosen_by}")
        run = evaluate_on_markets if config.task.is_trading else evaluate_on_episodes
        figures, text = run(agents, options, world)
        if world.is_main_process:
            print(text, flush=True)
            if options.json:
                Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")

    try:
        return until_stopped(evaluate, world)
    except EnvironmentFaultError as fault:
        raise UserError(f"rank {world.rank}: {fault}", exit_code=1) from fault
    except OSError as error:
        message, code = explained(error)
        raise UserError(message, exit_code=code) from error


def add_paths(parser: argparse.ArgumentParser) -> None:
    """Add the paths of policies to the parser."""
    parser.add_argument("path", metavar="RUN_DIR_OR_CHECKPOINT")
    more = "more policies for the table"
    parser.add_argument("--compare", nargs="+", default=[], metavar="RUN_DIR", help=more)


@explains_errors
def main() -> int:
    """Run the command; return the exit code."""
    parsed = parse_flags(
        {"evaluation": EvaluateConfig()},
        prog="python -m agents.evaluate RUN_DIR_OR_CHECKPOINT",
        description=__doc__ or "",
        extra=add_paths,
    )
    options = parsed.configs["evaluation"]
    arguments = parsed.extra.path, parsed.extra.compare, options
    return launch(evaluate_saved, arguments, options.num_gpus, copies=True)
