"""What hosts of one job must have in common."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl_dist.errors import UserError, refuse_restarts
from rl_dist.hardware.addresses import MAX_RESTARTS, elastic_count, host_range
from rl_dist.process_group.collectives import all_gather_json, all_reduce_max

if TYPE_CHECKING:
    from rl_dist.process_group.world import World

CODE = Path(__file__).parents[2]
PACKAGES = ("rl_dist", "agents", "envs")
SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of a machine, however many hosts it plays
MOST_APART_S = 60.0  # clocks: beyond it times of files and logs mislead


def code_version() -> str:
    """Return a short hash of our own modules."""
    paths = [path for name in PACKAGES for path in (CODE / name).rglob("*.py")]
    return short_hash([*sorted(paths), *CODE.glob("train_distributed.py")])


def short_hash(paths: Sequence[Path]) -> str:
    """Return a short hash of files and their names."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def devices_differ(world: World) -> bool:
    """Return True if ranks are on unlike devices, which may round sums otherwise."""
    if world.size == 1:
        return False
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
    else:
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    mark = zlib.crc32(name.encode())
    return all_reduce_max(mark, world) != -all_reduce_max(-mark, world)


def versions(modules: Mapping[str, Sequence[Path]]) -> dict[str, str]:
    """Return what must be alike on all hosts, by the words for it."""
    own = {f"module {name}, version": short_hash(files) for name, files in modules.items()}
    return own | {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "this project's code, version": code_version(),
    }


def difference(owners: Sequence[str], found: Sequence[Mapping[str, Any]]) -> str:
    """Return the first difference from the first owner; "": there is none."""
    first = found[0]
    for owner, other in zip(owners, found, strict=True):
        for name in {**first, **other}:
            if other.get(name) != first.get(name):
                return (
                    f"{owner} has {name} {other.get(name)!r}, "
                    f"but {owners[0]} has {first.get(name)!r}"
                )
    return ""


def check_settings(settings: Mapping[str, Any], world: World) -> None:
    """Compare the settings of all ranks, by name; all ranks call.

    Raises:
        UserError: names the first setting that differs, the rank and both values; on all ranks.
    """
    owners = [f"rank {rank}" for rank in range(world.size)]
    if complaint := difference(owners, all_gather_json(settings, world)):
        refuse_restarts()
        raise UserError(f"{complaint}: start all ranks with the same flags and data")


def compare_hosts(world: World, modules: Mapping[str, Sequence[Path]]) -> None:
    """Compare the hosts of a job that another launcher started; all ranks call.

    What is no error goes to `world.warnings`, on the main process.

    Args:
        modules: files of the user's own modules, by name.

    Raises:
        UserError: Python, torch, numpy or code differs between hosts.
    """
    machine = BOOT_ID.read_text() if BOOT_ID.exists() else socket.gethostname()
    affinity = getattr(os, "sched_getaffinity", lambda pid: ())  # macOS has none
    cores = sorted(affinity(0))
    about: dict[str, Any] = {
        "host": socket.gethostname(),
        "versions": versions(modules),
        "cores": len(cores),
        "which": zlib.crc32(f"{machine} {cores}".encode()),
        "threads": torch.get_num_threads(),
    }
    ranks = all_gather_json(about, world)
    hosts = [f"host {rank['host']}" for rank in ranks]
    if complaint := difference(hosts, [rank["versions"] for rank in ranks]):
        refuse_restarts()
        raise UserError(f"{complaint}: install the same on all hosts")
    warnings = [warn_of_shared_cores(ranks)] if cores else []
    clocks_s = all_gather_json(time.time(), world)  # right after a meeting
    if (apart_s := max(clocks_s) - min(clocks_s)) > MOST_APART_S:
        warnings.append(f"the hosts' clocks are {apart_s:.0f} s apart: set them by NTP")
    least, most = host_range()
    several = most > 1 or len({rank["host"] for rank in ranks}) > 1
    again = least < most or elastic_count(MAX_RESTARTS)
    if several and again and os.environ.get(SHARED_STORE) != "1":
        warnings.append(f"a lost host will end the job: set {SHARED_STORE}=1 for every torchrun")
    if world.is_main_process:
        world.warnings += filter(None, warnings)


def warn_of_shared_cores(ranks: list[dict[str, Any]]) -> str:
    """Return a warning if ranks have more threads than their machine has cores.

    Agents on one machine do not know of each other, and each gives its ranks all cores.
    """
    ranks_on = Counter(rank["which"] for rank in ranks)
    for rank in ranks:
        wanted = ranks_on[rank["which"]] * rank["threads"]
        if rank["threads"] > 1 and wanted > rank["cores"]:
            share = max(1, rank["cores"] // ranks_on[rank["which"]])
            return (
                f"host {rank['host']}: {wanted} threads of this job share {rank['cores']} core(s): "
                f"give --threads {share}"
            )
    return ""
