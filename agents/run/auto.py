"""Measure before training what a run's flags leave to auto."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor

from agents.config import AUTO, RunConfig, TrainConfig, probe
from agents.network.minibatches import Minibatch
from agents.policy import Policy
from agents.ppo import PPO, ppo_loss
from agents.run.limits import GIB, free_for_each_rank, rollout_bytes
from agents.run.sizes import shard_sizes, shares_out
from agents.run.start import Run, sizes_table
from envs.task import AUTO as AUTO_WORKERS
from envs.task import GymTask
from envs.vector.layout import random_actions
from rl_dist.errors import UserError
from rl_dist.machine import available_cores, cpu_has_bf16, peak_memory_bytes
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World
from rl_dist.run_dir import RunDir
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.measure import HEADROOM, TOLERANCE, Candidate, doublings, fastest
from rl_dist.strategies.precision import autocast_dtype
from rl_dist.strategies.strategy import Strategy

SMALLEST, LARGEST = 8, 2**19  # sequences of a rank between which batch_size auto chooses
WORTH = 1.1  # speedup from which bf16 is worth its rounding, and workers are worth their cores


def choose(run: Run, world: World) -> Run:
    """Return the run with a value for every auto; all ranks call.

    config.json gets the values before training begins; ranks that start again take them from it.
    """
    config = _with_kept_choices(run, world)
    task = config.prepare_task(world.heartbeat)
    trials = Trials(task, run.resolved.gpu_ids, run.directory, world)
    if config.train.batch_size == AUTO:
        sizes = doublings(allowed_batch_sizes(config.train, world.size))
        config = trials.best(config, "train", "batch_size", sizes, trials.steps_alone, TOLERANCE)
        if world.is_main_process:
            share = shard_sizes(config.train, world.rank, world.size)
            print(sizes_table(config.train, share, world.size, config.ppo), flush=True)
    if config.launch.precision == "auto":
        units = world.device.type == "cpu" and cpu_has_bf16()
        names = ("fp32", "bf16") if all(all_gather_json(units, world)) else ("fp32",)
        config = trials.best(config, "launch", "precision", names, trials.steps_alone, WORTH)
    if config.launch.strategy == "auto" and not config.launch.chosen_strategy:
        modes = strategy_modes(world.size, len(run.resolved.gpu_ids))
        config = _changed(config, "launch", chosen_on=run.resolved.place)
        config = trials.best(config, "launch", "chosen_strategy", modes, trials.steps, TOLERANCE)
    if config.task.env_workers == AUTO_WORKERS and isinstance(task, GymTask):
        cores = max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        counts = (0, cores, 4 * cores)
        config = trials.best(config, "task", "env_workers", counts, trials.env_steps, WORTH)
    if config != run.config and world.is_main_process:
        run.directory.write_config(config.to_dict())
        run.directory.update_state(precision=config.launch.precision)
    return replace(run, config=config)


def _with_kept_choices(run: Run, world: World) -> RunConfig:
    """Return the configuration with the choices of an earlier start of these ranks."""
    text = json.dumps(run.directory.config()) if world.is_main_process else ""
    kept = RunConfig.from_dict(json.loads(all_gather_json(text, world)[0]))
    config = run.config
    if AUTO_WORKERS in (config.task.env_workers, kept.task.env_workers):  # it may differ by host
        config = _changed(config, "task", env_workers=kept.task.env_workers)
    config = _changed(config, "train", batch_size=kept.train.batch_size)
    names = ("precision", "chosen_strategy", "chosen_on")
    return _changed(config, "launch", **{name: getattr(kept.launch, name) for name in names})


def _changed(config: RunConfig, section: str, **values: Any) -> RunConfig:
    changes: dict[str, Any] = {section: replace(getattr(config, section), **values)}
    return replace(config, **changes)


def allowed_batch_sizes(train: TrainConfig, num_ranks: int) -> Iterator[int]:
    """Yield values of batch_size that divide over the ranks, ascending."""
    ranks = num_ranks if train.scaling == "strong" else 1
    sequences_per_env = train.num_steps // train.bptt_steps
    most = train.num_envs * sequences_per_env // train.grad_accumulation or LARGEST * ranks
    for size in range(min(SMALLEST * ranks, most), most + 1):
        if shares_out(replace(train, batch_size=size), num_ranks):
            yield size


def strategy_modes(num_ranks: int, num_devices: int) -> tuple[str, ...]:
    """Return the strategies that auto chooses from, the simplest one first."""
    if num_ranks > 1:
        return "ddp", "hybrid"
    return ("none", "dp") if num_devices > 1 else ("none",)


class Trials:
    """Steps of a job, to measure values of its flags with."""

    def __init__(self, task: Any, gpu_ids: tuple[int, ...], run: RunDir, world: World) -> None:
        self.task, self.gpu_ids, self.run, self.world = task, gpu_ids, run, world
        self.free_bytes = free_for_each_rank(world.device, world.size)
        self.held_bytes = psutil.Process().memory_info().rss
        self.bytes_per_sequence = 0.0  # that forward and backward have added to this process

    def best(
        self,
        config: RunConfig,
        section: str,
        flag: str,
        values: Iterable[Any],
        steps: Callable[[RunConfig], Iterator[None]],
        tolerance: float,
    ) -> RunConfig:
        """Return the configuration with the fastest value of a flag, and print why."""
        if self.world.is_main_process:
            self.run.update_state(phase="dry_run")
        growing = flag == "batch_size"
        options: dict[str, RunConfig] = {}

        def candidates() -> Iterator[Candidate]:
            for value in values:
                option = options[str(value)] = _changed(config, section, **{flag: value})
                yield Candidate(str(value), partial(steps, option), value if growing else 1)

        best, results = fastest(candidates(), self.world, tolerance=tolerance, growing=growing)
        figures = "; ".join(map(str, results)) or "no value divides over the ranks"
        name = flag.replace("chosen_", "")
        if best is None:
            raise UserError(f"{name} auto finds no value that works: {figures}", exit_code=1)
        if self.world.is_main_process:
            unit = "sequence" if growing else "step"
            print(f"{name} auto: {best.name} (for each {unit} {figures})", flush=True)
        return options[best.name]

    def steps_alone(self, config: RunConfig) -> Iterator[None]:
        """Take the gradient steps of this rank without the other ranks."""
        alone = replace(self.world, rank=0, size=1, watchdog=None)
        none = StrategyConfig(mode="none", precision=config.launch.precision)
        return self._steps(config, alone, none)

    def steps(self, config: RunConfig) -> Iterator[None]:
        """Take the gradient steps of this rank together with the other ranks."""
        strategy = replace(config.launch.strategy_config, device_ids=self.gpu_ids)
        return self._steps(config, self.world, strategy)

    def _steps(
        self, config: RunConfig, world: World, strategy_config: StrategyConfig
    ) -> Iterator[None]:
        train, device = config.train, world.device
        sizes = shard_sizes(train, self.world.rank, self.world.size)
        layout, space, _ = probe(self.task)
        policy = Policy(config.policy, layout, space).to(device, config.launch.dtype)
        policy.low_precision = autocast_dtype(config.launch.precision)

        # alone: forward and backward of a larger step, beside a rollout
        sequences = math.ceil(sizes.batch_size / HEADROOM)
        rollout = rollout_bytes(config, sizes.num_envs, policy)
        needed = rollout + self.bytes_per_sequence * sequences
        if device.type == "cpu" and needed > HEADROOM * self.free_bytes:
            raise MemoryError(  # Linux would end the process
                f"{needed / GIB:.2g} GiB are needed, {self.free_bytes / GIB:.2g} GiB are free"
            )
        _rollout = torch.empty(rollout, dtype=torch.uint8, device=device)
        minibatch = dummy_minibatch(policy, train.bptt_steps, sequences)
        for part in minibatch.into_microbatches(sizes.num_microbatches):
            seen = policy(part.obs, part.actions, part.lstm_state, part.episode_start)
            ppo_loss(seen, part, config.ppo).total.backward()
        policy.zero_grad()
        grown = peak_memory_bytes(device) - self.held_bytes
        self.bytes_per_sequence = max(0, grown) / sequences
        yield

        # together: steps of the real size
        strategy = Strategy(strategy_config, world)
        try:
            ppo = PPO(policy, config.ppo, strategy, train.grad_accumulation)
            minibatch = minibatch.pick(Tensor.narrow, 0, sizes.batch_size)
            while True:
                ppo.step(minibatch)
                yield
        finally:
            strategy.close()

    def env_steps(self, config: RunConfig) -> Iterator[None]:
        """Take random steps of all environments of this rank."""
        sizes = shard_sizes(config.train, self.world.rank, self.world.size)
        task, device = replace(self.task, config=config.task), self.world.device
        env = task.training_env(sizes.num_envs, sizes.env_offset, str(device))
        try:
            env.action_space.seed(0)
            obs = env.reset(seed=list(range(sizes.num_envs)))[0]
            yield
            while True:
                actions = torch.as_tensor(random_actions(env, obs.cpu()))
                obs = env.step(actions.to(device))[0]
                yield
        finally:
            env.close()


def dummy_minibatch(policy: Policy, length: int, sequences: int) -> Minibatch:
    """Make up a minibatch of a policy's shapes, with an episode start per sequence."""
    cells = (length, sequences)
    like = next(policy.parameters())
    steps = like.new_ones(cells)  # [L, N]
    actions = like.new_zeros(*cells, policy.num_actions)
    if policy.discrete:
        digits = (len(policy.action_sizes),) * bool(policy.action_sizes)
        actions = like.new_zeros(cells + digits, dtype=torch.int64)
    return Minibatch(
        obs=like.new_ones(*cells, policy.num_obs * max(policy.config.feature_window, 1)),
        actions=actions,
        logprobs=steps,
        values=steps,
        advantages=steps,
        returns=steps,
        episode_start=torch.rand(cells, device=like.device) < 1.0 / length,
        lstm_state=like.new_ones(sequences, policy.num_states, policy.config.hidden_size),
    )
