"""Train a recurrent PPO policy on one rank or many.

Run it as `python train_distributed.py --num_gpus N`.
"""

from __future__ import annotations

if __name__ == "__main__":  # before anything slow is imported
    from rl_dist.launch.supervisor import supervise

    supervise()

import argparse
import dataclasses
import json
import logging
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from agents.dry_run.batch_size import settle_batch_size
from agents.dry_run.memory_advice import JUDGING, check_rollouts, limit_reached
from agents.dry_run.strategy import settle_strategy
from agents.evaluate.command import judge_run, validation
from agents.pretrain.weights import check_pretrained, load_pretrained
from agents.run.bottleneck import bottleneck
from agents.run.config import (
    OWNERS,
    SECTIONS,
    SUMMARY,
    RunConfig,
    check_resumable,
    discard_unstarted,
    fresh_directory,
    load_newest,
    load_saved,
    save_config,
    set_results_aside,
)
from agents.run.interactive import ask_user
from agents.run.resumed import config_to_resume
from agents.run.sizes_table import sizes_table
from agents.sizes import AUTO, share_out
from agents.trainer import MakeEnv, Training, train
from envs.task import GymTask, check_flags
from envs.trading.simulated_market import market_card
from envs.trading.task import TradingTask
from envs.vector.faults import EnvironmentFault, Interruption
from rl_dist.checkpoint.file import load_checkpoint
from rl_dist.checkpoint.folder import CHECKPOINT_DIR, Found, find_latest_run, latest_checkpoint
from rl_dist.checkpoint.run_lock import RunLock, hold, hold_new
from rl_dist.config import ParsedFlags, parse_flags
from rl_dist.errors import FULL_DISK, UserError, explained, explains_errors, outlive_readers, tell_once, unwritable
from rl_dist.hardware.addresses import MAX_RESTARTS, elastic_count
from rl_dist.hardware.plain_files import leads_to
from rl_dist.launch.fallback import settle_launch
from rl_dist.launch.launcher import ResolvedLaunch, launch, restart_count
from rl_dist.launch.rank import mark_failure
from rl_dist.parallel.speed import check_compiler
from rl_dist.process_group.collectives import agree_max, gather_json
from rl_dist.process_group.hashes import parameter_hash
from rl_dist.process_group.process_ends import STOP_SIGNALS, report
from rl_dist.process_group.world import end_at_signals, open_world, stop_flag
from rl_dist.speedup.outcome import describe, outcome_of
from rl_dist.telemetry import events
from rl_dist.telemetry.metrics import open_writer, setup_logging, truncate_metrics, write_whole
from rl_dist.telemetry.monitor import Monitor, sources_of

RUNS = Path("runs")
logger = logging.getLogger("train_distributed")  # for the log files
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


def go_back(run_dir: Path) -> Found | None:
    """Cut the metrics back to the newest checkpoint."""
    newest = load_newest(run_dir)
    truncate_metrics(run_dir, newest.state["iteration"] if newest else 0)
    return newest


