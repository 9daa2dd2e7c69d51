"""What to tell the user of a training that ran out of memory, files or threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from agents.dry_run.memory import Shapes, compute_memory, largest_sizes
from agents.run.config import JUDGING, RunConfig
from agents.sizes import AUTO, TrainConfig, share_out, shares_out
from agents.trainer import last_checkpoint
from envs.vector.faults import EnvironmentFault
from rl_dist.checkpoint.folder import latest_checkpoint
from rl_dist.errors import CLOSED_DISK, FULL_DISK, UserError, unwritable
from rl_dist.hardware.out_of_memory import free_memory_bytes, is_out_of_memory, other_limit
from rl_dist.process_group.world import World

GIB = 2**30
STEPPING = ("update", "choice of the batch size")  # phases whose memory grows with batch_size
SMALLEST_SHAPES = Shapes(num_obs=1, num_actions=1, discrete=True)  # no environment has smaller ones
REFUSED_SHARE = 2  # of what is free; up to it others may still make room


def free_for_each_rank(device: torch.device, num_ranks: int) -> int:
    """Bytes that every rank may still take.

    On CPUs the ranks of a machine share what is free.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)) if device.type == "cpu" else 1
    return free_memory_bytes(device, local_ranks)


def check_rollouts(config: RunConfig, device: torch.device, num_ranks: int) -> str:
    """What to warn of, before environments are made whose rollouts cannot fit.

    Computed for the smallest environment there could be, and without the update: what it finds too large is.

    Returns:
        One line; "" where they may fit.

    Raises:
        UserError: they need more than twice what is free, or the sizes do not share out over the ranks.
    """

    def rollout_bytes(train: TrainConfig) -> int:
        sizes, itemsize = share_out(train, 0, num_ranks), config.launch.dtype.itemsize
        need = compute_memory(config.policy, train, sizes, SMALLEST_SHAPES, itemsize=itemsize)
        return need.peak - need.activations

    needed, free = rollout_bytes(config.train), free_for_each_rank(device, num_ranks)
    if needed <= free:
        return ""
    num_envs, batch_size = largest_sizes(config.train, num_ranks, rollout_bytes, free)
    by_batch = f"--batch_size {batch_size} without --num_envs" if batch_size else "a smaller --hidden_size"
    sizes = (
        f"rollouts need at least {needed / GIB:.1f} GiB on each rank and {free / GIB:.1f} GiB are free on {device}"
        f"{' for each' if num_ranks > 1 else ''}"
    )
    fitting = f"what may fit: {f'--num_envs {num_envs}, or {by_batch}' if num_envs else by_batch}"
    if needed > REFUSED_SHARE * free:
        raise UserError(f"{sizes}; {fitting}")
    return f"{sizes}: expect this training to run out of memory; {fitting}"


def limit_reached(error: BaseException, config: RunConfig, run_dir: Path, world: World) -> UserError | None:
    """The one line for memory, files or threads that ran out; None: another error."""
    if is_out_of_memory(error):
        return _out_of_memory(error, config, run_dir, world)
    if not (limit := other_limit(error)):
        return None
    fix = f"does {config.task.env} close all that it opens? Go on with --resume {run_dir}"
    return UserError(f"rank {world.rank} met the limit of {limit}: {fix}", exit_code=1)


def _out_of_memory(error: BaseException, config: RunConfig, run_dir: Path, world: World) -> UserError:
    """Phase, sizes, what is free, and the flags to change."""
    train, phase = config.train, world.doing.phase
    wanted = " ".join(str(error).split())[:200]
    sizes = (
        f"num_envs {train.num_envs or 'by default'}, batch_size {train.batch_size or 'auto'}, "
        f"bptt_steps {train.bptt_steps}, hidden_size {config.policy.hidden_size}, "
        f"{world.size} rank{'s' * (world.size > 1)}"
    )
    if train.batch_size != AUTO and shares_out(train, world.size):
        sizes = sizes.replace("by default", str(share_out(train, 0, world.size).global_num_envs))
    free = f"{free_memory_bytes(world.device) / GIB:.2f} GiB free on {world.device}"
    said = f": {wanted}" if wanted else ""
    return UserError(
        f"rank {world.rank} ran out of memory in {phase}, with {sizes}, {free}; "
        f"{_advice(train, phase, run_dir, world)}; the error was {type(error).__name__}{said}",
        exit_code=1,
    )


def _advice(train: TrainConfig, phase: str, run_dir: Path, world: World) -> str:
    """The flags to change, and where the run can go on."""
    saved = latest_checkpoint(run_dir) is not None
    if phase == JUDGING:
        judging = f"python -m agents.evaluate {run_dir} judges it, on less with --num_worlds or --episodes"
        return f"training is saved: {judging}"
    smaller = smaller_parts(train, world.size) if phase in STEPPING else ""
    if smaller:
        resumed = f"--resume {run_dir} " if saved else ""
        return f"the same gradient steps in less memory: {resumed}{smaller}; {last_checkpoint(run_dir)}"
    fewer = fewer_environments(train, world.size) or "a smaller --hidden_size"
    return f"a fresh run fits with less: {fewer}; {last_checkpoint(run_dir)}"


def smaller_parts(train: TrainConfig, num_ranks: int) -> str:
    """Flags that cut each minibatch into parts, for the same step; "": none divide."""
    for parts in range(2, train.batch_size + 1):
        if train.batch_size % parts:
            continue
        batch_size, accumulation = train.batch_size // parts, train.grad_accumulation * parts
        if shares_out(replace(train, batch_size=batch_size, grad_accumulation=accumulation), num_ranks):
            return f"--batch_size {batch_size} --grad_accumulation {accumulation}"
    return ""


def fewer_environments(train: TrainConfig, num_ranks: int) -> str:
    """Flags for half as many environments or fewer; "": none divide."""
    if train.batch_size == AUTO or not shares_out(train, num_ranks):  # or a run begun on other ranks
        return f"--num_envs {train.num_envs // 2}" if train.num_envs > 1 else ""
    total = share_out(train, 0, num_ranks).global_num_envs
    now = total // num_ranks if train.scaling == "weak" else total
    for num_envs in range(now // 2, 0, -1):
        if shares_out(replace(train, num_envs=num_envs), num_ranks):
            return f"--num_envs {num_envs}"
    for batch_size in range(train.batch_size // 2, 0, -1):
        smaller = replace(train, num_envs=0, batch_size=batch_size)
        if shares_out(smaller, num_ranks) and share_out(smaller, 0, num_ranks).global_num_envs <= total // 2:
            num_envs = share_out(smaller, 0, num_ranks).global_num_envs * now // total
            return f"--num_envs {num_envs} --batch_size {batch_size}"
    return ""


@contextmanager
def explained_faults(config: RunConfig, run_dir: Path, world: World) -> Iterator[None]:
    """Turn faults of environments, memory and disk into one line for the user.

    Raises:
        UserError: in place of them.
    """
    try:
        yield
    except EnvironmentFault as fault:
        raise UserError(f"rank {world.rank}: {fault}", exit_code=1) from fault
    except (RuntimeError, MemoryError, OSError) as error:
        if reached := limit_reached(error, config, run_dir, world):
            raise reached from error
        if not isinstance(error, OSError) or error.errno not in FULL_DISK | CLOSED_DISK:
            raise
        raise unwritable(str(error.filename or run_dir), error) from None
