"""--batch_size auto: gradient steps at several sizes, before training.

The update of the real policy alone is measured: `PPO.step` on made-up observations of the job's
shapes, without the reduction over ranks, while every rank does the same and holds as many bytes as
its rollout takes.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agents.network.minibatches import Minibatch
from agents.policy import Policy
from agents.ppo import PPO
from agents.run.config import RunConfig, save_config
from agents.run.limits import GIB, free_for_each_rank
from agents.run.memory import MemoryNeed, compute_memory, observe_shapes
from agents.run.start import sizes_table
from agents.sizes import Sizes, TrainConfig, learning_rate_factor, shard_sizes, shares_out
from agents.trainer import Job, MakeEnv
from rl_dist.errors import UserError
from rl_dist.machine import clear_gpu_memory
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World
from rl_dist.strategies.batch_size import Choice, fastest_batch_size
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy

SMALLEST = 8  # sequences of a rank to begin with, if more are allowed
LARGEST = 2**19
DEFAULT_BATCH = TrainConfig().sequences_per_step  # what learning_rate's default was chosen for
ENDS = {
    "flat": "the smallest within 5 % of the fastest",
    "memory": "the fastest that fits with 10 % to spare",
    "time": "larger ones take too long to try",
    "sizes": "the fastest of those that divide",
}


def saved_section(name: str, run_dir: Path, world: World) -> dict[str, Any]:
    """Return what the main process reads in config.json; all ranks call."""
    saved: Any = None
    if world.is_main_process:
        saved = json.loads((run_dir / "config.json").read_text())[name]
    return all_gather_json(saved, world)[0]


def resolve_batch_size(
    config: RunConfig, make_env: MakeEnv, run_dir: Path, world: World
) -> RunConfig:
    """Return the configuration with batch_size auto measured; all ranks call.

    The number is written to config.json, and taken from there by ranks that start again.
    """
    batch_size = saved_section("train", run_dir, world)["batch_size"]
    reason = ""
    if batch_size == "auto":
        batch_size, reason = choose_batch_size(config.job(make_env, run_dir), world)
    config = replace(config, train=replace(config.train, batch_size=batch_size))
    if world.is_main_process and reason:
        save_config(config, run_dir)
        print(reason)
        sizes = shard_sizes(config.train, world.rank, world.size)
        print(sizes_table(config.train, sizes, world.size, config.ppo), flush=True)
    return config


def choose_batch_size(job: Job, world: World) -> tuple[int, str]:
    """Measure the fastest batch_size that fits, together on all ranks.

    Changes no random state. Returns the value of the flag, and why, in words.
    """
    before = world.doing.phase
    world.set_phase("choice of the batch size")
    ranks = world.size if job.train.scaling == "strong" else 1
    sizes = [size // ranks for size in allowed_batch_sizes(job.train, world.size)]
    free = free_for_each_rank(world.device, world.size)
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        torch.manual_seed(job.train.seed)
        update = UpdateDryRun(job, world, free)
        try:
            choice = fastest_batch_size(update, sizes, world)
        except MemoryError as error:
            raise UserError(
                f"batch_size auto: {error} beside its rollout, {free / GIB:.1f} GiB are free: "
                "lower --num_envs, --hidden_size or --num_steps",
                exit_code=1,
            ) from None
        used = update.need(choice.size).peak
    del update
    clear_gpu_memory()
    world.set_phase(before)
    return choice.size * ranks, _describe(job, choice, world.size, used / GIB, free / GIB)


def allowed_batch_sizes(train: TrainConfig, num_ranks: int) -> list[int]:
    """Return the values of the flag that divide over the ranks, ascending."""
    sequences_per_env = train.num_steps // train.bptt_steps
    ranks = num_ranks if train.scaling == "strong" else 1
    if train.num_envs:  # whole minibatches: divisors of all sequences
        sequences = train.num_envs * sequences_per_env
        wanted = {size for size in range(1, sequences + 1) if sequences % size == 0}
    else:  # also such that environments are whole
        powers = [ranks << power for power in range(LARGEST.bit_length())]
        wanted = {*powers, *(power * sequences_per_env for power in powers)}
    found = [
        size
        for size in sorted(wanted)
        if size <= LARGEST and shares_out(replace(train, batch_size=size), num_ranks)
    ]
    if not found:
        raise UserError(
            f"batch_size auto: no size divides num_envs {train.num_envs} over {num_ranks} ranks: "
            "leave --num_envs out or make it a multiple"
        )
    return [size for size in found if size >= SMALLEST * ranks] or found[-1:]


class UpdateDryRun:
    """Gradient steps of one rank; called with a number of sequences."""

    def __init__(self, job: Job, world: World, free_bytes: int) -> None:
        self.job, self.device, self.free_bytes = job, world.device, free_bytes
        self.num_ranks = world.size
        self.shapes = observe_shapes(job.make_env)
        policy = Policy(job.policy, self.shapes.layout, self.shapes.action_space)
        self.policy = policy.to(world.device, job.dtype)
        alone = replace(world, rank=0, size=1, watchdog=None)
        strategy = Strategy(StrategyConfig(mode="none", precision=job.strategy.precision), alone)
        self.ppo = PPO(self.policy, job.ppo, strategy, speed=job.speed)

    def __call__(self, sequences: int) -> None:
        """Take one step, while as much is allocated as training holds besides."""
        need = self.need(sequences)
        if self.device.type == "cpu" and need.peak > self.free_bytes:
            raise MemoryError(
                f"{need.peak / GIB:.1f} GiB are needed, {self.free_bytes / GIB:.1f} GiB are free"
            )
        length, episode = self.job.train.bptt_steps, self.shapes.episode_length
        minibatch = random_minibatch(self.policy, length, sequences, episode)
        num_bytes = sum(getattr(minibatch, item.name).nbytes for item in fields(Minibatch))
        waiting = (self.job.train.grad_accumulation - 1) * num_bytes  # the step's other parts
        held = need.parts["environment"] + need.parts["rollout"] + waiting
        placeholder = torch.empty(held, dtype=torch.uint8, device=self.device)
        bool(self.ppo.step(minibatch)[2])  # waits for a GPU
        del placeholder

    def need(self, sequences: int) -> MemoryNeed:
        """Compute the memory of a rank whose minibatches have so many sequences."""
        train = self.job.train
        sequences_per_env = train.num_steps // train.bptt_steps
        ranks = self.num_ranks if train.scaling == "strong" else 1
        step_sequences = sequences * train.grad_accumulation
        sizes = Sizes(
            num_envs=-(-train.num_envs // ranks) or -(-2 * step_sequences // sequences_per_env),
            env_offset=0,
            batch_size=step_sequences,
            sequences_per_env=sequences_per_env,
            num_minibatches=2,
            global_num_envs=0,
            global_batch_size=0,
            num_microbatches=train.grad_accumulation,
        )
        kind = {"itemsize": self.job.dtype.itemsize, "device_type": self.device.type}
        return compute_memory(self.job.policy, train, sizes, self.shapes, **kind)  # type: ignore[arg-type]


def random_minibatch(
    policy: Policy, length: int, sequences: int, episode_length: float = math.inf
) -> Minibatch:
    """Make up a minibatch of a policy's shapes, cut by episodes of such a length."""
    cells = (length, sequences)
    like = next(policy.parameters())

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=like.dtype, device=like.device)

    actions = normal(*cells, policy.num_actions)
    if policy.action_sizes:
        digits = [torch.randint(size, cells, device=like.device) for size in policy.action_sizes]
        actions = torch.stack(digits, dim=-1)
    elif policy.discrete:
        actions = torch.randint(policy.num_actions, cells, device=like.device)
    return Minibatch(
        obs=normal(*cells, policy.num_obs * max(policy.config.feature_window, 1)),
        actions=actions,
        logprobs=normal(*cells),
        values=normal(*cells),
        advantages=normal(*cells),
        returns=normal(*cells),
        episode_start=torch.rand(cells, device=like.device) < 1.0 / episode_length,
        lstm_state=normal(sequences, policy.num_states, policy.config.hidden_size),
    )


def _describe(job: Job, choice: Choice, num_ranks: int, used_gib: float, free_gib: float) -> str:
    """Return why this size, and what it means for the learning rate."""
    train = job.train
    ranks = num_ranks if train.scaling == "strong" else 1
    pace = ", ".join(
        f"{p.size * ranks}: {p.samples_per_s * train.bptt_steps:,.0f}" for p in choice.points
    )
    text = (
        f"batch_size auto: {choice.size * ranks} sequences, {ENDS[choice.ended_by]} "
        f"({used_gib:.2g} of {free_gib:.3g} GiB free{' of each rank' * (num_ranks > 1)}; "
        f"environment steps/s through forward and backward by size: {pace})"
    )
    step = choice.size * num_ranks * train.grad_accumulation
    growth = step / DEFAULT_BATCH
    if growth == 1.0:
        return text
    rate = job.ppo.learning_rate * learning_rate_factor(growth, "sqrt")
    return (
        f"{text}\n  a gradient step takes {step} sequences, {growth:.3g} times the default; the "
        f"square-root rule gives --learning_rate {rate:.3g} (not applied)"
    )
