"""One rank of a training, from the agreement on its start to its last word."""

from __future__ import annotations

import logging
import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agents.run.config import OWNERS, RunConfig, load_newest, open_run_writer
from agents.run.limits import check_rollouts, explained_faults
from agents.sizes import AUTO
from agents.trainer import Training, Validate, train
from rl_dist.checkpoint.store import (
    CHECKPOINT_DIR,
    iteration_in_name,
    load_checkpoint,
    write_atomically,
)
from rl_dist.checkpoint.trust import module_files
from rl_dist.errors import UserError
from rl_dist.files import remove
from rl_dist.flags import ParsedFlags
from rl_dist.launch.config import ResolvedLaunch
from rl_dist.launch.ranks import restart_count
from rl_dist.process_group.addresses import may_start_again
from rl_dist.process_group.collectives import all_gather_json, broadcast_bytes
from rl_dist.process_group.join import check_settings
from rl_dist.process_group.world import World, open_world, stop_flag
from rl_dist.run_dir import RankEntry, RunDir
from rl_dist.telemetry import events
from rl_dist.telemetry.metrics import setup_logging
from rl_dist.telemetry.monitor import Monitor, sources_of

if TYPE_CHECKING:
    from agents.api.callbacks import Callbacks

logger = logging.getLogger(__name__)  # for the log files
# Flags that may differ between hosts: what a host has (GPUs, cores), and where its data lie. The
# content of the data is compared by `data_digest`. The command of on_event is rank 0's alone.
OF_A_HOST = {"num_gpus", "device", "gpu_ids", "threads", "env_workers", "data", "on_event"}
OF_A_HOST |= {"chosen_on", "pretrained", "init_from"}


def run_rank(
    config: RunConfig,
    resolved: ResolvedLaunch,
    run_dir: Path,
    resume_from: str,
    lock: RunDir | None,
    callbacks: Callbacks = MappingProxyType({}),
) -> int:
    """Train, evaluate and leave, on every rank; return the exit code."""
    world = open_watched(config, resolved)
    with ExitStack() as closing:
        closing.enter_context(explained_faults(config, run_dir, world))
        run_dir, resume_from = agree_on_start(run_dir, resume_from, config, world)
        if world.is_main_process:
            events.configure(config.launch.on_event, run_dir)
        setup_logging(run_dir, world.rank)
        logger.info("%s, rank %d of %d", config.task.env, world.rank, world.size)

        # the task, and the choices that only measurements can make
        task = config.prepare_task(world.heartbeat)

        if any(all_gather_json(has_auto(config), world)):
            from agents.run.auto import choose

            config, task = choose(config, task, resolved, run_dir, world)

        def make_env(count: int, first: int) -> Any:
            return task.training_env(count, first, str(world.device))

        closing.enter_context(explained_faults(config, run_dir, world))  # with measured sizes
        check_rollouts(config, world.device, world.size)

        # policy, optimizer, environments: new ones, or those of the checkpoint
        parts: dict[str, Any] = {}
        if not resume_from:
            parts["pretrained"] = initial_weights(config)
        if config.train.validate_every:
            parts["validate"] = validation_of(config, task, world)
        if config.train.stop_at or config.train.callback or callbacks:
            from agents.api.callbacks import make_watch

            parts["watch"] = make_watch(
                config.train.stop_at, config.train.callback, callbacks, world
            )
        training = Training(config.job(make_env, run_dir, resolved.gpu_ids, **parts), world)
        if world.is_main_process:
            print(f"observation: {training.policy.layout.describe()}", flush=True)
        training.monitor = Monitor(sources_of(world.device), config.train.monitor_every)
        closing.callback(training.monitor.close)
        if resume_from:
            training.restore(load_checkpoint(resume_from))
        if world.is_main_process and training.progress < 1.0:
            remove(RunDir(run_dir).summary_path)  # it says that the run has finished
        writer = open_run_writer(training, config.task.env, lock)
        closing.callback(writer.close)
        stop_flag.notice = "saving after this iteration" if world.is_main_process else ""
        signum = train(training, writer, stop_flag)
        world.set_phase("closing of loggers and environments")
        logger.info("trained to iteration %d, %d steps", training.iteration, training.global_step)
        writer.close()
        training.env.close()
        if signum:
            if world.is_main_process:
                say_stopped(signum, run_dir)
            return 128 + signum
        if world.is_main_process:
            RunDir(run_dir).update_state(phase="evaluation")
        from agents.evaluate.final import evaluate_and_finish

        return evaluate_and_finish(config, task, training, run_dir)


def has_auto(config: RunConfig) -> bool:
    """Return True if a flag of this rank is to be measured before training."""
    measured = config.train.batch_size == AUTO or config.task.env_workers < 0
    return measured or "auto" in (config.launch.precision, config.launch.strategy)


