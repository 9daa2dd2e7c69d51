"""Define the settings of a training run and their presets."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from gymnasium import spaces

from agents.learner.network.inputs import is_large
from agents.learner.policy import Policy
from agents.learner.settings import PolicyConfig, PPOConfig, TrainConfig
from envs import MEMORY_IDS, makes_batch
from envs.task import Task, TaskConfig, TaskSettings, make_task
from envs.trading.config import DataConfig, SimulatedMarketConfig, TradingConfig
from envs.vector.layout import Layout, TorchEnv
from rl_dist.errors import UserError
from rl_dist.flags import changed, read_sections, saved_form
from rl_dist.launch.config import LaunchConfig
from rl_dist.process_group.watchdog import end_rank

# A network is small if steps per minibatch * hidden_size**2 is below this number; see
# `with_threads`.
SMALL_NETWORK = 10_000_000

# Presets replace the defaults of flags for one kind of task. Sizes, learning rates and epochs were
# tuned: see docs/LOG.md. In trading, the reward follows a trade immediately, so low values of gamma
# and gae_lambda are enough.
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
    # Pink noise finds rare rewards (Hollenstein et al., https://arxiv.org/abs/2312.11091).
    "control": _SMALL | {"learning_rate": 3e-4, "noise_color": 1.0},
    "memory": _SMALL
    | {
        "num_envs": 32,
        "gae_lambda": 0.9,
        "refresh_states": True,
        "min_adv_std": 0.2,
        "noise_color": 1.0,
    },
    # As CleanRL's ppo_atari_lstm.py and the settings for Atari in RL Baselines3 Zoo.
    "pixels": {
        "total_steps": 10_000_000,
        "batch_size": 8,
        "num_envs": 8,
        "num_steps": 128,
        "learning_rate": 2.5e-4,
        "update_epochs": 4,
        "clip_coef": 0.1,
        "ent_coef": 0.01,
        "hidden_size": 128,
        "policy": "lstm",
    },
    # For thousands of simulated environments: the common settings of Isaac Lab's tasks for rsl_rl
    # (https://github.com/isaac-sim/IsaacLab, rsl_rl_ppo_cfg.py of anymal_d: 4096 environments, 24
    # steps, 4 minibatches, 5 epochs, max_grad_norm 1, standard deviation 1). rl_games has the same
    # gradient norm and a threshold of 0.008 for the KL divergence.
    "massive": {
        "total_steps": 100_000_000,
        "batch_size": 1024,
        "num_envs": 4096,
        "num_steps": 32,
        "bptt_steps": 32,
        "validate_every": 0,
        "learning_rate": 1e-3,
        "anneal_lr": False,
        "desired_kl": 0.01,
        "gamma": 0.99,
        "gae_lambda": 0.95,
        "update_epochs": 5,
        "ent_coef": 0.005,
        "max_grad_norm": 1.0,
        "hidden_size": 256,
        "log_std_init": 0.0,
    },
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
PURPOSES = {  # what each preset was made for
    "trading": "StockTrading-v0",
    "small": "discrete actions, and tasks that fit no other preset",
    "control": "continuous actions",
    "memory": "memory tasks",
    "pixels": "images of at least 64 x 64 pixels",
    "massive": "batches on a GPU or of at least 1,024 environments",
    "paper": "StockTrading-v0 as in arXiv 2212.02721",
}
# ids of memory tasks, with or without the module that registers them
MEMORY_TASKS = re.compile(rf"(.*:)?({'|'.join(MEMORY_IDS)}|popgym-.*)")
MASSIVE_ENVS = 1024  # from this number on, the preset for a user's batch is massive
MASSIVE_MINIBATCHES = 4  # per epoch, with the preset massive and any num_envs
QUICK = {  # settings of --quick, which override those of the preset
    "num_episodes": 96,
    "total_steps": 0,
    "batch_size": 64,
    "num_envs": 32,
    "validate_every": 4,
    "num_worlds": 16,
}


def quick_settings(task: TaskConfig) -> dict[str, Any]:
    """Return the settings of --quick for a task."""
    settings = dict(QUICK)
    if not task.is_trading:
        del settings["validate_every"]  # the default, auto, limits the cost of validation
    return settings


# Each entry: a section, its field that names a module to import, and other fields of the section
# that are passed to that module.
NAMED_MODULES = (
    ("task", "env", "env_kwargs"),
    ("policy", "core"),
    ("policy", "encoder"),
    ("train", "callback"),
)

# flags that --help shows; --help_all shows all flags
MAIN_FLAGS = {
    "env", "data", "total_steps", "num_episodes", "stop_at", "seed", "num_gpus", "device",
    "threads", "num_envs", "batch_size", "learning_rate", "gamma", "policy", "hidden_size",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run by section, as stored in config.json."""

    launch: LaunchConfig = LaunchConfig()
    train: TrainConfig = TrainConfig()
    ppo: PPOConfig = PPOConfig()
    policy: PolicyConfig = PolicyConfig()
    task: TaskConfig = TaskConfig()
    data: DataConfig = DataConfig()
    market: SimulatedMarketConfig = SimulatedMarketConfig()
    trading: TradingConfig = TradingConfig()

    def __post_init__(self) -> None:
        if self.launch.strategy_config.pipelined and self.policy.policy != "clstm":
            raise UserError("hybrid_form pipeline needs --policy clstm: use it, or --strategy ddp")
        if self.train.pretrained and self.policy.encoder:
            raise UserError("pretrained does not fit encoder: omit --pretrained or --encoder")

    @property
    def values(self) -> dict[str, Any]:
        """Return the values of all settings, by flag name."""
        return {name: v for section in vars(self).values() for name, v in vars(section).items()}

    @property
    def named_code(self) -> list[str]:
        """Return the settings that may name a user's module, as `module:name`."""
        return [self.values[name] for _, name, *_ in NAMED_MODULES]

    def changed(self, values: Mapping[str, Any]) -> "RunConfig":
        """Return a copy of the configuration with new values, given by flag name."""
        return RunConfig(**changed(vars(self), values))

    def idle_flags(self) -> list[str]:
        """Return the flags that have no effect, given the values of the other flags."""
        launch = self.launch
        is_trading = self.task.is_trading
        on_simulated_markets = is_trading and self.data.data == "simulated"
        has_shards = launch.strategy in ("hybrid", "auto") and launch.hybrid_form == "shard"
        groups = (  # (True if these flags have an effect, names of the flags)
            (not is_trading, [name for name in vars(self.task) if name != "env"]),
            (is_trading, [*vars(self.data), *vars(self.trading)]),
            (on_simulated_markets, vars(self.market)),
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
        """Return the values to store, by section and name, in the format of config.json."""
        return saved_form(self)

    @staticmethod
    def from_dict(saved: object) -> "RunConfig":
        """Build the configuration from the result of `to_dict`."""
        return RunConfig(**read_sections(SECTIONS, saved))

    def prepare_task(
        self, heartbeat: Callable[[], None] = lambda: None, device: str = "cpu"
    ) -> Task:
        """Make the task that --env names.

        Args:
            heartbeat: function that is called whenever environments make progress.
            device: device of the environments' tensors.
        """
        return make_task(
            TaskSettings(
                task=self.task,
                sections=vars(self),
                discount=self.ppo.gamma,
                device=device,
                end=end_rank,
                heartbeat=heartbeat,
            )
        )

    @property
    def validates(self) -> bool:
        """Return True if the policy is evaluated during training, not only at the end."""
        return bool(self.train.validate_every and self.task.eval_episodes)

    @property
    def trusts_best(self) -> bool:
        """Return True if validation is precise enough to choose the best checkpoint.

        For real prices, the result is False, because validation is too noisy.
        """
        return self.data.data == "simulated"


SECTIONS: dict[str, Any] = vars(RunConfig())
DEFAULTS = RunConfig().values
# flag name -> name of the section that contains the flag
OWNERS = {name: heading for heading, section in SECTIONS.items() for name in vars(section)}


def is_massive(config: RunConfig) -> bool:
    """Return whether a user's batch of environments runs on a GPU, or is large."""
    on_gpu = config.launch.device != "cpu" and torch.cuda.is_available()
    return on_gpu or config.train.num_envs >= MASSIVE_ENVS


def preset_of(kind: str, config: RunConfig, make_env: Callable[[], TorchEnv | None]) -> str:
    """Return the name of the preset to use.

    Args:
        kind: the value of --preset.
        config: the flags of the command line and, for the others, their defaults.
        make_env: returns a closed environment, or None if only ranks can make one; called only if
            the task's name decides nothing.
    """
    task = config.task
    if kind == "auto":
        if task.is_trading:
            kind = "trading"
        elif MEMORY_TASKS.fullmatch(task.env):
            kind = "memory"
        elif makes_batch(task.env) and is_massive(config):
            kind = "massive"
        else:
            env = make_env()
            kind = "small"
            if env and any(map(is_large, env.layout.parts)):
                kind = "pixels"
            elif env and isinstance(env.single_action_space, spaces.Box):
                kind = "control"
    if (kind in ("trading", "paper")) != task.is_trading:
        raise UserError(f"preset {kind} does not fit env {task.env}: omit --preset")
    return kind


def with_threads(config: RunConfig) -> RunConfig:
    """Return a copy with threads=1 if the network is small and threads is not set.

    If steps per minibatch * hidden_size**2 is below 10 million, one thread is as fast as two, and
    much faster if other programs use the CPU: see docs/performance.md. A CNN is not small.
    """
    train = config.train
    if train.chosen_preset == "pixels":
        return config
    steps = train.batch_size * train.bptt_steps  # steps per minibatch; 0: batch size still unknown
    if config.launch.threads or not 0 < steps * config.policy.hidden_size**2 < SMALL_NETWORK:
        return config
    return replace(config, launch=replace(config.launch, threads=1))


def check_data(config: RunConfig, task: Task) -> None:
    """Raise a UserError if the price file is missing, or has changed since the run began."""
    problem = "has changed since this run began"
    try:
        if task.digest() == config.data.data_digest:
            return
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    raise UserError(
        f"--data {config.data.data} {problem}: restore the file, or pass its new path with --data, "
        "or start a new run with --init_from"
    )


def probe(task: Task) -> TorchEnv | None:
    """Create and close a small environment of a task; return it, for its spaces and layout.

    Returns None if only ranks can make environments.

    Raises:
        UserError: a TorchEnv has action bounds other than -1 and 1. An exported policy could not
            apply them, because it does not contain the environment's code.
    """
    if not task.can_probe:
        return None
    env = task.probe_env()
    env.close()
    space = env.single_action_space
    is_box = isinstance(space, spaces.Box)
    # An environment with `spaces_json` is exempt: with the Gymnasium spaces in this JSON, an
    # exported policy scales and clips actions by itself.
    if is_box and not env.spaces_json and not ((space.low == -1) & (space.high == 1)).all():
        raise UserError(
            f"the actions of a TorchEnv must be Box(-1, 1), but are {space}: scale and clip them "
            "in its step"
        )
    return env


def empty_policy(config: RunConfig, layout: Layout, action_space: spaces.Space) -> Policy:
    """Build the policy of a run on the meta device, without allocating weights.

    Raises a UserError if the policy settings do not fit the spaces.
    """
    with torch.device("meta"):
        return Policy(config.policy, layout, action_space).to(config.launch.dtype)
