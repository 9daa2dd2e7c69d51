"""The start of a run: chosen, checked and announced before ranks exist."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agents.config import AUTO, RunConfig, TrainConfig, forget_probed, probe, with_threads
from agents.ppo import PPOConfig, learning_rate
from agents.run.choice import (
    RUNS,
    check_resumable,
    choose_run,
    describe_preset,
    is_first,
    parse_training,
)
from agents.run.saved import check_initial
from agents.run.sizes import Sizes, in_ranks, shard_sizes
from rl_dist.checkpoint.store import CHECKPOINT_DIR, Found
from rl_dist.errors import UserError, explained, print_error_once, report_to_caller
from rl_dist.flags import ParsedFlags
from rl_dist.launch.config import LaunchConfig, ResolvedLaunch, resolve
from rl_dist.launch.ranks import launch, restart_count
from rl_dist.process_group.process_ends import report
from rl_dist.run_dir import ENDED, RunDir, SavedCheckpoint
from rl_dist.telemetry import events
from rl_dist.telemetry.metrics import close_logging


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that is ready to start; every rank gets it."""

    directory: RunDir  # locked by the first process; torchrun's other ranks learn its path there
    config: RunConfig
    resolved: ResolvedLaunch
    resume_from: str  # a checkpoint; "": the run begins
    is_new: bool  # its directory was empty or missing

    @property
    def path(self) -> Path:
        """Return the run directory."""
        return self.directory.path

    def launch(self, run_rank: Callable[..., int], *arguments: Any) -> int:
        """Call `run_rank(run, *arguments)` on all ranks; return the exit code.

        A new run that fails before its first iteration ends is removed.
        """
        code = 1
        try:
            code = launch(
                run_rank,
                (self, *arguments),
                self.resolved.num_ranks,
                max_restarts=self.config.launch.max_restarts,
                run_dir=self.path,
                threads=self.resolved.threads,
            )
        finally:
            if code and self.is_new:
                close_logging()
                self.directory.discard_unstarted(code)
        return code


def prepare(
    held: ExitStack,
    argv: Sequence[str] | None = None,
    several_seeds: Callable[[ParsedFlags], int] | None = None,
) -> Run | int:
    """Choose the run that the flags mean, check it, and write its configuration.

    `held` closes the lock on the run; `several_seeds` does what --seeds asks for. Returns the exit
    code if there is nothing to start; the reason is printed.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parsed = parse_training(words)
    config: RunConfig | None = None
    run_dir: Path | None = None
    forget_probed()
    try:
        if parsed.extra.interactive:
            from agents.run.interactive import ask_user

            answered = ask_user(parsed, words)
            if isinstance(answered, int):
                return answered
            parsed = parse_training(answered)
        if parsed.extra.seeds and several_seeds:
            return several_seeds(parsed)
        config, run_dir, found, lock = choose_run(parsed, held)
        launch, resolved = _resolve(with_threads(config).launch)
        config = replace(config, launch=replace(launch, threads=resolved.threads))
        is_new = not found and (run_dir is None or RunDir(run_dir).is_unused())
        directory = lock or RunDir(run_dir or RUNS)
        if is_first():
            restarts = restart_count()
            announce(config, resolved, found)
            if not lock:
                directory = RunDir(run_dir) if run_dir else RunDir.fresh(RUNS)
                held.enter_context(directory.hold_new())
            run_dir = directory.path
            events.configure(config.launch.on_event, run_dir)
            _notify_restart(directory, found, restarts)
            _record(directory, config, resolved, found)
            if parsed.extra.quick:
                print("--quick shows the whole path; it is too short to learn anything", flush=True)
    except (ValueError, OSError) as error:
        return _refuse(error, config, run_dir)
    report(run_dir=str(directory.path), on_event=config.launch.on_event)
    report_to_caller(run_dir=str(directory.path))
    return Run(
        directory=directory,
        config=config,
        resolved=resolved,
        resume_from=str(found.path) if found else "",
        is_new=is_new,
    )


def _resolve(launch: LaunchConfig) -> tuple[LaunchConfig, ResolvedLaunch]:
    """Decide the ranks and their device; keep an earlier choice of strategy, or fall back."""
    if not (launch.fallback or launch.chosen_strategy):
        return launch, resolve(launch)
    from rl_dist.launch.fallback import resolve_launch

    launch, resolved, note = resolve_launch(launch)
    if note and is_first():
        print(note)
    return launch, resolved


def _notify_restart(directory: RunDir, found: Found | None, restarts: int) -> None:
    """Send the event of a restart by torchrun, also for a host that came or left.

    Our own launcher sends this event itself.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    with suppress(OSError, UserError):
        state = directory.state()
        if restarts or (state is not None and state.phase not in ENDED):
            where = found.path if found else "the beginning"
            events.notify("restarted", f"continuing from {where}", restart=restarts)


