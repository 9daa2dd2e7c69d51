"""Flags that choose a task, and the task class for Gymnasium environments."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from envs import TRADING_ID, find_spec, make_vector_env
from envs.vector.guards import end_process
from rl_dist.errors import printable
from rl_dist.flags import Field, Text, configuration, or_auto

AUTO = -1  # env_workers auto: training finds the fastest number; other commands use 0


@configuration
class TaskConfig:
    """Flags that choose the environment of a run and how it is stepped."""

    env: Text = TRADING_ID
    """Gymnasium id, or module:id to import a module first."""
    env_kwargs: Text = ""
    """JSON object of arguments for an environment other than StockTrading-v0."""
    vectorization: Literal["auto", "sync"] = "auto"
    """auto: step the environment's own vector version (for CartPole-v1 ours) if it can seed and
    reset each environment separately, else use sync; sync: step one environment after the other."""
    info_mask: bool = False
    """Read the allowed actions of another environment from info["action_mask"]. A mask that is the
    entry action_mask of a Dict observation is used without this flag."""
    previous_action: bool = False
    """Add the previous action to the observation of another environment."""
    previous_reward: bool = False
    """Add the previous reward to the observation of another environment."""
    eval_episodes: int = Field(100, ge=1, le=10**6)
    """Number of episodes in an evaluation on another environment."""
    env_timeout: float = Field(120.0, ge=0, le=10**6)
    """Time limit in seconds for one step or reset of another environment; 0: no limit."""
    env_restarts: int = Field(0, ge=0, le=10**9)
    """How often each environment may be rebuilt after it raised, hung or returned NaN."""
    env_workers: Annotated[int, or_auto(AUTO)] = Field(0, ge=AUTO, le=1024)
    """Number of processes, for each rank and group, that step the environments; 0: the rank steps
    them itself; auto: the fastest of 0, one per core and four per core, measured before training.
    Workers make training faster if one step of all environments takes 5 ms or more."""
    env_groups: int = Field(1, ge=1, le=2)
    """With workers: 2 lets the policy act for one half of a rank's environments while the workers
    step the other half."""

    def __post_init__(self) -> None:
        self.kwargs()

    @property
    def is_trading(self) -> bool:
        """True if the environment is our trading task."""
        return self.env == TRADING_ID

    def kwargs(self) -> dict[str, Any]:
        """Return `env_kwargs` as a dict."""
        arguments: Any = None
        with suppress(ValueError, RecursionError):
            arguments = json.loads(self.env_kwargs or "{}")
        if not isinstance(arguments, dict):
            raise ValueError(
                "env_kwargs must be a JSON object such as '{\"size\": 3}', "
                f"got {self.env_kwargs!r}"
            )
        return arguments


@dataclass(frozen=True)
class GymTask:
    """Makes the environments of a run; TradingTask does the same for trading."""

    config: TaskConfig
    end: Callable[[str], None] = end_process  # ends the process if a hang cannot be interrupted
    heartbeat: Callable[[], None] = lambda: None  # called while environments make progress

    def __post_init__(self) -> None:
        find_spec(self.config.env)  # raises if the environment is unknown

    def training_env(self, num_envs: int, env_offset: int = 0, device: str = "cpu") -> Any:
        """Make environments numbered from `env_offset`."""
        config = self.config
        names = ("vectorization", "info_mask", "previous_action", "previous_reward")
        options: dict[str, Any] = {name: getattr(config, name) for name in names}
        options["env_kwargs"] = config.kwargs()
        make: Any = partial(make_vector_env, num_envs=num_envs, end=self.end, **options)
        if config.env_workers > 0:
            from envs.workers.env import WorkerEnv

            workers, groups = config.env_workers, config.env_groups
            make = partial(WorkerEnv, num_envs, workers, groups, options=options)
        return make(
            env_id=config.env,
            env_offset=env_offset,
            device=device,
            heartbeat=self.heartbeat,
            env_timeout=config.env_timeout,
            env_restarts=config.env_restarts,
        )

    evaluation_env = training_env

    def probe_env(self) -> Any:
        """Make one environment in this process, so that its spaces can be read."""
        config = replace(self.config, env_workers=0)
        return replace(self, config=config).training_env(1)

    def describe(self) -> str:
        """Return one line that names the environment."""
        return printable(f"environment: {self.config.env} {self.config.env_kwargs}".rstrip())
