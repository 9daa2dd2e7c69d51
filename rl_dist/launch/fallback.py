"""Decide the strategy of new ranks: asked for, chosen before, or a fallback."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from rl_dist.errors import UserError, one_line
from rl_dist.launch.bench import BenchError, time_reductions
from rl_dist.launch.config import LaunchConfig, ResolvedLaunch, resolve
from rl_dist.strategies.config import Mode

PROBE_BYTES, PROBE_TIMEOUT_S = 4096, 120.0


def try_ranks(resolved: ResolvedLaunch) -> None:
    """Start ranks that reduce gradients; raises BenchError where they cannot."""
    time_reductions(
        resolved.num_ranks,
        [PROBE_BYTES],
        resolved.device_type,
        timeout_s=PROBE_TIMEOUT_S,
        gpu_ids=resolved.gpu_ids,
    )


def resolve_launch(
    config: LaunchConfig, probe: Callable[[ResolvedLaunch], None] = try_ranks
) -> tuple[LaunchConfig, ResolvedLaunch, str]:
    """Return a launch that can begin, its ranks, and a note if it stepped down.

    A strategy that the run chose before stands on the same ranks. --fallback steps down from
    hybrid to ddp, and from every strategy to none on one rank.

    Args:
        probe: raises BenchError where ranks cannot work together; called with --fallback only.
    """
    if config.chosen_strategy:
        with suppress(ValueError):
            resolved = resolve(_with_mode(config, config.chosen_strategy))
            if resolved.place == config.chosen_on:
                return config, resolved, ""
        config = replace(config, chosen_strategy="", chosen_on="")
    if not config.fallback:
        return config, resolve(config), ""
    resolve(config.by_default())  # a mistake in other flags is no reason to step down
    problems: list[str] = []
    for mode in dict.fromkeys((config.strategy, *["ddp"] * (config.strategy == "hybrid"), "none")):
        try:
            resolved = resolve(config if mode == config.strategy else _with_mode(config, mode))
            if resolved.num_ranks > 1 and "RANK" not in os.environ:
                probe(resolved)
            break
        except (ValueError, BenchError) as error:
            problems.append(f"{mode} does not work here ({one_line(error, named=False)})")
    else:
        raise UserError(f"no strategy works: {'; '.join(problems)}")
    if not problems:
        return config, resolved, ""
    note = f"{'; '.join(problems)}: fallback to strategy {mode}, {resolved.place}"
    config = replace(
        config,
        chosen_strategy=cast("Mode", mode),
        chosen_on=resolved.place,
        gradient_compression="none",
    )
    return config, resolved, note


def _with_mode(config: LaunchConfig, mode: str) -> LaunchConfig:
    """Return the launch of another strategy on the same hardware; none takes one rank of it."""
    changes: dict[str, Any] = {"strategy": mode, "chosen_strategy": ""}
    if mode == "none" and "RANK" not in os.environ:
        changes["num_gpus"] = 1 if config.num_gpus else 0
        changes["gpu_ids"] = config.gpu_ids.split(",")[0]
    return replace(config.by_default(), **changes)
