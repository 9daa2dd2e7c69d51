"""Decide the strategy of new ranks: requested, chosen earlier, or a fallback."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rl_dist.errors import UserError, one_line
from rl_dist.launch.bench import time_reductions
from rl_dist.launch.child import ChildError
from rl_dist.launch.config import LaunchConfig, ResolvedLaunch, resolve

PROBE_BYTES = 4096  # size of the gradient in the trial of a strategy


def resolve_launch(config: LaunchConfig) -> tuple[LaunchConfig, ResolvedLaunch, str]:
    """Return a configuration that can start, its ranks, and a note on any fallback.

    A strategy that was chosen earlier in this run is kept as long as the number of ranks and their
    device stay the same. With --fallback, the ranks are first started for a trial. If they fail,
    hybrid is replaced by ddp, and any other strategy by none on one rank.
    """
    if config.chosen_strategy:
        with suppress(ValueError):
            resolved = resolve(_with_mode(config, config.chosen_strategy))
            if resolved.place == config.chosen_on:
                return config, resolved, ""
        config = replace(config, chosen_strategy="", chosen_on="")
    if not config.fallback:
        return config, resolve(config), ""
    problems = ""
    modes = ("hybrid", "ddp", "none") if config.strategy == "hybrid" else (config.strategy, "none")
    for mode in dict.fromkeys(modes):  # without duplicates
        try:
            resolved = resolve(_with_mode(config, mode) if problems else config)
            if resolved.num_ranks > 1 and "RANK" not in os.environ:
                kind, gpu_ids = resolved.device_type, resolved.gpu_ids
                time_reductions(resolved.num_ranks, [PROBE_BYTES], kind, gpu_ids=gpu_ids)
        except (ValueError, ChildError) as error:
            problems += f"{mode} does not work here ({one_line(error, named=False)}); "
            continue
        if not problems:
            return config, resolved, ""
        note = f"{problems}fallback to strategy {mode}, {resolved.place}"
        chosen: dict[str, Any] = {"chosen_strategy": mode, "chosen_on": resolved.place}
        return replace(config, **chosen, gradient_compression="none"), resolved, note
    raise UserError(f"{problems}no strategy is left: change the flags that are named")


def _with_mode(config: LaunchConfig, mode: str) -> LaunchConfig:
    """Return the configuration with strategy `mode`; mode "none" uses one rank."""
    changes: dict[str, Any] = {"strategy": mode, "chosen_strategy": "", "hybrid_form": "shard"}
    changes |= {"shard_size": 0, "gradient_compression": "none"}
    if mode == "none" and "RANK" not in os.environ:
        changes["num_gpus"] = 1 if config.num_gpus else 0
        changes["gpu_ids"] = config.gpu_ids.split(",")[0]
    return replace(config, **changes)
