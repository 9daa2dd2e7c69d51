"""The start of a run: chosen, checked and announced before ranks exist."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agents.config import AUTO, RunConfig, TrainConfig, forget_probed, probe, with_threads
from agents.ppo import PPOConfig, learning_rate
from agents.run.choice import RUNS, choose_run, describe_preset, is_first, parse_training
from agents.run.limits import check_rollouts
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
        """Call `run_rank(run, *arguments)` on all ranks; return the exit code."""
        code = launch(
            run_rank,
            (self, *arguments),
            self.resolved.num_ranks,
            max_restarts=self.config.launch.max_restarts,
            run_dir=self.path,
            threads=self.resolved.threads,
        )
        if code:
            self.discard(code)
        return code

    def discard(self, exit_code: int) -> None:
        """Remove a new run that has failed before its first iteration ended."""
        if self.is_new and self.directory.lock and self.directory.is_in_place():
            close_logging()
            self.directory.discard_unstarted(exit_code)


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

            asked = ask_user(parsed, words)
            if isinstance(asked, int):
                return asked
            parsed = parse_training(asked)
        if parsed.extra.seeds and several_seeds:
            return several_seeds(parsed)
        config, run_dir, found, lock = choose_run(parsed, held)
        launch, resolved = _resolve(with_threads(config).launch)
        config = dataclasses.replace(
            config, launch=dataclasses.replace(launch, threads=resolved.threads)
        )
        is_new = not found and (run_dir is None or RunDir(run_dir).is_unused())
        if is_first():
            announce(config, resolved, found)
            run_dir = run_dir or RunDir.fresh(RUNS).path
            lock = lock or held.enter_context(RunDir(run_dir).hold_new())
            again = _is_restart(run_dir)
            _record(config, resolved, run_dir, found, parsed.extra)
    except (ValueError, OSError) as error:
        return _refuse(error, config, run_dir)
    run = Run(
        directory=lock or RunDir(run_dir or RUNS),
        config=config,
        resolved=resolved,
        resume_from=str(found.path) if found else "",
        is_new=is_new,
    )
    report(run_dir=str(run.path), on_event=config.launch.on_event)
    report_to_caller(run_dir=str(run.path))
    if is_first():
        events.configure(config.launch.on_event, run.path)
        if again:  # by torchrun; our own launcher sends this event itself
            where, count = run.resume_from or "the beginning", restart_count()
            number = f"restart {count}, " if count else ""  # 0: a host came or went
            events.notify("restarted", f"{number}going on from {where}", restart=count)
    return run


def _is_restart(run_dir: Path) -> bool:
    """Return True if torchrun starts ranks again, also for a host that came or went."""
    if restart_count() or "TORCHELASTIC_RUN_ID" not in os.environ:
        return restart_count() > 0
    with suppress(OSError, UserError):
        state = RunDir(run_dir).state()
        return state is not None and state.phase not in ENDED
    return False


def _resolve(launch: LaunchConfig) -> tuple[LaunchConfig, ResolvedLaunch]:
    """Decide the ranks and their device; keep an earlier choice of strategy, or fall back."""
    if not (launch.fallback or launch.chosen_strategy):
        return launch, resolve(launch)
    from rl_dist.launch.fallback import resolve_launch

    launch, resolved, note = resolve_launch(launch)
    if note and is_first():
        print(note)
    return launch, resolved


def _record(
    config: RunConfig,
    resolved: ResolvedLaunch,
    run_dir: Path,
    found: Found | None,
    extra: argparse.Namespace,
) -> None:
    """Write the configuration, cut the metrics back to the checkpoint, and say where they are."""
    if not os.access(run_dir, os.W_OK):
        raise UserError(f"{run_dir}: Permission denied")
    RunDir(run_dir).write_config(config.to_dict())
    RunDir(run_dir).cut_records(found.state["iteration"] if found else 0)
    start_state(run_dir, config, resolved, found)
    going_on = f", going on from {found.path}" if found else ""
    print(f"run directory: {run_dir}{going_on}", flush=True)
    if extra.quick:
        print("--quick shows the whole path; it is too short to learn anything", flush=True)


def start_state(
    run_dir: Path, config: RunConfig, resolved: ResolvedLaunch, found: Found | None
) -> None:
    """Write state.json of a run whose ranks are about to start."""
    train = config.train
    values: dict[str, Any] = {}
    if found:
        values = {name: found.state[name] for name in ("iteration", "global_step", "episodes")}
        path = f"{CHECKPOINT_DIR}/{found.path.name}"
        values["checkpoint"] = SavedCheckpoint(path=path, iteration=values["iteration"])
    RunDir(run_dir).begin_state(
        num_ranks=resolved.num_ranks,
        strategy=config.launch.strategy_config.mode,
        precision=config.launch.precision.replace("auto", "fp32"),
        target=train.total_steps or train.num_episodes,
        unit="steps" if train.total_steps else "episodes",
        **values,
    )


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
        if resolved.device_type == "cpu":  # a GPU's memory is known to its rank
            check_rollouts(config, torch.device("cpu"), resolved.num_ranks)
    task: Any = config.prepare_task()
    check_own_parts(config, task)
    if not found:
        check_initial(config, task)
    if found:
        from agents.run.resumed import check_resumable

        check_resumable(found.state, config, task, resolved.num_ranks)
        _announce_end(train, found)
    print(resolved.message)
    print(task.describe())
    if train.chosen_preset and not found:
        print(describe_preset(config))
    if sizes:
        print(sizes_table(train, sizes, resolved.num_ranks, config.ppo))
        _warn_of_budget(train, sizes)


def check_own_parts(config: RunConfig, task: Any) -> None:
    """Refuse spaces, a core or a callback that ranks would refuse later."""
    core, sizes = config.policy.core, (config.policy.hidden_size, config.policy.num_layers)
    if core or not config.task.is_trading:
        width = probe(task).empty_policy(config).feature_encoder.num_outputs
        if core:
            from agents.network.own_core import make_core, try_core

            try_core(core, make_core(core, width, *sizes), width, sizes[0])
    if config.train.callback:
        from rl_dist.checkpoint.trust import import_own

        import_own("callback", config.train.callback)


def _warn_of_budget(train: TrainConfig, sizes: Sizes) -> None:
    """Warn of an iteration that is longer than the whole run shall be."""
    steps = sizes.global_num_envs * train.num_steps
    if 0 < train.total_steps < steps:
        print(
            f"warning: one iteration is {steps:,} steps, more than --total_steps "
            f"{train.total_steps:,}: --batch_size {train.batch_size} counts sequences of "
            f"{train.bptt_steps} steps, not steps; a smaller --batch_size without --num_envs makes "
            "shorter iterations",
            file=sys.stderr,
            flush=True,
        )


def _announce_end(train: TrainConfig, found: Found) -> None:
    """Print it where a run to resume has reached its budget already."""
    budget = "total_steps" if train.total_steps else "num_episodes"
    done = found.state["global_step" if train.total_steps else "episodes"]
    wanted = getattr(train, budget)
    if done >= wanted:
        print(
            f"trained to its end already, {done:,} of --{budget} {wanted:,}: nothing is trained, "
            f"it is evaluated again; --{budget} above {done:,} trains on"
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
    """Return the learning rate in words: scaled, rising, falling."""
    words = f"{ppo.learning_rate:g}"
    if config.lr_scaling != "none":
        growth = sizes.global_batch_size // config.sequences_per_step
        factor = sizes.learning_rate_factor
        peak = learning_rate(ppo, max(ppo.warmup, 1), 1.0, factor)
        words += f" x {factor:.4g} ({config.lr_scaling} of a {growth}-fold batch) = {peak:.4g}"
    if ppo.warmup:
        words += f", rising over the first {ppo.warmup} iterations"
    if ppo.anneal_lr and config.total_steps:
        words += f", falling to 0 over {config.total_steps} steps"
    elif ppo.anneal_lr:
        words += f", falling to 0 over {config.num_episodes} episodes"
    return words
