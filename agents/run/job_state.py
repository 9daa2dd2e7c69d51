"""What the ranks of a training agree on and write into state.json as they start."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from agents.run.config import RunConfig, load_newest
from agents.sizes import AUTO
from rl_dist.checkpoint.file import write_atomically
from rl_dist.checkpoint.folder import CHECKPOINT_DIR, Found, iteration_in_name
from rl_dist.launch.launcher import ResolvedLaunch, restart_count
from rl_dist.process_group.collectives import all_gather_json, broadcast_bytes
from rl_dist.process_group.hosts import check_hosts
from rl_dist.process_group.world import World
from rl_dist.telemetry.metrics import truncate_metrics
from rl_dist.telemetry.state_file import RankEntry, SavedCheckpoint, begin_state, update_state


def start_state(
    run_dir: Path, config: RunConfig, resolved: ResolvedLaunch, found: Found | None
) -> None:
    """Write state.json of a run whose ranks are about to start."""
    train = config.train
    values: dict[str, Any] = {}
    if found:
        values = {name: found.state[name] for name in ("iteration", "global_step", "episodes")}
        path = f"{CHECKPOINT_DIR}/{found.path.name}"
        values["checkpoint"] = SavedCheckpoint(path=path, iteration=values["iteration"])
    begin_state(
        run_dir,
        num_ranks=resolved.num_ranks,
        strategy=config.launch.strategy_config.mode,
        precision=config.launch.precision.replace("auto", "fp32"),
        target=train.total_steps or train.num_episodes,
        unit="steps" if train.total_steps else "episodes",
        **values,
    )


def agree_on_start(
    run_dir: Path, resume_from: str, config: RunConfig, world: World
) -> tuple[Path, str]:
    """Agree on run directory and newest checkpoint, and record all ranks.

    torchrun's ranks may have chosen differently, on hosts that share no file system for example.
    """
    check_hosts(world, config.launch.threads)
    if world.is_main_process and restart_count():
        newest = load_newest(run_dir)
        truncate_metrics(run_dir, newest.state["iteration"] if newest else 0)
        resume_from = str(newest.path) if newest else ""
    mine = {
        "rank": world.rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "device": str(world.device),
    }
    offer = resume_from if world.is_main_process or Path(resume_from).is_file() else ""
    gathered = all_gather_json([str(run_dir), offer, mine], world)
    run_dir = Path(gathered[0][0])
    if world.is_main_process:
        ranks = [RankEntry(**entry) for _, _, entry in gathered]
        dry_run = config.train.batch_size == AUTO or config.launch.strategy == "auto"
        phase = "dry_run" if dry_run else "starting"
        update_state(run_dir, ranks=ranks, num_ranks=world.size, phase=phase)
    return run_dir, share_checkpoint(run_dir, [each[1] for each in gathered], world)


def share_checkpoint(run_dir: Path, chosen: list[str], world: World) -> str:
    """Return the newest of the ranks' checkpoints; hosts that lack it get a copy.

    Another rank's choice counts only where rank 0 has no such file: else it has refused it.
    """
    folder = run_dir / CHECKPOINT_DIR

    def newness(rank: int) -> int:
        path = Path(chosen[rank])
        counts = path.parent == folder and (rank == 0 or not path.exists())
        return iteration_in_name(path) if counts else -2

    owner = all_gather_json(max(range(world.size), key=newness), world)[0]
    path = Path(chosen[owner])
    if chosen[owner] and any(all_gather_json(not path.exists(), world)):
        data = broadcast_bytes(path.read_bytes() if world.rank == owner else b"", owner, world)
        if world.local_rank == 0 and not path.exists():
            write_atomically(path, data)
        all_gather_json("written", world)
    return chosen[owner]
