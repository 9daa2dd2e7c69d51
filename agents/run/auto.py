"""Measure the best values for flags that are set to auto, before training begins."""

from __future__ import annotations

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
from agents.run.sizes import batch_fits, shard_sizes
from agents.run.start import Run
from envs.task import AUTO as AUTO_WORKERS
from envs.vector.layout import random_actions
from rl_dist.errors import UserError
from rl_dist.machine import available_cores, cpu_has_bf16, peak_memory_bytes
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.measure import HEADROOM, Candidate, doublings, fastest
from rl_dist.strategies.precision import autocast_dtype
from rl_dist.strategies.strategy import Strategy

# range of values that batch_size auto tries, in sequences per rank
SMALLEST, LARGEST = 8, 2**19
# Minimum speedup before auto takes a value that costs more memory, precision or cores.
WORTH = 1.1
CHOSEN = ("batch_size", "precision", "chosen_strategy", "chosen_on", "env_workers")


def choose(run: Run, world: World) -> Run:
    """Replace every auto of a run by a measured value. Every rank must call this.

    The values are written to config.json before training begins. After a restart, the ranks read
    them from that file and do not measure again.
    """
    config = run.config
    is_auto = (
        config.train.batch_size == AUTO,
        config.launch.precision == "auto",
        config.launch.strategy == "auto",
        config.task.env_workers == AUTO_WORKERS,
    )
    if not any(all_gather_json(any(is_auto), world)):
        return run
    if world.is_main_process:
        run.directory.update_state(phase="dry_run")
        config = RunConfig.from_dict(run.directory.config())
    kept = all_gather_json({name: config.values[name] for name in CHOSEN}, world)[0]
    config = run.config.changed(kept)
    trials = Trials(config.prepare_task(world.heartbeat), run.resolved.gpu_ids, world)
    if config.train.batch_size == AUTO:
        sizes = doublings(allowed_batch_sizes(config.train, world.size))
        config = trials.best(config, "batch_size", sizes, trials.steps)
    if config.launch.precision == "auto":
        has_units = world.device.type == "cpu" and cpu_has_bf16()
        names = ("fp32", "bf16") if all(all_gather_json(has_units, world)) else ("fp32",)
        config = trials.best(config, "precision", names, trials.steps)
    if config.launch.strategy == "auto" and not config.launch.chosen_strategy:
        config = config.changed({"chosen_on": run.resolved.place})
        modes = strategy_modes(world.size, len(run.resolved.gpu_ids))
        steps = partial(trials.steps, together=True)
        config = trials.best(config, "chosen_strategy", modes, steps)
    if config.task.env_workers == AUTO_WORKERS:
        cores = max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        counts = (0, cores, 4 * cores)
        config = trials.best(config, "env_workers", counts, trials.env_steps)
    if world.is_main_process:
        run.directory.write_config(config.to_dict())
        run.directory.update_state(precision=config.launch.precision)
    return replace(run, config=config)


def allowed_batch_sizes(train: TrainConfig, num_ranks: int) -> Iterator[int]:
    """Yield, in ascending order, each batch_size that divides evenly over the ranks."""
    ranks = num_ranks if train.scaling == "strong" else 1
    sequences_per_env = train.num_steps // train.bptt_steps
    most = train.num_envs * sequences_per_env // train.grad_accumulation or LARGEST * ranks
    sizes = range(min(SMALLEST * ranks, most), most + 1)
    return (size for size in sizes if batch_fits(train, num_ranks, size))


def strategy_modes(num_ranks: int, num_devices: int) -> tuple[str, ...]:
    """Return the strategies that `--strategy auto` tries, simplest first."""
    if num_ranks > 1:
        return "ddp", "hybrid"
    return ("none", "dp") if num_devices > 1 else ("none",)


