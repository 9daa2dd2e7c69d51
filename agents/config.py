"""Define the settings of a training run and their presets."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from gymnasium import spaces

from agents.policy import Policy, PolicyConfig
from agents.ppo import PPOConfig
from envs.task import AUTO as AUTOMATIC
from envs.task import GymTask, TaskConfig
from envs.trading.config import DataConfig, SimulatedMarketConfig, TradingConfig
from envs.vector.layout import Layout, TorchEnv
from rl_dist.errors import UserError
from rl_dist.files import read_plain
from rl_dist.flags import (
    Field,
    PathText,
    Text,
    changed,
    configuration,
    or_auto,
    read_sections,
    saved_form,
)
from rl_dist.launch.config import LaunchConfig
from rl_dist.process_group.watchdog import end_rank
from rl_dist.telemetry.loggers import named_loggers

if TYPE_CHECKING:  # only trading tasks import pandas and talib
    from envs.trading.task import TradingTask

AUTO = 0  # value of batch_size: measure the fastest size when the run starts
# A network counts as small if steps per minibatch * hidden_size**2 is below this number.
SMALL_NETWORK = 10_000_000

# Defaults for each kind of task. Sizes, learning rates and epochs were tuned: see docs/LOG.md. In
# trading, the reward follows a trade immediately, so low values of gamma and gae_lambda are
# enough.
_SMALL = {
    "total_steps": 200_000,
    "batch_size": 8,
    "num_envs": 16,
    "num_steps": 64,
    "learning_rate": 7e-4,
    "update_epochs": 10,
    "hidden_size": 64,
}
PRESETS: dict[str, dict[str, Any]] = {
    "trading": {"learning_rate": 1e-3, "gamma": 0.8, "gae_lambda": 0.5},
    "small": _SMALL,
    "control": _SMALL,
    "memory": _SMALL
    | {"num_envs": 32, "gae_lambda": 0.9, "refresh_states": True, "min_adv_std": 0.2},
    "paper": {  # arXiv 2212.02721
        "learning_rate": 3e-4,
        "anneal_lr": False,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "feature_window": 30,
        "observation": "paper",
        "order_unit": "shares",
        "max_order": 100.0,
        "execution": "close",
        "reward": "plain",
        "risk_aversion": 0.0,
    },
}
QUICK = {  # settings of --quick, which override those of the preset
    "num_episodes": 96,
    "total_steps": 0,
    "batch_size": 64,
    "num_envs": 32,
    "validate_every": 4,
    "num_worlds": 16,
}
# flags that --help shows; --help_all shows all flags
MAIN_FLAGS = {
    "env", "data", "total_steps", "num_episodes", "stop_at", "seed", "num_gpus", "device",
    "threads", "num_envs", "batch_size", "learning_rate", "gamma", "policy", "hidden_size",
}  # fmt: skip


@configuration
class TrainConfig:
    """Length, sizes and checkpoints of a training run."""

    num_episodes: int = Field(5000, ge=1, le=10**12)
    """Stop after this many training episodes, counted over all ranks."""
    total_steps: int = Field(0, ge=0, le=10**15)
    """Stop after this many environment steps, counted over all ranks; 0: use num_episodes."""
    batch_size: Annotated[int, or_auto(AUTO)] = Field(128, ge=AUTO, le=10**7)
    """Number of sequences per minibatch; 128 sequences with bptt_steps 32 are 4,096 steps; auto or
    0: when the run starts, time sizes that fit into memory, and use the fastest."""
    grad_accumulation: int = Field(1, ge=1, le=10**6)
    """Number of minibatches whose gradients are added up before each optimizer step. This has the
    effect of a batch_size that is this many times larger, but needs less memory."""
    num_envs: int = Field(0, ge=0, le=10**7)
    """Number of environments that run in parallel; 0: enough for two optimizer steps per epoch,
    which is 2 * batch_size * grad_accumulation * bptt_steps / num_steps or slightly more."""
    num_steps: int = Field(128, ge=1, le=10**6)
    """Steps that each environment takes per rollout; must be a multiple of bptt_steps."""
    bptt_steps: int = Field(32, ge=1, le=10**6)
    """Length of a training sequence: gradients flow back through this many steps."""
    scaling: Literal["strong", "weak"] = "strong"
    """strong: num_envs and batch_size are totals that are divided among the ranks, so that the
    learning curve does not depend on the number of ranks; weak: they are sizes per rank."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """With --scaling weak, multiply learning_rate by the number of ranks (linear) or by the square
    root of that number (sqrt)."""
    pretrained: PathText = ""
    """Start from the feature LSTM that python -m agents.pretrain wrote to this directory."""
    init_from: PathText = ""
    """Start from the weights and normalisers of an earlier run or checkpoint. Inputs must
    have the same shapes in both runs, and so must outputs. Optimizer, counters and environments
    start anew."""
    seed: int = Field(1, ge=0, le=2**63 - 1)
    """Seed for the policy, the environments, the action noise and the shuffling of sequences."""
    normalize_obs: bool = True
    """Normalise observations by their running mean and standard deviation over all ranks."""
    normalize_rewards: bool = True
    """Divide rewards by the running standard deviation of discounted returns."""
    validate_every: Annotated[int, or_auto(AUTOMATIC)] = Field(AUTOMATIC, ge=AUTOMATIC, le=10**9)
    """Number of iterations between evaluations on the validation data; 0: never evaluate; auto:
    every 20 iterations, but with fewer episodes or more rarely, so that all evaluations together
    take at most a tenth as many environment steps as training (in trading: every 20)."""
    checkpoint_every: int = Field(20, ge=1, le=10**9)
    """Number of iterations between checkpoints. A checkpoint is also saved after the first
    iteration, at the end of training and after a stop signal."""
    stop_at: Text = Field("", json_schema_extra={"nargs": "+"})
    """Metric and value, such as valid/return 475. Training stops after the iteration in which the
    metric reaches the value; valid/ metrics are computed only every validate_every iterations."""
    callback: Text = ""
    """Function to call on every rank after each iteration, evaluation and checkpoint, given as
    module:function. If it returns False, training stops."""
    keep_checkpoints: int = Field(3, ge=1, le=10**6)
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_best: Text = "auto"
    """Keep the checkpoint with the highest value of this metric, such as episode/return, as
    checkpoints/best.pt; auto: use valid/sharpe or valid/return, whichever the run reports; off:
    do not write best.pt."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What to do if a checkpoint cannot be written, for example because the disk is full: end the
    run, or continue without this checkpoint."""
    sync_check_every: int = Field(5, ge=0, le=10**9)
    """Number of iterations between comparisons of the parameters, which must be equal on all ranks.
    They are also compared before every checkpoint; 0: compare only before checkpoints."""
    collective_timeout: float = Field(600.0, ge=1, le=80_000)
    """End the run if a rank makes no progress for this many seconds. The limit applies to the
    time for which other ranks wait for this rank, to each call of an environment, callback, core
    or logger, and to writing a checkpoint. The error names the rank and what it was doing."""
    startup_timeout: float = Field(600.0, ge=1, le=80_000)
    """Timeout in seconds that replaces collective_timeout until the first rollout begins, while the
    ranks connect to each other and build their environments."""
    loggers: Text = ""
    """Loggers to use in addition to TensorBoard, separated by commas: wandb, mlflow (install them
    with pip install 'clstm-ppo[wandb]'). Their environment variables, such as WANDB_MODE and
    MLFLOW_TRACKING_URI, are respected."""
    monitor_every: float = Field(1.0, ge=0, le=86_400)
    """Seconds between measurements of each rank's GPU, CPU and memory use; 0: off."""
    profile: bool = False
    """Measure how long each part of an iteration takes; the report is in RUN_DIR/profile."""

    chosen_preset: Text = ""  # not a flag: the run records its preset here

    def __post_init__(self) -> None:
        named_loggers(self.loggers)
        if self.pretrained and (self.init_from or not self.normalize_obs):
            raise ValueError(
                "pretrained needs normalize_obs and excludes init_from: change one of the three"
            )
        try:
            _ = self.stop
        except ValueError:
            raise ValueError(
                f"stop_at must be a metric and a value, such as valid/return 475, got "
                f"{self.stop_at!r}"
            ) from None
        if self.num_steps % self.bptt_steps:
            raise ValueError(
                f"num_steps {self.num_steps} is not a multiple of bptt_steps {self.bptt_steps}: "
                "change one of them"
            )

    @property
    def stop(self) -> tuple[str, float]:
        """Return the metric and the value of stop_at, or ("", 0) if stop_at is empty."""
        name, _, value = (self.stop_at or " 0").partition(" ")
        return name, float(value)

    @property
    def validation_interval(self) -> int:
        """Return the number of iterations between possible validations; 0: never validate."""
        return 20 if self.validate_every == AUTOMATIC else self.validate_every

    @property
    def budget(self) -> tuple[int, Literal["steps", "episodes"]]:
        """Return the length of the run and its unit, steps or episodes."""
        return (self.total_steps, "steps") if self.total_steps else (self.num_episodes, "episodes")

    @property
    def sequences_per_step(self) -> int:
        """Return the number of sequences per optimizer step; with weak scaling, per rank."""
        return self.batch_size * self.grad_accumulation

    @property
    def named_metrics(self) -> dict[str, str]:
        """Return the names of the metrics given to stop_at and keep_best, by flag."""
        named = {"stop_at": self.stop[0], "keep_best": self.keep_best}
        return {flag: name for flag, name in named.items() if name not in ("", "auto", "off")}

    @property
    def best_metrics(self) -> tuple[str, ...]:
        """Return candidates for keep_best; the first one that the run reports is used."""
        return {"auto": ("valid/sharpe", "valid/return"), "off": ()}.get(
            self.keep_best, (self.keep_best,)
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run by section, as stored in config.json."""

    launch: LaunchConfig = field(default_factory=LaunchConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    market: SimulatedMarketConfig = field(default_factory=SimulatedMarketConfig)
    trading: TradingConfig = field(default_factory=TradingConfig)

    def __post_init__(self) -> None:
        if self.launch.strategy_config.pipelined and self.policy.policy != "clstm":
            raise UserError("hybrid_form pipeline needs --policy clstm: use it, or --strategy ddp")

    @property
    def values(self) -> dict[str, Any]:
        """Return the values of all settings, by flag name."""
        return {name: v for section in vars(self).values() for name, v in vars(section).items()}

    @property
    def named_code(self) -> tuple[str, str, str]:
        """Return the settings that may name a user's module, as `module:name`."""
        return self.task.env, self.policy.core, self.train.callback

    def changed(self, values: Mapping[str, Any]) -> "RunConfig":
        """Return a copy of the configuration with new values, given by flag name."""
        return RunConfig(**changed(vars(self), values))

    def idle_flags(self) -> list[str]:
        """Return the flags that have no effect, given the values of the other flags."""
        launch = self.launch
        is_trading = self.task.is_trading
        on_markets = is_trading and self.data.data == "simulated"
        has_shards = launch.strategy in ("hybrid", "auto") and launch.hybrid_form == "shard"
        groups = (  # each entry: whether a group of flags has an effect, and the names of the flags
            (not is_trading, [name for name in vars(self.task) if name != "env"]),
            (is_trading, [*vars(self.data), *vars(self.trading)]),
            (on_markets, vars(self.market)),
            (not self.train.total_steps, ["num_episodes"]),
            (not self.policy.stateless, ["refresh_states"]),
            (launch.strategy == "hybrid", ["hybrid_form"]),
            (has_shards, ["shard_size"]),
        )
        return [name for has_effect, names in groups if not has_effect for name in names]

    def without_idle(self) -> "RunConfig":
        """Return a copy in which flags without effect have their default values."""
        return self.changed({name: DEFAULTS[name] for name in self.idle_flags()})

    def to_dict(self) -> dict[str, Any]:
        """Return all values by section and name, in the format of config.json."""
        return saved_form(self)

    @staticmethod
    def from_dict(saved: Any) -> "RunConfig":
        """Build the configuration from the result of `to_dict`."""
        return RunConfig(**read_sections(SECTIONS, saved))

    def prepare_task(self, heartbeat: Callable[[], None] = lambda: None) -> "TradingTask | GymTask":
        """Prepare the trading task with its markets and spans, or the Gymnasium task.

        Args:
            heartbeat: function that is called whenever Gymnasium environments make progress.
        """
        if not self.task.is_trading:
            return GymTask(self.task, end_rank, heartbeat)
        from envs.trading.task import TradingTask

        return TradingTask(self.data, self.market, self.trading, self.ppo.gamma)


SECTIONS: dict[str, Any] = vars(RunConfig())
DEFAULTS = RunConfig().values
OWNERS = {name: heading for heading, section in SECTIONS.items() for name in vars(section)}


def with_threads(config: RunConfig) -> RunConfig:
    """Return a copy with threads=1 if the network is small and threads is not set.

    If steps per minibatch * hidden_size**2 is below 10 million, one thread is as fast as two, and
    much faster if other programs use the CPU: see docs/performance.md.
    """
    train = config.train
    steps = train.batch_size * train.bptt_steps  # steps per minibatch; 0: batch size still unknown
    if config.launch.threads or not 0 < steps * config.policy.hidden_size**2 < SMALL_NETWORK:
        return config
    return replace(config, launch=replace(config.launch, threads=1))


def data_digest(config: DataConfig) -> str:
    """Return a digest of the price file; it reveals whether the file has changed."""
    if config.data == "simulated":
        return ""
    content = read_plain(config.data, most=None)
    return hashlib.sha256(content).hexdigest()[:16]


def check_data(config: DataConfig) -> None:
    """Refuse a price file that is missing, or has other content than when the run began."""
    problem = "has changed since this run began"
    try:
        if data_digest(config) == config.data_digest:
            return
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    raise UserError(
        f"--data {config.data} {problem}: restore the file, or pass its new path with --data, "
        "or start a new run with --init_from"
    )


def probe(task: "TradingTask | GymTask") -> TorchEnv:
    """Return a small environment of a task, already closed; use only its spaces."""
    if isinstance(task, GymTask):
        env = task.probe_env()
    else:
        env = task.evaluation_env(task.markets("train", 1), task.spans.train)
    env.close()
    return env


def empty_policy(config: RunConfig, layout: Layout, action_space: spaces.Space) -> Policy:
    """Build the policy of a run on the meta device, without allocating weights.

    Raises a UserError if the policy settings do not fit the spaces.
    """
    with torch.device("meta"):
        return Policy(config.policy, layout, action_space).to(config.launch.dtype)
