"""A run: its configuration by section, its directory, and the agent saved in it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from gymnasium import spaces

from agents.normalize import Normalizer
from agents.pipeline import NO_CASCADE
from agents.policy import Policy, PolicyConfig
from agents.ppo import PPOConfig
from agents.run.saved_state import action_space, check_shapes
from agents.sizes import TrainConfig, share_out
from agents.trainer import Job, MakeEnv
from envs.task import GymTask, TaskConfig
from envs.trading.config import TradingConfig
from envs.trading.market_data import DataConfig
from envs.trading.simulated_market import SimulatedMarketConfig
from envs.trading.task import TradingTask, prepare_task
from rl_dist.checkpoint.file import load_checkpoint
from rl_dist.checkpoint.folder import CHECKPOINT_DIR, Found, load_latest
from rl_dist.checkpoint.schema import RUN, kind_of
from rl_dist.config import read_sections, saved_form
from rl_dist.errors import UserError, unwritable
from rl_dist.hardware.plain_files import read_plain
from rl_dist.launch.launcher import LaunchConfig
from rl_dist.parallel.precision import autocast_dtype
from rl_dist.parallel.speed import SpeedConfig
from rl_dist.process_group.watchdog import end_rank
from rl_dist.telemetry.metrics import EVENT_FILES, METRICS_FILE, close_logging

JUDGING = "judging"

SECTIONS: dict[str, type] = {
    "launch": LaunchConfig,
    "speed": SpeedConfig,
    "train": TrainConfig,
    "ppo": PPOConfig,
    "policy": PolicyConfig,
    "task": TaskConfig,
    "data": DataConfig,
    "market": SimulatedMarketConfig,
    "trading": TradingConfig,
}
OWNERS = {item.name: name for name, section in SECTIONS.items() for item in dataclasses.fields(section)}
SUMMARY = "summary.json"  # of a finished run, and of no other
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
            raise UserError(NO_CASCADE)

    def to_dict(self) -> dict[str, Any]:
        """What files hold of it."""
        return saved_form(self)

    @staticmethod
    def from_dict(saved: Any) -> RunConfig:
        """Inverse of `to_dict`, but for what is not stored; see `read_sections`."""
        launch = saved.get("launch") if isinstance(saved, dict) else None
        if isinstance(launch, dict) and launch.get("strategy") == "auto" and "chosen_strategy" not in launch:
            saved = saved | {"launch": launch | {"strategy": "default"}}  # as default was called once
        return RunConfig(**read_sections(SECTIONS, saved))

    def job(self, make_env: MakeEnv, run_dir: Path, gpu_ids: tuple[int, ...] = (), **others: Any) -> Job:
        """What the trainer is given of it.

        Args:
            gpu_ids: of the one process of strategy dp.
            others: further fields of the job.
        """
        return Job(
            train=self.train,
            policy=self.policy,
            ppo=self.ppo,
            make_env=make_env,
            run_dir=run_dir,
            strategy=dataclasses.replace(self.launch.strategy_config, device_ids=gpu_ids),
            speed=self.speed,
            dtype=self.launch.dtype,
            config=self.to_dict(),
            **others,
        )

    def prepare_task(self, beat: Callable[[], None] = lambda: None) -> TradingTask | GymTask:
        """The markets and spans of the trading task, or the Gymnasium task.

        `beat` says that the work of its environments goes on.
        """
        if self.task.is_trading:
            return prepare_task(self.data, self.market, self.trading, self.ppo.gamma)
        return GymTask(self.task, end_rank, beat)


def fresh_directory(runs: Path) -> Path:
    """Make a directory named by the time; no two runs get the same."""
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        for number in itertools.count(1):
            path = runs / (f"{stamp}_{number}" if number > 1 else stamp)
            with suppress(FileExistsError):
                runs.mkdir(parents=True, exist_ok=True)
                path.mkdir()
                break
    except OSError as error:
        raise unwritable(str(runs), error) from None
    return path


class Configuration(Protocol):
    """What config.json can hold."""

    def to_dict(self) -> dict[str, Any]:
        """What files hold of it."""


def save_config(config: Configuration, run_dir: Path) -> None:
    """Write config.json, in place: it is what a training locks."""
    path, text = run_dir / "config.json", json.dumps(config.to_dict(), indent=2).encode() + b"\n"
    before = b""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        path.touch()
        before = read_plain(path)
        if text != before:
            _overwrite(path, text)
    except OSError as error:
        with suppress(OSError):
            if before:
                _overwrite(path, before)
        raise unwritable(str(error.filename or f"run_dir {run_dir}"), error) from None


def _overwrite(path: Path, data: bytes) -> None:
    """Replace what a file holds; a full disk leaves it as long as it was."""
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()


def set_results_aside(run_dir: Path) -> None:
    """Rename what says that a run has finished: it goes on."""
    for name in (SUMMARY, "plots/learning_curve.png", "plots/equity.png"):
        path = run_dir / name
        if path.exists():
            path.replace(path.with_name(f"{path.name}.superseded"))


def discard_unstarted(run_dir: Path) -> None:
    """Remove what a run that failed before its first iteration ended has written."""
    metrics = run_dir / METRICS_FILE
    if not run_dir.is_dir() or (run_dir / "checkpoints").exists() or (metrics.exists() and metrics.stat().st_size):
        return
    close_logging()
    shutil.rmtree(run_dir / "logs", ignore_errors=True)
    for path in (run_dir / "config.json", metrics, *run_dir.glob(EVENT_FILES)):
        path.unlink(missing_ok=True)
    if not any(run_dir.iterdir()):
        run_dir.rmdir()


def glance(task: TradingTask | GymTask) -> Any:
    """An environment to look at the spaces of: the smallest of the task."""
    if isinstance(task, TradingTask):
        return task.judging_env(task.markets("train", 1), task.spans.train)
    return task.training_env(1)


def check_resumable(state: dict[str, Any], config: RunConfig, task: TradingTask | GymTask, num_ranks: int) -> None:
    """Compare a checkpoint with the environments of now, before anything is written.

    Raises:
        UserError: names everything that differs.
    """
    check_shapes(state, config.policy, config.launch.dtype)
    env = glance(task)
    space = env.single_action_space
    discrete = isinstance(space, spaces.Discrete)
    num_actions = int(space.n) if isinstance(space, spaces.Discrete) else math.prod(space.shape)
    saved = len(state["carry"]["obs"])
    num_envs = share_out(config.train, 0, num_ranks, saved).global_num_envs
    kinds = {True: "discrete", False: "continuous"}
    compared = {
        "observation size": (int(env.single_observation_space.shape[0]), state["num_obs"]),
        "actions": (f"{num_actions} {kinds[discrete]}", f"{state['num_actions']} {kinds[state['discrete']]}"),
        f"environments on {num_ranks} rank(s)": (num_envs, saved),
    }
    if state["environments"] is not None and not getattr(env, "can_snapshot", False):
        compared["snapshots of environments"] = ("none", "some")
    env.close()
    differing = [f"{name} {here} (it has {there})" for name, (here, there) in compared.items() if here != there]
    refuse_differences(differing, "use the environment and the sizes it was trained with")


def refuse_differences(differing: list[str], cure: str) -> None:
    """Refuse a resume, if there are any; names all of them."""
    if differing:
        raise UserError(f"this differs from the run to resume: {', '.join(sorted(differing))}; {cure}")


@dataclass(frozen=True)
class LoadedAgent:
    """A trained policy with its normaliser, ready to act."""

    policy: Policy
    normalizer: Normalizer
    config: RunConfig
    iteration: int
    path: Path

    @property
    def run_dir(self) -> Path:
        """The directory of its run, or where the checkpoint was copied to."""
        folder = self.path.absolute().parent
        return folder.parent if folder.name == CHECKPOINT_DIR else folder


def load_saved(path: str | Path) -> Found:
    """A checkpoint file, or the newest valid one of a run directory.

    Raises:
        UserError, CheckpointError: there is none.
    """
    path = Path(path)
    if path.is_dir():
        newest = load_latest(path)
        if newest is None:
            raise UserError(f"{path} holds no valid checkpoint: give a run directory or a .pt file")
        return _of_training(newest)
    if not path.exists():
        raise UserError(f"{path} does not exist: give a run directory or a checkpoint file")
    return _of_training(Found(path, load_checkpoint(path)))


def _of_training(found: Found) -> Found:
    if kind_of(found.state) != RUN:
        raise UserError(f"{found.path} is no checkpoint of {RUN}: name one, or its run directory")
    return found


def load_newest(run_dir: Path) -> Found | None:
    """The newest valid checkpoint of a run; None only where there are none at all.

    Raises:
        UserError: there are some, but none is valid: beginning anew would overwrite them.
    """
    newest = load_latest(run_dir)
    if newest is None and any((run_dir / CHECKPOINT_DIR).glob("*.pt")):
        raise UserError(
            f"{run_dir} holds checkpoints, but none is valid: see python -m rl_dist.checkpoint verify {run_dir}; "
            "move them away to begin anew"
        )
    return newest and _of_training(newest)


def load_agent(path: str | Path, device: str | torch.device = "cpu") -> LoadedAgent:
    """Load a policy from a checkpoint or run directory, wherever it was trained.

    Raises:
        UserError, CheckpointError: nothing valid there.
    """
    file, state = load_saved(path)
    config = RunConfig.from_dict(json.loads(state["config"]))
    check_shapes(state, config.policy, config.launch.dtype)
    policy = Policy(config.policy, state["num_obs"], action_space(state)).to(config.launch.dtype)
    policy.low_precision = autocast_dtype(config.launch.precision)
    policy.load_state_dict(state["policy"])
    normalizer = Normalizer(state["num_obs"], enabled=config.train.normalize_obs)
    normalizer.load_state_dict(state["obs_normalizer"])
    return LoadedAgent(policy.to(device), normalizer.to(device), config, state["iteration"], file)