def open_watched(config: RunConfig, resolved: ResolvedLaunch) -> World:
    """Join the other ranks; whatever hangs from here on is ended."""
    return open_world(
        resolved.device_type,
        config.train.collective_timeout,
        resolved.gpu_ids,
        resolved.threads,
        config.train.startup_timeout,
        module_files([config.task.env, config.policy.core, config.train.callback]),
        watches_work=True,
    )


def say_stopped(signum: int, run_dir: Path) -> None:
    """Say that a signal ended the run, or that torchrun ended its ranks for a while."""
    again = may_start_again(signum)
    RunDir(run_dir).update_state(phase="restarting" if again else "stopped")
    if again:
        print("saved, as torchrun ends its ranks; it starts them again where a host came or went")
    name = signal.Signals(signum).name
    print(f"{'else' if again else f'stopped by {name}, saved;'} go on with --resume {run_dir}")


def check_weights(config: RunConfig, task: Any) -> None:
    """Check that the weights of --pretrained or --init_from fit the run."""
    if config.train.pretrained:
        from agents.pretrain.weights import check_pretrained

        check_pretrained(config, task)
    if config.train.init_from:
        from agents.run.saved import check_initial

        check_initial(config, task)


def train_several(parsed: ParsedFlags) -> int:
    """Do what --seeds asks for; return the exit code."""
    from agents.api.seeds import train_seeds

    extra = vars(parsed.extra)
    if "RANK" in os.environ:
        raise UserError("--seeds starts trainings of its own: run it without torchrun")
    if "seed" in parsed.given or extra["resume"]:
        raise UserError("--seeds begins runs of its own: leave --seed and --resume out")
    words = [f"--{name}={value}" for name, value in parsed.given.items()]
    words += [f"--preset={extra['preset']}"] * bool(extra["preset"]) + ["--quick"] * extra["quick"]
    print(train_seeds(extra["seeds"], extra["run_dir"], words))
    return 0


def validation_of(config: RunConfig, task: Any, world: World) -> Validate | None:
    """Return what training calls for `valid/` figures; None without such days."""
    if config.task.is_trading:
        from agents.evaluate.markets import market_validation

        return market_validation(task, world)
    from agents.evaluate.evaluation import validation

    return validation(task, config, world)


def initial_weights(config: RunConfig) -> Any:
    """Return the weights that a new run starts from; None: random ones."""
    if config.train.pretrained:
        from agents.pretrain.weights import load_pretrained

        return load_pretrained(config.train.pretrained)[0]
    if config.train.init_from:
        from agents.run.saved import load_initial

        return load_initial(config.train.init_from)
    return None


def agree_on_start(
    run_dir: Path, resume_from: str, config: RunConfig, world: World
) -> tuple[Path, str]:
    """Compare configurations, agree on directory and checkpoint, record all ranks.

    torchrun's ranks may have chosen differently, on hosts that share no file system for example.
    """
    shared = {name: section for name, section in OWNERS.items() if name not in OF_A_HOST}
    settings = {name: getattr(getattr(config, section), name) for name, section in shared.items()}
    check_settings(settings, world)
    if world.is_main_process and restart_count():
        newest = load_newest(run_dir)
        RunDir(run_dir).cut_records(newest.state["iteration"] if newest else 0)
        resume_from = str(newest.path) if newest else ""
    mine = {
        "rank": world.rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "device": str(world.device),
    }
    offer = resume_from if world.is_main_process or Path(resume_from).is_file() else ""
    gathered = all_gather_json([str(run_dir), offer, mine], world)
    run_dir = Path(gathered[0][0])
    if world.is_main_process:
        ranks = [RankEntry(**entry) for _, _, entry in gathered]
        RunDir(run_dir).update_state(ranks=ranks, num_ranks=world.size, phase="starting")
    return run_dir, share_checkpoint(run_dir, [each[1] for each in gathered], world)


def share_checkpoint(run_dir: Path, chosen: list[str], world: World) -> str:
    """Return the newest of the ranks' checkpoints; hosts that lack it get a copy.

    Another rank's choice counts only where rank 0 has no such file: else it has refused it.
    """
    folder = run_dir / CHECKPOINT_DIR

    def newness(rank: int) -> int:
        path = Path(chosen[rank])
        counts = path.parent == folder and (rank == 0 or not path.exists())
        return iteration_in_name(path) if counts else -2

    owner = all_gather_json(max(range(world.size), key=newness), world)[0]
    path = Path(chosen[owner])
    if chosen[owner] and any(all_gather_json(not path.exists(), world)):
        data = broadcast_bytes(path.read_bytes() if world.rank == owner else b"", owner, world)
        if world.local_rank == 0 and not path.exists():
            write_atomically(path, data)
        all_gather_json("written", world)
    return chosen[owner]
