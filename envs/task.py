"""One interface to what a run trains on: trading, or any Gymnasium environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from envs import TRADING_ID, find_spec, make_vector_env
from envs.vector.hangs import end_process
from rl_dist.config import Text, configuration, setting


@configuration
class TaskConfig:
    """Which environment to train on."""

    env: Text = setting(TRADING_ID, main=True)
    """Gymnasium id, or module:id to import a module first."""
    env_kwargs: Text = setting("")
    """JSON object of arguments for an environment other than StockTrading-v0."""
    vectorization: Literal["auto", "sync", "native"] = setting("auto")
    """auto: the environment's own vector form if it seeds and resets each environment by itself,
    else one after the other (sync); native: its own vector form in any case."""
    eval_episodes: int = setting(100, "episodes", within=(1, 10**6))
    """Episodes that evaluate the policy of another environment."""
    env_timeout: float = setting(120.0, "seconds", within=(0, 10**6))
    """Longest time for one step or reset of another environment; 0: any."""
    env_restarts: int = setting(0, "restarts of each environment", within=(0, 10**9))
    """Make a Python environment that raised, hung or returned NaN again, this often at most."""

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
    """Any Gymnasium id with vector observations and Discrete or Box actions."""

    config: TaskConfig
    end: Callable[[str], None] = end_process  # ends the process when an environment hangs for good
    heartbeat: Callable[[], None] = lambda: None  # reports that work goes on

    def __post_init__(self) -> None:
        find_spec(self.config.env)  # an unknown one is an error at once

    def training_env(
        self, num_envs: int, env_offset: int = 0, device: str = "cpu", kind: str = "environment"
    ) -> Any:
        """Make a batch of environments env_offset, ... of the run."""
        return make_vector_env(
            self.config.env,
            num_envs,
            env_offset=env_offset,
            device=device,
            vectorization=self.config.vectorization,
            env_kwargs=self.config.kwargs(),
            env_timeout=self.config.env_timeout,
            env_restarts=self.config.env_restarts,
            end=self.end,
            heartbeat=self.heartbeat,
            kind=kind,
        )

    def evaluation_env(self, num_envs: int, env_offset: int = 0, device: str = "cpu") -> Any:
        """Make the same with a name of their own in messages, as numbers start at 0."""
        return self.training_env(num_envs, env_offset, device, "evaluation environment")

    def describe(self) -> str:
        """Return one line that names the environment."""
        return f"environment: {self.config.env} {self.config.env_kwargs}".rstrip()


def check_flags(
    config: TaskConfig, simulated: bool, given: set[str], owners: dict[str, str]
) -> None:
    """Refuse flags that cannot take effect; `owners` gives the section of each flag."""
    for name in sorted(given & owners.keys()):
        section = owners[name]
        reason = ""
        if not config.is_trading and section in ("data", "market", "trading"):
            reason = f"belongs to {TRADING_ID} and does nothing with --env {config.env}"
        elif config.is_trading and section == "task" and name != "env":
            reason = f"does nothing with {TRADING_ID}, which has flags of its own: see --help"
        elif config.is_trading and section == "market" and not simulated:
            reason = "belongs to the simulated market and does nothing with --data FILE"
        if reason:
            raise ValueError(f"--{name} {reason}")
