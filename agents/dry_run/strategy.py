"""Dry runs of strategies with gradient steps of the job, before it begins."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agents.dry_run.batch_size import random_minibatch
from agents.policy import Policy
from agents.ppo import PPO, ppo_loss
from agents.rollout import Minibatch, into_microbatches
from agents.run.config import RunConfig, probe_env, save_config
from agents.run.memory import Shapes, compute_memory
from agents.sizes import shard_sizes
from agents.trainer import make_strategy
from rl_dist.launch.launcher import ResolvedLaunch
from rl_dist.parallel.choice import (
    Candidate,
    Hardware,
    ResolvedStrategy,
    choose_strategy,
    measure_mode,
)
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World

logger = logging.getLogger(__name__)


def resolve_training_strategy(
    config: RunConfig, resolved: ResolvedLaunch, task: Any, world: World, run_dir: Path
) -> RunConfig:
    """Return the configuration with the strategy that auto or fallback comes to.

    config.json keeps it. An earlier choice in this run stands. All ranks call together.
    """
    launch = config.launch
    if launch.chosen_strategy or not (launch.fallback or launch.strategy == "auto"):
        return config
    kept = all_gather_json(_kept_choice(run_dir) if world.is_main_process else "", world)[0]
    if not kept:
        choice = _choose(config, resolved, task, world)
        kept = choice.mode if choice.reason else launch.strategy
        if world.is_main_process and choice.reason:
            print(choice.reason, flush=True)
        if choice.reason:
            logger.info("%s", choice.reason)
    if kept == launch.strategy:
        return config
    launch = dataclasses.replace(launch, chosen_strategy=kept, chosen_on=resolved.place)
    config = dataclasses.replace(config, launch=launch)
    if world.is_main_process:
        save_config(config, run_dir)
    return config


def _kept_choice(run_dir: Path) -> str:
    """Read config.json: ranks that were started again find their earlier choice there."""
    path = run_dir / "config.json"
    launch = json.loads(path.read_bytes())["launch"] if path.exists() else {}
    return str(launch.get("chosen_strategy", ""))


def _choose(
    config: RunConfig, resolved: ResolvedLaunch, task: Any, world: World
) -> ResolvedStrategy:
    trial = StrategyDryRun(config, resolved, task, world)
    steps = {} if config.launch.strategy == "auto" else {"warm_up": 0, "steps": 1}
    return choose_strategy(
        config.launch.strategy_config,
        Hardware(world.size, world.device.type, len(resolved.gpu_ids)),
        lambda mode: measure_mode(mode, trial.start, world, **steps),
        fallback=config.launch.fallback,
    )


class StrategyDryRun:
    """Gradient steps of the job on made-up slots, with policies of their own."""

    def __init__(
        self, config: RunConfig, resolved: ResolvedLaunch, task: Any, world: World
    ) -> None:
        self.config, self.world = config, world
        self.device_ids = resolved.gpu_ids
        self.sizes = shard_sizes(config.train, world.rank, world.size)
        env = probe_env(task)
        self.num_obs = int(env.single_observation_space.shape[0])
        self.action_space = env.single_action_space
        env.close()

    def start(self, mode: str) -> Candidate:
        """Make a policy and a strategy, ready to wrap it and to step."""
        config = self.config
        world = self.world
        sizes = self.sizes
        launch = config.launch
        policy = Policy(config.policy, self.num_obs, self.action_space).to(
            world.device, launch.dtype
        )
        minibatch = self._minibatch(policy)
        rollout = self._rollout(policy)
        one_epoch = dataclasses.replace(config.ppo, update_epochs=1, target_kl=0.0)
        strategy = self._strategy(mode)
        ppo: PPO

        def wrap() -> None:
            nonlocal ppo
            ppo = PPO(policy, one_epoch, strategy, config.train.grad_accumulation, config.speed)

        def alone() -> None:
            for part in into_microbatches(minibatch, sizes.num_microbatches):
                with strategy.accumulating(last=False):
                    evaluation = ppo.wrapped(
                        part.obs, part.actions, part.lstm_state, part.episode_start
                    )
                    stored = part.logprobs, part.values, part.advantages, part.returns
                    ppo_loss(evaluation, *stored, one_epoch).total.backward()

        def step() -> None:
            assert rollout.numel()  # it takes its place in memory
            ppo.update(minibatch, (0, 0), 0, sizes.batch_size, num_minibatches=1)

        return Candidate(wrap, alone, step)

    def _strategy(self, mode: str) -> Strategy:
        asked = self.config.launch.strategy_config
        config: StrategyConfig = dataclasses.replace(
            asked,
            mode=mode,  # type: ignore[arg-type]  # one of its modes
            device_ids=self.device_ids,
            batch_axes=Policy.BATCH_AXES,
        )
        return make_strategy(config, self.world)

    def _rollout(self, policy: Policy) -> Tensor:
        """Allocate as many bytes as training holds in its rollouts during an update."""
        shapes = Shapes(self.num_obs, policy.num_actions, policy.discrete)
        launch, train = self.config.launch, self.config.train
        kind: dict[str, Any] = {
            "itemsize": launch.dtype.itemsize,
            "device_type": self.world.device.type,
        }
        need = compute_memory(self.config.policy, train, self.sizes, shapes, **kind)
        return torch.empty(need.rollout, dtype=torch.uint8, device=self.world.device)

    def _minibatch(self, policy: Policy) -> Minibatch:
        """Make up one step's slots of this rank."""
        return random_minibatch(policy, self.config.train.bptt_steps, self.sizes.batch_size)
