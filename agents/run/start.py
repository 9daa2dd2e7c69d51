"""Start a run: choose it, check it, launch its ranks, and explain their failures."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from agents.config import PURPOSES, RunConfig, empty_policy, probe, with_threads
from agents.learner.network.own_modules import core_problem, make_own, try_own
from agents.learner.settings import AUTO_SIZE, TrainConfig
from agents.learner.sizes import shard_sizes
from agents.learner.trainer import COUNTERS
from agents.run.choice import RUNS, check_resumable, choose_run
from agents.run.metric_table import check_metric
from agents.run.saved import check_initial
from envs.vector.guards import EnvironmentFaultError
from envs.vector.layout import TorchEnv
from rl_dist.checkpoint.store import CHECKPOINT_DIR, LoadedCheckpoint
from rl_dist.checkpoint.trust import import_own
from rl_dist.errors import (
    CLOSED_DISK,
    FULL_DISK,
    UserError,
    one_line,
    report_to_caller,
    unwritable,
)
from rl_dist.files import absolute, is_first
from rl_dist.flags import ParsedFlags
from rl_dist.launch.config import ResolvedLaunch, resolve_launch
from rl_dist.launch.ranks import restart_count, run_ranks
from rl_dist.machine import GIB, is_out_of_memory, peak_memory_bytes
from rl_dist.process_group.process_ends import report
from rl_dist.process_group.world import World
from rl_dist.run_dir import RankEntry, RunDir, SavedCheckpoint
from rl_dist.strategies.config import StrategyConfig
from rl_dist.telemetry import events
from rl_dist.telemetry.loggers import check_installed
from rl_dist.telemetry.metrics import close_logging

HUGE = 128  # pixels; images with a longer side are mostly raw frames


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is ready to start. Every rank receives a copy."""

    directory: RunDir  # locked by this process or the launcher
    config: RunConfig
    resolved: ResolvedLaunch
    resume_from: str  # path of a checkpoint; "" for a new run

    @property
    def path(self) -> Path:
        """Return the run directory."""
        return self.directory.path

    @property
    def strategy(self) -> StrategyConfig:
        """Return the settings of the strategy, with the devices of this host."""
        return replace(self.config.launch.strategy_config, device_ids=self.resolved.gpu_ids)


class Outcome(NamedTuple):
    """How a run ended."""

    exit_code: int  # 0: done; 128 + n: stopped by signal n
    error: str  # one line; "" if no rank failed, or if only another host knows the error
    run_dir: Path


def start(parsed: ParsedFlags, run_rank: Callable[..., int], *arguments: object) -> Outcome:
    """Start the run that the flags describe; return how it ended.

    If a new run fails during its first iteration, its directory is removed.

    Args:
        run_rank: called as `run_rank(run, *arguments)` on every rank.

    Raises:
        ValueError, OSError: the run cannot start.
    """
    with ExitStack() as cleanup:
        run = prepare(parsed, cleanup)
        code = 1
        try:
            report = run_ranks(
                run_rank,
                (run, *arguments),
                run.resolved.num_ranks,
                max_restarts=run.config.launch.max_restarts,
                directory=run.directory,
                threads=run.resolved.threads,
            )
            code = report.exit_code
        finally:
            if code and not run.resume_from:
                close_logging()
                run.directory.discard_unstarted(code)
        return Outcome(code, report.summary if report.failed else "", run.path)


def prepare(parsed: ParsedFlags, cleanup: ExitStack) -> Run:
    """Choose and check the run that the flags describe; write the first files of a new run.

    Closing `cleanup` releases the lock on the run directory.
    """
    runs = absolute(RUNS)
    config, directory, checkpoint, probed = choose_run(parsed, cleanup)
    chosen_launch, resolved, note = resolve_launch(with_threads(config).launch)
    config = replace(config, launch=replace(chosen_launch, threads=resolved.threads))
    if is_first():
        if note:
            print(note)
        check_and_announce(config, resolved, checkpoint, probed)
        if not (directory and directory.lock):
            directory = directory or RunDir.fresh(runs)
            cleanup.enter_context(directory.hold_new())
        events.configure(config.launch.on_event, directory.path)
    # Under torchrun, the other ranks receive the path of rank 0 later, in `agents.rank.agree`.
    directory = directory or RunDir(RUNS)
    run = Run(
        directory=directory,
        config=config,
        resolved=resolved,
        resume_from=str(checkpoint.path) if checkpoint else "",
    )
    if is_first():
        if not checkpoint:
            record(run, dict.fromkeys(COUNTERS, 0))
        continuing = f", continuing from {run.resume_from}" if checkpoint else ""
        print(f"run directory: {run.path}{continuing}", flush=True)
    report(run_dir=str(directory.path), on_event=config.launch.on_event)
    report_to_caller(run_dir=str(directory.path))
    return run


