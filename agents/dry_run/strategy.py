"""Dry runs of strategies with gradient steps of the job, before it begins."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from agents.dry_run.batch_size import random_minibatch, saved_section
from agents.policy import Policy
from agents.ppo import PPO, ppo_loss
from agents.run.config import RunConfig, probe, save_config
from agents.run.memory import Shapes, compute_memory
from agents.sizes import shard_sizes
from agents.trainer import make_strategy
from rl_dist.launch.config import ResolvedLaunch
from rl_dist.process_group.world import World
from rl_dist.strategies.choice import STEPS, Hardware, choose_strategy, measure_mode

logger = logging.getLogger(__name__)


def resolve_training_strategy(
    config: RunConfig, resolved: ResolvedLaunch, task: Any, world: World, run_dir: Path
) -> RunConfig:
    """Return the configuration with the strategy that auto takes.

    config.json keeps it. An earlier choice in this run stands. All ranks call together.
    """
    launch = config.launch
    if launch.chosen_strategy:
        return config
    # ranks that were started again find their earlier choice there
    kept = saved_section("launch", run_dir, world)["chosen_strategy"]
    if not kept:
        start = gradient_steps(config, resolved.gpu_ids, task, world)
        choice = choose_strategy(
            launch.strategy_config,
            Hardware(world.size, world.device.type, len(resolved.gpu_ids)),
            lambda mode: measure_mode(mode, start, world, STEPS),
        )
        kept = choice.mode
        logger.info("%s", choice.reason)
        if world.is_main_process:
            print(choice.reason, flush=True)
    launch = dataclasses.replace(launch, chosen_strategy=kept, chosen_on=resolved.place)
    config = dataclasses.replace(config, launch=launch)
    if world.is_main_process:
        save_config(config, run_dir)
    return config


def gradient_steps(
    config: RunConfig, gpu_ids: tuple[int, ...], task: Any, world: World
) -> Callable[[str], Iterator[None]]:
    """Return what `measure_mode` tries a mode with: steps of the job."""
    layout, space, _ = probe(task)
    launch, train, device = config.launch, config.train, world.device

    def steps(mode: str) -> Iterator[None]:
        sizes = shard_sizes(train, world.rank, world.size)
        policy = Policy(config.policy, layout, space).to(device, launch.dtype)
        minibatch = random_minibatch(policy, train.bptt_steps, sizes.batch_size)
        # as many bytes as training holds in its rollouts during an update
        shapes = Shapes(layout, space)
        kind: dict[str, Any] = {"itemsize": launch.dtype.itemsize, "device_type": device.type}
        need = compute_memory(config.policy, train, sizes, shapes, **kind)
        rollout = torch.empty(need.parts["rollout"], dtype=torch.uint8, device=device)
        options: dict[str, Any] = {"mode": mode, "device_ids": gpu_ids}
        options["batch_axes"] = Policy.BATCH_AXES
        strategy = make_strategy(dataclasses.replace(launch.strategy_config, **options), world)
        one_epoch = dataclasses.replace(config.ppo, update_epochs=1, target_kl=0.0)
        try:
            yield
            ppo = PPO(policy, one_epoch, strategy, train.grad_accumulation, config.speed)
            yield
            for part in minibatch.into_microbatches(sizes.num_microbatches):
                with strategy.accumulating(last=False):
                    given = part.obs, part.actions, part.lstm_state, part.episode_start
                    stored = part.logprobs, part.values, part.advantages, part.returns
                    ppo_loss(ppo.wrapped(*given), *stored, one_epoch).total.backward()
            yield
            while rollout.numel():
                ppo.update(minibatch, (0, 0), 0, sizes.batch_size, num_minibatches=1)
                yield
        finally:
            strategy.close()

    return steps