class Trials:
    """Finds the fastest value of a flag by timing steps as in the real run."""

    def __init__(self, task: Any, gpu_ids: tuple[int, ...], world: World) -> None:
        self.task = task
        self.gpu_ids = gpu_ids
        self.world = world
        self.env = probe(task)
        self.free_bytes = free_for_each_rank(world.device, world.size)
        self.held_bytes = psutil.Process().memory_info().rss
        self.bytes_per_sequence = 0.0  # forward and backward memory in the last trial

    def best(
        self,
        config: RunConfig,
        flag: str,
        values: Iterable[Any],
        steps: Callable[[RunConfig], Iterator[None]],
    ) -> RunConfig:
        """Set a flag to its fastest value; print the times of all values."""
        growing = flag == "batch_size"
        candidates = (
            Candidate(
                str(value),
                partial(steps, config.changed({flag: value})),
                value if growing else 1,
            )
            for value in values
        )
        best, results = fastest(candidates, self.world, tolerance=WORTH, growing=growing)
        figures = "; ".join(map(str, results)) or "no value divides over the ranks"
        name = flag.removeprefix("chosen_")
        if best is None:
            raise UserError(f"{name} auto finds no value that works: {figures}", exit_code=1)
        if self.world.is_main_process:
            unit = "sequence" if growing else "step"
            print(f"{name} auto: {best.name} (time per {unit}: {figures})", flush=True)
        return config.changed({flag: best.name})

    def steps(self, config: RunConfig, together: bool = False) -> Iterator[None]:
        """Take gradient steps on random data and yield after each one.

        The first `next` only tests memory: it runs forward and backward on a minibatch that is
        larger than the real one, with memory allocated for a rollout.

        Args:
            together: reduce gradients over all ranks; False: this rank takes its steps alone.
        """
        train = config.train
        world = self.world
        device = world.device
        sizes = shard_sizes(train, world.rank, world.size)
        policy = Policy(config.policy, self.env.layout, self.env.single_action_space)
        policy.to(device, config.launch.dtype)
        policy.low_precision = autocast_dtype(config.launch.precision)

        # Test the memory.
        sequences = math.ceil(sizes.batch_size / HEADROOM)
        rollout = rollout_bytes(config, sizes.num_envs, policy)
        needed = rollout + self.bytes_per_sequence * sequences
        if device.type == "cpu" and needed > HEADROOM * self.free_bytes:
            raise MemoryError(  # without this, Linux would kill the process
                f"{needed / GIB:.2g} GiB are needed, {self.free_bytes / GIB:.2g} GiB are free"
            )
        _held = torch.empty(rollout, dtype=torch.uint8, device=device)  # takes the rollout's place
        minibatch = dummy_minibatch(policy, train.bptt_steps, sequences)
        for part in minibatch.into_microbatches(sizes.num_microbatches):
            seen = policy(part.obs, part.actions, part.lstm_state, part.episode_start)
            ppo_loss(seen, part, config.ppo).total.backward()
        policy.zero_grad()
        grown = peak_memory_bytes(device) - self.held_bytes
        self.bytes_per_sequence = max(0, grown) / sequences
        yield

        # Take steps with a minibatch of the real size.
        strategy_config = StrategyConfig(mode="none", precision=config.launch.precision)
        if together:
            strategy_config = replace(config.launch.strategy_config, device_ids=self.gpu_ids)
        else:
            world = replace(world, rank=0, size=1, watchdog=None)
        strategy = Strategy(strategy_config, world)
        try:
            ppo = PPO(policy, config.ppo, strategy, train.grad_accumulation)
            minibatch = minibatch.pick(Tensor.narrow, 0, sizes.batch_size)
            starts = minibatch.episode_start.cpu().numpy()
            while True:
                ppo.step(minibatch, starts)
                yield
        finally:
            strategy.close()

    def env_steps(self, config: RunConfig) -> Iterator[None]:
        """Step this rank's environments with random actions; yield after each step."""
        sizes = shard_sizes(config.train, self.world.rank, self.world.size)
        task = replace(self.task, config=config.task)
        device = self.world.device
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
    """Return a minibatch with random contents and the shapes that the policy expects.

    On average, one episode begins per sequence.
    """
    width = policy.num_obs * max(policy.config.feature_window, 1)
    obs = policy.critic_head.weight.new_ones(length, sequences, width)
    start = torch.rand(length, sequences, device=obs.device) < 1.0 / length
    state = policy.initial_state(sequences)
    actions, _, values, _ = policy.act(obs[0], state, start[0])
    numbers = torch.stack([values] * length)  # [L, N]
    return Minibatch(
        obs=obs,
        actions=torch.stack([actions] * length),
        logprobs=numbers,
        values=numbers,
        advantages=numbers,
        returns=numbers,
        episode_start=start,
        lstm_state=state,
    )