def _record(
    directory: RunDir, config: RunConfig, resolved: ResolvedLaunch, found: Found | None
) -> None:
    """Write configuration and state, and cut the metrics back to the checkpoint."""
    directory.write_config(config.to_dict())
    train = config.train
    values: dict[str, Any] = {}
    if found:
        values = {name: found.state[name] for name in ("iteration", "global_step", "episodes")}
        path = f"{CHECKPOINT_DIR}/{found.path.name}"
        values["checkpoint"] = SavedCheckpoint(path=path, iteration=values["iteration"])
    directory.cut_records(values.get("iteration", 0))
    directory.begin_state(
        num_ranks=resolved.num_ranks,
        strategy=config.launch.strategy_config.mode,
        precision=config.launch.precision.replace("auto", "fp32"),
        target=train.total_steps or train.num_episodes,
        unit="steps" if train.total_steps else "episodes",
        **values,
    )
    continuing = f", continuing from {found.path}" if found else ""
    print(f"run directory: {directory.path}{continuing}", flush=True)


def _refuse(error: ValueError | OSError, config: RunConfig | None, run_dir: Path | None) -> int:
    """Print why there is nothing to start, and return the exit code."""
    message, code = explained(error)
    print_error_once(f"error: {message}")
    if code != 2 and config and run_dir and is_first():  # a mistake at the keyboard is no event
        events.configure(config.launch.on_event, run_dir)
        events.notify("failed", message, exit_code=code)
        events.close()
    return code


def announce(config: RunConfig, resolved: ResolvedLaunch, found: Found | None) -> None:
    """Check what can be checked before ranks start, and print what will happen."""
    train = config.train
    for flag, name in train.named_metrics.items():
        from agents.run.metric_table import check_metric

        check_metric(flag, name, config.task.is_trading, config.launch.precision)
    sizes: Sizes | None = None
    if train.batch_size != AUTO:  # else the ranks measure it, and then print the table
        saved_num_envs = len(found.state["carry"]["obs"]) if found else 0
        sizes = shard_sizes(train, 0, resolved.num_ranks, saved_num_envs)
    task = config.prepare_task()
    if found:
        check_resumable(found.state, config, task, resolved.num_ranks)
    else:
        check_initial(config, task)
    if core := config.policy.core:
        from agents.network.own_core import make_core, try_core

        hidden_size, num_layers = config.policy.hidden_size, config.policy.num_layers
        width = probe(task).empty_policy(config).feature_encoder.num_outputs
        try_core(core, make_core(core, width, hidden_size, num_layers), width, hidden_size)
    print(resolved.message)
    print(task.describe())
    if train.chosen_preset and not found:
        print(describe_preset(config))
    if sizes:
        print(sizes_table(train, sizes, resolved.num_ranks, config.ppo))
    if found:
        budget = "total_steps" if train.total_steps else "num_episodes"
        done = found.state["global_step" if train.total_steps else "episodes"]
        if done >= getattr(train, budget):
            print(
                f"this run already reached --{budget} and is only evaluated: pass a value above "
                f"{done:,} to continue training"
            )


def sizes_table(config: TrainConfig, sizes: Sizes, num_ranks: int, ppo: PPOConfig) -> str:
    """Return a table of the work of one rank and of all together."""
    steps = ppo.update_epochs * sizes.num_minibatches
    length, bptt = config.num_steps, config.bptt_steps
    batch = "minibatch" if sizes.num_microbatches == 1 else f"{sizes.num_microbatches} minibatches"
    envs, all_envs = sizes.num_envs, sizes.global_num_envs
    own, together = sizes.batch_size, sizes.global_batch_size
    rows = [
        ("", "each rank", f"all {in_ranks(num_ranks)}"),
        ("environments", envs, all_envs),
        ("environment steps per iteration", envs * length, all_envs * length),
        (f"{batch}, sequences of {bptt} steps", own, together),
        (f"{batch}, environment steps", own * bptt, together * bptt),
        ("gradient steps per iteration", steps, f"{steps} (together)"),
    ]
    lines = [f"  {name:<34}{left!s:>12}{right!s:>16}" for name, left, right in rows]
    return "\n".join([*lines, f"  learning rate: {_describe_rate(config, sizes, ppo)}"])


def _describe_rate(config: TrainConfig, sizes: Sizes, ppo: PPOConfig) -> str:
    """Describe the learning rate: its scaling, its rise and its fall."""
    text = f"{ppo.learning_rate:g}"
    if config.lr_scaling != "none":
        factor = sizes.learning_rate_factor
        peak = learning_rate(ppo, max(ppo.warmup, 1), 1.0, factor)
        text += f" x {factor:.4g} ({config.lr_scaling}) = {peak:.4g}"
    if ppo.warmup:
        text += f", rising over the first {ppo.warmup} iterations"
    if ppo.anneal_lr:
        budget = (
            f"{config.total_steps} steps"
            if config.total_steps
            else f"{config.num_episodes} episodes"
        )
        text += f", falling to 0 over {budget}"
    return text
