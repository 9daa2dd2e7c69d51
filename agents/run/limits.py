"""Check that rollouts fit into memory; explain failures of a run in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from agents.config import RunConfig
from agents.policy import Policy
from agents.run.sizes import shard_sizes
from envs.vector.guards import EnvironmentFaultError
from rl_dist.checkpoint.store import last_checkpoint
from rl_dist.errors import CLOSED_DISK, FULL_DISK, UserError, one_line, unwritable
from rl_dist.machine import free_memory_bytes, is_out_of_memory, peak_memory_bytes
from rl_dist.process_group.world import World

GIB = 2**30
EVALUATING = "final evaluation"  # name of the phase after training


def free_for_each_rank(device: torch.device, num_ranks: int) -> int:
    """Return the free memory per rank in bytes; CPU ranks share the host's memory."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)) if device.type == "cpu" else 1
    return free_memory_bytes(device, local_ranks)


def rollout_bytes(config: RunConfig, num_envs: int, policy: Policy | None = None) -> int:
    """Return a lower bound for the memory of a rank's rollout, in bytes.

    The bound is tight if `policy` is given. If not, the sizes of observations and actions are
    unknown, and each counts as one number.
    """
    # numbers stored per step: observation twice, action, log-probability, two values, recurrent
    # state
    numbers = 6 + config.policy.hidden_size * (not config.policy.stateless)
    if policy:
        seen = policy.num_obs * (1 + max(config.policy.feature_window, 1))
        numbers = seen + policy.num_actions + 3 + policy.initial_state(1).numel()
    # other bytes stored per step: reward, return and length of the episode, three flags
    others = 27
    return num_envs * config.train.num_steps * (config.launch.dtype.itemsize * numbers + others)


def check_rollouts(config: RunConfig, device: torch.device, num_ranks: int) -> None:
    """Refuse rollouts that cannot fit into memory.

    Call this before creating environments.
    """
    free = free_for_each_rank(device, num_ranks)
    needed = rollout_bytes(config, shard_sizes(config.train, 0, num_ranks).num_envs)
    if needed > free:
        raise UserError(
            f"a rollout needs at least {needed / GIB:.1f} GiB on each rank, and {free / GIB:.1f} "
            f"GiB are free on {device}: use a smaller --num_envs, --num_steps or --hidden_size"
        )


@contextmanager
def explained_faults(config: RunConfig, run_dir: Path, world: World) -> Iterator[None]:
    """Turn environment, memory and disk failures into a UserError with one line.

    This function imports nothing, because an import can fail when memory has run out.
    """
    try:
        yield
    except EnvironmentFaultError as fault:
        where = ""
        if fault.__cause__:  # the fault was raised in this process
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
    """Return one line with the phase, the sizes, peak memory, advice and the error."""
    train = config.train
    phase = world.doing.phase
    advice = {
        EVALUATING: f"training is saved: evaluate it with python -m agents.evaluate {run_dir}",
        "update": "the same gradient steps take less memory with a smaller --batch_size and a "
        "--grad_accumulation that is larger by the same factor, also after --resume",
    }
    fresh = "a new run needs less with a smaller --num_envs, --num_steps or --hidden_size"
    return (
        f"rank {world.rank} ran out of memory in {phase}, with num_envs "
        f"{train.num_envs or 'by default'}, batch_size {train.batch_size or 'auto'}, bptt_steps "
        f"{train.bptt_steps}, hidden_size {config.policy.hidden_size}, {world.size} rank(s), "
        f"after a peak of {peak_memory_bytes(world.device) / GIB:.2f} GiB on {world.device}; "
        f"{advice.get(phase, fresh)}; {last_checkpoint(run_dir)}; the error was "
        f"{one_line(error, 220)}"
    )
