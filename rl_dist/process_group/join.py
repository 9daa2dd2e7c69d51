"""Join the ranks: their store, and what their hosts must have in common."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
import threading
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from rl_dist.errors import UserError, refuse_restarts
from rl_dist.process_group.addresses import MAX_RESTARTS, check_address, elastic_count, host_range
from rl_dist.process_group.collectives import all_gather_json, all_reduce_max

if TYPE_CHECKING:
    from rl_dist.process_group.world import World

GREETING_EVERY_S = 0.05
NOTICE_AFTER_S = 15.0
CODE = Path(__file__).parents[2]
PACKAGES = ("rl_dist", "agents", "envs")
SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of a machine, however many hosts it plays
MOST_APART_S = 60.0  # clocks: beyond it times of files and logs mislead


def open_store(rank: int, size: int, job_dir: str, timeout_s: float) -> dist.Store:
    """Open the store in which ranks meet: a file, or MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: the address does not work, or not all ranks came there in time.
    """
    if size == 1:
        return dist.HashStore()
    timeout = timedelta(seconds=timeout_s)
    # no port is opened, and nobody else may read the directory
    if job_dir and not os.environ.get("MASTER_PORT"):
        generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store: dist.Store = dist.FileStore(f"{job_dir}/store_{generation}", size)
        store.set_timeout(timeout)
        return store
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    hosted_here = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    check_address(host, port, hosted_here=hosted_here)
    deadline_s = time.monotonic() + timeout_s
    meeting = f"all {size} ranks at MASTER_ADDR {host}, MASTER_PORT {port}"
    limit = f"{timeout_s:g} s (--startup_timeout)"
    words = f"rank {rank} waits for {meeting}: {limit}"
    to_user = {"file": sys.stderr, "flush": True}
    notice = threading.Timer(NOTICE_AFTER_S, print, [words], to_user)
    notice.daemon = True
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once on a machine
        notice.start()
    try:
        if not hosted_here:
            _wait_for_listener(host, port, deadline_s)
        store = dist.TCPStore(
            host, port, is_master=hosted_here, timeout=timeout, wait_for_workers=False
        )
        return _own_part(store, rank, size, deadline_s)
    except (dist.DistError, TimeoutError) as error:
        cause = " ".join(str(error).split())[:200]
        raise ValueError(
            f"rank {rank} did not meet {meeting} within {limit}: check both on every machine, that "
            f"{size} ranks were started, and the firewall ({cause})"
        ) from None
    finally:
        notice.cancel()


def _wait_for_listener(host: str, port: int, deadline_s: float) -> None:
    """Wait until somebody listens: torch would, too, but with pages of complaints."""
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise TimeoutError(error.strerror or str(error)) from None
        time.sleep(0.2)


def _own_part(store: dist.Store, rank: int, size: int, deadline_s: float) -> dist.Store:
    """Return a part of the store that only ranks of this start use.

    torchrun's store outlives its ranks, and a restarted rank must not read what dead ones wrote. No
    variable numbers the starts (a node that rejoins keeps its TORCHELASTIC_RESTART_COUNT), so the
    ranks greet: rank 0 repeats to each what it hears of it, and who hears itself knows that rank 0
    is alive.
    """

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    own = uuid.uuid4().hex
    missing = list(range(1, size))
    store.set(f"greeting/{rank}", own)
    answered: dict[int, str] = {}  # greetings
    while time.monotonic() < deadline_s:
        if rank == 0:
            for other in range(1, size):
                greeting = read(f"greeting/{other}")
                if greeting != answered.get(other, ""):
                    store.set(f"heard/{other}", f"{own} {greeting}")
                    answered[other] = greeting
            missing = [other for other in missing if read(f"agreed/{other}") != own]
            if not missing:
                return dist.PrefixStore(own, store)
        else:
            name, _, heard = read(f"heard/{rank}").partition(" ")
            if heard == own:
                store.set(f"agreed/{rank}", name)
                return dist.PrefixStore(name, store)
        time.sleep(GREETING_EVERY_S)
    absent = ", ".join(map(str, missing[:8])) + ", ..." * (len(missing) > 8)
    raise TimeoutError(f"no sign of rank {0 if rank else absent}")


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
