"""Training sizes as asked for, shared out over ranks, checked before the start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_dist.config import flag
from rl_dist.errors import UserError
from rl_dist.parallel.batch_size import LR_RULES, learning_rate_factor

LR_SCALINGS = LR_RULES
AUTO = 0  # batch_size: measured by the ranks when a run begins


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and how large to train, and what to keep."""

    num_episodes: int = flag(5000, "training episodes, total over all ranks", "episodes")
    total_steps: int = flag(0, "stop by environment steps of all ranks instead; 0 = by episodes", "steps")
    batch_size: int = flag(
        128,
        "slots (sequences of bptt_steps) per minibatch; auto (or 0): the fastest that fits, measured at the start",
        "slots",
        words={"auto": AUTO},
    )
    grad_accumulation: int = flag(
        1, "minibatches whose gradients add up to one step: as with a batch_size this many times larger, in less memory"
    )
    num_envs: int = flag(0, "environments; 0 = two minibatches per epoch", "environments")
    num_steps: int = flag(128, "rollout length", "steps")
    bptt_steps: int = flag(32, "length of truncated backpropagation through time", "steps")
    scaling: str = flag(
        "strong",
        "strong: num_envs and batch_size are totals shared out over the ranks; weak: they are per rank",
        choices=("strong", "weak"),
    )
    lr_scaling: str = flag(
        "none",
        "weak scaling: multiply learning_rate by the factor, or its root, by which the batch of all ranks is larger",
        choices=LR_SCALINGS,
    )
    pretrained: str = flag("", "start from the feature LSTM that python -m agents.pretrain wrote there", "path")
    seed: int = flag(1, "seed of policy, environments, action noise and shuffling")
    normalize_obs: bool = flag(True, "normalise observations by running statistics of all ranks")
    normalize_rewards: bool = flag(True, "scale rewards by the running deviation of discounted returns")
    validate_every: int = flag(20, "evaluate the validation span this often; 0 = never", "iterations")
    checkpoint_every: int = flag(20, "save this often; always at the end and on a stop signal", "iterations")
    keep_checkpoints: int = flag(3, "newest checkpoints to keep", "files")
    keep_best: str = flag(
        "auto",
        "keep the checkpoint with the highest value of this metric as checkpoints/best.pt, for example episode/return; "
        "auto: valid/sharpe or valid/return, whichever the run has; off: none",
    )
    on_save_error: str = flag(
        "stop",
        "when a checkpoint cannot be written, such as on a full disk: stop, or continue without it",
        choices=("stop", "continue"),
    )
    sync_check_every: int = flag(
        5, "compare the parameters of all ranks this often, and before every save; 0 = only then", "iterations"
    )
    collective_timeout: float = flag(
        300.0, "longest wait for a rank that neither comes nor makes progress; start-up may take 600", "seconds"
    )
    monitor_every: float = flag(1.0, "sample each rank's use of GPU, CPU and memory this often; 0 = off", "seconds")
    profile: bool = flag(False, "measure where the time of a few iterations goes: RUN_DIR/profile")

    def __post_init__(self) -> None:
        if self.scaling not in ("strong", "weak"):
            raise ValueError(f"scaling must be strong or weak, got {self.scaling!r}")
        if self.on_save_error not in ("stop", "continue"):
            raise ValueError(f"on_save_error must be stop or continue, got {self.on_save_error!r}")
        if self.keep_best.startswith("valid/") and not self.validate_every:
            raise ValueError(f"keep_best {self.keep_best} needs validation: give --validate_every, which is 0")
        if self.lr_scaling not in LR_SCALINGS:
            raise ValueError(f"lr_scaling must be one of {', '.join(LR_SCALINGS)}, got {self.lr_scaling!r}")
        if self.lr_scaling != "none" and self.scaling == "strong":
            raise ValueError(
                f"lr_scaling {self.lr_scaling} does nothing with scaling strong, where more ranks share one batch: "
                "leave it out or add --scaling weak"
            )
        for name, low, high in (
            ("num_episodes", 1, 10**12),
            ("total_steps", 0, 10**15),
            ("batch_size", AUTO, 10**7),
            ("grad_accumulation", 1, 10**6),
            ("num_envs", 0, 10**7),
            ("num_steps", 1, 10**6),
            ("bptt_steps", 1, 10**6),
            ("seed", 0, 2**63 - 1),
            ("validate_every", 0, 10**9),
            ("checkpoint_every", 1, 10**9),
            ("keep_checkpoints", 1, 10**6),
            ("sync_check_every", 0, 10**9),
            ("collective_timeout", 1, 80_000),
            ("monitor_every", 0, 86_400),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must be {low}..{high}, got {value}")
        if 0 < self.monitor_every < 0.01:
            raise ValueError(f"monitor_every must be 0 (off) or at least 0.01 seconds, got {self.monitor_every}")
        if self.num_steps % self.bptt_steps:
            raise ValueError(
                f"num_steps {self.num_steps} must be a multiple of bptt_steps {self.bptt_steps}: "
                f"try --num_steps {_nearest_multiple(self.num_steps, self.bptt_steps)}"
            )

    @property
    def slots_per_step(self) -> int:
        """Slots of one gradient step, in the unit of the flags."""
        return self.batch_size * self.grad_accumulation

    @property
    def best_metrics(self) -> tuple[str, ...]:
        """The metrics of which the first that a run reports chooses best.pt."""
        return {"auto": ("valid/sharpe", "valid/return"), "off": ()}.get(self.keep_best, (self.keep_best,))


@dataclass(frozen=True)
class Sizes:
    """One rank's share of the work; `global_` figures are of all ranks together."""

    num_envs: int
    first_env: int  # global index of this rank's first environment
    batch_size: int  # slots of this rank in each gradient step
    slots_per_env: int
    num_minibatches: int  # per epoch, the same on every rank
    global_num_envs: int
    global_batch_size: int
    learning_rate_factor: float = 1.0  # of lr_scaling
    num_parts: int = 1  # of a gradient step's batch, one after the other


def _nearest_multiple(value: int, of: int) -> int:
    return max(of, round(value / of) * of)


def share_out(config: TrainConfig, rank: int, num_ranks: int, saved_num_envs: int = 0) -> Sizes:
    """This rank's share of environments and batch.

    Args:
        saved_num_envs: environments of all ranks in the run that goes on, 0 for a fresh one. With weak
            scaling it tells how many ranks the run began with: their totals and learning rate are kept.

    Raises:
        UserError: something that must divide does not; the message names the nearest sizes that do. Or batch_size
            is still to be measured.
    """
    if config.batch_size == AUTO:
        raise UserError("batch_size auto is measured when a training starts: name a number here")
    slots_per_env = config.num_steps // config.bptt_steps
    unit_envs = config.num_envs or _default_num_envs(config.slots_per_step, slots_per_env)
    unit = 1  # totals per unit of the flags
    if config.scaling == "weak":
        unit = saved_num_envs // unit_envs or num_ranks
    batch_size, num_envs = config.slots_per_step * unit, unit_envs * unit
    if saved_num_envs not in (0, num_envs):
        raise UserError(f"the checkpoint holds {saved_num_envs} environments, not {num_envs}")
    if config.batch_size * unit % num_ranks or not _fits(num_envs, batch_size, slots_per_env, num_ranks):
        if saved_num_envs:
            raise UserError(_other_ranks(num_envs, config.batch_size * unit, num_ranks))
        if config.batch_size * unit % num_ranks:
            what = f"batch_size {config.batch_size * unit} does not divide over {in_ranks(num_ranks)}"
        else:
            what = (
                f"num_envs {num_envs // unit} with num_steps {config.num_steps}, bptt_steps {config.bptt_steps}, "
                f"batch_size {_asked_batch(config)} does not divide into whole minibatches over {in_ranks(num_ranks)}"
            )
        raise UserError(f"{what}: try {' or '.join(_proposals(config, unit, num_ranks))}")
    return Sizes(
        num_envs=num_envs // num_ranks,
        first_env=rank * (num_envs // num_ranks),
        batch_size=batch_size // num_ranks,
        slots_per_env=slots_per_env,
        num_minibatches=num_envs * slots_per_env // batch_size,
        global_num_envs=num_envs,
        global_batch_size=batch_size,
        num_parts=config.grad_accumulation,
        learning_rate_factor=learning_rate_factor(unit, config.lr_scaling),
    )


def shares_out(config: TrainConfig, num_ranks: int) -> bool:
    """Whether these sizes share out over so many ranks."""
    try:
        share_out(config, 0, num_ranks)
    except UserError:
        return False
    return True


def _asked_batch(config: TrainConfig) -> str:
    """The batch of a gradient step, as an error names it."""
    parts = config.grad_accumulation
    return str(config.batch_size) + (f" times grad_accumulation {parts}" if parts > 1 else "")


def in_ranks(number: int) -> str:
    """A number of ranks in words."""
    return f"{number} rank" + "s" * (number > 1)


def _fits(num_envs: int, batch_size: int, slots_per_env: int, num_ranks: int) -> bool:
    """Whether these totals give whole minibatches of which every rank owns an equal share.

    Strata then divide as well: with batch_size = num_ranks * b, K = slots_per_env and g = gcd(M, K), K / g
    divides b, so that the M * b / K environments of a rank are a multiple of the stratum M / g.
    """
    return not (batch_size % num_ranks or num_envs % num_ranks or num_envs * slots_per_env % batch_size)


def _default_num_envs(batch_size: int, slots_per_env: int) -> int:
    """Two minibatches per epoch, or the next number that fits; the same for any number of ranks."""
    return _nearest_num_envs(-(-2 * batch_size // slots_per_env), batch_size, slots_per_env, num_ranks=1)[-1]


def _nearest_num_envs(num_envs: int, batch_size: int, slots_per_env: int, num_ranks: int) -> list[int]:
    """`num_envs` if it fits, else the nearest that do, below (if any) and above."""
    step = math.lcm(num_ranks, batch_size // math.gcd(batch_size, slots_per_env))
    return sorted({count for count in (num_envs // step * step, -(-num_envs // step) * step) if count})


def _other_ranks(num_envs: int, batch_size: int, num_ranks: int) -> str:
    """The error of a resumed run, whose sizes stand: the nearest numbers of ranks that share them out."""
    divisors = [number for number in range(1, batch_size + 1) if num_envs % number == batch_size % number == 0]
    near = [n for n in divisors if n < num_ranks][-1:] + [n for n in divisors if n > num_ranks][:1]
    return (
        f"the run to resume has {num_envs} environments and batches of {batch_size} slots in all, which do not "
        f"divide over {in_ranks(num_ranks)}: try {' or '.join(f'--num_gpus {number}' for number in near)}"
    )


def _proposals(config: TrainConfig, unit: int, num_ranks: int) -> list[str]:
    """Flags with the nearest sizes that fit, for an error message."""
    slots_per_env = config.num_steps // config.bptt_steps
    asked = config.batch_size * unit
    found: list[str] = []
    for batch_size in sorted({asked // num_ranks * num_ranks, -(-asked // num_ranks) * num_ranks} - {0}):
        change = f"--batch_size {batch_size} " if batch_size != asked else ""  # never with weak scaling
        step = batch_size * config.grad_accumulation
        wanted = unit * (config.num_envs or _default_num_envs(step // unit, slots_per_env))
        near = _nearest_num_envs(wanted, step, slots_per_env, num_ranks)
        if change and near == [wanted]:
            found.append(change.strip())
        else:
            found += [f"{change}--num_envs {count // unit}" for count in near]
    return found

