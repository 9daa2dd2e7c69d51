"""Read a rank's environment variables, and open the store that the ranks share."""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from rl_dist.errors import one_line

# Environment variable for the private directory of a job that our launcher started
JOB_DIR_VARIABLE = "RL_DIST_JOB_DIR"
RESTART_COUNT, MAX_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
HOW_TO_START = "start with torchrun, which sets all variables, or unset RANK and give --num_gpus"
# Environment variables in which launchers store how many copies of a command they have started
COPIES = ("SLURM_NTASKS", "PET_NNODES", "WORLD_SIZE")
GREETING_EVERY_S = 0.05


def check_variables() -> None:
    """Check the environment variables that make this process a rank.

    Raises:
        ValueError: a variable is missing or wrong; or several copies of this command were started
            without RANK, and each copy would train alone.
    """
    if "RANK" in os.environ:
        rank, size = _number("RANK"), _number("WORLD_SIZE")
        if rank >= size:
            raise ValueError(f"RANK is {rank}, but WORLD_SIZE is {size}: ranks are numbered from 0")
        if size > 1:
            _number("LOCAL_RANK")
            _number("MASTER_PORT")
            if not os.environ.get("MASTER_ADDR"):
                raise ValueError(f"RANK is set, but MASTER_ADDR is not: {HOW_TO_START}")
        return
    for name in COPIES:
        count = os.environ.get(name, "").split(":")[-1]  # PET_NNODES may be a range such as 1:4
        if count.isdecimal() and int(count) > 1:
            raise ValueError(
                f"{name} is {os.environ[name]}, but RANK is not set: every copy would train alone; "
                f"start the ranks with torchrun (as deploy/slurm.sbatch does), or unset {name} "
                "to use this machine alone"
            )


def started_elsewhere() -> bool:
    """Return True if torchrun, srun or another external launcher started this rank."""
    return "RANK" in os.environ and JOB_DIR_VARIABLE not in os.environ


def elastic_count(name: str) -> int:
    """Return the number in the environment variable `name`, or 0 if it is not set."""
    return int(os.environ.get(name) or 0)


def may_start_again(signum: int) -> bool:
    """Return True if torchrun may have sent this signal to restart the ranks.

    torchrun sends SIGTERM when a host has joined or left, but also when torchrun itself is stopped.
    """
    return signum == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if text.isdecimal():
        return int(text)
    raise ValueError(f"{name} must be a whole number, got {text!r}: {HOW_TO_START}")


# ---- the store


def open_store(rank: int, size: int, timeout_s: float) -> dist.Store:
    """Open the store through which all ranks find each other.

    The store is a file if our launcher started the ranks. Otherwise rank 0 or torchrun serves it at
    MASTER_ADDR and MASTER_PORT.

    Raises:
        ValueError: no process listens at this address, or some ranks did not join in time.
    """
    if size == 1:
        return dist.HashStore()
    timeout = timedelta(seconds=timeout_s)
    # a file in a private directory is enough: no port needs to be opened
    if job_dir := os.environ.get(JOB_DIR_VARIABLE):
        store: dist.Store = dist.FileStore(f"{job_dir}/store_{elastic_count(RESTART_COUNT)}", size)
        store.set_timeout(timeout)
        return store
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosted_here = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline_s = time.monotonic() + timeout_s
    try:
        if not hosted_here:
            _wait_for_listener(host, port, deadline_s)
        store = dist.TCPStore(
            host, port, is_master=hosted_here, timeout=timeout, wait_for_workers=False
        )
        return part_of_this_start(store, rank, size, deadline_s)
    except (dist.DistError, OSError) as error:
        cause = one_line(error, 200, named=False)
        raise ValueError(
            f"rank {rank} did not meet all {size} ranks at MASTER_ADDR {host}, MASTER_PORT {port} "
            f"within {timeout_s:g} s (--startup_timeout): check both variables on every machine, "
            f"the firewall, and whether {size} ranks were started ({cause})"
        ) from None


def _wait_for_listener(host: str, port: int, deadline_s: float) -> None:
    """Wait until a process listens at `host` and `port`.

    If torch itself waited for this process, it would print many warnings.
    """
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(0.2)


def part_of_this_start(store: dist.Store, rank: int, size: int, deadline_s: float) -> dist.Store:
    """Return a part of the store that only the ranks of the current start use.

    torchrun's store outlives the ranks, and restarted ranks must not read what dead ranks wrote. No
    environment variable reliably contains the number of the start: a node that rejoins keeps its
    TORCHELASTIC_RESTART_COUNT. Therefore the ranks of a start agree on a random name:

    1. Every rank writes a random greeting to the store.
    2. Rank 0 answers every other rank with two greetings: its own, and the one from that rank.
    3. A rank that finds its own greeting in the answer knows that rank 0 is alive. It confirms the
       greeting of rank 0, which becomes the name of the part.
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
    raise TimeoutError(f"no answer from ranks {missing[:8]}")
