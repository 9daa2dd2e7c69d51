"""Training sizes as asked for, shared out over ranks, checked before the start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_dist.flags import flag


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and how large to train, and what to keep."""

    num_episodes: int = flag(5000, "training episodes, total over all ranks", "episodes")
    total_steps: int = flag(0, "stop by environment steps of all ranks instead; 0 = by episodes", "steps")
    batch_size: int = flag(128, "slots (sequences of bptt_steps) per minibatch", "slots")
    num_envs: int = flag(0, "environments; 0 = two minibatches per epoch", "environments")
    num_steps: int = flag(128, "rollout length", "steps")
    bptt_steps: int = flag(32, "length of truncated backpropagation through time", "steps")
    scaling: str = flag(
        "strong",
        "strong: num_envs and batch_size are totals shared out over the ranks; weak: they are per rank",
        choices=("strong", "weak"),
    )
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

    def __post_init__(self) -> None:
        if self.scaling not in ("strong", "weak"):
            raise ValueError(f"scaling must be strong or weak, got {self.scaling!r}")
        if self.on_save_error not in ("stop", "continue"):
            raise ValueError(f"on_save_error must be stop or continue, got {self.on_save_error!r}")
        if self.keep_best.startswith("valid/") and not self.validate_every:
            raise ValueError(f"keep_best {self.keep_best} needs validation: give --validate_every, which is 0")
        for name, low, high in (
            ("num_episodes", 1, 10**12),
            ("total_steps", 0, 10**15),
            ("batch_size", 1, 10**7),
            ("num_envs", 0, 10**7),
            ("num_steps", 1, 10**6),
            ("bptt_steps", 1, 10**6),
            ("seed", 0, 2**63 - 1),
            ("validate_every", 0, 10**9),
            ("checkpoint_every", 1, 10**9),
            ("keep_checkpoints", 1, 10**6),
            ("sync_check_every", 0, 10**9),
            ("collective_timeout", 1, 80_000),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must be {low}..{high}, got {value}")
        if self.num_steps % self.bptt_steps:
            raise ValueError(
                f"num_steps {self.num_steps} must be a multiple of bptt_steps {self.bptt_steps}: "
                f"try --num_steps {_nearest_multiple(self.num_steps, self.bptt_steps)}"
            )

    @property
    def best_metrics(self) -> tuple[str, ...]:
        """The metrics of which the first that a run reports chooses best.pt."""
        return {"auto": ("valid/sharpe", "valid/return"), "off": ()}.get(self.keep_best, (self.keep_best,))


@dataclass(frozen=True)
class Sizes:
    """One rank's share of the work; `global_` figures are of all ranks together."""

    num_envs: int
    first_env: int  # global index of this rank's first environment
    batch_size: int  # slots of this rank in each minibatch
    slots_per_env: int
    num_minibatches: int  # per epoch, the same on every rank
    global_num_envs: int
    global_batch_size: int


def _nearest_multiple(value: int, of: int) -> int:
    return max(of, round(value / of) * of)


def share_out(config: TrainConfig, rank: int, num_ranks: int) -> Sizes:
    """This rank's share of environments and batch.

    Raises:
        ValueError: something that must divide does not; the message names the nearest sizes that do.
    """
    slots_per_env = config.num_steps // config.bptt_steps
    unit = num_ranks if config.scaling == "weak" else 1  # totals per unit of the flags
    batch_size = config.batch_size * unit
    num_envs = unit * (config.num_envs or _default_num_envs(config.batch_size, slots_per_env))
    if not _fits(num_envs, batch_size, slots_per_env, num_ranks):
        if batch_size % num_ranks:
            what = f"batch_size {batch_size} does not divide over {_ranks(num_ranks)}"
        else:
            what = (
                f"num_envs {num_envs // unit} with num_steps {config.num_steps}, bptt_steps {config.bptt_steps}, "
                f"batch_size {config.batch_size} does not divide into whole minibatches over {_ranks(num_ranks)}"
            )
        raise ValueError(f"{what}: try {' or '.join(_proposals(config, unit, num_ranks))}")
    return Sizes(
        num_envs=num_envs // num_ranks,
        first_env=rank * (num_envs // num_ranks),
        batch_size=batch_size // num_ranks,
        slots_per_env=slots_per_env,
        num_minibatches=num_envs * slots_per_env // batch_size,
        global_num_envs=num_envs,
        global_batch_size=batch_size,
    )


def _ranks(number: int) -> str:
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


def _proposals(config: TrainConfig, unit: int, num_ranks: int) -> list[str]:
    """Flags with the nearest sizes that fit, for an error message."""
    slots_per_env = config.num_steps // config.bptt_steps
    asked = config.batch_size * unit
    found: list[str] = []
    for batch_size in sorted({asked // num_ranks * num_ranks, -(-asked // num_ranks) * num_ranks} - {0}):
        change = f"--batch_size {batch_size} " if batch_size != asked else ""  # never with weak scaling
        wanted = unit * (config.num_envs or _default_num_envs(batch_size // unit, slots_per_env))
        near = _nearest_num_envs(wanted, batch_size, slots_per_env, num_ranks)
        if change and near == [wanted]:
            found.append(change.strip())
        else:
            found += [f"{change}--num_envs {count // unit}" for count in near]
    return found


def sizes_table(config: TrainConfig, sizes: Sizes, num_ranks: int, update_epochs: int) -> str:
    """What one rank does and what all do together, as printed at the start."""
    steps = update_epochs * sizes.num_minibatches
    length = config.num_steps
    rows = [
        ("", "each rank", f"all {_ranks(num_ranks)}"),
        ("environments", sizes.num_envs, sizes.global_num_envs),
        ("environment steps per iteration", sizes.num_envs * length, sizes.global_num_envs * length),
        (f"slots of {config.bptt_steps} steps per minibatch", sizes.batch_size, sizes.global_batch_size),
        ("gradient steps per iteration", steps, f"{steps} (together)"),
    ]
    return "\n".join(f"  {name:<34}{each!s:>12}{together!s:>16}" for name, each, together in rows)
