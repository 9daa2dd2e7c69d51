"""Main function of each rank: agree on settings, train, evaluate."""

import os
import signal
import socket
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from agents.evaluate.trials import validate
from agents.learner.callbacks import Callbacks, UserCallbacks, named_callbacks
from agents.learner.checkpoint_schema import RunSchema
from agents.learner.network.own_modules import encoder_problem, try_own
from agents.learner.rollout import policy_input
from agents.learner.trainer import Training, train
from agents.run.auto import check_rollouts, choose
from agents.run.saved import initial_weights, load_newest, share_checkpoint
from agents.run.start import Run, check_policy, faults_as_user_errors, record
from envs.task import Task
from envs.vector.layout import TorchEnv
from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.checkpoint.trust import module_files
from rl_dist.files import remove
from rl_dist.launch.ranks import restart_count
from rl_dist.process_group.collectives import all_gather_json, check_settings
from rl_dist.process_group.join import may_start_again
from rl_dist.process_group.world import World, open_world, stop_flag
from rl_dist.run_dir import RankEntry, RunDir
from rl_dist.telemetry import events
from rl_dist.telemetry.loggers import named_loggers, open_logger
from rl_dist.telemetry.metrics import MetricsWriter, NullWriter, setup_logging

# Settings that may differ between hosts: hardware and file paths; on_event, because only rank 0
# runs this command; and the name of the preset, because its values are compared. The path of the
# price file may differ, but `data_digest` ensures that the content is the same.
HOST_SETTINGS = {
    "num_gpus", "device", "gpu_ids", "threads", "env_workers", "data", "on_event", "chosen_on",
    "pretrained", "init_from", "chosen_preset",
}  # fmt: skip


def run_rank(run: Run, callbacks: Callbacks = MappingProxyType({})) -> int:
    """Train and evaluate; return the exit code. Every rank must call this."""
    world = open_world(
        run.resolved.device_type,
        run.config.train.collective_timeout,
        run.resolved.gpu_ids,
        run.resolved.threads,
        run.config.train.startup_timeout,
        backend=run.resolved.backend,
        watches_work=True,
    )
    with ExitStack() as closing:
        # agree with the other ranks on the directory, the checkpoint and the settings
        run = agree(run, world)
        closing.enter_context(faults_as_user_errors(run.directory, world))
        if world.is_main_process:
            events.configure(run.config.launch.on_event, run.path)
        setup_logging(run.path, world.rank)
        run = choose(run, world)
        check_rollouts(run.config, world)

        # train
        task = run.config.prepare_task(world.heartbeat, str(world.device))
        closing.callback(task.close)
        training = make_training(run, task, world)
        closing.callback(training.monitor.close)
        writer = open_run_writer(run, task, training)
        closing.callback(writer.close)
        if world.is_main_process:
            stop_flag.notice = "saving after this iteration; a second signal ends without saving"
        signum = train(
            training,
            writer,
            stop_flag,
            callbacks=UserCallbacks(
                named_callbacks(run.config.train) or callbacks,
                run.directory,
                training.policy,
                world,
                run.config.train.stop,
            ),
            validate=partial(validate, task) if run.config.validates else None,
            scored_by=f"valid/{task.scored_by}",
        )
        world.set_phase("closing of loggers and environments")
        writer.close()
        task.release(training.env)

        # report a stop, or evaluate
        if signum:
            if world.is_main_process:
                phase = "restarting" if may_start_again(signum) else "stopped"
                run.directory.update_state(phase=phase)
                name = signal.Signals(signum).name
                print(f"stopped by {name}, saved a checkpoint; continue with --resume {run.path}")
            return 128 + signum
        if world.is_main_process:
            run.directory.update_state(phase="evaluation")
        from agents.evaluate.command import evaluate_and_finish

        return evaluate_and_finish(run, task, training)


