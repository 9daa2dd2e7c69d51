"""Where a training writes its metrics."""

from __future__ import annotations

from agents.trainer import Training
from rl_dist.checkpoint.run_lock import RunLock
from rl_dist.telemetry.metrics import NullWriter, open_writer


def open_run_writer(training: Training, env: str, lock: RunLock | None) -> NullWriter:
    """The writer of a training's metrics; it writes on the main process only."""
    train = training.job.train
    by_steps = train.total_steps
    writer = open_writer(
        training.job.run_dir,
        training.world,
        by_steps or train.num_episodes,
        "steps" if by_steps else "episodes",
        start=training.global_step if by_steps else training.episodes,
        purge_step=training.global_step + 1,
        lock=(lock.path, lock.file) if lock else None,
    )
    if not getattr(training.env, "can_snapshot", False):
        writer.say(
            f"{env} cannot be snapshot: after --resume its episodes begin anew "
            "(envs/vector/snapshots.py tells how an environment takes part)"
        )
    return writer
