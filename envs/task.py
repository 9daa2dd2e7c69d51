"""One interface to what a run trains on: trading, or any Gymnasium environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from envs import TRADING_ID, find_spec, make_vector_env
from envs.vector.hangs import end_process

DATES = ("train_start", "train_end", "valid_start", "valid_end", "test_start", "test_end")
OF_OTHERS = ("env_kwargs", "vectorization", "eval_episodes", "env_timeout", "env_restarts")  # not of trading


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Which environment to train on."""

    env: str = field(
        default=TRADING_ID,
        metadata={"help": "Gymnasium id, or module:id to import a module first", "unit": ""},
    )
    env_kwargs: str = field(
        default="", metadata={"help": "JSON object of arguments for another environment", "unit": ""}
    )
    vectorization: str = field(
        default="auto",
        metadata={
            "help": "auto: a native vector environment if it keeps our promises, else one after the other; "
            "native forces it",
            "choices": ("auto", "sync", "native"),
        },
    )
    eval_episodes: int = field(
        default=100,
        metadata={"help": "episodes that judge the policy of another environment", "unit": "episodes"},
    )
    env_timeout: float = field(
        default=120.0,
        metadata={"help": "longest time for one step or reset of another environment; 0 = any", "unit": "seconds"},
    )
    env_restarts: int = field(
        default=0,
        metadata={
            "help": "make a Python environment that raised, hung or returned NaN anew, this often at most",
            "unit": "restarts of each environment",
        },
    )

    def __post_init__(self) -> None:
        if self.vectorization not in ("auto", "sync", "native"):
            raise ValueError(f"vectorization must be auto, sync or native, got {self.vectorization!r}")
        if not 1 <= self.eval_episodes <= 10**6:
            raise ValueError(f"eval_episodes must be 1..1000000, got {self.eval_episodes}")
        if not 0.0 <= self.env_timeout <= 1e6:
            raise ValueError(f"env_timeout must be 0..1000000 seconds, got {self.env_timeout:g}")
        if not 0 <= self.env_restarts <= 10**9:
            raise ValueError(f"env_restarts must be 0..1000000000, got {self.env_restarts}")
        self.kwargs()

    @property
    def is_trading(self) -> bool:
        """Whether this is our trading task."""
        return self.env == TRADING_ID

    def kwargs(self) -> dict[str, Any]:
        """The arguments in `env_kwargs`."""
        try:
            found = json.loads(self.env_kwargs or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"env_kwargs must be a JSON object, got {self.env_kwargs!r}: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"env_kwargs must be a JSON object such as '{{\"size\": 3}}', got {self.env_kwargs!r}")
        return found


@dataclass(frozen=True)
class GymTask:
    """Any Gymnasium id with vector observations and Discrete or Box actions."""

    config: TaskConfig
    end: Callable[[str], None] = end_process  # ends the process when an environment hangs for good
    beat: Callable[[], None] = lambda: None  # says that work goes on

    def __post_init__(self) -> None:
        find_spec(self.config.env)  # an unknown one is an error at once

    def training_env(self, num_envs: int, first_global_index: int = 0, device: str = "cpu") -> Any:
        """A batch of environments first_global_index, ... of the run."""
        return self._make(num_envs, first_global_index, device)

    def judging_env(self, num_envs: int, first_global_index: int = 0, device: str = "cpu") -> Any:
        """The same, told apart in messages: their numbers are not those of training."""
        return self._make(num_envs, first_global_index, device, kind="judged environment")

    def _make(self, num_envs: int, first_global_index: int, device: str, **guard: Any) -> Any:
        return make_vector_env(
            self.config.env,
            num_envs,
            first_global_index=first_global_index,
            device=device,
            vectorization=self.config.vectorization,
            env_kwargs=self.config.kwargs(),
            env_timeout=self.config.env_timeout,
            env_restarts=self.config.env_restarts,
            end=self.end,
            beat=self.beat,
            **guard,
        )

    def describe(self) -> str:
        """Which environment the run uses."""
        return f"environment: {self.config.env} {self.config.env_kwargs}".rstrip()


def check_flags(config: TaskConfig, simulated: bool, given: set[str], owners: dict[str, str]) -> None:
    """Refuse flags that cannot take effect.

    Args:
        given: flags on the command line. owners: section of each flag ("data", "market", "trading", ...).

    Raises:
        ValueError: names the flag and why it would do nothing.
    """
    sections = {name: owners[name] for name in sorted(given) if name in owners}
    for name, section in sections.items():
        if not config.is_trading and section in ("data", "market", "trading"):
            raise ValueError(f"--{name} belongs to {TRADING_ID} and does nothing with --env {config.env}")
        if config.is_trading and name in OF_OTHERS:
            raise ValueError(f"--{name} does nothing with {TRADING_ID}, which has flags of its own: see --help")
        if config.is_trading and not simulated and section == "market":
            raise ValueError(f"--{name} belongs to the simulated market and does nothing with --data FILE")
