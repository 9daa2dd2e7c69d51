"""Divide environments and batches over the ranks; propose sizes that fit."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from agents.learner.settings import AUTO_SIZE, TrainConfig
from rl_dist.errors import UserError

FARTHEST = 10_000  # a proposed size differs from the given size by less than this number


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
            With weak scaling, the totals depend on the number of ranks when the run began, which is
            computed from `saved_num_envs`.
    """
    if config.batch_size == AUTO_SIZE:
        raise UserError("batch_size auto is measured when training starts: give a number instead")
    sequences_per_env = config.num_steps // config.bptt_steps
    num_envs = config.num_envs or _default_num_envs(config, config.batch_size)
    # With strong scaling, the flags are totals over all ranks. With weak scaling, the flags are
    # sizes per rank; multiply them by the number of ranks when the run began to get the totals.
    multiplier = 1 if config.scaling == "strong" else saved_num_envs // num_envs or num_ranks
    global_num_envs = num_envs * multiplier
    global_batch_size = config.sequences_per_step * multiplier
    if saved_num_envs not in (0, global_num_envs):
        raise UserError(
            f"the checkpoint holds {saved_num_envs} environments, not {global_num_envs}"
        )

    def divides(ranks: int, envs: int = num_envs) -> bool:
        return _divides(config, multiplier, ranks, envs, config.batch_size)

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
            f"num_envs {global_num_envs} and batch_size {config.batch_size * multiplier} of all "
            f"ranks, with num_steps {config.num_steps} and grad_accumulation "
            f"{config.grad_accumulation}, do not divide into whole minibatches over {num_ranks} "
            f"rank(s) (batch_size counts sequences of {config.bptt_steps} steps, see --bptt_steps; "
            f"there are {global_num_envs * sequences_per_env} per rollout): "
            f"try {' or '.join(flags) or f'multiples of {num_ranks} for both'}"
        )
    # Both scaling rules hold while gradient noise dominates. Sources: linear (SGD): Goyal et al.,
    # https://arxiv.org/abs/1706.02677; square root (Adam): Malladi et al.,
    # https://arxiv.org/abs/2205.10287.
    factors = {"none": 1.0, "sqrt": math.sqrt(multiplier), "linear": float(multiplier)}
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
    multiplier = 1 if config.scaling == "strong" else num_ranks
    num_envs = config.num_envs or _default_num_envs(config, batch_size)
    return _divides(config, multiplier, num_ranks, num_envs, batch_size)


def _divides(
    config: TrainConfig, multiplier: int, num_ranks: int, num_envs: int, batch_size: int
) -> bool:
    """Return True if environments and minibatches divide evenly over the ranks.

    `num_envs * multiplier` and `batch_size * multiplier` are the totals over all ranks.

    If they divide evenly, so do the strata of `agents.learner.network.noise`. Proof: let a
    minibatch have b sequences on each rank, and let there be K sequences per environment, M
    minibatches and g = gcd(M, K). A rank has M * b / K environments. This is a whole number, so
    K / g divides b, and the number of environments is a multiple of the stratum size M / g.
    """
    sequences = num_envs * (config.num_steps // config.bptt_steps)
    whole = sequences % (batch_size * config.grad_accumulation) == 0
    return whole and math.gcd(num_envs * multiplier, batch_size * multiplier) % num_ranks == 0


def _default_num_envs(config: TrainConfig, batch_size: int) -> int:
    """Return the smallest number of environments that allows two gradient steps per epoch.

    The sequences of these environments divide evenly into gradient steps.
    """
    sequences_per_env = config.num_steps // config.bptt_steps
    sequences = batch_size * config.grad_accumulation
    step = sequences // math.gcd(sequences, sequences_per_env)
    return step * math.ceil(2 * sequences / (step * sequences_per_env))


def _nearest(number: int, fits: Callable[[int], bool]) -> list[int]:
    """Return the nearest smaller and the nearest larger number that fit, if any."""
    smaller = range(number - 1, max(0, number - FARTHEST), -1)
    larger = range(number + 1, number + FARTHEST)
    nearest = (next(filter(fits, sizes), 0) for sizes in (smaller, larger))  # 0: none fits
    return [size for size in nearest if size]
