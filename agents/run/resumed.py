"""The configuration of a run that goes on: the saved one, and what may change."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from agents.run.config import SECTIONS, RunConfig, refuse_differences
from agents.sizes import AUTO, TrainConfig
from rl_dist.checkpoint.folder import Found
from rl_dist.checkpoint.own_modules import check_module
from rl_dist.config import ParsedFlags, given_once
from rl_dist.errors import UserError

# What a resumed run may change: how long, and where it runs.
CHANGEABLE = {"num_episodes", "total_steps", "num_gpus", "device", "strategy", "hybrid_form", "checkpoint_every"} | {
    "gpu_ids",
    "fallback",
    "keep_checkpoints",
    "keep_best",
    "on_save_error",
    "validate_every",
    "max_restarts",
    "on_event",
    "env_timeout",
    "env_restarts",
    "max_bad_steps",
    "sync_check_every",
    "collective_timeout",
    "monitor_every",
    "shard_size",
    "gradient_compression",
    "cudnn_autotune",
    "fused_adam",
    "compile",
    "profile",
}


def config_to_resume(found: Found, run_dir: Path, parsed: ParsedFlags) -> RunConfig:
    """`resumed_config` of a checkpoint; says what it had that is to be given again.

    Raises:
        UserError: as `resumed_config` and `check_module`.
    """
    saved = json.loads(found.state["config"])
    config = resumed_config(RunConfig.from_dict(saved), parsed)
    check_module(config.task.env, config.task.env_kwargs, run_dir, parsed.named("env"))
    for name in sorted(given_once(SECTIONS, saved) - parsed.given):
        if os.environ.get("RANK", "0") == "0":
            print(f"this run had --{name}, which is not stored: it does nothing now unless it is given again")
    return config


def resumed_config(saved: RunConfig, parsed: ParsedFlags) -> RunConfig:
    """The saved configuration, with the flags that a resumed run may change.

    Raises:
        UserError: flags were repeated with other values than the run was started with; names all of them.
    """
    sections: dict[str, Any] = {}
    differing: list[str] = []
    changeable = CHANGEABLE | _same_step(saved.train, parsed)
    for name in SECTIONS:
        old, new = getattr(saved, name), parsed.configs[name]
        given = sorted({item.name for item in dataclasses.fields(new)} & parsed.given)
        changes = {flag: getattr(new, flag) for flag in given if getattr(new, flag) != getattr(old, flag)}
        if changes.get("batch_size") == AUTO:  # it was measured when the run began
            del changes["batch_size"]
        if changes.get("strategy", "hybrid") != "hybrid":
            changes = {"hybrid_form": "shard", "shard_size": 0} | changes  # they would do nothing from here on
        if changes.get("hybrid_form") == "pipeline":
            changes = {"shard_size": 0} | changes  # so would this
        differing += [f"--{flag} {changes[flag]} (it has {getattr(old, flag)})" for flag in changes.keys() - changeable]
        kept = {flag: changes[flag] for flag in changes.keys() & changeable}
        sections[name] = dataclasses.replace(old, **kept | (_other_devices(kept) if name == "launch" else {}))
    refuse_differences(differing, "leave out what differs, or start a fresh run")
    config = RunConfig(**sections)
    if config.train.total_steps and "num_episodes" in parsed.given:
        raise UserError("--num_episodes does nothing in a run that stops by --total_steps: give --total_steps")
    return config


def _other_devices(changes: dict[str, Any]) -> dict[str, Any]:
    """What no longer counts when a resumed run gets other ranks or another strategy."""
    reset: dict[str, Any] = {}
    if "gpu_ids" in changes and "num_gpus" not in changes:
        reset["num_gpus"] = -1
    if "gpu_ids" not in changes and changes.keys() & {"num_gpus", "device"}:
        reset["gpu_ids"] = ""
    if changes.keys() & {"strategy", "hybrid_form", "shard_size", "gradient_compression"}:  # else they do nothing
        reset |= {"chosen_strategy": "", "chosen_on": ""}
    return reset


def _same_step(old: TrainConfig, parsed: ParsedFlags) -> set[str]:
    """The sizes that may change together, because a gradient step still takes as many slots."""
    sizes = {"batch_size", "grad_accumulation"}
    new = {name: getattr(parsed.configs["train"], name) for name in sizes & parsed.given}
    same = new.get("batch_size") != AUTO and dataclasses.replace(old, **new).slots_per_step == old.slots_per_step
    return sizes if same else set()
