"""Sizes of a training, shared out over ranks and checked before the start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agents.config import AUTO, TrainConfig
from rl_dist.errors import UserError


@dataclass(frozen=True)
class Sizes:
    """One rank's share of the work; `global_` figures are of all ranks together."""

    num_envs: int
    env_offset: int  # global index of this rank's first environment
    batch_size: int  # sequences of this rank in each gradient step
    sequences_per_env: int  # sequences in a rollout of one environment
    num_minibatches: int  # per epoch, the same on every rank
    global_num_envs: int
    global_batch_size: int
    learning_rate_factor: float = 1.0  # of lr_scaling
    num_microbatches: int = 1  # microbatches of a gradient step, one after the other


def shard_sizes(config: TrainConfig, rank: int, num_ranks: int, saved_num_envs: int = 0) -> Sizes:
    """Return this rank's share of environments and batch; errors name near sizes.

    Args:
        saved_num_envs: environments of all ranks in the run to resume, 0 for a fresh one. With weak
            scaling it says how many ranks the run began with: their totals and rate are kept.
    """
    if config.batch_size == AUTO:
        raise UserError("batch_size auto is measured when a training starts: name a number here")

    # totals over all ranks: those of the flags, or `unit` times as large
    sequences_per_env = config.num_steps // config.bptt_steps
    unit_envs = config.num_envs or _default_num_envs(config.sequences_per_step, sequences_per_env)
    unit = 1
    if config.scaling == "weak":
        unit = saved_num_envs // unit_envs or num_ranks
    batch_size = config.sequences_per_step * unit
    num_envs = unit_envs * unit
    if saved_num_envs not in (0, num_envs):
        raise UserError(f"the checkpoint holds {saved_num_envs} environments, not {num_envs}")

    # Every rank needs an equal share of environments and of each minibatch. Strata then divide as
    # well: with batch_size = num_ranks * b, K = sequences_per_env and g = gcd(M, K), K / g divides
    # b, so that the M * b / K environments of a rank are a multiple of the stratum M / g.
    common = math.gcd(num_envs, config.batch_size * unit)
    if common % num_ranks or num_envs * sequences_per_env % batch_size:
        if saved_num_envs:
            raise UserError(
                f"the run to resume has {num_envs} environments and batches of "
                f"{config.batch_size * unit} sequences in all, which do not divide over "
                f"{in_ranks(num_ranks)}: try {_other_ranks(common, num_ranks)}"
            )
        raise UserError(_other_sizes(config, unit, unit_envs, num_ranks))
    return Sizes(
        num_envs=num_envs // num_ranks,
        env_offset=rank * (num_envs // num_ranks),
        batch_size=batch_size // num_ranks,
        sequences_per_env=sequences_per_env,
        num_minibatches=num_envs * sequences_per_env // batch_size,
        global_num_envs=num_envs,
        global_batch_size=batch_size,
        num_microbatches=config.grad_accumulation,
        learning_rate_factor=learning_rate_factor(unit, config.lr_scaling),
    )


def shares_out(config: TrainConfig, num_ranks: int) -> bool:
    """Return True if these sizes divide over this number of ranks."""
    try:
        shard_sizes(config, 0, num_ranks)
    except UserError:
        return False
    return True


def learning_rate_factor(growth: float, rule: str) -> float:
    """Return what to multiply the rate by when the batch grows `growth`-fold.

    Source: linear (SGD): Goyal et al., https://arxiv.org/abs/1706.02677; square root (Adam):
    Malladi et al., https://arxiv.org/abs/2205.10287. Both hold while gradients are noisy.
    """
    return {"none": 1.0, "sqrt": math.sqrt(growth), "linear": float(growth)}[rule]


def in_ranks(number: int) -> str:
    """Return a number of ranks with its noun."""
    return f"{number} rank" + "s" * (number > 1)


def _default_num_envs(batch_size: int, sequences_per_env: int) -> int:
    """Return environments for two minibatches per epoch, on any number of ranks."""
    wanted = -(-2 * batch_size // sequences_per_env)
    return _nearest_num_envs(wanted, batch_size, sequences_per_env, num_ranks=1)[-1]


def _nearest_num_envs(
    num_envs: int, batch_size: int, sequences_per_env: int, num_ranks: int
) -> list[int]:
    """Return `num_envs` if it fits, else the nearest that do, below and above."""
    step = math.lcm(num_ranks, batch_size // math.gcd(batch_size, sequences_per_env))
    return sorted({num_envs // step * step, -(-num_envs // step) * step} - {0})


def _other_ranks(common: int, num_ranks: int) -> str:
    """Return flags with the nearest numbers of ranks that divide `common`."""
    divisors = [number for number in range(1, common + 1) if common % number == 0]
    near = [n for n in divisors if n < num_ranks][-1:] + [n for n in divisors if n > num_ranks][:1]
    return " or ".join(f"--num_gpus {number}" for number in near)


def _other_sizes(config: TrainConfig, unit: int, unit_envs: int, num_ranks: int) -> str:
    """Return the error of a fresh run: names the flags with the nearest sizes that fit."""
    sequences_per_env = config.num_steps // config.bptt_steps
    asked = config.batch_size * unit
    if asked % num_ranks:
        what = f"batch_size {asked} does not divide over {in_ranks(num_ranks)}"
    else:
        parts = config.grad_accumulation
        times = f" times grad_accumulation {parts}" if parts > 1 else ""
        what = (
            f"num_envs {unit_envs} with num_steps {config.num_steps}, bptt_steps "
            f"{config.bptt_steps}, batch_size {config.batch_size}{times} does not divide into "
            f"whole minibatches over {in_ranks(num_ranks)}"
        )
    proposals: list[str] = []
    below = asked // num_ranks * num_ranks
    for batch_size in sorted({below, asked if below == asked else below + num_ranks} - {0}):
        # weak scaling never needs another batch
        change = f"--batch_size {batch_size} " if batch_size != asked else ""
        step = batch_size * config.grad_accumulation
        wanted = unit * (config.num_envs or _default_num_envs(step // unit, sequences_per_env))
        near = _nearest_num_envs(wanted, step, sequences_per_env, num_ranks)
        if change and near == [wanted]:
            proposals.append(change.strip())
        else:
            proposals += [f"{change}--num_envs {count // unit}" for count in near]
    if config.num_envs and asked % num_ranks == 0:  # the batch that is asked for fits these
        near_batches = _nearest_batches(config, unit, sequences_per_env, num_ranks)
        proposals += [f"--batch_size {batch_size}" for batch_size in near_batches]
    return f"{what}: try {' or '.join(proposals)}"


def _nearest_batches(
    config: TrainConfig, unit: int, sequences_per_env: int, num_ranks: int
) -> list[int]:
    """Return the nearest values of batch_size, below and above, with the same num_envs."""
    num_envs = config.num_envs * unit
    num_batches, rest = divmod(config.num_envs * sequences_per_env, config.grad_accumulation)
    fitting = [
        size
        for size in range(1, 0 if rest else num_batches + 1)
        if num_batches % size == 0 and math.gcd(num_envs, size * unit) % num_ranks == 0
    ]
    below = [size for size in fitting if size < config.batch_size][-1:]
    return below + [size for size in fitting if size > config.batch_size][:1]
