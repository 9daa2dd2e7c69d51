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

from agents.clstm import Policy, PolicyConfig
from agents.normalize import Normalizer
from agents.pipeline import NO_CASCADE
from agents.ppo import PPOConfig
from agents.pretrained import load_pretrained
from agents.sizes import AUTO, TrainConfig, share_out
from agents.trainer import Job, MakeEnv, check_weights
from envs.market_data import DataConfig
from envs.simulated_market import SimulatedMarketConfig
from envs.task import GymTask, TaskConfig
from envs.trading_config import TradingConfig
from envs.trading_task import TradingTask, prepare_task
from rl_dist.checkpoint import CHECKPOINT_DIR, Found, load_checkpoint, load_latest
from rl_dist.flags import ParsedFlags
from rl_dist.launch import LaunchConfig, UserError
from rl_dist.metrics import EVENT_FILES, METRICS_FILE, close_logging
from rl_dist.precision import autocast_dtype
from rl_dist.run_files import read_plain
from rl_dist.speed import SpeedConfig
from rl_dist.watchdog import end_rank
from rl_dist.world import unwritable

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
# What a resumed run may change: how long, and where it runs.
CHANGEABLE = {"num_episodes", "total_steps", "num_gpus", "device", "strategy", "hybrid_form", "checkpoint_every"} | {
    "gpu_ids",
    "fallback",
    "keep_checkpoints",
    "keep_best",
    "on_save_error",
    "validate_every",
    "max_restarts",
    "on_event",
    "env_timeout",
    "env_restarts",
    "max_bad_steps",
    "sync_check_every",
    "collective_timeout",
    "monitor_every",
    "shard_size",
    "gradient_compression",
    "cudnn_autotune",
    "fused_adam",
    "compile",
    "profile",
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
            raise UserError(NO_CASCADE)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> RunConfig:
        """Inverse of `to_dict`.

        Raises:
            UserError: a section or field this version does not know.
        """
        launch = saved.get("launch", {})
        if launch.get("strategy") == "auto" and "chosen_strategy" not in launch:  # as default was called once
            saved = saved | {"launch": launch | {"strategy": "default"}}
        try:
            return RunConfig(**{name: SECTIONS[name](**values) for name, values in saved.items()})
        except (KeyError, TypeError) as error:
            raise UserError(f"the saved configuration does not fit this version: {error}") from None

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
        """Nested plain values."""


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


def resumed_config(saved: RunConfig, parsed: ParsedFlags) -> RunConfig:
    """The saved configuration, with the flags that a resumed run may change.

    Raises:
        UserError: flags were repeated with other values than the run was started with; names all of them.
    """
    sections: dict[str, Any] = {}
    differing: list[str] = []
    changeable = CHANGEABLE | _same_step(saved.train, parsed)
    for name in SECTIONS:
        old, new = getattr(saved, name), parsed.configs[name]
        given = sorted({item.name for item in dataclasses.fields(new)} & parsed.given)
        changes = {flag: getattr(new, flag) for flag in given if getattr(new, flag) != getattr(old, flag)}
        if changes.get("batch_size") == AUTO:  # it was measured when the run began
            del changes["batch_size"]
        if changes.get("strategy", "hybrid") != "hybrid":
            changes = {"hybrid_form": "shard", "shard_size": 0} | changes  # they would do nothing from here on
        if changes.get("hybrid_form") == "pipeline":
            changes = {"shard_size": 0} | changes  # so would this
        differing += [f"--{flag} {changes[flag]} (it has {getattr(old, flag)})" for flag in changes.keys() - changeable]
        kept = {flag: changes[flag] for flag in changes.keys() & changeable}
        sections[name] = dataclasses.replace(old, **kept | (_other_devices(kept) if name == "launch" else {}))
    _refuse_differences(differing, "leave out what differs, or start a fresh run")
    config = RunConfig(**sections)
    if config.train.total_steps and "num_episodes" in parsed.given:
        raise UserError("--num_episodes does nothing in a run that stops by --total_steps: give --total_steps")
    return config


def _other_devices(changes: dict[str, Any]) -> dict[str, Any]:
    """What no longer counts when a resumed run gets other ranks or another strategy."""
    reset: dict[str, Any] = {}
    if "gpu_ids" in changes and "num_gpus" not in changes:
        reset["num_gpus"] = -1
    if "gpu_ids" not in changes and changes.keys() & {"num_gpus", "device"}:
        reset["gpu_ids"] = ""
    if changes.keys() & {"strategy", "hybrid_form", "shard_size", "gradient_compression"}:  # else they do nothing
        reset |= {"chosen_strategy": "", "chosen_on": ""}
    return reset


def check_pretrained(config: RunConfig, task: TradingTask | GymTask) -> None:
    """Compare --pretrained with the run, before anything is written.

    Raises:
        UserError, CheckpointError: it does not fit, or is none.
    """
    if not isinstance(task, TradingTask):
        raise UserError(f"--pretrained was trained on markets and does nothing with --env {config.task.env}")
    env = glance(task)
    num_obs = int(env.single_observation_space.shape[0])
    env.close()
    found = load_pretrained(config.train.pretrained)
    found.check(config.policy, num_obs, config.trading.observation, normalize_obs=config.train.normalize_obs)


def glance(task: TradingTask | GymTask) -> Any:
    """An environment to look at the spaces of: the smallest of the task."""
    if isinstance(task, TradingTask):
        return task.judging_env(task.markets("train", 1), task.spans.train)
    return task.training_env(1)


def _same_step(old: TrainConfig, parsed: ParsedFlags) -> set[str]:
    """The sizes that may change together, because a gradient step still takes as many slots."""
    sizes = {"batch_size", "grad_accumulation"}
    new = {name: getattr(parsed.configs["train"], name) for name in sizes & parsed.given}
    same = new.get("batch_size") != AUTO and dataclasses.replace(old, **new).slots_per_step == old.slots_per_step
    return sizes if same else set()


def check_resumable(state: dict[str, Any], config: RunConfig, task: TradingTask | GymTask, num_ranks: int) -> None:
    """Compare a checkpoint with the environments of now, before anything is written.

    Raises:
        UserError: names everything that differs.
    """
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
    _refuse_differences(differing, "use the environment and the sizes it was trained with")


def _refuse_differences(differing: list[str], cure: str) -> None:
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
        return newest
    if not path.exists():
        raise UserError(f"{path} does not exist: give a run directory or a checkpoint file")
    return Found(path, load_checkpoint(path))


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
    return newest


def load_agent(path: str | Path, device: str | torch.device = "cpu") -> LoadedAgent:
    """Load a policy from a checkpoint or run directory, wherever it was trained.

    Raises:
        UserError, CheckpointError: nothing valid there.
    """
    file, state = load_saved(path)
    config = RunConfig.from_dict(json.loads(state["config"]))
    number = state["num_actions"]
    space = spaces.Discrete(number) if state["discrete"] else spaces.Box(-1.0, 1.0, (number,))
    policy = Policy(config.policy, state["num_obs"], space).to(config.launch.dtype)
    policy.low_precision = autocast_dtype(config.launch.precision)
    check_weights(policy, state["policy"])
    policy.load_state_dict(state["policy"])
    normalizer = Normalizer(state["num_obs"], enabled=config.train.normalize_obs)
    normalizer.load_state_dict(state["obs_normalizer"])
    return LoadedAgent(policy.to(device), normalizer.to(device), config, state["iteration"], file)
