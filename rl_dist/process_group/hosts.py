"""What hosts of one job must have in common."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import socket
import time
import zlib
from pathlib import Path

import torch

from rl_dist.errors import UserError
from rl_dist.hardware.addresses import MAX_RESTARTS, elastic_count
from rl_dist.process_group.collectives import all_gather_json, all_reduce_max
from rl_dist.process_group.world import World

CODE = Path(__file__).parents[2]
PACKAGES = ("rl_dist", "agents", "envs")
SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of a machine, however many hosts it plays
MOST_APART_S = 60.0  # clocks: beyond it times of files and logs mislead
logger = logging.getLogger(__name__)


def code_version() -> str:
    """Return a short hash of our own modules."""
    digest = hashlib.sha256()
    for path in sorted(path for name in PACKAGES for path in (CODE / name).rglob("*.py")):
        digest.update(f"{path.relative_to(CODE)}\0".encode() + path.read_bytes())
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


def difference(ranks: list[dict[str, str]]) -> str:
    """Return what differs between these ranks' hosts, torch or code; "" if nothing."""
    first = ranks[0]
    for name, words in (("torch", "torch"), ("code", "this project's code, version")):
        for other in ranks:
            if other[name] != first[name]:
                return (
                    f"host {other['host']} has {words} {other[name]}, but host {first['host']} "
                    f"has {first[name]}: install the same on all hosts"
                )
    return ""


def share_cores(world: World, threads: int) -> None:
    """Take this rank's share of cores that ranks of other hosts use, too.

    Agents on one machine do not know of each other, and each gives its ranks all cores; threads
    that wait for a core spin. Not if the user has given `threads`.
    """
    try:
        machine = BOOT_ID.read_text().strip()
    except OSError:
        machine = socket.gethostname()
    own = [machine, sorted(os.sched_getaffinity(0))]
    before = torch.get_num_threads()
    share = max(1, len(own[1]) // all_gather_json(own, world).count(own))
    if share < before and not threads:
        torch.set_num_threads(share)
        logger.warning(
            "hosts of this job share cores: %d thread(s) for each rank instead of %d (--threads)",
            *(share, before),
        )


def check_hosts(world: World, threads: int = 0) -> None:
    """Compare the hosts of a job on several of them; all ranks call.

    Logs a warning where clocks are apart, or where a lost host would end the job.

    Args:
        threads: asked for by the user; 0: ranks on the same cores share them.

    Raises:
        UserError: torch or our code differs between hosts.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", world.size)) == world.size:
        return
    versions = {"torch": torch.__version__, "code": code_version()}
    if complaint := difference(all_gather_json({"host": socket.gethostname(), **versions}, world)):
        raise UserError(complaint)
    if hasattr(os, "sched_getaffinity"):
        share_cores(world, threads)
    clocks_s = all_gather_json(time.time(), world)  # right after a meeting
    if not world.is_main_process:
        return
    if (apart_s := max(clocks_s) - min(clocks_s)) > MOST_APART_S:
        logger.warning("the hosts' clocks are %.0f s apart: set them by NTP", apart_s)
    if elastic_count(MAX_RESTARTS) and os.environ.get(SHARED_STORE) != "1":
        logger.warning(
            "a lost host will end the job: set %s=1 for torchrun on every host", SHARED_STORE
        )
