"""--batch_size auto: steps of the real policy at several sizes, before training.

What is measured is the update: `PPO.step` on made-up observations of the job's shapes, without the reduction over
ranks, while every rank does the same and holds as many bytes as its rollout will take.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import fields, replace
from pathlib import Path

import torch
from gymnasium import spaces
from torch import Tensor

from agents.dry_run.memory import MemoryNeed, compute_memory, probe
from agents.dry_run.memory_advice import free_for_each_rank
from agents.policy import Policy
from agents.ppo import PPO, PPOConfig
from agents.rollout import Minibatch
from agents.run.config import RunConfig, save_config
from agents.run.sizes_table import sizes_table
from agents.sizes import AUTO, Sizes, TrainConfig, share_out, shares_out
from agents.trainer import Job, MakeEnv
from rl_dist.errors import UserError
from rl_dist.hardware.out_of_memory import clear_gpu_memory
from rl_dist.parallel.batch_size import Choice, effective_batch_size, fastest_batch_size, learning_rate_factor
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.collectives import gather_json
from rl_dist.process_group.world import World

GIB = 2**30
SMALLEST = 8  # slots of a rank to begin with, if more are allowed
LARGEST, PER_DOUBLING = 2**19, 16  # of the sizes that are allowed
DEFAULT_BATCH = TrainConfig().slots_per_step  # what learning_rate's default was chosen for


def settle_batch_size(config: RunConfig, make_env: MakeEnv, run_dir: Path, world: World) -> RunConfig:
    """The configuration with a number where batch_size was auto; all ranks call.

    The number is written to config.json, and taken from there by ranks that start again.
    """
    if config.train.batch_size != AUTO:
        return config
    saved = json.loads((run_dir / "config.json").read_text()) if world.main else config.to_dict()
    batch_size, told = gather_json(saved["train"]["batch_size"], world)[0], ""
    if batch_size == AUTO:
        batch_size, told = choose_batch_size(config.job(make_env, run_dir), world)
    config = replace(config, train=replace(config.train, batch_size=batch_size))
    if world.main and told:
        save_config(config, run_dir)
        print(told)
        sizes = share_out(config.train, world.rank, world.size)
        print(sizes_table(config.train, sizes, world.size, config.ppo), flush=True)
    return config


def choose_batch_size(job: Job, world: World) -> tuple[int, str]:
    """Measure the fastest batch_size that fits, together on all ranks.

    Changes no random state. Returns the value of the flag, and why, in words.

    Raises:
        UserError: no size divides over the ranks, or not even the smallest fits.
    """
    before = world.doing.phase
    world.enter("choice of the batch size")
    ranks = world.size if job.train.scaling == "strong" else 1
    allowed = allowed_batch_sizes(job.train, world.size)
    sizes = [size // ranks for size in allowed]
    free = free_for_each_rank(world.device, world.size)
    devices = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(job.train.seed)
        tryout = UpdateTryout(job, world, free)
        try:
            choice = fastest_batch_size(tryout, sizes, world)
        except MemoryError as error:
            raise UserError(
                f"batch_size auto: {error} beside its rollout, {free / GIB:.1f} GiB are free: "
                "lower --num_envs, --hidden_size or --num_steps",
                exit_code=1,
            ) from None
        computed = tryout.need(choice.size).peak
    del tryout
    clear_gpu_memory()
    world.enter(before)
    return choice.size * ranks, _describe(job.train, job.ppo, choice, ranks, world, computed, free)


def allowed_batch_sizes(train: TrainConfig, num_ranks: int) -> list[int]:
    """Values of the flag that share out over the ranks, ascending.

    Raises:
        UserError: there is none.
    """
    slots_per_env = train.num_steps // train.bptt_steps
    ranks = num_ranks if train.scaling == "strong" else 1
    if train.num_envs:  # whole minibatches: divisors of all slots
        slots = train.num_envs * slots_per_env
        small = [number for number in range(1, math.isqrt(slots) + 1) if slots % number == 0]
        wanted = {*small, *(slots // number for number in small)}
    else:  # for whole environments, too
        powers = range(LARGEST.bit_length())
        steps = {2**power * (PER_DOUBLING + step) for power in powers for step in range(PER_DOUBLING)}
        wanted = {ranks * slots_per_env * number for number in steps | set(range(PER_DOUBLING))}
        wanted |= {ranks * 2**power for power in powers}
    wanted = {size for size in wanted if 0 < size <= LARGEST}
    found = [size for size in sorted(wanted) if shares_out(replace(train, batch_size=size), num_ranks)]
    if not found:
        cure = "leave --num_envs out or make it a multiple"
        raise UserError(f"batch_size auto: no size divides num_envs {train.num_envs} over {num_ranks} ranks: {cure}")
    return [size for size in found if size >= SMALLEST * ranks] or found[-1:]


class UpdateTryout:
    """Gradient steps of one rank with any number of slots; called with that number."""

    def __init__(self, job: Job, world: World, free_bytes: int) -> None:
        self.job, self.device, self.free_bytes = job, world.device, free_bytes
        self.num_ranks = world.size
        self.shapes = probe(job.make_env)
        number = self.shapes.num_actions
        space = spaces.Discrete(number) if self.shapes.discrete else spaces.Box(-1.0, 1.0, (number,))
        self.policy = Policy(job.policy, self.shapes.num_obs, space).to(world.device, job.dtype)
        alone = replace(world, rank=0, size=1, watchdog=None)
        strategy = Strategy(StrategyConfig(mode="none", precision=job.strategy.precision), alone)
        self.ppo = PPO(self.policy, job.ppo, strategy, speed=job.speed)

    def __call__(self, slots: int) -> None:
        """One step, while as much is allocated as training holds besides.

        Raises:
            MemoryError: the host has less memory than is computed. Linux would give it out and end a process later.
        """
        need = self.need(slots)
        if self.device.type == "cpu" and need.peak > self.free_bytes:
            raise MemoryError(f"{need.peak / GIB:.1f} GiB are needed, {self.free_bytes / GIB:.1f} GiB are free")
        minibatch = self.minibatch(slots)
        waiting = (self.job.train.grad_accumulation - 1) * _num_bytes(minibatch)  # the step's other parts
        held = torch.empty(need.environment + need.rollout + waiting, dtype=torch.uint8, device=self.device)
        self.ppo.step(minibatch)
        del held

    def need(self, slots: int) -> MemoryNeed:
        """The memory of a rank whose minibatches have so many slots, computed."""
        train, shapes = self.job.train, self.shapes
        slots_per_env = train.num_steps // train.bptt_steps
        ranks = self.num_ranks if train.scaling == "strong" else 1
        step_slots = slots * train.grad_accumulation
        sizes = Sizes(
            num_envs=-(-train.num_envs // ranks) or -(-2 * step_slots // slots_per_env),
            first_env=0,
            batch_size=step_slots,
            slots_per_env=slots_per_env,
            num_minibatches=2,
            global_num_envs=0,
            global_batch_size=0,
            num_parts=train.grad_accumulation,
        )
        itemsize = self.job.dtype.itemsize
        return compute_memory(
            self.job.policy, train, sizes, shapes, itemsize=itemsize, device_type=self.device.type
        )

    def minibatch(self, slots: int) -> Minibatch:
        """Made-up steps of the job's shapes, cut as often as its episodes are."""
        length, policy, shapes = self.job.train.bptt_steps, self.job.policy, self.shapes
        cells = (length, slots)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=self.job.dtype, device=self.device)

        if shapes.discrete:
            actions = torch.randint(shapes.num_actions, cells, device=self.device)
        else:
            actions = normal(*cells, shapes.num_actions)
        often = 1.0 / statistics.mean(shapes.episode_lengths) if shapes.episode_lengths else 0.0
        return Minibatch(
            obs=normal(*cells, shapes.num_obs * max(policy.feature_window, 1)),
            actions=actions,
            logprobs=normal(*cells),
            values=normal(*cells),
            advantages=normal(*cells),
            returns=normal(*cells),
            episode_start=torch.rand(cells, device=self.device) < often,
            lstm_state=normal(slots, self.policy.num_states, policy.hidden_size),
        )


