"""The configuration of a run that goes on: the saved one, and what may change."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.policy import spaces_of
from agents.run.config import SECTIONS, RunConfig, data_digest, probe
from agents.run.saved import check_shapes
from agents.sizes import AUTO, TrainConfig, shard_sizes
from envs.trading_config import DataConfig
from rl_dist.checkpoint.store import Found
from rl_dist.checkpoint.trust import check_named, import_from_here
from rl_dist.errors import UserError
from rl_dist.flags import ParsedFlags

if TYPE_CHECKING:
    from envs.task import GymTask
    from envs.trading.task import TradingTask

# What a resumed run may change: how long, where it runs, and what it keeps and reports.
CHANGEABLE = {
    "num_episodes", "total_steps",
    "num_gpus", "gpu_ids", "device", "threads", "strategy", "hybrid_form", "shard_size",
    "gradient_compression", "fallback", "fused_adam", "max_restarts",
    "collective_timeout", "startup_timeout", "env_timeout", "env_restarts", "env_workers",
    "env_groups", "max_bad_steps", "loggers",
    "checkpoint_every", "keep_checkpoints", "keep_best", "on_save_error", "validate_every",
    "stop_at", "callback",
    "on_event", "sync_check_every", "monitor_every", "profile",
}  # fmt: skip


def config_to_resume(found: Found, run_dir: Path, parsed: ParsedFlags) -> RunConfig:
    """Return the configuration to go on with."""
    config = resumed_config(RunConfig.from_dict(json.loads(found.state["config"])), parsed)
    if config.task.is_trading:
        check_data(config.data, f"begin a run with --init_from {run_dir}")
    check_own_modules(config, run_dir, parsed)
    return config


def check_own_modules(config: RunConfig, run_dir: Path, parsed: ParsedFlags) -> None:
    """Let modules lie in the current directory; refuse those that nobody here named."""
    task, core, callback = config.task, config.policy.core, config.train.callback
    import_from_here(task.env, core, callback)
    for section, saved in (
        ("task", {"env": task.env, "env_kwargs": task.env_kwargs}),
        ("policy", {"core": core}),
        ("train", {"callback": callback}),
    ):
        field = next(iter(saved))
        given = getattr(parsed.configs[section], field) if field in parsed.given else None
        check_named(run_dir, section, saved, given)


def check_data(config: DataConfig, otherwise: str) -> None:
    """Refuse prices that have changed: days of training and test would move."""
    if config.data_digest and data_digest(config) not in ("", config.data_digest):
        raise UserError(
            f"--data {config.data} has changed since this run began: bring the file back, or "
            f"{otherwise}"
        )


def resumed_config(saved: RunConfig, parsed: ParsedFlags) -> RunConfig:
    """Return the saved configuration with flags that may change; refuse all others."""
    sections: dict[str, Any] = {}
    differing: list[str] = []
    changeable = CHANGEABLE | _same_step(saved.train, parsed)
    for name in SECTIONS:
        old, new = getattr(saved, name), parsed.configs[name]
        given = sorted({item.name for item in dataclasses.fields(new)} & parsed.given)
        changes = {
            flag: getattr(new, flag) for flag in given if getattr(new, flag) != getattr(old, flag)
        }
        for measured in (("batch_size", AUTO), ("precision", "auto")):  # when the run began
            if measured in changes.items():
                del changes[measured[0]]
        # flags of hybrid do nothing with another strategy, shard_size nothing in a pipeline
        if changes.get("strategy", "hybrid") != "hybrid":
            changes = {"hybrid_form": "shard", "shard_size": 0} | changes
        if changes.get("hybrid_form") == "pipeline":
            changes = {"shard_size": 0} | changes
        differing += [
            f"--{flag} {changes[flag]} (it has {getattr(old, flag)})"
            for flag in changes.keys() - changeable
        ]
        kept = {flag: changes[flag] for flag in changes.keys() & changeable}
        reset = _other_devices(kept) if name == "launch" else {}
        sections[name] = dataclasses.replace(old, **kept | reset)
    refuse_differences(differing, "omit what differs, or start a fresh run")
    config = RunConfig(**sections)
    if config.train.total_steps and "num_episodes" in parsed.given:
        raise UserError(
            "--num_episodes does nothing in a run that stops by --total_steps: give --total_steps"
        )
    return config


def _other_devices(changes: dict[str, Any]) -> dict[str, Any]:
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


def _same_step(old: TrainConfig, parsed: ParsedFlags) -> set[str]:
    """Return the sizes that may change together: a gradient step takes as many sequences."""
    sizes = {"batch_size", "grad_accumulation"}
    new = {name: getattr(parsed.configs["train"], name) for name in sizes & parsed.given}
    if new.get("batch_size") == AUTO:
        return set()
    same = dataclasses.replace(old, **new).sequences_per_step == old.sequences_per_step
    return sizes if same else set()


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
