"""Choose the run to start, new or resumed, from the command line or a dialogue."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from agents.config import (
    MAIN_FLAGS,
    MASSIVE_MINIBATCHES,
    NAMED_MODULES,
    OWNERS,
    PRESETS,
    QUICK,
    SECTIONS,
    RunConfig,
    check_data,
    preset_of,
    probe,
    quick_settings,
)
from agents.learner.policy import Policy
from agents.run.saved import check_shapes, differences, load_newest, spaces_of
from envs.task import TaskConfig
from envs.vector.adapter import LAST_ROW
from envs.vector.layout import TorchEnv
from rl_dist.checkpoint.store import LoadedCheckpoint, find_latest_run
from rl_dist.checkpoint.trust import check_named, import_from_here
from rl_dist.errors import UserError
from rl_dist.files import absolute, is_first
from rl_dist.flags import (
    Field,
    ParsedFlags,
    Text,
    allowed,
    configuration,
    fields_of,
    parse_flags,
    shown,
)
from rl_dist.launch.child import SHORT_RUN
from rl_dist.machine import print_gpu_info
from rl_dist.process_group.join import MAX_RESTARTS, elastic_count
from rl_dist.run_dir import RunDir

RUNS = Path("runs")
Probed = dict[TaskConfig, TorchEnv]  # results of `probe` by task
DESCRIPTION = "Train a cascaded-LSTM PPO policy, with the same learning curve on 1 or many ranks."
EPILOG = """examples:
  python train_distributed.py --quick                          a complete small run in half a minute
  python train_distributed.py                                  the main job: 5000 episodes
  python train_distributed.py --num_gpus 2 --device cpu        the same with two CPU ranks
  python train_distributed.py --data prices.csv --test_start 2016-01-04
  python train_distributed.py --env CartPole-v1 --total_steps 200000
  python train_distributed.py --resume runs/2026-01-31_12-00-00 --num_episodes 10000
