"""Join the ranks: where they meet, and what their hosts must have in common."""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from rl_dist.errors import UserError, refuse_restarts
from rl_dist.process_group.collectives import all_gather_json

if TYPE_CHECKING:
    from rl_dist.process_group.world import World

ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
RESTART_COUNT, MAX_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
DEFAULT_ADDRESS, DEFAULT_PORT = "127.0.0.1", 29500  # torchrun's port
HOW_TO_START = "start with torchrun, which sets them all, or unset RANK and give --num_gpus"
# Variables that count copies of a command which know no ranks, and how to start ranks instead.
COPIES = {
    "SLURM_NTASKS": "start them by srun with torchrun, as deploy/slurm.sbatch does",
    "PET_NNODES": "start them by torchrun, which reads the PET_* variables",
    "WORLD_SIZE": "set RANK as well",
}
GREETING_EVERY_S = 0.05
CODE = Path(__file__).parents[2]
PACKAGES = ("rl_dist", "agents", "envs")
SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of a machine, however many hosts it plays
MOST_APART_S = 60.0  # clocks: beyond it times of files and logs mislead


# ---- variables of torchrun and of schedulers


def check_variables() -> None:
    """Check the variables that make this process a rank; raises ValueError."""
    if "RANK" not in os.environ:
        check_copies()
        return
    rank, size = _number("RANK"), _number("WORLD_SIZE", 1)
    if rank >= size:
        raise ValueError(f"RANK is {rank}, but WORLD_SIZE is {size}: ranks are numbered from 0")
    if size > 1:
        _number("LOCAL_RANK")
        _number("MASTER_PORT", 1, 65535)
        if not os.environ.get("MASTER_ADDR"):
            raise ValueError(f"RANK is set, but MASTER_ADDR is not: {HOW_TO_START}")


def check_copies() -> None:
    """Refuse to be one of several copies, each of which would train alone."""
    for name, fix in COPIES.items():
        count = os.environ.get(name, "").split(":")[-1]  # torchrun allows 1:4
        if count.isdecimal() and int(count) > 1:
            raise ValueError(
                f"{name} is {os.environ[name]}, but RANK is not set: every copy would train alone; "
                f"{fix}, or unset {name} for ranks of this machine alone"
            )


def elastic_count(name: str) -> int:
    """Return RESTART_COUNT or MAX_RESTARTS of torchrun (ValueError: no count), or 0."""
    return _number(name) if os.environ.get(name) else 0


def may_start_again(signum: int) -> bool:
    """Return True for a signal by which torchrun may end ranks to start them again.

    It sends them SIGTERM when a host has come or gone, and also when it is ended itself.
    """
    return signum == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ


def _number(name: str, lowest: int = 0, highest: int = 2**31 - 1) -> int:
    text = os.environ.get(name, "")
    if not text:
        raise ValueError(f"RANK is set, but {name} is not: {HOW_TO_START}")
    if not text.isdecimal() or not lowest <= int(text) <= highest:
        raise ValueError(f"{name} must be a whole number of {lowest}..{highest}, got {text!r}")
    return int(text)


# ---- where ranks meet


def requested_address() -> tuple[str, int] | None:
    """Return the address given to our launcher, or None; ValueError: no port."""
    if not any(os.environ.get(name) for name in ADDRESS_VARIABLES):
        return None
    port = _number("MASTER_PORT", 1, 65535) if os.environ.get("MASTER_PORT") else DEFAULT_PORT
    return os.environ.get("MASTER_ADDR") or DEFAULT_ADDRESS, port


