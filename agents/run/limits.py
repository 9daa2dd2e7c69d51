"""Limits of memory and disk, and one line where they are met."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from gymnasium.spaces import Discrete

from agents.run.config import EVALUATING, RunConfig
from agents.sizes import TrainConfig, in_ranks, shard_sizes, shares_out
from envs.vector.faults import EnvironmentFaultError
from envs.vector.layout import Layout
from rl_dist.checkpoint.store import last_checkpoint, latest_checkpoint
from rl_dist.errors import CLOSED_DISK, FULL_DISK, UserError, unwritable
from rl_dist.machine import free_memory_bytes, is_out_of_memory
from rl_dist.process_group.world import World

GIB = 2**30
STEPPING = ("update", "choice of the batch size")  # phases whose memory grows with batch_size
REFUSED_SHARE = 2  # of what is free; up to it others may still make room


def free_for_each_rank(device: torch.device, num_ranks: int) -> int:
    """Return the bytes that a rank may still take; CPU ranks share the host's."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)) if device.type == "cpu" else 1
    return free_memory_bytes(device, local_ranks)


def check_rollouts(config: RunConfig, device: torch.device, num_ranks: int) -> str:
    """Return a warning where the smallest rollouts may not fit, else "".

    Refuses, before environments are made, more than twice what is free.
    """
    free = free_for_each_rank(device, num_ranks)
    steps = shard_sizes(config.train, 0, num_ranks).num_envs * config.train.num_steps
    size, window = config.policy.hidden_size, config.policy.feature_window
    # more than `compute_memory` can come to, which takes long to import and is seldom needed
    if steps * (320 + 24 * window + 144 * size) + 2048 * size**2 <= free:
        return ""
    from agents.run.memory import Shapes, compute_memory, largest_sizes

    def rollout_bytes(train: TrainConfig) -> int:
        sizes = shard_sizes(train, 0, num_ranks)
        smallest = Shapes(Layout.vector(1), Discrete(1))
        itemsize = config.launch.dtype.itemsize
        need = compute_memory(config.policy, train, sizes, smallest, itemsize=itemsize)
        return need.peak - need.parts["activations"]

    needed = rollout_bytes(config.train)
    if needed <= free:
        return ""
    num_envs, batch_size = largest_sizes(config.train, num_ranks, rollout_bytes, free)
    fitting = "a smaller --hidden_size"
    if batch_size:
        fitting = f"--batch_size {batch_size} without --num_envs"
    if num_envs:
        fitting = f"--num_envs {num_envs}, or {fitting}"
    shortage = (
        f"rollouts need at least {needed / GIB:.1f} GiB on each rank and {free / GIB:.1f} GiB are "
        f"free on {device}{' for each' if num_ranks > 1 else ''}"
    )
    if needed > REFUSED_SHARE * free:
        raise UserError(f"{shortage}; what may fit: {fitting}")
    return f"{shortage}: expect this training to run out of memory; what may fit: {fitting}"


@contextmanager
def explained_faults(config: RunConfig, run_dir: Path, world: World) -> Iterator[None]:
    """Turn faults of environments, memory and disk into a UserError of one line.

    Nothing is imported here: that may fail where memory has run out.
    """
    try:
        yield
    except EnvironmentFaultError as fault:
        where = ""
        if fault.__cause__:  # it was raised in this process
            where = f"; traceback in {run_dir / 'logs' / f'rank_{world.rank}.log'}"
        raise UserError(f"rank {world.rank}: {fault}{where}", exit_code=1) from fault
    except (RuntimeError, MemoryError, OSError) as error:
        if is_out_of_memory(error):
            message = _out_of_memory(error, config, run_dir, world)
            raise UserError(message, exit_code=1) from error
        if not isinstance(error, OSError) or error.errno not in FULL_DISK | CLOSED_DISK:
            raise
        raise unwritable(str(error.filename or run_dir), error) from None


def _out_of_memory(error: BaseException, config: RunConfig, run_dir: Path, world: World) -> str:
    """Return phase, sizes, what is free, and the flags to change."""
    train, phase = config.train, world.doing.phase
    free = f"{free_memory_bytes(world.device) / GIB:.2f} GiB free on {world.device}"
    said = " ".join(f"{type(error).__name__}: {error}".split())[:220].removesuffix(":")
    return (
        f"rank {world.rank} ran out of memory in {phase}, with num_envs "
        f"{train.num_envs or 'by default'}, batch_size {train.batch_size or 'auto'}, bptt_steps "
        f"{train.bptt_steps}, hidden_size {config.policy.hidden_size}, {in_ranks(world.size)}, "
        f"{free}; {_advice(train, phase, run_dir, world)}; the error was {said}"
    )


def _advice(train: TrainConfig, phase: str, run_dir: Path, world: World) -> str:
    """Return the flags to change, and where the run can go on."""
    if phase == EVALUATING:
        command = f"python -m agents.evaluate {run_dir}"
        return f"training is saved: {command} evaluates it, on less with --num_worlds or --episodes"
    smaller = smaller_parts(train, world.size) if phase in STEPPING else ""
    if smaller:
        resumed = f"--resume {run_dir} " if latest_checkpoint(run_dir) else ""
        advice = f"the same gradient steps in less memory: {resumed}{smaller}"
    else:
        fewer = fewer_environments(train, world.size) or "a smaller --hidden_size"
        advice = f"a fresh run fits with less: {fewer}"
    return f"{advice}; {last_checkpoint(run_dir)}"


def smaller_parts(train: TrainConfig, num_ranks: int) -> str:
    """Return flags that cut minibatches into parts; "": none divide."""
    for parts in range(2, train.batch_size + 1):
        batch_size = train.batch_size // parts
        accumulation = train.grad_accumulation * parts
        smaller = replace(train, batch_size=batch_size, grad_accumulation=accumulation)
        if train.batch_size % parts == 0 and shares_out(smaller, num_ranks):
            return f"--batch_size {batch_size} --grad_accumulation {accumulation}"
    return ""


def fewer_environments(train: TrainConfig, num_ranks: int) -> str:
    """Return flags for half as many environments or fewer; "": none divide."""
    # not yet measured, or a run begun on other ranks
    if not shares_out(train, num_ranks):
        return f"--num_envs {train.num_envs // 2}" if train.num_envs > 1 else ""
    total = shard_sizes(train, 0, num_ranks).global_num_envs
    now = total // num_ranks if train.scaling == "weak" else total
    for parts in range(2, now + 1):
        num_envs = now // parts
        if shares_out(replace(train, num_envs=num_envs), num_ranks):
            return f"--num_envs {num_envs}"
        batch_size = train.batch_size // parts
        if shares_out(replace(train, num_envs=num_envs, batch_size=batch_size), num_ranks):
            return f"--num_envs {num_envs} --batch_size {batch_size}"
    return ""
