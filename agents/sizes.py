"""Training sizes as asked for, shared out over ranks, checked before the start."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from rl_dist.errors import UserError
from rl_dist.flags import Field, Text, configuration, or_auto
from rl_dist.telemetry.loggers import named_loggers

LearningRateRule = Literal["none", "sqrt", "linear"]
AUTO = 0  # batch_size: measured by the ranks when a run begins


@configuration
class TrainConfig:
    """How long and how large to train, and what to keep."""

    num_episodes: int = Field(5000, ge=1, le=10**12)
    """Training episodes, total over all ranks."""
    total_steps: int = Field(0, ge=0, le=10**15)
    """Stop after this many environment steps of all ranks instead; 0: by episodes."""
    batch_size: Annotated[int, or_auto(AUTO)] = Field(128, ge=AUTO, le=10**7)
    """Sequences per minibatch, each bptt_steps = 32 steps long: 128 means 4,096 steps; auto or 0:
    the fastest that fits, measured at the start."""
    grad_accumulation: int = Field(1, ge=1, le=10**6)
    """Minibatches whose gradients add up to one optimizer step: the effect of a batch_size this
    many times larger, in less memory."""
    num_envs: int = Field(0, ge=0, le=10**7)
    """Environments that run side by side; 0: as many as make two minibatches per epoch,
    2 * batch_size * bptt_steps / num_steps."""
    num_steps: int = Field(128, ge=1, le=10**6)
    """Steps of each environment in a rollout; a multiple of bptt_steps."""
    bptt_steps: int = Field(32, ge=1, le=10**6)
    """Length of a training sequence: gradients flow back through this many steps."""
    scaling: Literal["strong", "weak"] = "strong"
    """strong: num_envs and batch_size are totals, shared out over the ranks, so the learning curve
    is the same on any number of them; weak: they are per rank."""
    lr_scaling: LearningRateRule = "none"
    """With scaling weak: multiply learning_rate by the growth of the batch of all ranks (linear)
    or by its square root (sqrt)."""
    pretrained: Text = ""
    """Start from the feature LSTM that python -m agents.pretrain wrote to this directory."""
    init_from: Text = ""
    """Start from weights and normalisers of an earlier run or checkpoint of the same shapes.
    Optimizer, counters and environments restart."""
    seed: int = Field(1, ge=0, le=2**63 - 1)
    """Seed of the policy, the environments, the action noise and the shuffling."""
    normalize_obs: bool = True
    """Scale observations by the running mean and deviation of all ranks."""
    normalize_rewards: bool = True
    """Divide rewards by the running deviation of discounted returns."""
    validate_every: int = Field(20, ge=0, le=10**9)
    """Evaluate on the validation span after this many iterations; 0: never."""
    checkpoint_every: int = Field(20, ge=1, le=10**9)
    """Save after this many iterations; always at the end and on a stop signal."""
    stop_at: Text = Field("", json_schema_extra={"nargs": "+"})
    """Stop after the iteration in which this metric reaches this value, such as valid/return 475;
    valid/ metrics are known every validate_every iterations."""
    callback: Text = ""
    """Call this module:function at every iteration, evaluation and checkpoint, on every rank; False
    stops the training."""
    keep_checkpoints: int = Field(3, ge=1, le=10**6)
    """Newest checkpoints to keep."""
    keep_best: Text = "auto"
    """Keep the checkpoint with the highest value of this metric, such as episode/return, as
    checkpoints/best.pt; auto: valid/sharpe or valid/return, whichever the run has; off: none."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """When a checkpoint cannot be written, as on a full disk: stop, or train on."""
    sync_check_every: int = Field(5, ge=0, le=10**9)
    """Compare the parameters of all ranks after this many iterations and before every save; 0: only
    before a save."""
    collective_timeout: float = Field(600.0, ge=1, le=80_000)
    """End the run, and name the place, when a rank makes no progress for this many seconds: while
    others wait for it, or in one call of an environment, callback, core or logger, or one write of
    a checkpoint, also on one rank alone."""
    startup_timeout: float = Field(600.0, ge=1, le=80_000)
    """The same until the first rollout: for ranks to meet, connect and build environments."""
    loggers: Text = ""
    """Log to these besides TensorBoard, by comma: wandb, mlflow (pip install 'clstm-ppo[wandb]').
    Their own variables, such as WANDB_MODE and MLFLOW_TRACKING_URI, are obeyed."""
    monitor_every: float = Field(1.0, ge=0, le=86_400)
    """Seconds between samples of each rank's use of GPU, CPU and memory; 0: off."""
    profile: bool = False
    """Measure where the time of a few iterations goes, in RUN_DIR/profile."""

    chosen_preset: Text = ""  # no flag

    def __post_init__(self) -> None:
        named_loggers(self.loggers)
        if self.pretrained and self.init_from:
            raise ValueError("init_from brings all weights: leave pretrained out")
        if self.callback and not all(self.callback.partition(":")):
            raise ValueError(f"callback must be module:function, got {self.callback!r}")
        if self.stop_at:
            self._check_stop()
        if self.num_steps % self.bptt_steps:
            near = max(1, round(self.num_steps / self.bptt_steps)) * self.bptt_steps
            raise ValueError(
                f"num_steps {self.num_steps} must be a multiple of bptt_steps {self.bptt_steps}: "
                f"try --num_steps {near}"
            )

    def _check_stop(self) -> None:
        name, _, value = self.stop_at.partition(" ")
        try:
            float(value)
        except ValueError:
            raise ValueError(
                f"stop_at must be a metric and a value, such as valid/return 475, got "
                f"{self.stop_at!r}"
            ) from None

    @property
    def sequences_per_step(self) -> int:
        """Return the sequences of one gradient step, in the unit of the flags."""
        return self.batch_size * self.grad_accumulation

    @property
    def named_metrics(self) -> dict[str, str]:
        """Return the metrics that flags name, by flag."""
        named = {"stop_at": self.stop_at.split(" ")[0], "keep_best": self.keep_best}
        return {flag: name for flag, name in named.items() if name not in ("", "auto", "off")}

    @property
    def best_metrics(self) -> tuple[str, ...]:
        """Return the metrics of which the first that a run reports chooses best.pt."""
        return {"auto": ("valid/sharpe", "valid/return"), "off": ()}.get(
            self.keep_best, (self.keep_best,)
        )


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
    """This rank's share of environments and batch; an error names the nearest sizes.

    Args:
        saved_num_envs: environments of all ranks in the run to resume, 0 for a fresh one. With weak
            scaling it says how many ranks the run began with: their totals and rate are kept.
    """
    if config.batch_size == AUTO:
        raise UserError("batch_size auto is measured when a training starts: name a number here")

    # totals over all ranks: as the flags say, or so many times as much
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
    """Return True if these sizes divide over so many ranks."""
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
    """A number of ranks in words."""
    return f"{number} rank" + "s" * (number > 1)


def _default_num_envs(batch_size: int, sequences_per_env: int) -> int:
    """Two minibatches per epoch, or the next number that fits; the same for any number of ranks."""
    wanted = -(-2 * batch_size // sequences_per_env)
    return _nearest_num_envs(wanted, batch_size, sequences_per_env, num_ranks=1)[-1]


def _nearest_num_envs(
    num_envs: int, batch_size: int, sequences_per_env: int, num_ranks: int
) -> list[int]:
    """`num_envs` if it fits, else the nearest that do, below (if any) and above."""
    step = math.lcm(num_ranks, batch_size // math.gcd(batch_size, sequences_per_env))
    return sorted({num_envs // step * step, -(-num_envs // step) * step} - {0})


def _other_ranks(common: int, num_ranks: int) -> str:
    """Return the flags with the nearest numbers of ranks that divide `common`."""
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
