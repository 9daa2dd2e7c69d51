"""The configuration of a run that goes on: the saved one, and what may change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.config import RunConfig, data_digest, probe
from agents.run.saved import check_shapes, spaces_of
from agents.run.sizes import shard_sizes
from envs.trading.config import DataConfig
from rl_dist.checkpoint.store import Found
from rl_dist.checkpoint.trust import check_named, import_from_here
from rl_dist.errors import UserError
from rl_dist.flags import ParsedFlags

if TYPE_CHECKING:
    from envs.task import GymTask
    from envs.trading.task import TradingTask

# A resumed run may change how long and where it runs, and what it keeps and reports.
CHANGEABLE = {
    "num_episodes", "total_steps",
    "num_gpus", "gpu_ids", "device", "threads", "strategy", "hybrid_form", "shard_size",
    "gradient_compression", "fallback", "max_restarts",
    "collective_timeout", "startup_timeout", "env_timeout", "env_restarts", "env_workers",
    "env_groups", "max_bad_steps", "loggers",
    "checkpoint_every", "keep_checkpoints", "keep_best", "on_save_error", "validate_every",
    "stop_at", "callback",
    "on_event", "sync_check_every", "monitor_every", "profile",
}  # fmt: skip
KEPT_CHOICES = (("batch_size", "auto"), ("precision", "auto"))


def config_to_resume(found: Found, run_dir: Path, parsed: ParsedFlags) -> RunConfig:
    """Return the configuration to go on with."""
    saved = RunConfig.from_dict(json.loads(found.state["config"]))
    config = resumed_config(saved, parsed.given)
    if config.task.is_trading:
        check_data(config.data, f"begin a run with --init_from {run_dir}")
    check_own_modules(config, run_dir, parsed.given)
    return config


def check_own_modules(config: RunConfig, run_dir: Path, given: Mapping[str, str]) -> None:
    """Let modules lie in the current directory; refuse those that nobody here named."""
    task, core, callback = config.task, config.policy.core, config.train.callback
    import_from_here(task.env, core, callback)
    for section, saved in (
        ("task", {"env": task.env, "env_kwargs": task.env_kwargs}),
        ("policy", {"core": core}),
        ("train", {"callback": callback}),
    ):
        check_named(run_dir, section, saved, given.get(next(iter(saved))))


def check_data(config: DataConfig, otherwise: str) -> None:
    """Refuse prices that have changed: days of training and test would move."""
    if config.data_digest and data_digest(config) not in ("", config.data_digest):
        raise UserError(
            f"--data {config.data} has changed since this run began: bring the file back, or "
            f"{otherwise}"
        )


def resumed_config(saved: RunConfig, given: Mapping[str, str]) -> RunConfig:
    """Return the saved configuration with flags that may change; refuse all others."""
    old, new = saved.values, RunConfig().changed(given).values
    changes = {
        name: new[name]
        for name, text in given.items()
        # what auto chose when the run began stays
        if new[name] != old[name] and (name, text) not in KEPT_CHOICES
    }
    config = saved.changed(_other_devices(changes) | changes)
    changeable = CHANGEABLE
    if config.train.sequences_per_step == saved.train.sequences_per_step:
        changeable = changeable | {"batch_size", "grad_accumulation"}
    refuse_differences(
        [f"--{n} {v} (it has {old[n]})" for n, v in changes.items() if n not in changeable],
        "omit what differs, or start a fresh run",
    )
    return config.without_idle()


def _other_devices(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields that no longer count with other ranks or another strategy, reset."""
    reset: dict[str, Any] = {}
    if "gpu_ids" in changes and "num_gpus" not in changes:
        reset["num_gpus"] = -1
    if "gpu_ids" not in changes and changes.keys() & {"num_gpus", "device"}:
        reset["gpu_ids"] = ""
    if "threads" not in changes and changes.keys() & {"num_gpus", "device", "gpu_ids"}:
        reset["threads"] = 0  # other ranks share the cores
    # else these changes would do nothing
    if changes.keys() & {"strategy", "hybrid_form", "shard_size", "gradient_compression"}:
        reset |= {"chosen_strategy": "", "chosen_on": ""}
    return reset


def check_resumable(
    state: dict[str, Any], config: RunConfig, task: TradingTask | GymTask, num_ranks: int
) -> None:
    """Raise UserError where a checkpoint does not fit the environments of now."""
    check_shapes(state, config.policy, config.launch.dtype)
    saved = len(state["carry"]["obs"])
    num_envs = shard_sizes(config.train, 0, num_ranks, saved).global_num_envs
    found = probe(task)
    now = found.empty_policy(config)
    compared = {
        "observation size": (now.num_obs, state["num_obs"]),
        "actions": (_actions(now.shapes()), _actions(state)),
        "observations": (now.layout.kinds(), spaces_of(state)[0].kinds()),
        f"environments on {num_ranks} rank(s)": (num_envs, saved),
    }
    if state["environments"] is not None and not found.can_snapshot:
        compared["snapshots of environments"] = ("none", "some")
    differing = [f"{name} {a} (it has {b})" for name, (a, b) in compared.items() if a != b]
    refuse_differences(differing, "use the environment, sizes and version it was trained with")


def _actions(shapes: dict[str, Any]) -> str:
    kind = "discrete" if shapes["discrete"] else "continuous"
    several = f" {shapes['action_sizes']}" if shapes["action_sizes"] else ""
    return f"{shapes['num_actions']} {kind}{several}"


def refuse_differences(differing: list[str], fix: str) -> None:
    """Raise UserError where something differs from the run to resume."""
    if differing:
        raise UserError(
            f"this differs from the run to resume: {', '.join(sorted(differing))}; {fix}"
        )
