"""The flags that choose a task, and the interface that all tasks implement.

A task defines what a run trains on and how the trained policy is scored. A task calls an agent like
a function. It does not need to know how a policy works, or that several ranks share the work.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import numpy as np
from pydantic import TypeAdapter
from torch import Tensor

from envs import TRADING_ID, import_home, makes_batch
from envs.vector.guards import end_process
from envs.vector.layout import TorchEnv
from rl_dist.errors import one_line
from rl_dist.flags import Field, Text, configuration, or_auto
from rl_dist.run_dir import RunDir

# Value of env_workers that stands for auto: training measures which number of workers is fastest;
# other commands use no workers.
AUTO_WORKERS = -1
_KWARGS = TypeAdapter(dict)


@configuration
class TaskConfig:
    """Flags that choose a run's environment and how to step it."""

    env: Text = TRADING_ID
    """Gymnasium id of the environment; module:id, whose module registers the id; or module:name of
    a class or function that makes an environment or, given num_envs, a batch of environments."""
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


# ---- agents, trials and their results


class Agent(Protocol):
    """Chooses actions for a batch of environments; may remember earlier calls."""

    def __call__(self, env: Any, obs: Tensor, episode_start: Tensor, /) -> Tensor:
        """Return actions [B, A] or [B] for observations [B, F] and episode starts [B]."""


@runtime_checkable
class TrainedAgent(Agent, Protocol):
    """An agent with a policy, as opposed to a rule."""

    def without_memory(self) -> Agent | None:
        """Return the agent with its memory cleared before every step.

        Return None if its policy is not a cascaded LSTM.
        """


TrainedAgents = Mapping[str, TrainedAgent]  # agents by name
Record = dict[str, np.ndarray]  # one agent's results; the first axis is the episode or market
Records = Mapping[str, Record]  # one record for each agent, by the agent's name
Results = Mapping[str, Records]  # the records of each trial, by the trial's name
Report = tuple[dict[str, Any], str]  # a summary, and a text to print
# Runs an agent on the episodes or markets with the given numbers. Returns each result as a list
# with one entry per episode or market.
RunAgent = Callable[[Agent, range], dict[str, list]]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Episodes or markets on which agents are compared; ranks may divide them."""

    agents: Mapping[str, Agent]
    count: int  # number of episodes or markets
    run: RunAgent


@dataclass(frozen=True, kw_only=True)
class Validation(Trial):
    """A trial that scores the policy during training."""

    figures: Callable[[Records], dict[str, float]]  # computes metrics from the results


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Amount of training and validation so far."""

    global_step: int  # environment steps of the training on all ranks
    episodes: int  # training episodes that have ended
    # "steps": environment steps of all validations; "longest": steps of their longest episode
    validated: dict[str, int] = field(default_factory=lambda: {"steps": 0, "longest": 0})


Seeds = Callable[[int, int], list[int]]  # (number of the first episode, count) -> seeds


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options of a validation or an evaluation; a task ignores those that it does not need."""

    seeds: Seeds
    counts: Counts  # counts of the training that made the first policy
    directory: RunDir  # run directory of the first policy
    picture: Path | None = None  # file for the picture of the results; None: the task chooses
    writes: bool  # True: this rank writes the files; False: another rank does
    after_training: bool = False  # True: final test of a training; False: of saved policies
    within_budget: bool = False  # True: limit the validations, see `Task.validation`
    open_test: bool = False  # True: evaluate on the test span of real prices
    num_worlds: int | None = None  # number of simulated markets; None: the task chooses
    video: Path | None = None  # folder for a GIF of the first episode; None: make no GIF
    # run directory and iteration of each evaluated policy, by the agent's name
    sources: Mapping[str, tuple[RunDir, int]] = field(default_factory=dict)


# ---- tasks


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """The settings from which a task is made."""

    task: TaskConfig = TaskConfig()
    sections: Mapping[str, Any] = field(default_factory=dict)  # settings of the run, by section
    discount: float = 0.8  # value of the flag gamma
    device: str = "cpu"
    # Ends the process if an environment hangs and cannot be interrupted.
    end: Callable[[str], None] = end_process
    heartbeat: Callable[[], None] = lambda: None  # called while environments make progress


class Task(Protocol):
    """Defines what a run trains on and how the trained policy is scored."""

    scored_by: str  # validation metric by which best.pt is chosen; larger is better
    metrics: tuple[str, ...]  # names of all metrics of a validation; empty: it never validates
    can_probe: bool = True  # False: only ranks can make environments
    tests_best: bool = False  # True: the final test after training also evaluates best.pt
    advice: str = ""  # points to documentation that helps if the policy does not learn
    watermark: str = ""  # text printed across the plots of results
    solved_at: float | None = None  # mean return at which the task is solved; None: unknown

    def describe(self) -> str:
        """Return the lines that a run prints about its task."""
        raise NotImplementedError

    def digest(self) -> str:
        """Return a digest that changes with the task's data; "" if the task reads no data."""
        return ""

    def probe_env(self) -> TorchEnv:
        """Make a small environment in this process, to read its spaces."""
        return self.training_env(1)

    def training_env(self, num_envs: int, env_offset: int = 0) -> TorchEnv:
        """Make environments whose global numbers start at `env_offset`."""
        raise NotImplementedError

    def release(self, env: TorchEnv) -> None:
        """Close environments that `training_env` made, unless the task needs them again."""
        env.close()

    def close(self) -> None:
        """Close what `release` has kept."""
        return

    def try_evaluation_env(self, env_offset: int) -> None:
        """Raise a UserError if no evaluation environment can be made during training."""
        return

    def validation(self, agent: TrainedAgent, options: EvaluationOptions) -> Validation | None:
        """Return a trial of the policy in training; None if there is nothing to validate on.

        If `options.within_budget` is set, the task must limit the steps of all validations of a run
        to a small share of the run's training steps. `Validation.figures` adds the steps of its
        validation to `options.counts.validated`.
        """
        raise NotImplementedError

    def tests(self, agents: TrainedAgents, options: EvaluationOptions) -> Mapping[str, Trial]:
        """Return the trials of an evaluation by name; agents["policy"] is the first policy."""
        raise NotImplementedError

    def report(self, results: Results, options: EvaluationOptions) -> Report:
        """Return a summary of the results of all trials and agents, and a text to print."""
        raise NotImplementedError


# Maps a Gymnasium id or another name to the module:name of a class or function. The class or
# function makes the task from TaskSettings. A user's module may add a task to this table:
# `--env my_module:MyTask-v0` imports the module before the name is looked up.
TASKS = {TRADING_ID: "envs.trading.task:TradingTask"}
# makes the task if --env is not in TASKS
GYM_TASK = "envs.gym_task:GymTask"
BATCH_TASK = "envs.batch_task:BatchTask"  # if --env names a function that makes a batch


def make_task(settings: TaskSettings) -> Task:
    """Make the task that `settings.task.env` names.

    Raises:
        ValueError: the task cannot be imported, its environment is unknown, or `scored_by` is not
            one of its metrics.
    """
    env = settings.task.env
    place = TASKS.get(import_home(env), BATCH_TASK if makes_batch(env) else GYM_TASK)
    module, _, name = place.partition(":")
    try:
        make = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"envs.task.TASKS names {place!r}: {one_line(error)}") from error
    task = make(settings)
    if task.metrics and task.scored_by not in task.metrics:
        raise ValueError(f"{place} is scored by {task.scored_by!r}, but has only {task.metrics}")
    return task
