"""Divide environments and batches over the ranks; propose sizes that fit."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from agents.learner.settings import AUTO_SIZE, TrainConfig
from rl_dist.errors import UserError

FARTHEST = 10_000  # proposed sizes differ from the given size by less than this number


@dataclass(frozen=True)
class Sizes:
    """One rank's share of the work; `global_...` fields are totals over all ranks."""

    num_envs: int
    env_offset: int  # global index of this rank's first environment
    batch_size: int  # sequences per gradient step on this rank
    sequences_per_env: int  # sequences per rollout of one environment
    num_minibatches: int  # gradient steps per epoch, the same on every rank
    global_num_envs: int
    global_batch_size: int
    learning_rate_factor: float = 1.0  # set by --lr_scaling


def shard_sizes(config: TrainConfig, rank: int, num_ranks: int, saved_num_envs: int = 0) -> Sizes:
    """Return this rank's share of the environments and the batch.

    If the sizes do not divide over the ranks, the error proposes the nearest sizes that do.

    Args:
        saved_num_envs: total number of environments in the run to resume; 0 for a new run.
            With weak scaling, the number of ranks at the start of the run fixed the totals;
            `saved_num_envs` recovers that number.
    """
    if config.batch_size == AUTO_SIZE:
        raise UserError("batch_size auto is measured when training starts: give a number instead")
    sequences_per_env = config.num_steps // config.bptt_steps
    num_envs = config.num_envs or _default_num_envs(config, config.batch_size)
    # With strong scaling, the flags are totals. With weak scaling, they are sizes per rank: the
    # totals are these sizes times the number of ranks when the run began.
    unit = 1 if config.scaling == "strong" else saved_num_envs // num_envs or num_ranks
    global_num_envs = num_envs * unit
    global_batch_size = config.sequences_per_step * unit
    if saved_num_envs not in (0, global_num_envs):
        raise UserError(
            f"the checkpoint holds {saved_num_envs} environments, not {global_num_envs}"
        )

    def divides(ranks: int, envs: int = num_envs) -> bool:
        return _divides(config, unit, ranks, envs, config.batch_size)

    if not divides(num_ranks):
        proposals: dict[str, list[int]] = {}
        if saved_num_envs:
            proposals["num_gpus"] = _nearest(min(num_ranks, global_num_envs + 1), divides)
        else:
            proposals["num_envs"] = _nearest(num_envs, lambda envs: divides(num_ranks, envs))
            proposals["batch_size"] = _nearest(
                config.batch_size, lambda size: batch_fits(config, num_ranks, size)
            )
        flags = [f"--{name} {size}" for name, sizes in proposals.items() for size in sizes]
        raise UserError(
            f"num_envs {global_num_envs} and batch_size {config.batch_size * unit} of all ranks, "
            f"with num_steps {config.num_steps} and grad_accumulation {config.grad_accumulation}, "
            f"do not divide into whole minibatches over {num_ranks} rank(s) (batch_size counts "
            f"sequences of {config.bptt_steps} steps, see --bptt_steps; there are "
            f"{global_num_envs * sequences_per_env} per rollout): "
            f"try {' or '.join(flags) or f'multiples of {num_ranks} for both'}"
        )
    # Both scaling rules hold while gradient noise dominates. Sources: linear (SGD): Goyal et al.,
    # https://arxiv.org/abs/1706.02677; square root (Adam): Malladi et al.,
    # https://arxiv.org/abs/2205.10287.
    factors = {"none": 1.0, "sqrt": math.sqrt(unit), "linear": float(unit)}
    return Sizes(
        num_envs=global_num_envs // num_ranks,
        env_offset=rank * (global_num_envs // num_ranks),
        batch_size=global_batch_size // num_ranks,
        sequences_per_env=sequences_per_env,
        num_minibatches=global_num_envs * sequences_per_env // global_batch_size,
        global_num_envs=global_num_envs,
        global_batch_size=global_batch_size,
        learning_rate_factor=factors[config.lr_scaling],
    )


def batch_fits(config: TrainConfig, num_ranks: int, batch_size: int) -> bool:
    """Return True if this batch_size divides evenly over the ranks of a new run."""
    unit = 1 if config.scaling == "strong" else num_ranks
    num_envs = config.num_envs or _default_num_envs(config, batch_size)
    return _divides(config, unit, num_ranks, num_envs, batch_size)


def _divides(
    config: TrainConfig, unit: int, num_ranks: int, num_envs: int, batch_size: int
) -> bool:
    """Return True if environments and minibatches divide evenly over the ranks.

    If so, the strata of `agents.learner.network.noise` also divide evenly: with batch_size =
    num_ranks * b, K sequences per environment, M minibatches and g = gcd(M, K), K / g divides b. So
    M * b / K, the number of environments of a rank, is a multiple of the stratum size M / g.
    """
    sequences = num_envs * (config.num_steps // config.bptt_steps)
    whole = sequences % (batch_size * config.grad_accumulation) == 0
    return whole and math.gcd(num_envs * unit, batch_size * unit) % num_ranks == 0


def _default_num_envs(config: TrainConfig, batch_size: int) -> int:
    """Return the smallest number of environments for two gradient steps per epoch.

    Their sequences divide into whole minibatches.
    """
    sequences_per_env = config.num_steps // config.bptt_steps
    sequences = batch_size * config.grad_accumulation
    step = sequences // math.gcd(sequences, sequences_per_env)
    return step * math.ceil(2 * sequences / (step * sequences_per_env))


def _nearest(number: int, fits: Callable[[int], bool]) -> list[int]:
    """Return the nearest smaller and the nearest larger number that fit, if any."""
    smaller = range(number - 1, max(0, number - FARTHEST), -1)
    larger = range(number + 1, number + FARTHEST)
    near = (next(filter(fits, side), 0) for side in (smaller, larger))
    return [size for size in near if size]
