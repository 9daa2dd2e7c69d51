"""The run that a command line means: a new one, or one to go on with."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from gymnasium import spaces

from agents.config import (
    MAIN_FLAGS,
    PRESETS,
    QUICK,
    SECTIONS,
    RunConfig,
    TrainConfig,
    probe,
    with_digest,
)
from agents.run.saved import load_newest, load_saved
from agents.run.sizes import shard_sizes
from envs import find_spec
from envs.task import GymTask, TaskConfig
from rl_dist.checkpoint.store import CHECKPOINT_DIR, Found, find_latest_run, latest_checkpoint
from rl_dist.errors import UserError, did_you_mean
from rl_dist.flags import ParsedFlags, parse_flags
from rl_dist.process_group.join import MAX_RESTARTS, elastic_count
from rl_dist.run_dir import RunDir

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


def _kind(text: str) -> str:
    """Parse a value of --preset."""
    if text and text not in PRESETS:
        fix = did_you_mean(text, PRESETS) or f"choose from {', '.join(PRESETS)}"
        raise argparse.ArgumentTypeError(f"there is no preset {text!r}: {fix}")
    return text


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
        help="continue the run in this directory from its newest checkpoint (a file is refused); "
        "auto: in run_dir, else the newest, else a new run",
    )
    group.add_argument(
        "--quick",
        action="store_true",
        help="a complete small run in half a minute, too short to learn",
    )
    group.add_argument(
        "--preset",
        default="",
        type=_kind,
        metavar="{" + ",".join(PRESETS) + "}",
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
    run_dir: Path | None  # None: none was named
    found: Found | None  # the checkpoint to go on from; None: the run begins
    lock: RunDir | None  # on a directory that holds a run already


def choose_run(parsed: ParsedFlags, held: ExitStack) -> ChosenRun:
    """Find the run to start; `held` closes its lock.

    The lock is taken before the checkpoint is chosen: no other training saves one meanwhile.
    """
    extra = parsed.extra
    lock: RunDir | None = None
    if elastic_count(MAX_RESTARTS) and extra.resume in ("", "auto"):
        if not extra.run_dir:
            raise UserError(
                "torchrun --max-restarts needs --run_dir DIR: a restart must find its run again"
            )
        extra.resume = "auto"
    named = Path(extra.run_dir) if extra.run_dir else None
    if extra.resume:
        if extra.resume == "auto" and named:  # it may have no checkpoint yet
            lock = _lock_existing(named, held)
        run_dir = _run_to_resume(extra.resume, named)
        if run_dir is not None:
            from agents.run.resumed import config_to_resume

            lock = lock or _lock_existing(run_dir, held)
            newest = load_newest(run_dir) if extra.resume == "auto" else None
            found = newest or load_saved(run_dir)
            config = config_to_resume(found, run_dir, parsed)
            _name_idle_flags(config, parsed, resumed=True)
            return ChosenRun(config, run_dir, found, lock)
        if is_first():
            print("nothing to resume: starting a fresh run")
    config = fresh_config(parsed)
    if named and is_first() and not extra.resume:
        check_unused(named)
    _name_idle_flags(config, parsed, resumed=False)
    return ChosenRun(config, named, None, lock)


def _name_idle_flags(config: RunConfig, parsed: ParsedFlags, *, resumed: bool) -> None:
    """Print the given flags that have no effect on the run."""
    idle = [name for name in config.idle_flags() if name in parsed.given]
    if resumed:  # the checkpoint decides
        idle += [name for name in ("preset", "quick") if getattr(parsed.extra, name)]
    if idle and is_first():
        print(f"no effect here: {', '.join(f'--{name}' for name in idle)}")


def check_unused(run_dir: Path) -> None:
    """Refuse to begin a run where other files are."""
    run = RunDir(run_dir)
    if not run_dir.is_dir() or run.is_unused():
        return
    if not run.checkpoints.exists() and not run.metrics_path.exists():
        raise UserError(f"run_dir {run_dir} holds other files: name a new or empty directory")
    fix = "it has no checkpoint: remove it"
    if latest_checkpoint(run_dir):
        fix = f"go on with --resume {run_dir}"
    raise UserError(f"run_dir {run_dir} holds a run already: {fix}, or name another")


def _lock_existing(run_dir: Path, held: ExitStack) -> RunDir | None:
    """Lock a run directory that holds a run, on the first process; else None."""
    run = RunDir(run_dir)
    if is_first() and (run.config_path.exists() or run.checkpoints.is_dir()):
        return held.enter_context(run.hold())
    return None


def fresh_config(parsed: ParsedFlags) -> RunConfig:
    """Return the configuration of a new run: defaults, preset, --quick, flags."""
    given, config = parsed.given, RunConfig(**parsed.configs)
    own = config.task.env, config.policy.core, config.train.callback
    if any(":" in name for name in own):
        from rl_dist.checkpoint.trust import import_from_here

        import_from_here(*own)
    kind = parsed.extra.preset or kind_of_task(config.task)
    if (kind in ("trading", "paper")) != config.task.is_trading:
        owner = "other environments" if config.task.is_trading else "StockTrading-v0"
        raise UserError(f"--preset {kind} belongs to {owner}: leave it out")
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
    if not batch or train.num_envs or not total or bptt == 1 or batch % bptt:  # 0: auto
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


def _run_to_resume(resume: str, named: Path | None) -> Path | None:
    """Return the run directory that --resume means; None: there is nothing to resume."""
    if resume == "auto":
        if named is None:
            return find_latest_run(RUNS)
        if _is_in_run(named.absolute()):
            raise UserError(f"run_dir {named} is inside a run: give --run_dir {named.parent}")
        return named if any((named / CHECKPOINT_DIR).glob("*.pt")) else None
    if named:
        raise UserError(f"--run_dir does nothing with --resume {resume}: leave it out")
    path = Path(resume)
    folder = path.absolute().parent if path.is_file() else path.absolute()
    in_run = _is_in_run(folder)
    if in_run or not path.is_dir():
        missing = "" if path.exists() else ", which does not exist"
        raise UserError(
            f"--resume takes a run directory, whose newest checkpoint counts, got {path}{missing}"
            + (f": give --resume {folder.parent}" if in_run else "")
        )
    return path


def _is_in_run(folder: Path) -> bool:
    """Return whether a folder is that of a run's checkpoints."""
    if folder.name != CHECKPOINT_DIR or (folder / "config.json").is_file():
        return False
    return (folder.parent / "config.json").is_file()
