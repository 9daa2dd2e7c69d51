"""Compare the settings, software and devices of all ranks."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from rl_dist.errors import UserError, refuse_restarts
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.join import started_elsewhere
from rl_dist.process_group.world import World

logger = logging.getLogger(__name__)

CODE = Path(__file__).parents[2]
PACKAGES = ("rl_dist", "agents", "envs")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # equal in all containers of a machine


def check_settings(
    settings: Mapping[str, Any],
    world: World,
    modules: Mapping[str, Sequence[Path]] = MappingProxyType({}),
) -> None:
    """Check that settings, software and code are equal on all ranks.

    Every rank must call this.

    Args:
        settings: further values to compare, by name.
        modules: source files of the user's modules, by module name.

    Raises:
        UserError: something differs. Every rank raises it, with the first difference, both values,
            both ranks and their hosts.
    """
    if world.size == 1:
        return
    host = socket.gethostname()
    (first_host, first), *others = all_gather_json([host, {**software(modules), **settings}], world)
    for rank, (host, values) in enumerate(others, 1):
        for name in first | values:
            if values.get(name) != first.get(name):
                refuse_restarts()
                raise UserError(
                    f"rank {rank} on host {host} has {name} {values.get(name)!r}, but rank 0 on "
                    f"host {first_host} has {first.get(name)!r}: start all ranks with the same "
                    "software, code, flags and data"
                )


def software(modules: Mapping[str, Sequence[Path]]) -> dict[str, str]:
    """Return the versions of Python, torch, numpy and code on this rank, by name."""
    our_files = [path for name in PACKAGES for path in (CODE / name).rglob("*.py")]
    our_files += CODE.glob("train_distributed.py")
    hashes = {f"module {name}, version": short_hash(files) for name, files in modules.items()}
    return hashes | {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "this project's code, version": short_hash(our_files),
    }


def short_hash(paths: Sequence[Path]) -> str:
    """Return a short hash of the contents and names of files."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def devices_differ(world: World) -> bool:
    """Return True if device models differ, so that ranks may round differently."""
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
    else:
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return len(set(all_gather_json(name, world))) > 1


def warn_of_crowded_cores(world: World) -> None:
    """Warn if the ranks of a machine together have more threads than cores.

    That happens if several torchruns on one machine each give all cores to their ranks. Every rank
    must call this.
    """
    if world.size == 1 or not started_elsewhere():
        return
    machine = BOOT_ID.read_text() if BOOT_ID.exists() else socket.gethostname()
    cores = sorted(getattr(os, "sched_getaffinity", lambda pid: ())(0))  # not on macOS
    place = f"{machine} {cores}"
    ranks = all_gather_json([place, torch.get_num_threads()], world)
    threads = [count for other_place, count in ranks if other_place == place]
    if world.is_main_process and max(threads) > 1 and sum(threads) > len(cores) > 0:
        logger.warning(
            "%d threads of this job share %d core(s): give --threads %d",
            sum(threads),
            len(cores),
            max(1, len(cores) // len(threads)),
        )
