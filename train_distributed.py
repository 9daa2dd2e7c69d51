"""Train a recurrent PPO policy on one rank or many.

Run it as `python train_distributed.py --num_gpus N`. The training loop is `train` in
agents/trainer.py; the gradient step is `PPO.update` in agents/ppo.py.
"""

from __future__ import annotations

if __name__ == "__main__":  # before anything slow is imported
    from rl_dist.launch.supervisor import supervise

    supervise()

import logging
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agents.run.config import RunConfig, open_run_writer, set_results_aside
from agents.run.job_state import agree_on_start
from agents.run.limits import check_rollouts, explained_faults
from agents.sizes import AUTO
from agents.trainer import Training, train
from rl_dist.checkpoint.file import load_checkpoint
from rl_dist.checkpoint.run_lock import RunLock
from rl_dist.errors import explains_errors, outlive_readers
from rl_dist.launch.launcher import ResolvedLaunch, launch
from rl_dist.launch.supervisor import imports_done
from rl_dist.process_group.process_ends import report
from rl_dist.process_group.world import open_world, stop_flag
from rl_dist.telemetry import events
from rl_dist.telemetry.metrics import setup_logging
from rl_dist.telemetry.monitor import Monitor, sources_of
from rl_dist.telemetry.state_file import update_state

logger = logging.getLogger("train_distributed")  # for the log files


def run_rank(
    config: RunConfig,
    resolved: ResolvedLaunch,
    run_dir: Path,
    resume_from: str,
    lock: RunLock | None,
) -> int:
    """Train, evaluate and leave, on every rank; return the exit code."""
    timeout_s, startup_s = config.train.collective_timeout, config.train.startup_timeout
    world = open_world(
        resolved.device_type, timeout_s, resolved.gpu_ids, resolved.threads, startup_s
    )
    with ExitStack() as closing:
        closing.enter_context(explained_faults(config, run_dir, world))
        run_dir, resume_from = agree_on_start(run_dir, resume_from, config, world)
        if world.is_main_process:
            events.configure(config.launch.on_event, run_dir)
        setup_logging(run_dir, world.rank)
        place = f"rank {world.rank} of {world.size} on {world.device}"
        logger.info("%s, %s", config.task.env, place)

        # environments, and the choices that only measurements can make
        task = config.prepare_task(world.heartbeat)

        def make_env(count: int, first: int) -> Any:
            return task.training_env(count, first, str(world.device))

        if config.train.batch_size == AUTO:
            from agents.dry_run.batch_size import resolve_batch_size

            config = resolve_batch_size(config, make_env, run_dir, world)
        if config.launch.fallback or config.launch.strategy == "auto":
            from agents.dry_run.strategy import resolve_training_strategy

            config = resolve_training_strategy(config, resolved, task, world, run_dir)
        closing.enter_context(explained_faults(config, run_dir, world))  # with measured sizes
        if (warning := check_rollouts(config, world.device, world.size)) and world.is_main_process:
            logger.warning(warning)

        # policy, optimizer, environments: new ones, or those of the checkpoint
        parts: dict[str, Any] = {}
        if config.train.pretrained and not resume_from:
            from agents.pretrain.weights import load_pretrained

            parts["pretrained"] = load_pretrained(config.train.pretrained)
        if config.train.validate_every:
            from agents.evaluate.evaluation import validation

            parts["validate"] = validation(task, config, world)
        training = Training(config.job(make_env, run_dir, resolved.gpu_ids, **parts), world)
        training.monitor = Monitor(sources_of(world.device), config.train.monitor_every)
        closing.callback(training.monitor.close)
        if resume_from:
            training.restore(load_checkpoint(resume_from))
        if world.is_main_process and training.progress < 1.0:
            set_results_aside(run_dir)
        writer = open_run_writer(training, config.task.env, lock)
        closing.callback(writer.close)
        signum = train(training, writer, stop_flag)
        logger.info("trained to iteration %d, %d steps", training.iteration, training.global_step)
        writer.close()
        if signum:
            if world.is_main_process:
                update_state(run_dir, phase="stopped")
                name = signal.Signals(signum).name
                print(f"stopped by {name}, saved; go on with --resume {run_dir}")
            return 128 + signum
        if world.is_main_process:
            update_state(run_dir, phase="evaluation")
        from agents.evaluate.final import evaluate_and_finish

        return evaluate_and_finish(config, task, training, run_dir)


def check_weights(config: RunConfig, task: Any) -> None:
    """Check that the weights of --pretrained fit the run."""
    from agents.pretrain.weights import check_pretrained

    check_pretrained(config, task)


@explains_errors
def main() -> int:
    """Choose a run, start its ranks, and return the exit code."""
    from agents.run.start import prepare

    with ExitStack() as held:  # the run's lock
        start = prepare(held, check_weights)
        if isinstance(start, int):
            return start
        code = launch(
            run_rank,
            (start.config, start.resolved, start.run_dir, start.resume_from, start.lock),
            start.resolved.num_ranks,
            max_restarts=start.config.launch.max_restarts,
            run_dir=start.run_dir,
        )
        if code:
            start.discard()
        return code


if __name__ == "__main__":
    imports_done()
    outlive_readers()
    code = main()
    report(exit_code=code)
    sys.exit(code)
