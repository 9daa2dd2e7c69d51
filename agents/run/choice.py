"""The run that a command line means: a new one, or one to continue."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gymnasium import spaces

from agents.config import (
    AUTO,
    MAIN_FLAGS,
    PRESETS,
    QUICK,
    SECTIONS,
    RunConfig,
    TrainConfig,
    data_digest,
    probe,
    with_digest,
)
from agents.run.saved import check_shapes, load_newest, load_saved, spaces_of
from agents.run.sizes import shard_sizes
from envs import find_spec
from envs.task import GymTask, TaskConfig
from rl_dist.checkpoint.store import CHECKPOINT_DIR, Found, find_latest_run
from rl_dist.checkpoint.trust import check_named, import_from_here
from rl_dist.errors import UserError
from rl_dist.flags import ParsedFlags, parse_flags
from rl_dist.process_group.join import MAX_RESTARTS, elastic_count
from rl_dist.run_dir import RunDir, runs_below

if TYPE_CHECKING:
    from envs.trading.task import TradingTask

RUNS = Path("runs")
DESCRIPTION = "Train a cascaded-LSTM PPO policy, on one rank or many, with the same learning curve."
EPILOG = """examples:
  python train_distributed.py --quick                          the whole path in half a minute
  python train_distributed.py                                  the main job: 5000 episodes
  python train_distributed.py --num_gpus 2 --device cpu        the same with two CPU ranks
  python train_distributed.py --data prices.csv --test_start 2016-01-04
  python train_distributed.py --env CartPole-v1 --total_steps 200000
  python train_distributed.py --resume runs/2026-01-31_12-00-00 --num_episodes 10000
exit codes: 0 done, 1 failed, 2 bad usage, stopped after saving: 130 (INT),
143 (TERM), 138 (USR1), 129 (HUP)"""

# the usual names of our flags in Stable-Baselines3, CleanRL, RLlib and rl_games
OTHER_NAMES = {
    "lr": "learning_rate",
    "n_envs": "num_envs",
    "num_workers": "num_envs",
    "n_steps": "num_steps",
    "horizon_length": "num_steps",
    "seq_len": "bptt_steps",
    "minibatch_size": "batch_size",
    "num_minibatches": "batch_size",
    "n_epochs": "update_epochs",
    "total_timesteps": "total_steps",
    "lam": "gae_lambda",
    "tau": "gae_lambda",
    "clip_range": "clip_coef",
    "env_id": "env",
    "log_dir": "run_dir",
}

# A resumed run may change how long and where it runs, and what it keeps and reports.
CHANGEABLE = {
    "num_episodes", "total_steps",
    "num_gpus", "gpu_ids", "device", "threads", "strategy", "hybrid_form", "shard_size",
    "gradient_compression", "fallback", "max_restarts",
    "collective_timeout", "startup_timeout", "env_timeout", "env_restarts", "env_workers",
    "env_groups", "max_bad_steps", "loggers",
    "checkpoint_every", "keep_checkpoints", "keep_best", "on_save_error", "validate_every",
    "stop_at", "callback",
    "on_event", "sync_check_every", "monitor_every", "profile",
}  # fmt: skip
KEPT_CHOICES = (("batch_size", "auto"), ("precision", "auto"))


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that belong to no component."""
    group = parser.add_argument_group("run")
    group.add_argument(
        "--run_dir", default="", metavar="DIR", help="directory to write (default: runs/DATE_TIME)"
    )
    group.add_argument(
        "--resume",
        default="",
        metavar="DIR",
        help="continue the run in this directory from its newest checkpoint; auto: in run_dir, "
        "else the newest, else a new run",
    )
    group.add_argument(
        "--quick",
        action="store_true",
        help="a complete small run in half a minute, too short to learn",
    )
    group.add_argument(
        "--preset",
        default="",
        choices=PRESETS,
        help="defaults for a kind of task; by itself trading for StockTrading-v0, control for Box "
        "actions, small for others, memory for the memory tasks; paper: the settings of arXiv "
        "2212.02721",
    )
    group.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="train once with each of these seeds, and report means and their intervals",
    )
    group.add_argument(
        "--interactive",
        action="store_true",
        help="ask for the main flags in the terminal, then start",
    )


def parse_training(argv: Sequence[str] | None = None) -> ParsedFlags:
    """Parse the command line of train_distributed.py."""
    return parse_flags(
        SECTIONS,
        argv,
        description=DESCRIPTION,
        epilog=EPILOG,
        extra=add_run_flags,
        main=MAIN_FLAGS,
        other_names=OTHER_NAMES,
    )