def check_address(host: str, port: int, *, hosted_here: bool) -> None:
    """Check early that ranks can meet at MASTER_ADDR and MASTER_PORT.

    Args:
        hosted_here: this process, or one that it starts, will listen there.

    Raises:
        ValueError: the host is unknown. If hosted_here, also: the host is another machine, or the
            port is in use.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if hosted_here:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
                probe.bind(address)
    except OSError as error:
        raise ValueError(
            f"ranks cannot meet at MASTER_ADDR {host!r}, MASTER_PORT {port}: {error.strerror}; "
            f"name rank 0's machine and a free port, such as {free_port()}, or unset both"
        ) from None


def free_port() -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((DEFAULT_ADDRESS, 0))
        return probe.getsockname()[1]


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
        generation = os.environ.get(RESTART_COUNT, "0")
        store: dist.Store = dist.FileStore(f"{job_dir}/store_{generation}", size)
        store.set_timeout(timeout)
        return store
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted_here = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    check_address(host, port, hosted_here=hosted_here)
    deadline_s = time.monotonic() + timeout_s
    try:
        if not hosted_here:
            _wait_for_listener(host, port, deadline_s)
        store = dist.TCPStore(
            host, port, is_master=hosted_here, timeout=timeout, wait_for_workers=False
        )
        return part_of_this_start(store, rank, size, deadline_s)
    except (dist.DistError, TimeoutError) as error:
        cause = " ".join(str(error).split())[:200]
        raise ValueError(
            f"rank {rank} did not meet all {size} ranks at MASTER_ADDR {host}, MASTER_PORT {port} "
            f"within {timeout_s:g} s (--startup_timeout): check both on every machine, that {size} "
            f"ranks were started, and the firewall ({cause})"
        ) from None


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


def part_of_this_start(store: dist.Store, rank: int, size: int, deadline_s: float) -> dist.Store:
    """Return a part of the store that only ranks of this start use.

    torchrun's store outlives its ranks, and a restarted rank must not read what dead ones wrote. No
    variable numbers the starts (a node that rejoins keeps its TORCHELASTIC_RESTART_COUNT), so the
    ranks greet: rank 0 repeats to each rank what it hears from it, and a rank that hears itself
    knows that rank 0 is alive.
    """

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    greeting = uuid.uuid4().hex
    missing = list(range(1, size)) if rank == 0 else [0]
    store.set(f"greeting/{rank}", greeting)
    while time.monotonic() < deadline_s:
        if rank == 0:
            for other in range(1, size):
                store.set(f"heard/{other}", f"{greeting} {read(f'greeting/{other}')}")
            missing = [other for other in missing if read(f"agreed/{other}") != greeting]
            if not missing:
                return dist.PrefixStore(greeting, store)
        else:
            name, _, heard = read(f"heard/{rank}").partition(" ")
            if heard == greeting:
                store.set(f"agreed/{rank}", name)
                return dist.PrefixStore(name, store)
        time.sleep(GREETING_EVERY_S)
    raise TimeoutError(f"no sign of ranks {missing[:8]}")


# ---- what ranks and hosts must have in common


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
    """Return True if ranks have different devices, which may round sums differently."""
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
    else:
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return len(set(all_gather_json(name, world))) > 1


def versions(modules: Mapping[str, Sequence[Path]]) -> dict[str, str]:
    """Return what must be the same on all hosts, by its name in messages."""
    hashes = {f"module {name}, version": short_hash(files) for name, files in modules.items()}
    return hashes | {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "this project's code, version": code_version(),
    }


def difference(owners: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> str:
    """Return the first difference from the first owner's settings; "": there is none."""
    first = settings[0]
    for owner, other in zip(owners, settings, strict=True):
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

    Differences that are no errors become `world.warnings` of the main process.

    Args:
        modules: files of the user's modules, by name.

    Raises:
        UserError: Python, torch, numpy or code differs between hosts.
    """
    machine = BOOT_ID.read_text() if BOOT_ID.exists() else socket.gethostname()
    cores = sorted(getattr(os, "sched_getaffinity", lambda pid: ())(0))  # macOS has none
    facts = {
        "host": socket.gethostname(),
        "versions": versions(modules),
        "num_cores": len(cores),
        "cores": f"{machine} {cores}",
        "threads": torch.get_num_threads(),
    }
    ranks = all_gather_json(facts, world)
    clocks_s = all_gather_json(time.time(), world)  # right after a meeting
    hosts = [f"host {rank['host']}" for rank in ranks]
    if complaint := difference(hosts, [rank["versions"] for rank in ranks]):
        refuse_restarts()
        raise UserError(f"{complaint}: install the same on all hosts")
    warnings: list[str] = []
    sharing = Counter(rank["cores"] for rank in ranks)  # each agent gives its ranks all cores
    for rank in ranks:
        num_ranks, num_cores = sharing[rank["cores"]], rank["num_cores"]
        if rank["threads"] > 1 and num_ranks * rank["threads"] > num_cores > 0 and not warnings:
            warnings.append(
                f"host {rank['host']}: {num_ranks * rank['threads']} threads of this job share "
                f"{num_cores} core(s): give --threads {max(1, num_cores // num_ranks)}"
            )
    if (apart_s := max(clocks_s) - min(clocks_s)) > MOST_APART_S:
        warnings.append(f"the hosts' clocks are {apart_s:.0f} s apart: set them by NTP")
    if len(set(hosts)) > 1 and elastic_count(MAX_RESTARTS) and os.environ.get(SHARED_STORE) != "1":
        warnings.append(f"a lost host will end the job: set {SHARED_STORE}=1 for every torchrun")
    if world.is_main_process:
        world.warnings += warnings
