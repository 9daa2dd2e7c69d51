"""Read a rank's environment variables, and open the store that the ranks share."""

import os
import re
import signal
import socket
import time
import uuid
from datetime import timedelta

import psutil
import torch.distributed as dist

from rl_dist.errors import one_line

# Environment variable with the path of a job's private directory; only our launcher sets it
JOB_DIR_VARIABLE = "RL_DIST_JOB_DIR"
RESTART_COUNT, MAX_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
HOW_TO_START = "start with torchrun, which sets all variables, or unset RANK and give --num_gpus"
# Many launchers start several copies of a command and describe the copies in environment variables.
# COUNTS matches variables with the number of copies, and NUMBERS those with the index of this copy:
# Kubernetes, MPI, Flux, jsrun, Horovod, PALS, ALPS.
COUNTS = (
    r"PET_NNODES|(\w+_)?WORLD_SIZE|(PMIX?|FLUX_JOB|JSM_NAMESPACE|HOROVOD|PALS)_SIZE"
    r"|MPI_LOCALNRANKS|SLURM_STEP_NUM_TASKS"
)
NUMBERS = (
    r"(\w+_)?WORLD_RANK|(PMIX?|FLUX_TASK|JSM_NAMESPACE|HOROVOD)_RANK|PALS_RANKID|ALPS_APP_PE"
    r"|MPI_LOCALRANKID"
)
# Pattern of all variables that make a process a rank, or one of several copies
RANK_VARIABLES = (
    rf"{COUNTS}|{NUMBERS}|(LOCAL_)?RANK|MASTER_(ADDR|PORT)|{JOB_DIR_VARIABLE}|\w*TORCHELASTIC\w*"
    r"|SLURM_(NTASKS|PROCID|STEP_?ID)"
)
GREETING_EVERY_S = 0.05  # time between two attempts of the ranks to agree on a name


def check_variables() -> None:
    """Check the environment variables that make this process a rank.

    Raises:
        ValueError: a variable is missing or wrong, or its host name has no address; or a launcher
            started several copies of this command without RANK, so that each would train alone.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        _number("LOCAL_WORLD_SIZE")
    if "RANK" in os.environ:
        rank = _number("RANK")
        size = _number("WORLD_SIZE")
        if rank >= size:
            raise ValueError(f"RANK is {rank}, but WORLD_SIZE is {size}: ranks are numbered from 0")
        if size > 1:
            _number("LOCAL_RANK")
            port = _number("MASTER_PORT")
            host = os.environ.get("MASTER_ADDR", "")
            try:
                socket.getaddrinfo(host, port)
            except (OSError, UnicodeError) as error:  # UnicodeError: the name is too long
                raise ValueError(
                    f"MASTER_ADDR {host!r} has no address ({error}): give the name or the IP "
                    "address of the first machine, such as 10.0.0.1 or ::1, without brackets"
                ) from None
    elif name := _sign_of_copies():
        raise ValueError(
            f"{name} is {os.environ[name]}, but RANK is not set: every copy would train alone; "
            f"start the ranks with torchrun (as deploy/slurm.sbatch does), or unset {name} "
            "to use this machine alone"
        )


def _sign_of_copies() -> str:
    """Return a variable which shows that this process is one of several copies, or ""."""
    counts = [name for name in os.environ if re.fullmatch(COUNTS, name)]
    # SLURM sets SLURM_NTASKS also in the shell of an allocation, although this shell is not a copy.
    # But a SLURM_PROCID above 0 is always the index of a copy.
    if os.environ.get("SLURM_PROCID", "0") != "0":
        return "SLURM_PROCID"
    # Older versions of SLURM do not set SLURM_STEP_NUM_TASKS in a step. Then use SLURM_NTASKS.
    if os.environ.keys() & {"SLURM_STEP_ID", "SLURM_STEPID"} and not counts:
        counts = [name for name in ("SLURM_NTASKS", "SLURM_NPROCS") if name in os.environ]
    # A number of copies above 1 is a sign. PET_NNODES may be a range such as 1:4; use its end.
    signs = [name for name in counts if os.environ[name].split(":")[-1] not in ("", "0", "1")]
    indices = [name for name in os.environ if re.fullmatch(NUMBERS, name)]
    # The index of this copy is a sign if it is above 0, or if the number of copies is unknown.
    signs += [name for name in indices if not counts or os.environ[name] != "0"]
    return next(iter(signs), "")


def check_interface() -> None:
    """Check that GLOO_SOCKET_IFNAME, if it is set, names interfaces that gloo can use.

    Raises:
        ValueError: an interface does not exist or has no IP address.
    """
    value = os.environ.get("GLOO_SOCKET_IFNAME")
    # An interface has an IP address if its first address is one: psutil lists IP addresses first.
    interfaces = psutil.net_if_addrs().items()
    usable = {name for name, (first, *_) in interfaces if first.family != psutil.AF_LINK}
    if value and not usable.issuperset(value.split(",")):
        raise ValueError(
            f"GLOO_SOCKET_IFNAME is {value!r}, but the interfaces with an IP address are "
            f"{', '.join(sorted(usable)) or 'none'}: name one of them, or unset the variable"
        )


def started_elsewhere() -> bool:
    """Return True if torchrun, srun or another external launcher started this rank."""
    return "RANK" in os.environ and JOB_DIR_VARIABLE not in os.environ


def elastic_count(name: str) -> int:
    """Return the number in the environment variable `name`, or 0 if it is not set."""
    return _number(name) if os.environ.get(name) else 0


def may_start_again(signum: int) -> bool:
    """Return True if torchrun may have sent this signal to restart the ranks.

    torchrun sends SIGTERM when a host has joined or left, but also when torchrun itself is stopped.
    """
    return signum == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ


def _number(name: str) -> int:
    """Return the whole number in an environment variable, or raise a ValueError."""
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
    # Ranks of our launcher share a file in its private directory, so they need no open port.
    if job_dir := os.environ.get(JOB_DIR_VARIABLE):
        store: dist.Store = dist.FileStore(f"{job_dir}/store_{elastic_count(RESTART_COUNT)}", size)
        store.set_timeout(timeout)
        return store
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    hosted_here = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline_s = time.monotonic() + timeout_s
    try:
        if not hosted_here:
            _wait_for_listener(host, port, deadline_s)
        # If torch could not connect to its own store, it would print many warnings.
        address = "localhost" if hosted_here else host
        store = dist.TCPStore(
            address, port, is_master=hosted_here, timeout=timeout, wait_for_workers=False
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

    torchrun's store exists longer than the ranks, and restarted ranks must not read what dead ranks
    wrote. No environment variable reliably contains the number of the start, because a node that
    rejoins keeps its TORCHELASTIC_RESTART_COUNT. Therefore the ranks agree on a random name:

    1. Every rank writes a random greeting to the store.
    2. Rank 0 answers every other rank with two greetings: its own, and that of the other rank.
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