def make_training(run: Run, task: Task, world: World) -> Training:
    """Create the training state; for a resumed run, restore it from the checkpoint."""
    state = load_checkpoint(run.resume_from, RunSchema) if run.resume_from else None
    encoder = run.config.policy.encoder

    def make_env(num_envs: int, env_offset: int) -> TorchEnv:
        env = task.training_env(num_envs, env_offset)
        if not task.can_probe:  # else the launching process has checked this
            check_policy(run.config, env, state)
        return env

    training = Training(
        run,
        make_env,
        world,
        initial=None if state else initial_weights(run.config.train),
        saved_num_envs=len(state["carry"]["obs"]) if state else 0,
    )
    if world.is_main_process:
        layout = training.policy.layout
        reader = f"; {encoder or 'a CNN'} reads images" if "image" in layout.kinds() else ""
        print(f"observation: {layout.describe()}{reader}", flush=True)
    if encoder:
        policy, carry = training.policy, training.carry
        rows = policy_input(training.normalizers.obs, carry.history[:, :0], carry.obs)
        try_own(
            "encoder",
            encoder,
            encoder_problem,
            policy.feature_encoder,
            rows.to(run.config.launch.dtype),
        )
    if run.config.validates:
        task.try_evaluation_env(world.rank)
    if state:
        training.restore(state)
    return training


def open_run_writer(run: Run, task: Task, training: Training) -> NullWriter:
    """Record the start of the run, and open the metrics writer.

    On ranks other than 0, the writer does nothing. Call this after all checks that can refuse to
    start, so that a refused resume leaves the run unchanged.
    """
    world = training.world
    settings = run.config.to_dict()
    names = named_loggers(run.config.train.loggers) if world.is_main_process else ()
    loggers = [open_logger(name, run.path, settings) for name in names]
    entry = {
        "rank": world.rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "device": str(world.device),
    }
    ranks = [RankEntry(**gathered) for gathered in all_gather_json(entry, world)]
    if not world.is_main_process:
        return NullWriter()
    record(run, training.counters, ranks)
    if training.progress < 1.0:
        remove(run.directory.summary_path)  # summary.json would mark the run as finished
    total, unit = run.config.train.budget
    writer = MetricsWriter(
        run.directory,
        total,
        unit,
        start=training.done,
        purge_step=training.global_step + 1,
        loggers=loggers,
        advice=task.advice,
    )
    writer.update_state(
        strategy=training.ppo.strategy.mode,
        gradient_bytes=training.ppo.strategy.gradient_bytes,
    )
    if not training.env.can_snapshot:
        writer.say(
            f"{run.config.task.env} cannot be snapshotted, so --resume starts new episodes; to "
            "continue the old ones, add two methods (docs/own_environment.md, Exact resume)"
        )
    return writer


class RankOffer(NamedTuple):
    """Directory and checkpoint that one rank chose before the ranks were connected."""

    run_dir: str
    checkpoint: str  # path; "": a new run, or the file is not on this rank's host


def agree(run: Run, world: World) -> Run:
    """Compare the settings of all ranks; agree on a run directory and a checkpoint.

    Under torchrun, every rank has chosen its directory and checkpoint by itself. Without a shared
    file system, the choices may differ between hosts.
    """
    shared = {name: v for name, v in run.config.values.items() if name not in HOST_SETTINGS}
    check_settings(shared, world, module_files(run.config.named_code))
    resume_from = run.resume_from
    # After a restart, there may be a newer checkpoint than the one that was chosen at the start.
    if world.is_main_process and restart_count():
        newest = load_newest(run.path)
        resume_from = str(newest.path) if newest else ""
    offer = resume_from if world.is_main_process or Path(resume_from).is_file() else ""
    offers = [RankOffer(*pair) for pair in all_gather_json([str(run.path), offer], world)]
    if str(run.path) != offers[0].run_dir:  # use the directory of rank 0, which holds the lock
        run = replace(run, directory=RunDir(offers[0].run_dir))
    checkpoints = [offer.checkpoint for offer in offers]
    return replace(run, resume_from=share_checkpoint(run.directory, checkpoints, world))
