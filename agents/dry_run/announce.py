"""What is checked and printed before ranks start."""

from __future__ import annotations

import torch

from agents.dry_run.memory_advice import check_rollouts
from agents.run.config import (
    RunConfig,
    check_resumable,
)
from agents.run.sizes_table import sizes_table
from agents.sizes import AUTO, share_out
from envs.trading.simulated_market import market_card
from envs.trading.task import TradingTask
from rl_dist.checkpoint.folder import Found
from rl_dist.launch.launcher import ResolvedLaunch


def announce(config: RunConfig, resolved: ResolvedLaunch, found: Found | None) -> None:
    """Check what can be checked before ranks start, and say what will happen."""
    saved_num_envs = len(found.state["carry"]["obs"]) if found else 0
    measured = config.train.batch_size == AUTO  # by the ranks, which then tell
    sizes = None if measured else share_out(config.train, 0, resolved.num_ranks, saved_num_envs)
    if sizes and resolved.device_type == "cpu":  # of a GPU's memory its rank knows
        check_rollouts(config, torch.device("cpu"), resolved.num_ranks)
    task = config.prepare_task()
    if found:
        check_resumable(found.state, config, task, resolved.num_ranks)
        budget, counter = ("total_steps", "global_step") if config.train.total_steps else ("num_episodes", "episodes")
        if found.state[counter] >= getattr(config.train, budget):
            told = f"{found.state[counter]:,} of {getattr(config.train, budget):,}"
            print(f"trained to its end already ({told}): it is judged again; --{budget} N trains on")
    print(resolved.message)
    print(task.describe())
    if isinstance(task, TradingTask) and task.real is None:
        print(market_card(task.markets("train", 8), config.market))
    if sizes:
        print(sizes_table(config.train, sizes, resolved.num_ranks, config.ppo))