def _num_bytes(minibatch: Minibatch) -> int:
    return sum(getattr(minibatch, item.name).nbytes for item in fields(Minibatch))


def _describe(
    train: TrainConfig, ppo: PPOConfig, choice: Choice, ranks: int, world: World, computed: int, free: int
) -> str:
    """Why this size, and what it means for the learning rate."""
    pace = ", ".join(f"{p.size * ranks}: {p.samples_per_s * train.bptt_steps:,.0f}" for p in choice.points)
    ends = {
        "flat": "the smallest within 5 % of the fastest",
        "memory": "the fastest that fits with 10 % to spare",
        "time": "larger ones take too long to try",
        "sizes": "the fastest of those that divide",
    }[choice.ended_by]
    used = choice.point.memory_bytes or computed
    each = " of each rank" if world.size > 1 else ""
    step = effective_batch_size(choice.size, world.size, train.grad_accumulation)
    text = (
        f"batch_size auto: {choice.size * ranks} slots, {ends} ({used / GIB:.2g} of {free / GIB:.3g} GiB free{each}; "
        f"environment steps/s through forward and backward by size: {pace})"
    )
    growth = step / DEFAULT_BATCH
    if growth == 1.0:
        return text
    rate = ppo.learning_rate * learning_rate_factor(growth, "sqrt")
    return (
        f"{text}\n  a gradient step takes {step} slots, {growth:.3g} times the default: if the learning rate was "
        f"chosen for that, the square-root rule gives --learning_rate {rate:.3g} (not applied)"
    )
