"""Flags that choose a task, and the task class for Gymnasium environments."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter

from envs import TRADING_ID, find_spec, make_vector_env
from envs.vector.guards import end_process
from rl_dist.errors import printable
from rl_dist.flags import Field, Text, configuration, or_auto

# Value of env_workers that stands for auto: training measures which number of workers is fastest;
# other commands use no workers.
AUTO_WORKERS = -1
_KWARGS = TypeAdapter(dict)


@configuration
class TaskConfig:
    """Flags that choose a run's environment and how to step it."""

    env: Text = TRADING_ID
    """Gymnasium id of the environment; if it has the form module:id, import the module first."""
    env_kwargs: Text = ""
    """JSON object with arguments for making the environment (not for StockTrading-v0)."""
    vectorization: Literal["auto", "sync"] = "auto"
    """sync: step the environments one after another. auto: step all environments in one call of the
    environment's vector version; if there is no vector version, or if it cannot seed and reset each
    environment separately, do the same as sync. For CartPole-v1, auto uses this project's vector
    version."""
    info_mask: bool = False
    """Read the allowed actions from info["action_mask"] (not for StockTrading-v0). If a Dict
    observation has an entry action_mask, this mask is used even without the flag."""
    previous_action: bool = False
    """Add the previous action to each observation (not for StockTrading-v0)."""
    previous_reward: bool = False
    """Add the previous reward to each observation (not for StockTrading-v0)."""
    eval_episodes: int = Field(100, ge=0, le=10**6)
    """Number of episodes in each evaluation (not for StockTrading-v0); 0: neither validation nor
    a final test."""
    env_timeout: float = Field(120.0, ge=0, le=10**6)
    """Time limit in seconds for one step or reset (not for StockTrading-v0); 0: no limit."""
    env_restarts: int = Field(0, ge=0, le=10**9)
    """Number of times that each environment may be rebuilt after it raised an error, hung or
    returned NaN."""
    env_workers: Annotated[int, or_auto(AUTO_WORKERS)] = Field(0, ge=AUTO_WORKERS, le=1024)
    """Number of worker processes that step the environments, for each rank and group. 0: the rank
    steps the environments itself; auto: before training, measure the speed without workers, with
    one worker per core and with four per core, then use the fastest of the three. Workers help if
    one step of all environments takes 5 ms or more."""
    env_groups: int = Field(1, ge=1, le=2)
    """Number of groups into which a rank's environments are divided; more than 1 needs workers.
    With 2 groups, the policy computes actions for one group while workers step the other."""

    def __post_init__(self) -> None:
        self.kwargs()

    @property
    def is_trading(self) -> bool:
        """True if the environment is our trading task."""
        return self.env == TRADING_ID

    def kwargs(self) -> dict:
        """Return `env_kwargs` as a dict."""
        try:
            return _KWARGS.validate_json(self.env_kwargs or "{}")
        except ValueError:
            raise ValueError(
                "env_kwargs must be a JSON object such as '{\"size\": 3}', "
                f"got {self.env_kwargs!r}"
            ) from None


@dataclass(frozen=True)
class GymTask:
    """Makes the Gymnasium environments of a run; for trading, see TradingTask."""

    config: TaskConfig
    # Ends the process if an environment hangs and cannot be interrupted.
    end: Callable[[str], None] = end_process
    heartbeat: Callable[[], None] = lambda: None  # called while environments make progress

    def __post_init__(self) -> None:
        find_spec(self.config.env)  # raises if the environment is unknown

    def training_env(self, num_envs: int, env_offset: int = 0, device: str = "cpu") -> Any:
        """Make environments whose global numbers start at `env_offset`."""
        config = self.config
        names = ("vectorization", "info_mask", "previous_action", "previous_reward")
        options: dict = {name: getattr(config, name) for name in names}
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

    @property
    def max_episode_steps(self) -> int | None:
        """Return the step limit that the environment is registered with, if any."""
        spec = find_spec(self.config.env)
        limit = self.config.kwargs().get("max_episode_steps", spec.max_episode_steps)
        return None if limit == -1 else limit  # Gymnasium's value for no limit

    def probe_env(self) -> Any:
        """Make one environment in this process, to read its spaces."""
        return replace(self, config=replace(self.config, env_workers=0)).training_env(1)

    def describe(self) -> str:
        """Return one line with the environment's id and arguments."""
        return printable(f"environment: {self.config.env} {self.config.env_kwargs}".rstrip())