exit codes: 0 done, 1 failed, 2 bad usage; stopped by a signal, after saving: 130 (INT),
143 (TERM), 138 (USR1), 129 (HUP)"""

# Flags that may change when a run is resumed: length, hardware, files to keep, and reporting.
CHANGEABLE = {
    "num_episodes", "total_steps", "data",
    "num_gpus", "gpu_ids", "device", "backend", "threads",
    "strategy", "hybrid_form", "shard_size", "gradient_compression", "fallback", "max_restarts",
    "collective_timeout", "startup_timeout", "env_timeout", "env_restarts", "env_workers",
    "env_groups", "max_bad_steps", "loggers",
    "checkpoint_every", "keep_checkpoints", "keep_best", "on_save_error", "validate_every",
    "eval_episodes",
    "stop_at", "callback",
    "on_event", "sync_check_every", "monitor_every", "profile",
}  # fmt: skip
# A resumed run ignores these values: it keeps the values that were measured when it began.
KEPT_CHOICES = (("batch_size", "auto"), ("precision", "auto"))
# Other settings that may change during a run, so config.json and a checkpoint may differ in them.
ADJUSTED = {"batch_size", "grad_accumulation", "chosen_strategy", "chosen_on"}
OMIT = "omit these flags, or start a new run"

# Flags of a short run; see SHORT_RUN.
SHORT_RUN_FLAGS = (
    "--total_steps=1000000000000000", "--checkpoint_every=1000000000", "--validate_every=0",
    "--keep_best=off", "--max_restarts=0", "--on_event=", "--seeds=", "--profile=false",
)  # fmt: skip

# Flags that --interactive asks for.
QUESTIONS = (
    "env", "data", "num_gpus", "strategy", "hidden_size", "num_steps", "batch_size", "num_envs",
    "total_steps", "num_episodes",
)  # fmt: skip


@configuration
class RunFlags:
    """Run directory, preset, seeds, and how to start the run."""

    run_dir: Text = ""
    """Directory to write to; by default, runs/DATE_TIME."""
    resume: Text = ""
    """Continue the run in this directory from its newest checkpoint; auto: continue run_dir if
    it is given, otherwise the newest run; if there is no run to continue, start a new one."""
    quick: bool = False
    """Do a small but complete run, which takes half a minute; the policy learns little."""
    preset: Literal[
        "auto", "trading", "small", "control", "memory", "pixels", "massive", "paper"
    ] = "auto"
    """Defaults for a kind of task, which replace the defaults listed here; auto: trading for
    StockTrading-v0, memory for the memory tasks of this project and of POPGym, massive for your own
    batches on a GPU or of at least 1,024 environments, pixels for other tasks with images of at
    least 64 x 64 pixels, control for continuous actions, small for the rest; paper: the settings of
    arXiv 2212.02721. A run prints its preset."""
    seeds: Text = Field("", json_schema_extra={"nargs": "+"})
    """Train once with each of these seeds; report the mean score and its 95 % interval."""
    interactive: bool = False
    """Ask for the main flags in the terminal, then start."""


ALL_SECTIONS = {"run": RunFlags(), **SECTIONS}


def parse_training(argv: Sequence[str] | None = None) -> ParsedFlags:
    """Parse the command line of train_distributed.py."""
    if SHORT_RUN in os.environ:
        argv = [*(sys.argv[1:] if argv is None else argv), *SHORT_RUN_FLAGS]
    return parse_flags(
        ALL_SECTIONS,
        argv,
        description=DESCRIPTION,
        epilog=EPILOG,
        main=MAIN_FLAGS | vars(RunFlags()).keys(),
    )


class ChosenRun(NamedTuple):
    """Configuration, directory and checkpoint of the run to start."""

    config: RunConfig
    directory: RunDir | None  # locked if it already contains a run; None: a new folder in runs/
    checkpoint: LoadedCheckpoint | None  # checkpoint to resume from; None: a new run
    env: TorchEnv | None  # closed environment from `probe`; None: the preset did not depend on it


def choose_run(parsed: ParsedFlags, cleanup: ExitStack) -> ChosenRun:
    """Find the directory, the checkpoint and the configuration of the run to start.

    A directory that already contains a run is locked before its checkpoint is chosen, so that no
    other process can save a newer checkpoint in between. Closing `cleanup` releases the lock.
    """
    flags: RunFlags = parsed.configs["run"]
    resume = flags.resume
    path: str | Path | None = flags.run_dir
    if elastic_count(MAX_RESTARTS):
        resume = resume or "auto"
        if resume == "auto" and not path:
            raise UserError(
                "torchrun --max-restarts needs --run_dir DIR, so that a restart can find the run"
            )
    if resume == "auto":
        path = path or find_latest_run(RUNS)
    elif resume:
        path = resume
    directory = RunDir(path) if path else None
    checkpoint: LoadedCheckpoint | None = None
    probed: Probed = {}
    if directory and resume:
        contains_run = directory.config_path.exists() or directory.checkpoints.is_dir()
        if is_first() and contains_run:
            cleanup.enter_context(directory.hold())
        checkpoint = load_newest(directory.checkpoints)
        if not checkpoint and resume != "auto":
            raise UserError(
                f"--resume finds no checkpoints in {directory.checkpoints}: give the directory "
                "of a run"
            )
    elif directory and is_first() and not directory.is_unused():
        raise UserError(
            f"run_dir {path} is not empty: continue its run with --resume {path}, or name another "
            "directory"
        )

    if directory and checkpoint:
        config = config_to_resume(checkpoint, directory, parsed.given)
        train = config.train
        sizes = {"num_envs", "batch_size"} - parsed.given.keys()
        conflicts = {  # flag -> True if its value does not fit the run to resume
            "--run_dir": resume != "auto" and absolute(flags.run_dir or resume) != directory.path,
            "--preset": flags.preset not in ("auto", train.chosen_preset),
            "--quick": flags.quick and any(getattr(train, name) != QUICK[name] for name in sizes),
        }
        _refuse([flag for flag in conflicts if conflicts[flag]], OMIT)
    else:
        config = fresh_config(parsed, probed)
    idle = ", ".join(f"--{name}" for name in config.idle_flags() if name in parsed.given)
    if idle and is_first():
        print(f"no effect in this run: {idle}")
    return ChosenRun(config, directory, checkpoint, probed.get(config.task))


# ---- new runs


def fresh_config(parsed: ParsedFlags, probed: Probed) -> RunConfig:
    """Return the configuration of a new run.

    Later sources override earlier ones: defaults, preset, --quick, flags on the command line.

    Args:
        probed: environments made so far to see what they observe; one more may be added.
    """
    given = parsed.given
    flags: RunFlags = parsed.configs["run"]
    config = RunConfig().changed(given)
    import_from_here(*config.named_code)

    def make_env() -> TorchEnv | None:
        env = probed.get(config.task) or probe(config.prepare_task())
        if env:
            probed[config.task] = env
        return env

    kind = preset_of(flags.preset, config, make_env)
    preset = PRESETS[kind] | {"chosen_preset": kind}
    # Drop preset sizes that may conflict with the given flags.
    is_massive = kind == "massive"  # its batch_size follows the other sizes
    if "bptt_steps" in given and not is_massive:
        preset.pop("num_steps", None)
    sizes = {"batch_size", "num_steps", "bptt_steps", "grad_accumulation"}
    if given.keys() & sizes and not is_massive:
        preset.pop("num_envs", None)
    if "num_episodes" in given:
        preset.pop("total_steps", None)
    if flags.quick:
        preset |= quick_settings(config.task)
    if is_massive:
        train = RunConfig().changed(preset | given).train
        sequences = train.num_envs * (train.num_steps // train.bptt_steps)
        steps = MASSIVE_MINIBATCHES * train.grad_accumulation
        preset["batch_size"] = sequences // steps or preset["batch_size"]
    if config.policy.encoder:
        preset["normalize_obs"] = False
    config = RunConfig().changed(preset | given).without_idle()
    return config.changed({"data_digest": config.prepare_task().digest()})


# ---- resumed runs


def config_to_resume(
    checkpoint: LoadedCheckpoint, directory: RunDir, given: Mapping[str, str]
) -> RunConfig:
    """Return the configuration saved in a checkpoint, with the given flags applied."""
    saved = RunConfig.from_dict(json.loads(checkpoint.state["config"]))
    config = resumed_config(saved, given)
    # With --env_restarts, environments are created one by one. They cannot load the state of a
    # batch of environments, which has no entry LAST_ROW.
    state = checkpoint.state["environments"] or {LAST_ROW}
    if config.task.env_restarts and LAST_ROW not in state:
        _refuse(["--env_restarts"], OMIT)
    # Check that the user trusts the modules that the run names, because the run directory may come
    # from another user.
    values = config.values
    for section, *names in NAMED_MODULES:
        named_values = {name: values[name] for name in names}
        check_named(directory.path, section, named_values, given.get(names[0]))
    check_data(config, config.prepare_task())
    recorded = saved
    with suppress(OSError, ValueError):  # config.json may be missing or damaged
        recorded = RunConfig.from_dict(directory.config())
    fixed = values.keys() - CHANGEABLE - ADJUSTED
    in_file, in_checkpoint = (
        {name: source.values[name] for name in fixed} for source in (recorded, saved)
    )
    if differing := differences(in_file, in_checkpoint):
        raise UserError(
            f"{checkpoint.path} and config.json are from different runs; config.json has "
            f"{', '.join(differing)}: move the checkpoint away"
        )
    return config


def resumed_config(saved: RunConfig, given: Mapping[str, str]) -> RunConfig:
    """Apply flags to a saved configuration; raise a UserError for flags that must not change."""
    old = saved.values
    new = RunConfig().changed(given).values
    changes = {
        name: new[name]
        for name in new.keys() & given.keys()
        if new[name] != old[name] and (name, given[name]) not in KEPT_CHOICES
    }
    # Reset settings whose values fitted only the old devices, ranks or strategy.
    reset: dict = {}
    if changes.keys() & {"num_gpus", "device", "gpu_ids"}:
        reset = {"gpu_ids": "", "threads": 0}
    if "gpu_ids" in changes:
        reset["num_gpus"] = -1
    if changes.keys() & {"strategy", "hybrid_form", "shard_size", "gradient_compression"}:
        reset |= {"chosen_strategy": "", "chosen_on": ""}
    config = saved.changed(reset | changes)
    changeable = CHANGEABLE
    if config.train.sequences_per_step == saved.train.sequences_per_step:
        changeable = changeable | {"batch_size", "grad_accumulation"}
    refused = changes.keys() - changeable
    now = {f"--{name}": changes[name] for name in refused}
    before = {f"--{name}": old[name] for name in refused}
    _refuse(differences(now, before), OMIT)
    return config.without_idle()


def check_resumable(state: dict, config: RunConfig, policy: Policy) -> None:
    """Raise a UserError if the spaces of the environment differ from those in the checkpoint."""
    check_shapes(state, config)
    now = policy.shapes()
    before = {name: state[name] for name in now}
    now["layout"] = policy.layout.kinds()
    before["layout"] = spaces_of(state)[0].kinds()
    _refuse(differences(now, before), "use the same environment and version as in training")


def _refuse(differing: list[str], fix: str) -> None:
    if differing:
        raise UserError(f"this differs from the run to resume: {', '.join(differing)}; {fix}")


# ---- the dialogue of --interactive


def ask_user(parsed: ParsedFlags, words: list[str]) -> ParsedFlags:
    """Ask for the main flags in the terminal; then print the equivalent command.

    Each answer is appended to the command line as a flag. Then the command line is parsed again, so
    that answers get the same checks and error messages as flags. No files are written.

    Args:
        words: the command line from which `parsed` was read.

    Raises:
        SystemExit: the user cancelled.
        ValueError: there is no terminal, or the flags do not fit.
    """
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if parsed.configs["run"].resume or "RANK" in os.environ or not has_terminal:
        raise UserError(
            "--interactive needs a terminal and works only for new runs, not with --resume or "
            "torchrun: omit --interactive and give flags (see --help)"
        )
    words = [word for word in words if word != "--interactive"]
    probed: Probed = {}
    print_gpu_info()
    print("Press Enter to accept the value in brackets, or Ctrl-C to cancel.")
    try:
        for flag in QUESTIONS:
            words = _ask(flag, words, probed)
        print(f"\nEquivalent command:\n  python train_distributed.py {shlex.join(words)}")
        input("Press Enter to start, or Ctrl-C to cancel.")
    except (EOFError, KeyboardInterrupt):
        print("\nCancelled; nothing was started.")
        raise SystemExit(128 + signal.SIGINT) from None
    return parse_training(words)


def _ask(flag: str, words: list[str], probed: Probed) -> list[str]:
    """Ask for a flag until the answer is valid; return `words` with this flag added."""
    config = fresh_config(parse_training(words), probed)
    if flag in config.idle_flags():
        return words
    section = getattr(config, OWNERS[flag])
    field = fields_of(section)[flag]
    question = f"{flag}: {field.description} ({allowed(field)}) [{shown(getattr(section, flag))}]: "
    while reply := input(question).strip():
        answered = [*words, f"--{flag}={reply}"]
        try:
            fresh_config(parse_training(answered), probed)
        except SystemExit:  # the parser has already printed the error
            continue
        except ValueError as error:
            print(f"  {' '.join(str(error).split())}")
        else:
            return answered
    return words