def is_first() -> bool:
    """Return whether this process writes and prints: under torchrun, one rank does."""
    return os.environ.get("RANK", "0") == "0"


class ChosenRun(NamedTuple):
    """A run to start."""

    config: RunConfig
    run_dir: Path | None  # None: a new one below runs/
    found: Found | None  # the checkpoint to continue from; None: the run begins
    lock: RunDir | None  # on a directory that holds a run already


def choose_run(parsed: ParsedFlags, held: ExitStack) -> ChosenRun:
    """Find the run to start; `held` closes its lock.

    The lock is taken before the checkpoint is chosen, so that no other training can save another.
    """
    extra, resume = parsed.extra, parsed.extra.resume
    run_dir = Path(extra.run_dir) if extra.run_dir else None
    if elastic_count(MAX_RESTARTS) and not resume:
        resume = "auto"
    if resume == "auto" and not run_dir and elastic_count(MAX_RESTARTS):
        raise UserError(
            "torchrun --max-restarts needs --run_dir DIR: a restart must find its run again"
        )
    if resume == "auto":
        run_dir = run_dir or find_latest_run(RUNS)
    elif resume:
        run_dir = Path(resume)
        if not (run_dir / CHECKPOINT_DIR).is_dir():
            fix = runs_below(run_dir) or "give the directory of a run"
            raise UserError(f"--resume needs a folder {run_dir / CHECKPOINT_DIR}: {fix}")
    elif run_dir and is_first() and not RunDir(run_dir).is_unused():
        raise UserError(
            f"run_dir {run_dir} is not empty: continue its run with --resume {run_dir}, or name "
            "another directory"
        )

    lock: RunDir | None = None
    found: Found | None = None
    if resume and run_dir:
        run = RunDir(run_dir)
        if is_first() and (run.config_path.exists() or run.checkpoints.is_dir()):
            lock = held.enter_context(run.hold())
        found = load_newest(run_dir) if resume == "auto" else load_saved(run_dir)
    if found and run_dir:
        config = config_to_resume(found, run_dir, parsed)
    else:
        config = fresh_config(parsed)
        if resume and is_first():
            print("nothing to resume: starting a fresh run")

    idle = [name for name in config.idle_flags() if name in parsed.given]
    if found:  # the checkpoint decides
        names = ("preset", "quick") if resume == "auto" else ("preset", "quick", "run_dir")
        idle += [name for name in names if getattr(extra, name)]
    if idle and is_first():
        print(f"no effect here: {', '.join(f'--{name}' for name in idle)}")
    return ChosenRun(config, run_dir, found, lock)


# ---- a new run


def fresh_config(parsed: ParsedFlags) -> RunConfig:
    """Return the configuration of a new run: defaults, preset, --quick, flags."""
    given, config = parsed.given, RunConfig(**parsed.configs)
    import_from_here(config.task.env, config.policy.core, config.train.callback)
    kind = parsed.extra.preset or kind_of_task(config.task)
    if (kind in ("trading", "paper")) != config.task.is_trading:
        raise UserError(f"--preset {kind} does not fit --env {config.task.env}: omit it")
    preset = PRESETS[kind] | {"chosen_preset": kind}
    # sizes follow from those that are given
    if "bptt_steps" in given:
        preset.pop("num_steps", None)
    if given.keys() & {"batch_size", "num_steps", "bptt_steps", "grad_accumulation"}:
        preset.pop("num_envs", None)
    if "num_episodes" in given:
        preset.pop("total_steps", None)
    if parsed.extra.quick:
        preset |= QUICK
    config = RunConfig().changed(preset | given).without_idle()
    if "batch_size" in given:
        _refuse_batch_of_steps(config.train)
    return dataclasses.replace(config, data=with_digest(config.data))


def _refuse_batch_of_steps(train: TrainConfig) -> None:
    """Refuse a batch that makes an iteration longer than the whole run: it may mean steps."""
    batch, bptt, total = train.batch_size, train.bptt_steps, train.total_steps
    if batch == AUTO or train.num_envs or not total or bptt == 1 or batch % bptt:
        return
    steps = shard_sizes(train, 0, 1).global_num_envs * train.num_steps
    if steps > total >= steps // bptt:
        raise UserError(
            f"batch_size {batch} counts sequences of {bptt} steps, so one iteration is {steps:,} "
            f"steps, more than total_steps {total:,}: give --batch_size {batch // bptt} for "
            f"minibatches of {batch} steps, or --num_envs, too, if you mean sequences"
        )


