"""Which run a command line means: a new one, or one to go on with."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agents.run.config import (
    OWNERS,
    RunConfig,
    load_newest,
    load_saved,
)
from agents.run.resumed import config_to_resume
from envs.task import check_flags
from rl_dist.checkpoint.folder import CHECKPOINT_DIR, Found, find_latest_run, latest_checkpoint
from rl_dist.checkpoint.run_lock import RunLock, hold
from rl_dist.config import ParsedFlags
from rl_dist.errors import UserError, explained, tell_once
from rl_dist.hardware.addresses import MAX_RESTARTS, elastic_count
from rl_dist.telemetry import events

RUNS = Path("runs")
# Rewards that credit a trade at once need neither a long horizon nor long traces, and a short horizon makes a trade
# wait for its moment: what the main job was tuned to (docs/LOG.md).
TRADING = {"learning_rate": 1e-3, "gamma": 0.8, "gae_lambda": 0.5}
QUICK = {"num_episodes": 96, "num_worlds": 16, "num_envs": 32, "batch_size": 64, "validate_every": 4}
PAPER = {
    "feature_window": 30,
    "observation": "paper",
    "order_unit": "shares",
    "max_order": 100.0,
    "execution": "close",
    "reward": "plain",
    "risk_aversion": 0.0,
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "anneal_lr": False,
}
DESCRIPTION = "Train a cascaded-LSTM PPO policy, on one rank or many, with the same learning curve."
EPILOG = """examples:
  python train_distributed.py --quick                          the whole path in half a minute
  python train_distributed.py                                  the main job: 5000 episodes, simulated market
  python train_distributed.py --num_gpus 2 --device cpu        the same with two CPU ranks
  python train_distributed.py --data prices.csv --train_end 2015-12-31 --test_start 2016-01-04
  python train_distributed.py --env CartPole-v1 --total_steps 200000
  python train_distributed.py --resume runs/2026-01-31_12-00-00 --num_episodes 10000
exit codes: 0 done, 1 failed, 2 bad usage, 130, 143, 138 and 129 stopped by INT, TERM, USR1 and HUP after saving"""


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that belong to no component."""
    group = parser.add_argument_group("run")
    group.add_argument("--run_dir", default="", metavar="DIR", help="where to write (default: runs/DATE_TIME)")
    what = "go on with this run; auto: with run_dir, or else the newest run, or else begin"
    group.add_argument("--resume", default="", metavar="DIR", help=what)
    group.add_argument("--quick", action="store_true", help="a complete small run in half a minute, too short to learn")
    group.add_argument("--preset", default="", choices=("", "paper"), help="paper: the form of arXiv 2212.02721")
    group.add_argument("--interactive", action="store_true", help="ask for the main flags in the terminal, then start")


def is_first() -> bool:
    """Whether this process writes and speaks; under torchrun every rank comes here."""
    return os.environ.get("RANK", "0") == "0"


def choose_run(parsed: ParsedFlags, held: ExitStack) -> tuple[RunConfig, Path | None, Found | None, RunLock | None]:
    """Configuration, run directory, checkpoint, and the lock on a run that exists.

    The directory is None where none was named, the checkpoint where a run begins. The lock is taken before the
    checkpoint is chosen, so that no other training saves one meanwhile; `held` closes it.
    """
    extra, lock = parsed.extra, None
    if elastic_count(MAX_RESTARTS) and extra.resume in ("", "auto"):
        if not extra.run_dir:
            raise UserError("torchrun --max-restarts needs --run_dir DIR here: a restart must find its run again")
        extra.resume = "auto"
    if extra.resume:
        if extra.resume == "auto" and extra.run_dir:  # it may have no checkpoint yet
            lock = lock_existing(Path(extra.run_dir), held)
        run_dir = _run_to_resume(parsed)
        if run_dir is not None:
            lock = lock or lock_existing(run_dir, held)
            found = (load_newest(run_dir) if extra.resume == "auto" else None) or load_saved(run_dir)
            return config_to_resume(found, run_dir, parsed), run_dir, found, lock
        if is_first():
            print("nothing to resume: starting a fresh run")
    config = fresh_config(parsed)
    if not extra.run_dir:
        return config, None, None, lock
    run_dir = Path(extra.run_dir)
    if is_first() and not extra.resume and run_dir.is_dir() and any(run_dir.iterdir()):
        if not (run_dir / "checkpoints").exists() and not (run_dir / "metrics.jsonl").exists():
            raise UserError(f"run_dir {run_dir} holds other files: name a new or empty directory")
        resume = f"go on with --resume {run_dir}" if latest_checkpoint(run_dir) else "it has no checkpoint: remove it"
        raise UserError(f"run_dir {run_dir} holds a run already: {resume}, or name another")
    return config, run_dir, None, lock


def lock_existing(run_dir: Path, held: ExitStack) -> RunLock | None:
    """Lock a run directory that holds a run, on the first process; else None."""
    path = run_dir / "config.json"
    if is_first() and (path.exists() or (run_dir / CHECKPOINT_DIR).is_dir()):
        return held.enter_context(hold(path))
    return None


def fresh_config(parsed: ParsedFlags) -> RunConfig:
    """What the flags of a new run lead to, with the defaults of task and presets.

    Raises:
        ValueError: flags that cannot take effect.
    """
    extra, is_trading = parsed.extra, parsed.configs["task"].is_trading
    check_flags(parsed.configs["task"], parsed.configs["data"].data == "simulated", parsed.given, OWNERS)
    if extra.preset and not is_trading:
        raise UserError(f"--preset {extra.preset} belongs to StockTrading-v0: leave it out")
    defaults: dict[str, Any] = TRADING if is_trading else {}
    parsed = parsed.with_defaults(defaults | (PAPER if extra.preset else {}) | (QUICK if extra.quick else {}))
    config = RunConfig(**parsed.configs)
    if config.train.total_steps and "num_episodes" in parsed.given:
        raise UserError("--num_episodes does nothing beside --total_steps: leave one of them out")
    return config


def _run_to_resume(parsed: ParsedFlags) -> Path | None:
    """The run directory that --resume means; None: there is nothing to go on with."""
    extra = parsed.extra
    if extra.resume == "auto":
        if extra.run_dir:
            return Path(extra.run_dir) if any(Path(extra.run_dir, CHECKPOINT_DIR).glob("*.pt")) else None
        return find_latest_run(RUNS)
    for name in ("run_dir", "preset", "quick"):
        if getattr(extra, name):
            raise UserError(f"--{name} does nothing with --resume {extra.resume}: leave it out")
    if "pretrained" in parsed.given:
        raise UserError(f"--pretrained does nothing with --resume {extra.resume}: leave it out")
    if Path(extra.resume).is_file():
        raise UserError(f"--resume takes a run directory (its newest checkpoint counts), got the file {extra.resume}")
    return Path(extra.resume)


def refuse(error: ValueError | OSError, config: RunConfig | None, run_dir: Path | None) -> int:
    """Say why there is nothing to start, and return the exit code."""
    message, code = explained(error)
    tell_once(f"error: {message}")
    if code != 2 and config and run_dir and is_first():  # a mistake at the keyboard is no event
        events.configure(config.launch.on_event, run_dir)
        events.notify("failed", message, exit_code=code)
        events.close()
    return code