def check_and_announce(
    config: RunConfig,
    resolved: ResolvedLaunch,
    checkpoint: LoadedCheckpoint | None,
    probed: TorchEnv | None,
) -> None:
    """Check the run before its ranks start; print its device, task and sizes."""
    train = config.train
    task = config.prepare_task()
    for flag, name in train.named_metrics.items():
        check_metric(flag, name, task.metrics, config.launch.precision)
        if name.startswith("valid/") and not config.validates:
            raise UserError(f"{flag} {name} needs --validate_every and --eval_episodes above 0")
    check_installed(train.loggers)
    state = checkpoint.state if checkpoint else None
    env = probed or probe(task)
    if env:
        check_policy(config, env, state)
    if state:
        announce_length(state, config)
    else:
        purpose = PURPOSES[train.chosen_preset]
        print(f"preset {train.chosen_preset}, made for {purpose} (--preset chooses another)")
    if train.callback:
        import_own("callback", train.callback)
    print(f"{resolved.message}\n{task.describe()}")
    if env:
        announce_env(env)
    if train.batch_size != AUTO_SIZE:
        saved_num_envs = len(checkpoint.state["carry"]["obs"]) if checkpoint else 0
        share = shard_sizes(train, 0, resolved.num_ranks, saved_num_envs)
        print(
            f"each of {resolved.num_ranks} rank(s): {share.num_envs} of {share.global_num_envs} "
            f"environments, {share.batch_size} of {share.global_batch_size} sequences of "
            f"{train.bptt_steps} steps per gradient step"
        )


def announce_env(env: TorchEnv) -> None:
    """Print what the user should know about the environments."""
    if env.note:
        print(env.note)
    for part in env.layout.parts:
        if part.kind == "image" and max(part.shape[1:]) > HUGE:
            print(
                f"{part.name} {part.describe()} is slow to learn from; the usual preprocessing: "
                "gymnasium.wrappers AtariPreprocessing and FrameStackObservation, or for Atari "
                "--env ale_py:ALE/..., which does both"
            )


def check_policy(config: RunConfig, env: TorchEnv, state: dict | None) -> None:
    """Refuse a policy, or a checkpoint's state, that does not fit the environments."""
    policy = empty_policy(config, env.layout, env.single_action_space)
    if state:
        check_resumable(state, config, policy)
    else:
        check_initial(config.train, policy)
    if core := config.policy.core:
        width = policy.feature_encoder.num_outputs
        hidden_size = config.policy.hidden_size
        module = make_own("core", core, width, hidden_size, config.policy.num_layers)
        try_own("core", core, core_problem, module, width, hidden_size)


def announce_length(state: dict, config: RunConfig) -> None:
    """Print how to extend a finished run, or how a new length changes the learning rate."""
    saved = RunConfig.from_dict(json.loads(state["config"]))

    def rate(train: TrainConfig) -> float:
        """Return the learning rate at the checkpoint, for a run of the length in `train`."""
        done = state["global_step" if train.total_steps else "episodes"]
        return config.ppo.learning_rate * (1 - min(1, done / train.budget[0]))

    before = rate(saved.train)
    now = rate(config.train)
    flag = "total_steps" if config.train.total_steps else "num_episodes"
    if not now:
        print(f"this run has reached its end: to continue training, pass a larger --{flag}")
    elif now != before and config.ppo.anneal_lr and not config.ppo.desired_kl:
        print(
            f"learning rate from here: {now:.3g} with this --{flag}, {before:.3g} with the "
            "earlier one (--anneal_lr lowers it to 0 over the whole run)"
        )


def record(run: Run, counters: Mapping[str, int], ranks: Sequence[RankEntry] = ()) -> None:
    """Write configuration and state; delete metrics newer than the checkpoint.

    For a resumed run, call this after all checks that can refuse to start, so that a refused resume
    changes no file.

    Args:
        counters: the values of COUNTERS at this start.
    """
    directory, launch = run.directory, run.config.launch
    directory.write_config(run.config.to_dict())
    directory.cut_records(counters["iteration"])
    path = f"{CHECKPOINT_DIR}/{Path(run.resume_from).name}"
    target, unit = run.config.train.budget
    directory.begin_state(
        restarts=restart_count(),
        num_ranks=len(ranks) or run.resolved.num_ranks,
        ranks=ranks,
        strategy=launch.strategy_config.mode,
        precision=launch.precision,
        target=target,
        unit=unit,
        checkpoint=SavedCheckpoint(path=path, iteration=counters["iteration"])
        if run.resume_from
        else None,
        **counters,
    )


@contextmanager
def faults_as_user_errors(directory: RunDir, world: World) -> Iterator[None]:
    """Turn environment, memory and disk failures into a one-line UserError.

    This function imports nothing, because an import can fail when memory has run out.
    """
    try:
        yield
    except EnvironmentFaultError as fault:
        where = ""
        if fault.__cause__:  # raised in this process, so the log of this rank has a traceback
            where = f"; traceback in {directory.log_of(world.rank)}"
        raise UserError(f"rank {world.rank}: {fault}{where}", exit_code=1) from fault
    except (RuntimeError, MemoryError, OSError) as error:
        if is_out_of_memory(error):
            raise UserError(
                f"rank {world.rank} ran out of memory in {world.doing.phase}, after a peak of "
                f"{peak_memory_bytes(world.device) / GIB:.2f} GiB on {world.device}: use a smaller "
                "--batch_size and a --grad_accumulation larger by the same factor (a resumed "
                "run may change both), or a new run with a smaller --num_envs, --num_steps or "
                f"--hidden_size; the error was {one_line(error, 220)}",
                exit_code=1,
            ) from error
        if not isinstance(error, OSError) or error.errno not in FULL_DISK | CLOSED_DISK:
            raise
        raise unwritable(str(error.filename or directory.path), error) from None
