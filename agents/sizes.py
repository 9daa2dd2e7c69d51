"""Training sizes: what the user asks for, shared out over the ranks, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from agents.rollout import stratum_size


def _flag(default, text: str, unit: str = "", choices: tuple[str, ...] = ()):  # noqa: ANN001, ANN202
    return field(default=default, metadata={"help": text, "unit": unit, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and how large to train, and what to keep."""

    num_episodes: int = _flag(5000, "training episodes, total over all ranks", "episodes")
    total_steps: int = _flag(0, "stop by environment steps of all ranks instead; 0 = by episodes", "steps")
    batch_size: int = _flag(128, "slots (sequences of bptt_steps) per minibatch", "slots")
    num_envs: int = _flag(0, "environments; 0 = two minibatches per epoch", "environments")
    num_steps: int = _flag(128, "rollout length", "steps")
    bptt_steps: int = _flag(32, "length of truncated backpropagation through time", "steps")
    scaling: str = _flag(
        "strong",
        "strong: num_envs and batch_size are totals shared out over the ranks; weak: they are per rank",
        choices=("strong", "weak"),
    )
    seed: int = _flag(1, "seed of policy, environments, action noise and shuffling")
    normalize_obs: bool = _flag(True, "normalise observations by running statistics of all ranks")
    normalize_rewards: bool = _flag(True, "scale rewards by the running deviation of discounted returns")
    validate_every: int = _flag(40, "evaluate the validation span this often; 0 = never", "iterations")
    checkpoint_every: int = _flag(20, "save this often; always at the end and on a stop signal", "iterations")
    keep_checkpoints: int = _flag(3, "newest checkpoints to keep", "files")

    def __post_init__(self) -> None:
        if self.scaling not in ("strong", "weak"):
            raise ValueError(f"scaling must be strong or weak, got {self.scaling!r}")
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
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must be {low}..{high}, got {value}")
        if self.num_steps % self.bptt_steps:
            raise ValueError(
                f"num_steps {self.num_steps} must be a multiple of bptt_steps {self.bptt_steps}: "
                f"try --num_steps {_nearest_multiple(self.num_steps, self.bptt_steps)}"
            )


@dataclass(frozen=True)
class Sizes:
    """One rank's share of the work; `global_` figures are those of all ranks together."""

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
    ranks = num_ranks if config.scaling == "weak" else 1
    batch_size = config.batch_size * ranks
    num_envs = config.num_envs * ranks or -(-2 * batch_size // slots_per_env)
    unit = _environment_unit(batch_size, slots_per_env, num_ranks)
    if batch_size % num_ranks:
        raise ValueError(
            f"batch_size {batch_size} does not divide over {num_ranks} ranks: "
            f"try --batch_size {_nearest_multiple(batch_size, num_ranks)}"
        )
    if num_envs % unit or (num_envs // num_ranks) % stratum_size(
        num_envs * slots_per_env // batch_size, slots_per_env
    ):
        near = _valid_counts(num_envs, unit, batch_size, slots_per_env, num_ranks)
        raise ValueError(
            f"num_envs {num_envs} with num_steps {config.num_steps}, bptt_steps {config.bptt_steps}, batch_size "
            f"{batch_size} does not divide into whole minibatches over {num_ranks} ranks: try --num_envs "
            + " or ".join(str(count // (num_ranks if ranks > 1 else 1)) for count in near)
        )
    return Sizes(
        num_envs=num_envs // num_ranks,
        first_env=rank * (num_envs // num_ranks),
        batch_size=batch_size // num_ranks,
        slots_per_env=slots_per_env,
        num_minibatches=num_envs * slots_per_env // batch_size,
        global_num_envs=num_envs,
        global_batch_size=batch_size,
    )


def _environment_unit(batch_size: int, slots_per_env: int, num_ranks: int) -> int:
    """Smallest number of environments that gives whole minibatches and whole ranks."""
    unit = num_ranks
    while unit * slots_per_env % batch_size:
        unit += num_ranks
    return unit


def _valid_counts(num_envs: int, unit: int, batch_size: int, slots_per_env: int, num_ranks: int) -> list[int]:
    """The nearest valid numbers of environments below and above `num_envs`."""

    def valid(count: int) -> bool:
        minibatches = count * slots_per_env // batch_size
        return count > 0 and (count // num_ranks) % stratum_size(minibatches, slots_per_env) == 0

    below = [count for count in range(num_envs // unit * unit, 0, -unit) if valid(count)][:1]
    above = [count for count in range((num_envs // unit + 1) * unit, 65 * num_envs + 65 * unit, unit) if valid(count)]
    return below + above[:1]


def sizes_table(config: TrainConfig, sizes: Sizes, num_ranks: int, update_epochs: int) -> str:
    """What one rank does and what all do together, as printed at the start."""
    steps = update_epochs * sizes.num_minibatches
    rows = [
        ("", "each rank", f"all {num_ranks} rank" + "s" * (num_ranks > 1)),
        ("environments", sizes.num_envs, sizes.global_num_envs),
        ("environment steps per iteration", sizes.num_envs * config.num_steps, sizes.global_num_envs * config.num_steps),
        (f"slots of {config.bptt_steps} steps per minibatch", sizes.batch_size, sizes.global_batch_size),
        ("gradient steps per iteration", steps, f"{steps} (together)"),
    ]
    return "\n".join(f"  {name:<34}{each!s:>12}{together!s:>16}" for name, each, together in rows)