def kind_of_task(task: TaskConfig) -> str:
    """Return the preset for a task, by its environment."""
    if task.is_trading:
        return "trading"
    if str(find_spec(task.env).entry_point).startswith("envs.memory_tasks:"):
        return "memory"
    is_box = isinstance(probe(GymTask(task)).action_space, spaces.Box)
    return "control" if is_box else "small"


def describe_preset(config: RunConfig) -> str:
    """Return one line that names the preset and its values that hold."""
    kind = config.train.chosen_preset
    values = config.values
    held = [f"{name} {value}" for name, value in PRESETS[kind].items() if values[name] == value]
    return f"preset {kind}: {', '.join(held) or 'all by flags'} (--preset chooses another)"


# ---- a run that continues


def config_to_resume(found: Found, run_dir: Path, parsed: ParsedFlags) -> RunConfig:
    """Return the saved configuration with the flags that may change."""
    config = resumed_config(RunConfig.from_dict(json.loads(found.state["config"])), parsed.given)
    data = config.data
    if data.data_digest and data_digest(data) not in ("", data.data_digest):
        raise UserError(
            f"--data {data.data} has changed since this run began: bring the file back, or begin a "
            f"run with --init_from {run_dir}"
        )
    # own modules may lie in the current directory; a foreign run must not name others
    task, core, callback = config.task, config.policy.core, config.train.callback
    import_from_here(task.env, core, callback)
    for section, saved in (
        ("task", {"env": task.env, "env_kwargs": task.env_kwargs}),
        ("policy", {"core": core}),
        ("train", {"callback": callback}),
    ):
        check_named(run_dir, section, saved, parsed.given.get(next(iter(saved))))
    return config


def resumed_config(saved: RunConfig, given: Mapping[str, str]) -> RunConfig:
    """Return a saved configuration with flags that may change; refuse all others."""
    old, new = saved.values, RunConfig().changed(given).values
    changes = {
        name: new[name]
        for name, text in given.items()
        # the value that auto chose when the run began stays
        if new[name] != old[name] and (name, text) not in KEPT_CHOICES
    }
    reset: dict[str, Any] = {}  # fields that mean nothing on other ranks or with another strategy
    if "gpu_ids" in changes and "num_gpus" not in changes:
        reset["num_gpus"] = -1
    if "gpu_ids" not in changes and changes.keys() & {"num_gpus", "device"}:
        reset["gpu_ids"] = ""
    if "threads" not in changes and changes.keys() & {"num_gpus", "device", "gpu_ids"}:
        reset["threads"] = 0
    if changes.keys() & {"strategy", "hybrid_form", "shard_size", "gradient_compression"}:
        reset |= {"chosen_strategy": "", "chosen_on": ""}
    config = saved.changed(reset | changes)
    changeable = CHANGEABLE
    if config.train.sequences_per_step == saved.train.sequences_per_step:
        changeable = changeable | {"batch_size", "grad_accumulation"}
    refuse_differences(
        [f"--{n} {v} (it has {old[n]})" for n, v in changes.items() if n not in changeable],
        "omit what differs, or start a fresh run",
    )
    return config.without_idle()


def check_resumable(
    state: dict[str, Any], config: RunConfig, task: TradingTask | GymTask, num_ranks: int
) -> None:
    """Raise UserError if a checkpoint does not fit today's environments."""
    check_shapes(state, config.policy, config.launch.dtype)
    saved_envs = len(state["carry"]["obs"])
    probed = probe(task)
    policy = probed.empty_policy(config)
    names = ("num_obs", "num_actions", "discrete", "action_sizes")
    compared = {name: (policy.shapes()[name], state[name]) for name in names}
    compared["observations"] = (policy.layout.kinds(), spaces_of(state)[0].kinds())
    num_envs = shard_sizes(config.train, 0, num_ranks, saved_envs).global_num_envs
    compared[f"environments on {num_ranks} rank(s)"] = (num_envs, saved_envs)
    if state["environments"] is not None:
        compared["snapshots of environments"] = (probed.can_snapshot, True)
    refuse_differences(
        [
            f"{name} {now} (it has {before})"
            for name, (now, before) in compared.items()
            if now != before
        ],
        "use the environment, sizes and version it was trained with",
    )


def refuse_differences(differing: list[str], fix: str) -> None:
    """Raise UserError if something differs from the run to resume."""
    if differing:
        raise UserError(
            f"this differs from the run to resume: {', '.join(sorted(differing))}; {fix}"
        )
