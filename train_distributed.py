"""Train a recurrent PPO policy on one rank or many.

Run it as `python train_distributed.py --num_gpus N`.
"""

from __future__ import annotations

if __name__ == "__main__":  # before anything slow is imported
    from rl_dist.launch.supervisor import supervise

    supervise()

import dataclasses
import logging
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from agents.dry_run.announce import announce
from agents.dry_run.batch_size import settle_batch_size
from agents.dry_run.memory_advice import check_rollouts, explained_faults
from agents.dry_run.strategy import settle_strategy
from agents.evaluate.command import validation
from agents.evaluate.final import judge
from agents.pretrain.weights import check_pretrained, load_pretrained
from agents.run.bottleneck import bottleneck
from agents.run.choice import DESCRIPTION, EPILOG, RUNS, add_run_flags, choose_run, fresh_config, is_first, refuse
from agents.run.config import (
    SECTIONS,
    RunConfig,
    discard_unstarted,
    fresh_directory,
    load_newest,
    save_config,
    set_results_aside,
)
from agents.run.interactive import ask_user
from agents.run.writer import open_run_writer
from agents.trainer import MakeEnv, Training, train
from rl_dist.checkpoint.file import load_checkpoint
from rl_dist.checkpoint.folder import Found
from rl_dist.checkpoint.run_lock import RunLock, hold_new
from rl_dist.config import ParsedFlags, parse_flags
from rl_dist.errors import explains_errors, outlive_readers
from rl_dist.hardware.plain_files import leads_to
from rl_dist.launch.fallback import settle_launch
from rl_dist.launch.launcher import ResolvedLaunch, launch, restart_count
from rl_dist.launch.rank import mark_failure
from rl_dist.parallel.speed import check_compiler
from rl_dist.process_group.collectives import gather_json
from rl_dist.process_group.process_ends import report
from rl_dist.process_group.world import open_world, stop_flag
from rl_dist.telemetry import events
from rl_dist.telemetry.metrics import setup_logging, truncate_metrics
from rl_dist.telemetry.monitor import Monitor, sources_of

logger = logging.getLogger("train_distributed")  # for the log files


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
    with ExitStack() as closing:
        closing.enter_context(explained_faults(config, run_dir, world))
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
        closing.enter_context(explained_faults(config, run_dir, world))  # with the sizes that were measured
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
        writer = open_run_writer(training, config.task.env, lock)
        closing.callback(writer.close)
        try:
            signum = train(training, writer, stop_flag)
        except BaseException:
            mark_failure()  # before anything is closed
            raise
        logger.info("trained to iteration %d, %d steps", training.iteration, training.global_step)
        writer.close()
        if signum:
            if world.main:
                print(f"stopped by {signal.Signals(signum).name}, saved; go on with --resume {run_dir}")
            return 128 + signum
        return judge(config, task, training, run_dir)


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
            if config.train.pretrained and not found:
                check_pretrained(config, config.prepare_task())
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
