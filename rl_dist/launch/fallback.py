"""The strategy that ranks are started for: asked, chosen before, or fallback."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from rl_dist.errors import UserError
from rl_dist.launch.bench import BenchError, time_reductions
from rl_dist.launch.config import LaunchConfig, ResolvedLaunch, resolve
from rl_dist.strategies.config import Mode

PROBE_BYTES, PROBE_TIMEOUT_S = 4096, 120.0


@dataclass(frozen=True)
class LaunchDecision:
    """What `resolve_launch` decided: a launch that can begin."""

    config: LaunchConfig  # with what was stepped down to, or chosen before
    resolved: ResolvedLaunch
    note: str = ""  # for the user: what was stepped down to, and why


def try_ranks(resolved: ResolvedLaunch) -> None:
    """Start ranks that reduce gradients; raises BenchError."""
    time_reductions(
        resolved.num_ranks,
        [PROBE_BYTES],
        resolved.device_type,
        timeout_s=PROBE_TIMEOUT_S,
        gpu_ids=resolved.gpu_ids,
    )


def resolve_launch(
    config: LaunchConfig, probe: Callable[[ResolvedLaunch], None] = try_ranks
) -> LaunchDecision:
    """Decide as `resolve` does, but for earlier choices and --fallback.

    What a run chose on the same ranks stands; --fallback steps down to what works.

    Args:
        probe: raises BenchError where ranks cannot work together; called with --fallback only.
    """
    if config.chosen_strategy:
        with suppress(ValueError):
            resolved = resolve(_with_mode(config, config.chosen_strategy))
            if resolved.place == config.chosen_on:
                return LaunchDecision(config, resolved)
        config = dataclasses.replace(config, chosen_strategy="", chosen_on="")
    if not config.fallback:
        return LaunchDecision(config, resolve(config))
    config.check_hybrid()
    if config.strategy != "none":  # a mistake in other flags is no reason to step down
        # torchrun's ranks are as many as they are
        one_process = config.strategy == "dp" and "RANK" not in os.environ
        resolve(_with_mode(config, "none" if one_process else "default"))

    failed: list[str] = []
    for mode in (config.strategy, *["ddp"] * (config.strategy == "hybrid"), "none"):
        try:
            lower = config if mode == config.strategy else _with_mode(config, mode)
            resolved = resolve(lower)
            if resolved.num_ranks > 1 and "RANK" not in os.environ:
                probe(resolved)
            break
        except (ValueError, BenchError) as error:
            failed.append(f"{mode} does not work here ({' '.join(str(error).split())})")
    else:
        raise UserError(f"no strategy works: {'; '.join(failed)}")
    if not failed:
        return LaunchDecision(config, resolved)
    decided = dataclasses.replace(
        config,
        chosen_strategy=cast("Mode", mode),
        chosen_on=resolved.place,
        gradient_compression=lower.gradient_compression,
    )
    reason = "; ".join(failed)
    return LaunchDecision(
        decided, resolved, f"{reason}: fallback to strategy {mode}, {resolved.place}"
    )


def _with_mode(config: LaunchConfig, mode: str) -> LaunchConfig:
    """The launch of another strategy on the same hardware; none takes one rank of it."""
    changes: dict[str, str | int] = {"strategy": mode, "chosen_strategy": ""}
    if mode != "hybrid":
        changes |= {"shard_size": 0, "hybrid_form": "shard"}
    if mode in ("none", "dp", "hybrid"):
        changes["gradient_compression"] = "none"
    if mode == "none" and "RANK" not in os.environ:
        changes |= {"num_gpus": min(config.num_gpus, 1) if config.num_gpus != -1 else 1}
        changes |= {"gpu_ids": config.gpu_ids.split(",")[0]}
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]
