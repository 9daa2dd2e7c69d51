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
    observation under the key action_mask is found without."""
    previous_action: bool = False
    """The action before it is part of the observation of another environment."""
    previous_reward: bool = False
    """The reward before it is part of the observation of another environment."""
    eval_episodes: int = Field(100, ge=1, le=10**6)
    """Episodes that evaluate the policy of another environment."""
    env_timeout: float = Field(120.0, ge=0, le=10**6)
    """Longest time in seconds for one step or reset of another environment; 0: any."""
    env_restarts: int = Field(0, ge=0, le=10**9)
    """Make a Python environment that raised, hung or returned NaN again, this often at most."""
    env_workers: Annotated[int, or_auto(AUTO)] = Field(0, ge=AUTO, le=1024)
    """Step the environments in this many processes of each rank, which pays where a step of all of
    them takes some 5 ms or more; 0: in the rank itself; auto: the fastest of 0, one per core and
    four per core, measured before training."""
    env_groups: int = Field(1, ge=1, le=2)
    """With workers: 2 halves of a rank's environments, so that the policy acts for one while the
    workers step the other."""

    def __post_init__(self) -> None:
        self.kwargs()

    @property
    def is_trading(self) -> bool:
        """Whether this is our trading task."""
        return self.env == TRADING_ID

    def kwargs(self) -> dict[str, Any]:
        """The arguments in `env_kwargs`."""
        found: Any = None
        with suppress(ValueError, RecursionError):
            found = json.loads(self.env_kwargs or "{}")
        if not isinstance(found, dict):
            raise ValueError(
                "env_kwargs must be a JSON object such as '{\"size\": 3}', "
                f"got {self.env_kwargs!r}"
            )
        return found


@dataclass(frozen=True)
class GymTask:
    """Any Gymnasium id whose observations and actions are numbers."""

    config: TaskConfig
    end: Callable[[str], None] = end_process  # ends the process when an environment hangs for good
    heartbeat: Callable[[], None] = lambda: None  # reports that work goes on

    def __post_init__(self) -> None:
        find_spec(self.config.env)  # an unknown one is an error at once

    def training_env(self, num_envs: int, env_offset: int = 0, device: str = "cpu") -> Any:
        """Make a batch of environments env_offset, ... of the run."""
        return self._make(num_envs, env_offset, device, "environment", self.config.env_groups)

    def evaluation_env(self, num_envs: int, env_offset: int = 0, device: str = "cpu") -> Any:
        """Make the same with a name of their own in messages, as numbers start at 0."""
        return self._make(num_envs, env_offset, device, "evaluation environment")

    def probe_env(self) -> Any:
        """Make one environment in this process, to look at."""
        return replace(self, config=replace(self.config, env_workers=0, env_groups=1))._make()

    def _make(
        self,
        num_envs: int = 1,
        env_offset: int = 0,
        device: str = "cpu",
        kind: str = "environment",
        groups: int = 1,
    ) -> Any:
        config = self.config
        how: dict[str, Any] = {"vectorization": config.vectorization, "env_kwargs": config.kwargs()}
        how |= {"env_timeout": config.env_timeout, "end": self.end, "heartbeat": self.heartbeat}
        for name in ("info_mask", "previous_action", "previous_reward"):
            how[name] = getattr(config, name)
        how |= {"env_offset": env_offset, "device": device, "kind": kind}
        how |= {"env_restarts": config.env_restarts}
        if config.env_workers > 0:
            from envs.workers.env import WorkerEnv

            return WorkerEnv(config.env, num_envs, config.env_workers, groups, **how)
        return make_vector_env(config.env, num_envs, **how)

    def describe(self) -> str:
        """Return one line that names the environment."""
        return printable(f"environment: {self.config.env} {self.config.env_kwargs}".rstrip())