def run_rank(
    config: RunConfig, resolved: ResolvedLaunch, run_dir: Path, resume_from: str, lock: RunLock | None
) -> int:
    """What every rank does: train, judge, leave. Returns the exit code."""
    world = open_world(resolved.device_type, config.train.collective_timeout, resolved.gpu_ids)
    found: Found | None = None
    closing = ExitStack()
    try:
        if world.main and restart_count():
            found = go_back(run_dir)
            resume_from = str(found.path) if found else ""
        chosen = gather_json([str(run_dir), resume_from], world)[0]  # torchrun's ranks may have chosen differently
        run_dir, resume_from = Path(chosen[0]), chosen[1]
        if world.main:
            events.configure(config.launch.on_event, run_dir)
        setup_logging(run_dir, world.rank)
        logger.info("%s, rank %d of %d on %s", config.task.env, world.rank, world.size, world.device)
        task = config.prepare_task(world.beat)
        make_env: MakeEnv = lambda count, first: task.training_env(count, first, str(world.device))  # noqa: E731
        config = settle_batch_size(config, make_env, run_dir, world)
        config = settle_strategy(config, resolved, task, world, run_dir)
        if (warning := check_rollouts(config, world.device, world.size)) and world.main:
            logger.warning(warning)
        starts_pretrained = bool(config.train.pretrained) and not resume_from
        job = config.job(
            make_env,
            run_dir,
            resolved.gpu_ids,
            validate=validation(task, config, world),
            explain=bottleneck,
            pretrained=load_pretrained(config.train.pretrained) if starts_pretrained else None,
        )
        training = Training(job, world)
        training.monitor = Monitor(sources_of(world.device), config.train.monitor_every)
        closing.callback(training.monitor.close)
        if resume_from:
            training.restore(found.state if found else load_checkpoint(resume_from))
        if world.main and training.progress < 1.0:
            set_results_aside(run_dir)
        by_steps = config.train.total_steps
        writer = open_writer(
            run_dir,
            world,
            by_steps or config.train.num_episodes,
            "steps" if by_steps else "episodes",
            start=training.global_step if by_steps else training.episodes,
            purge_step=training.global_step + 1,
            lock=(lock.path, lock.file) if lock else None,
        )
        closing.callback(writer.close)
        if not getattr(training.env, "can_snapshot", False):
            writer.say(
                f"{config.task.env} cannot be snapshot: after --resume its episodes begin anew "
                "(envs/vector/snapshots.py tells how an environment takes part)"
            )
        signum = train(training, writer, stop_flag)
        logger.info("trained to iteration %d, %d steps", training.iteration, training.global_step)
        writer.close()
        if signum:
            if world.main:
                print(f"stopped by {signal.Signals(signum).name}, saved; go on with --resume {run_dir}")
            return 128 + signum
        return judge(config, task, training, run_dir)
    except EnvironmentFault as fault:
        mark_failure()
        raise UserError(f"rank {world.rank}: {fault}", exit_code=1) from fault
    except (RuntimeError, MemoryError, OSError) as error:
        mark_failure()
        if reached := limit_reached(error, config, run_dir, world):
            raise reached from error
        if not isinstance(error, OSError) or error.errno not in FULL_DISK:
            raise
        raise unwritable(str(error.filename or run_dir), error) from None
    finally:
        closing.close()


