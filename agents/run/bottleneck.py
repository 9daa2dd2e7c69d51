"""What limits a training, out of the seconds of its sections."""

from __future__ import annotations

from collections.abc import Mapping

from rl_dist.telemetry.profiler import COPIES, GRADIENTS, WAITING

CURES = {
    "the environment": "every rank steps its own share, so more --num_gpus (on a CPU: ranks) step more at a time; a "
    "vectorised environment, or one on the GPU, steps many at once",
    "policy inference": "each call serves all environments of a rank: more --num_envs per call cost little more; a "
    "smaller --hidden_size costs less",
    "the update": "more --num_gpus share it out; fewer --update_epochs or a smaller --hidden_size make it shorter",
    "copies between CPU and GPU": "an environment that keeps its observations on the GPU needs none",
    "waiting for other ranks": "larger --batch_size and --num_envs make ranks meet less often for the same work; "
    "take fewer ranks where one is slower than the others",
}


def parts_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of an iteration by what could limit it.

    Args:
        seconds: of the sections of an iteration, as `rl_dist.telemetry.profiler` reads them.
    """
    copies_s, gradients_s = seconds.get(COPIES, 0.0), seconds.get(GRADIENTS, 0.0)
    return {
        "the environment": max(0.0, seconds["collect/environment"] - copies_s),  # it fetches actions, hands over obs
        "policy inference": seconds["collect/policy"],
        "the update": max(0.0, seconds["update"] - gradients_s),
        "copies between CPU and GPU": copies_s,
        "waiting for other ranks": gradients_s + seconds.get(WAITING, 0.0),
    }


def bottleneck(seconds: Mapping[str, float]) -> str:
    """The part of an iteration that takes longest, and its cure, in one sentence."""
    parts = parts_of(seconds)
    name = max(parts, key=parts.__getitem__)
    share = parts[name] / sum(parts.values())
    return f"bottleneck: {name} ({share:.0%} of environment, policy, update, copies and waiting): {CURES[name]}"
