"""A run: its configuration by section, and its directory."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from gymnasium import spaces

from agents.policy import Policy, PolicyConfig
from agents.ppo import PPOConfig
from agents.sizes import TrainConfig
from envs.task import GymTask, TaskConfig
from envs.trading_config import DataConfig, SimulatedMarketConfig, TradingConfig
from envs.vector.layout import Layout
from rl_dist.errors import UserError
from rl_dist.files import read_plain
from rl_dist.flags import changed, read_sections, saved_form
from rl_dist.launch.config import LaunchConfig
from rl_dist.process_group.watchdog import end_rank
from rl_dist.strategies.config import SpeedConfig

if TYPE_CHECKING:  # other tasks do without pandas and talib
    from envs.trading.task import TradingTask

SMALL_NETWORK = 10_000_000  # steps of a minibatch * hidden_size squared


# The defaults of a kind of task. Sizes, rates and epochs were tuned, see docs/LOG.md; rewards that
# credit a trade at once need neither a long horizon nor long traces.
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
QUICK = {  # applied after the preset
    "num_episodes": 96,
    "total_steps": 0,
    "batch_size": 64,
    "num_envs": 32,
    "validate_every": 4,
    "num_worlds": 16,
}
MAIN_FLAGS = {  # --help shows these
    *("env", "data", "total_steps", "num_episodes", "stop_at", "seed"),
    *("num_gpus", "device", "threads"),
    *("num_envs", "batch_size", "learning_rate", "gamma"),
    *("policy", "hidden_size"),
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that defines a run, nested by owner; config.json holds it."""

    launch: LaunchConfig = field(default_factory=LaunchConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    market: SimulatedMarketConfig = field(default_factory=SimulatedMarketConfig)
    trading: TradingConfig = field(default_factory=TradingConfig)

    def __post_init__(self) -> None:
        if self.launch.strategy_config.pipelined and self.policy.policy != "clstm":
            raise UserError("hybrid_form pipeline needs --policy clstm: use --strategy ddp")

    @property
    def values(self) -> dict[str, Any]:
        """Return all values by the names of flags."""
        return {name: v for section in vars(self).values() for name, v in vars(section).items()}

    def changed(self, values: Mapping[str, Any]) -> RunConfig:
        """Return the configuration with other values, by flag."""
        return RunConfig(**changed(vars(self), values))

    def idle_flags(self) -> list[str]:
        """Return the flags that do nothing beside the others."""
        return [name for name, needs in NEEDS.items() if not needs(self)]

    def without_idle(self) -> RunConfig:
        """Return the configuration with the defaults of flags that do nothing."""
        return self.changed({name: DEFAULTS[name] for name in self.idle_flags()})

    def to_dict(self) -> dict[str, Any]:
        """Return what files hold of it."""
        return saved_form(self)

    @staticmethod
    def from_dict(saved: Any) -> RunConfig:
        """Invert `to_dict`, but for what is not stored; see `read_sections`."""
        return RunConfig(**read_sections(SECTIONS, saved))

    def prepare_task(self, heartbeat: Callable[[], None] = lambda: None) -> TradingTask | GymTask:
        """Return the markets and spans of the trading task, or the Gymnasium task.

        Args:
            heartbeat: called while its environments make progress.
        """
        if not self.task.is_trading:
            return GymTask(self.task, end_rank, heartbeat)
        from envs.trading.task import prepare_task

        return prepare_task(self.data, self.market, self.trading, self.ppo.gamma)


SECTIONS: dict[str, Any] = vars(RunConfig())
DEFAULTS = RunConfig().values
OWNERS = {name: heading for heading, section in SECTIONS.items() for name in vars(section)}
_TASK = vars(TaskConfig()).keys() - {"env"}
_TRADING = vars(DataConfig()).keys() | vars(TradingConfig()).keys()
NEEDS: dict[str, Callable[[RunConfig], bool]] = {  # what a flag needs to have an effect
    **dict.fromkeys(sorted(_TASK), lambda config: not config.task.is_trading),
    **dict.fromkeys(sorted(_TRADING), lambda config: config.task.is_trading),
    **dict.fromkeys(
        vars(SimulatedMarketConfig()),
        lambda config: config.task.is_trading and config.data.data == "simulated",
    ),
    "num_episodes": lambda config: not config.train.total_steps,
    "lr_scaling": lambda config: config.train.scaling == "weak",
    "refresh_states": lambda config: not config.policy.stateless,
    "separate_trunks": lambda config: not config.policy.is_cascade,
    "hybrid_form": lambda config: config.launch.strategy == "hybrid",
    "shard_size": lambda config: (
        config.launch.strategy in ("hybrid", "auto") and config.launch.hybrid_form == "shard"
    ),
}


def with_threads(config: RunConfig) -> RunConfig:
    """Return the configuration, with one thread if its network is small.

    Threads that the user gave stay. Below some 10 million multiplications for each gate and pass
    one thread is as fast as two, and much faster beside other programs: docs/performance.md.
    """
    train = config.train
    steps = train.batch_size * train.bptt_steps  # of a minibatch; 0 if measured later
    if config.launch.threads or not 0 < steps * config.policy.hidden_size**2 < SMALL_NETWORK:
        return config
    return replace(config, launch=replace(config.launch, threads=1))


def with_digest(config: DataConfig) -> DataConfig:
    """Return the data of a run that begins, by which a changed file is known later."""
    return replace(config, data_digest=data_digest(config))


def data_digest(config: DataConfig) -> str:
    """Return what tells a file of prices from a changed one; "": there is none."""
    if config.data == "simulated":
        return ""
    try:
        content = read_plain(Path(config.data).expanduser(), most=None)
    except (OSError, ValueError):  # whoever loads it says why
        return ""
    return hashlib.sha256(content).hexdigest()[:16]


def probe_env(task: TradingTask | GymTask) -> Any:
    """Make the smallest environment of a task, to look at its spaces."""
    if isinstance(task, GymTask):
        return task.probe_env()
    return task.evaluation_env(task.markets("train", 1), task.spans.train)


class Probed(NamedTuple):
    """What one environment of a task shows."""

    layout: Layout
    action_space: spaces.Space
    can_snapshot: bool

    def empty_policy(self, config: RunConfig) -> Policy:
        """Return a run's policy without weights; refuse what it cannot be made of."""
        with torch.device("meta"):
            policy = Policy(config.policy, self.layout, self.action_space)
        return policy.to(config.launch.dtype)


def probe(task: TradingTask | GymTask) -> Probed:
    """Make an environment of a task and look at it; of a Gymnasium task only once."""
    return _probe_gym(task.config) if isinstance(task, GymTask) else _look_at(probe_env(task))


@functools.cache
def _probe_gym(config: TaskConfig) -> Probed:
    return _look_at(GymTask(config).probe_env())


def forget_probed() -> None:
    """Clear the cache of probed environments: ids may have been registered again."""
    _probe_gym.cache_clear()


def _look_at(env: Any) -> Probed:
    found = Probed(env.layout, env.single_action_space, env.can_snapshot)
    env.close()
    return found