class Stopped(Interruption):
    """A signal came while judging; no `except Exception` of a task catches it."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


def _stop(signum: int, frame: Any) -> None:
    for other in STOP_SIGNALS:
        signal.signal(other, signal.SIG_DFL)
    raise Stopped(signum)


def judge(config: RunConfig, task: TradingTask | GymTask, training: Training, run_dir: Path) -> int:
    """Judge the trained policy and write the result; returns the exit code.

    Everything is saved: a signal simply ends this.
    """
    end_at_signals()
    world = training.world
    world.enter(JUDGING)
    if world.size == 1:  # several ranks may wait for each other where Python sees no signal; their launcher does
        for each in (one for one in STOP_SIGNALS if signal.getsignal(one) is not signal.SIG_IGN):
            signal.signal(each, _stop)
    try:
        if signum := agree_max(stop_flag.signum, world):  # it came when training had just ended
            raise Stopped(signum)
        parts = training.policy, training.obs_normalizer, world
        summary, text = judge_run(task, config, *parts, run_dir / "plots")
        if world.main:
            finish(config, run_dir, training, summary, text)
    except Stopped as stopped:
        if world.main:
            name = signal.Signals(stopped.signum).name
            print(f"stopped by {name} while judging; training is saved: python -m agents.evaluate {run_dir} judges it")
        return 128 + stopped.signum
    return 0


def finish(config: RunConfig, run_dir: Path, training: Training, summary: dict, text: str) -> None:
    """Write summary.json and the learning curve, and print the result."""
    from agents.evaluate.plots import plot_learning_curve  # matplotlib: half a second, needed at the end only

    counters = {name: getattr(training, name) for name in ("iteration", "global_step", "episodes")}
    found = counters | {"parameter_sha256": parameter_hash(training.policy), "test": summary}
    scaling = outcome_of(run_dir) if training.ppo.strategy.mode == "ddp" else None  # the others the model does not know
    if scaling:
        found["scaling"] = scaling
    simulated = config.task.is_trading and config.data.data == "simulated"
    title = f"{config.task.env}, {config.policy.policy}, seed {config.train.seed}"
    plot_learning_curve(run_dir, run_dir / "plots" / "learning_curve.png", title, simulated)
    write_whole(run_dir / SUMMARY, json.dumps(found, indent=2) + "\n")  # the last: who finds it, finds all
    print(f"\n{text}\n")
    if scaling:
        print(describe(scaling))
    print(f"run directory: {run_dir} (plots/, metrics.jsonl, summary.json, checkpoints/)")


def announce(config: RunConfig, resolved: ResolvedLaunch, found: Found | None) -> None:
    """Check what can be checked before ranks start, and say what will happen."""
    saved_num_envs = len(found.state["carry"]["obs"]) if found else 0
    measured = config.train.batch_size == AUTO  # by the ranks, which then tell
    sizes = None if measured else share_out(config.train, 0, resolved.num_ranks, saved_num_envs)
    if sizes and resolved.device_type == "cpu":  # of a GPU's memory its rank knows
        check_rollouts(config, torch.device("cpu"), resolved.num_ranks)
    task = config.prepare_task()
    if found:
        check_resumable(found.state, config, task, resolved.num_ranks)
        budget, counter = ("total_steps", "global_step") if config.train.total_steps else ("num_episodes", "episodes")
        if found.state[counter] >= getattr(config.train, budget):
            told = f"{found.state[counter]:,} of {getattr(config.train, budget):,}"
            print(f"trained to its end already ({told}): it is judged again; --{budget} N trains on")
    elif config.train.pretrained:
        check_pretrained(config, task)
    print(resolved.message)
    print(task.describe())
    if isinstance(task, TradingTask) and task.real is None:
        print(market_card(task.markets("train", 8), config.market))
    if sizes:
        print(sizes_table(config.train, sizes, resolved.num_ranks, config.ppo))


def refuse(error: ValueError | OSError, config: RunConfig | None, run_dir: Path | None) -> int:
    """Say why there is nothing to start, and return the exit code."""
    message, code = explained(error)
    tell_once(f"error: {message}")
    if code != 2 and config and run_dir and is_first():  # a mistake at the keyboard is no event
        events.configure(config.launch.on_event, run_dir)
        events.notify("failed", message, exit_code=code)
        events.close()
    return code


@explains_errors
def main() -> int:
    """Entry of the command; returns the exit code."""
    parsed = parse_flags(SECTIONS, description=DESCRIPTION, epilog=EPILOG, extra=add_run_flags)
    with ExitStack() as held:  # the run's lock
        return run(parsed, held)


def run(parsed: ParsedFlags, held: ExitStack) -> int:
    """Choose or go on with a run and start its ranks; returns the exit code."""
    config, run_dir = None, None
    try:
        if parsed.extra.interactive:
            asked = ask_user(parsed, fresh_config)
            if isinstance(asked, int):
                return asked
            parsed = asked
        config, run_dir, found, lock = choose_run(parsed, held)
        settled = settle_launch(config.launch)
        config, resolved = dataclasses.replace(config, launch=settled.config), settled.resolved
        if config.speed.compile:
            check_compiler(resolved.device_type)
        is_new = run_dir is None or not run_dir.is_dir() or not any(run_dir.iterdir())
        if is_first():
            if settled.note:
                print(settled.note)
            announce(config, resolved, found)
            run_dir = run_dir or fresh_directory(RUNS)
            lock = lock or held.enter_context(hold_new(run_dir / "config.json"))
            going_on = f", going on from {found.path}" if found else ""
            print(f"run directory: {run_dir}{going_on}", flush=True)
            if parsed.extra.quick:
                print("--quick shows the whole path; it is too short to learn anything", flush=True)
            save_config(config, run_dir)
            truncate_metrics(run_dir, found.state["iteration"] if found else 0)
    except (ValueError, OSError) as error:
        return refuse(error, config, run_dir)
    run_dir, resume_from = run_dir or RUNS, str(found.path) if found else ""  # other ranks ask the first one
    report(run_dir=str(run_dir), on_event=config.launch.on_event)
    if is_first():
        events.configure(config.launch.on_event, run_dir)
        if restart_count():  # torchrun's; our own launcher says so itself
            message = f"restart {restart_count()}, going on from " + (resume_from or "the beginning")
            events.notify("restarted", message, restart=restart_count())
    launch_args = (config, resolved, run_dir, resume_from, lock)
    code = launch(run_rank, launch_args, resolved.num_ranks, max_restarts=config.launch.max_restarts, run_dir=run_dir)
    if code and not resume_from and is_new and lock and leads_to(lock.path, lock.file):  # else it is no longer ours
        discard_unstarted(run_dir)
    return code


if __name__ == "__main__":
    outlive_readers()
    code = main()
    report(exit_code=code)
    sys.exit(code)
