"""One interface to what a run trains on: trading, or any Gymnasium environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from envs import TRADING_ID, find_spec, make_vector_env
from envs.vector.guards import end_process
from rl_dist.errors import printable
from rl_dist.flags import Field, Text, configuration, or_auto

AUTO = -1  # env_workers: a training measures it before it begins; elsewhere 0


@configuration
class TaskConfig:
    """Which environment to train on."""

    env: Text = TRADING_ID
    """Gymnasium id, or module:id to import a module first."""
    env_kwargs: Text = ""
    """JSON object of arguments for an environment other than StockTrading-v0."""
    vectorization: Literal["auto", "sync"] = "auto"
    """auto: the environment's own vector form if it seeds and resets each environment by itself
    (ours for CartPole-v1), else one after the other (sync)."""
    info_mask: bool = False
    """info["action_mask"] of another environment says which actions are allowed. A mask in a Dict
    observation under the key action_mask needs no flag."""
    previous_action: bool = False
    """Add the previous action to the observation of another environment."""
    previous_reward: bool = False
    """Add the previous reward to the observation of another environment."""
    eval_episodes: int = Field(100, ge=1, le=10**6)
    """Episodes that evaluate the policy of another environment."""
    env_timeout: float = Field(120.0, ge=0, le=10**6)
    """Longest time in seconds for one step or reset of another environment; 0: any."""
    env_restarts: int = Field(0, ge=0, le=10**9)
    """Largest number of rebuilds of a Python environment that raised, hung or returned NaN."""
    env_workers: Annotated[int, or_auto(AUTO)] = Field(0, ge=AUTO, le=1024)
    """Step the environments in this many processes of each rank and group, which pays where a step
    of all of them takes some 5 ms or more; 0: in the rank itself; auto: the fastest of 0, one per
    core and four per core, measured before training."""
    env_groups: int = Field(1, ge=1, le=2)
    """With workers: 2 halves of a rank's environments, so that the policy acts for one while the
    workers step the other."""

    def __post_init__(self) -> None:
        self.kwargs()

    @property
    def is_trading(self) -> bool:
        """True for our trading task."""
        return self.env == TRADING_ID

    def kwargs(self) -> dict[str, Any]:
        """Return the arguments in `env_kwargs`."""
        arguments: Any = None
        with suppress(ValueError, RecursionError):
            arguments = json.loads(self.env_kwargs or "{}")
        if not isinstance(arguments, dict):
            raise ValueError(
                "env_kwargs must be a JSON object such as '{\"size\": 3}', "
                f"got {self.env_kwargs!r}"
            )
        return arguments


# passed on to the environments, in the rank or in its workers
_OPTIONS = ["vectorization", "info_mask", "previous_action", "previous_reward"]
_OPTIONS += ["env_timeout", "env_restarts"]


@dataclass(frozen=True)
class GymTask:
    """Any Gymnasium id whose observations and actions are numbers."""

    config: TaskConfig
    end: Callable[[str], None] = end_process  # ends the process when an environment hangs for good
    heartbeat: Callable[[], None] = lambda: None  # called while environments make progress

    def __post_init__(self) -> None:
        find_spec(self.config.env)  # refuses an unknown one

    def training_env(
        self, num_envs: int, env_offset: int = 0, device: str = "cpu", kind: str = "environment"
    ) -> Any:
        """Make a batch of environments env_offset, ...; `kind` names it in messages."""
        config = self.config
        options: dict[str, Any] = {name: getattr(config, name) for name in _OPTIONS}
        options |= {"env_id": config.env, "num_envs": num_envs, "env_kwargs": config.kwargs()}
        options |= {"env_offset": env_offset, "device": device, "kind": kind}
        options["heartbeat"] = self.heartbeat
        if config.env_workers > 0:
            from envs.workers.env import WorkerEnv

            groups = config.env_groups
            return WorkerEnv(num_workers=config.env_workers, num_groups=groups, **options)
        return make_vector_env(end=self.end, **options)

    def evaluation_env(self, num_envs: int, env_offset: int = 0, device: str = "cpu") -> Any:
        """Make the same with another name in messages, as its numbers start at 0."""
        return self.training_env(num_envs, env_offset, device, "evaluation environment")

    def probe_env(self) -> Any:
        """Make one environment in this process, to look at."""
        config = replace(self.config, env_workers=0)
        return replace(self, config=config).training_env(1)

    def describe(self) -> str:
        """Return one line that names the environment."""
        return printable(f"environment: {self.config.env} {self.config.env_kwargs}".rstrip())
