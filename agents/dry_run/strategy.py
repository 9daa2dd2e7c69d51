"""Tries strategies with gradient steps of the job before it begins."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from agents.dry_run.memory import Shapes, compute_memory
from agents.pipeline import make_strategy
from agents.policy import Policy
from agents.ppo import PPO, ppo_loss
from agents.rollout import Minibatch, equal_parts
from agents.run.config import RunConfig, glance, save_config
from agents.sizes import share_out
from rl_dist.launch.launcher import ResolvedLaunch
from rl_dist.parallel.choice import Choice, Trying, candidates, fastest, first_working, steps_down
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.collectives import gather_json
from rl_dist.process_group.world import World

logger = logging.getLogger(__name__)


def settle_strategy(config: RunConfig, resolved: ResolvedLaunch, task: Any, world: World, run_dir: Path) -> RunConfig:
    """The configuration with the strategy that auto or fallback comes to.

    config.json keeps it. What was chosen before in this run stands. All ranks call together.
    """
    launch = config.launch
    if launch.chosen_strategy or not (launch.fallback or launch.strategy == "auto"):
        return config
    kept = gather_json(_kept_choice(run_dir) if world.main else "", world)[0]
    if not kept:
        choice = _choose(config, resolved, task, world)
        kept = choice.mode
        if world.main and choice.reason:
            print(choice.reason, flush=True)
        if choice.reason:
            logger.info("%s", choice.reason)
    if kept == launch.strategy:
        return config
    launch = dataclasses.replace(launch, chosen_strategy=kept, chosen_on=resolved.place)
    config = dataclasses.replace(config, launch=launch)
    if world.main:
        save_config(config, run_dir)
    return config


def _kept_choice(run_dir: Path) -> str:
    """What config.json has: ranks that were started again find what they had chosen."""
    path = run_dir / "config.json"
    launch = json.loads(path.read_bytes())["launch"] if path.exists() else {}
    return str(launch.get("chosen_strategy", ""))


def _choose(config: RunConfig, resolved: ResolvedLaunch, task: Any, world: World) -> Choice:
    trial = StrategyTrial(config, resolved, task, world)
    if config.launch.strategy == "auto":
        return fastest(candidates(world.size, len(resolved.gpu_ids)), trial.start, world)
    mode = config.launch.strategy_config.mode
    modes = steps_down(mode, world.size, len(resolved.gpu_ids))
    return first_working(modes, trial.start, world) if len(modes) > 1 else Choice(mode, "")


class StrategyTrial:
    """Gradient steps of the job on made-up slots, with policies of their own."""

    def __init__(self, config: RunConfig, resolved: ResolvedLaunch, task: Any, world: World) -> None:
        self.config, self.world = config, world
        self.device_ids = resolved.gpu_ids
        self.sizes = share_out(config.train, world.rank, world.size)
        env = glance(task)
        self.num_obs = int(env.single_observation_space.shape[0])
        self.action_space = env.single_action_space
        env.close()

    def start(self, mode: str) -> Trying:
        """A policy and a strategy, ready to wrap it and to step."""
        config, world, sizes = self.config, self.world, self.sizes
        launch = config.launch
        policy = Policy(config.policy, self.num_obs, self.action_space).to(world.device, launch.dtype)
        minibatch, rollout = self._minibatch(policy), self._rollout(policy)
        one_epoch = dataclasses.replace(config.ppo, update_epochs=1, target_kl=0.0)
        strategy = self._strategy(mode)
        ppo: PPO

        def wrap() -> None:
            nonlocal ppo
            ppo = PPO(policy, one_epoch, strategy, config.train.grad_accumulation, config.speed)

        def alone() -> None:
            for part in equal_parts(minibatch, sizes.num_parts):
                with strategy.accumulating(last=False):
                    evaluation = ppo.wrapped(part.obs, part.actions, part.lstm_state, part.episode_start)
                    stored = part.logprobs, part.values, part.advantages, part.returns
                    ppo_loss(evaluation, *stored, one_epoch).total.backward()

        def step() -> None:
            assert rollout.numel()  # it takes its place in memory
            ppo.update(minibatch, (0, 0), 0, sizes.batch_size, num_minibatches=1)

        return Trying(wrap, alone, step)

    def _strategy(self, mode: str) -> Strategy:
        asked = self.config.launch.strategy_config
        config: StrategyConfig = dataclasses.replace(
            asked, mode=mode, device_ids=self.device_ids, batch_axes=Policy.BATCH_AXES
        )
        return make_strategy(config, self.world)

    def _rollout(self, policy: Policy) -> Tensor:
        """As many bytes as training holds in its rollouts during an update."""
        shapes = Shapes(self.num_obs, policy.num_actions, policy.discrete)
        launch, train = self.config.launch, self.config.train
        kind: dict[str, Any] = {"itemsize": launch.dtype.itemsize, "device_type": self.world.device.type}
        need = compute_memory(self.config.policy, train, self.sizes, shapes, **kind)
        return torch.empty(need.rollout, dtype=torch.uint8, device=self.world.device)

    def _minibatch(self, policy: Policy) -> Minibatch:
        """One step's slots of this rank, of the shapes that training has, with actions of this policy."""
        length, count = self.config.train.bptt_steps, self.sizes.batch_size
        zeros = policy.initial_state(1).new_zeros(length, count)
        size = (length, count, max(self.config.policy.feature_window, 1) * self.num_obs)
        obs, start = zeros.new_empty(size).normal_(), torch.zeros_like(zeros, dtype=torch.bool)
        state = policy.initial_state(count)
        if isinstance(self.action_space, spaces.Discrete):
            actions = torch.randint(policy.num_actions, (length, count), device=zeros.device)
        else:
            actions = zeros.new_empty(length, count, policy.num_actions).normal_()
        with torch.no_grad():
            evaluation = policy(obs, actions, state, start)
        return Minibatch(
            obs=obs,
            actions=actions,
            logprobs=evaluation.logprobs,
            values=evaluation.values,
            advantages=torch.randn_like(zeros),
            returns=torch.randn_like(zeros),
            episode_start=start,
            lstm_state=state,
        )
