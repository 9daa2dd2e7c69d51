"""What an iteration tells of the episodes that ended in it, and of the ranks."""

from __future__ import annotations

import logging
from typing import Any

from agents.rollout import Rollout
from rl_dist.collectives import gather_json
from rl_dist.stragglers import Stragglers
from rl_dist.world import World

logger = logging.getLogger(__name__)


def episode_metrics(rollout: Rollout, timing: dict[str, float], env_restarts: int, world: World) -> dict[str, Any]:
    """Returns and lengths of this rollout's ended episodes, overall and per rank."""
    ended = rollout.episode_end
    own = {
        "rank": world.rank,
        "episode/count": int(ended.sum()),
        "return_sum": float((rollout.episode_returns * ended).sum()),
        "length_sum": int((rollout.episode_lengths * ended).sum()),
        "restarts": env_restarts,
        **timing,
        **world.monitor.take(),
    }
    ranks = gather_json(own, world)
    count = sum(item["episode/count"] for item in ranks)
    return_sum = sum(item["return_sum"] for item in ranks)
    length_sum = sum(item.pop("length_sum") for item in ranks)
    for item in ranks:
        total = item.pop("return_sum")
        item["episode/return"] = total / item["episode/count"] if item["episode/count"] else None
    return {
        "episode/return": return_sum / count if count else None,
        "episode/length": length_sum / count if count else None,
        "episode/count": count,
        "env/restarts": sum(item.pop("restarts") for item in ranks),
        **{key: max(item[key] for item in ranks) for key in timing},
        "ranks": ranks,
    }


def tell_stragglers(stragglers: Stragglers, metrics: dict[str, Any]) -> None:
    """Warn of ranks that keep the others waiting."""
    keys = {"collect": "time/collect_s", "update": "time/update_own_s"}
    phases = {phase: [rank[key] for rank in metrics["ranks"]] for phase, key in keys.items()}
    for line in stragglers.observe(phases):
        logger.warning(line)
