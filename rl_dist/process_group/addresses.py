"""Where ranks are to meet: torchrun's variables, MASTER_ADDR, MASTER_PORT."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
RESTART_COUNT, MAX_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"
DEFAULT_ADDRESS, DEFAULT_PORT = "127.0.0.1", 29500  # torchrun's port
# variables of schedulers that started several copies of a command, and how to start ranks there
COPIES = {
    "SLURM_NTASKS": "start them by srun with torchrun, as deploy/slurm.sbatch does",
    "PET_NNODES": "start them by torchrun, which reads the PET_* variables",
}
HOW_TO_START = "start with torchrun, which sets them all, or unset RANK and give --num_gpus"


def check_variables() -> None:
    """Check variables of this rank, and temporary files; raises ValueError."""
    check_counts()
    try:
        tempfile.gettempdir()  # torch needs it, too
    except OSError as error:
        raise ValueError(f"{error.strerror}: set TMPDIR to a folder that can be written") from None
    if "RANK" not in os.environ:
        if (size_text := os.environ.get("WORLD_SIZE", "1")) != "1":
            problem = f"WORLD_SIZE is {size_text}, but RANK is not set"
            raise ValueError(f"{problem}: set both, or neither")
        check_copies()
        return
    rank, size = _number("RANK"), _number("WORLD_SIZE", 1)
    if rank >= size:
        raise ValueError(f"RANK is {rank}, but WORLD_SIZE is {size}: ranks are numbered from 0")
    if size == 1:
        return
    local_rank = _number("LOCAL_RANK")
    limit = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "WORLD_SIZE"
    if local_rank >= _number(limit, 1):
        words = f"LOCAL_RANK is {local_rank}, but {limit} is {os.environ[limit]}"
        raise ValueError(f"{words}: it numbers this machine's ranks from 0")
    if not os.environ.get("MASTER_ADDR"):
        raise ValueError(f"RANK is set, but MASTER_ADDR is not: {HOW_TO_START}")
    _number("MASTER_PORT", 1, 65535)


def check_copies() -> None:
    """Refuse to be one of several copies, each of which would train alone."""
    for name, fix in COPIES.items():
        count = os.environ.get(name, "").split(":")[-1]  # torchrun allows 1:4
        if count.isdecimal() and int(count) > 1:
            raise ValueError(
                f"{name} is {os.environ[name]}, but RANK is not set: every copy would train alone; "
                f"{fix}, or unset {name} for ranks of this machine alone"
            )


def check_counts() -> None:
    """Check torchrun's counts; raises like `elastic_count`."""
    for name in (RESTART_COUNT, MAX_RESTARTS):
        elastic_count(name)


def elastic_count(name: str) -> int:
    """RESTART_COUNT or MAX_RESTARTS of torchrun (ValueError: no count), or 0."""
    return _number(name) if os.environ.get(name) else 0


def may_start_again(signum: int) -> bool:
    """Return True for a signal by which torchrun may end ranks to start them again.

    It sends them SIGTERM where a host has come or gone, as it does where it is ended itself.
    """
    return signum == signal.SIGTERM and host_range()[1] > 1


def host_range(agent_pid: int | None = None) -> tuple[int, int]:
    """Return how many hosts torchrun takes, at least and at most; (1, 1): unknown.

    It tells its ranks only how many there are. Its own command line or variable says the rest;
    `agent_pid` is its process, by default the parent of this one.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 1, 1
    words = os.environ.get("PET_NNODES", "")
    with suppress(OSError):  # Linux has it
        line = (
            Path(f"/proc/{agent_pid or os.getppid()}/cmdline").read_bytes().decode(errors="replace")
        )
        words = (re.findall(r"\0--nnodes[=\0]([\d:]+)(?=\0)", line) or [words])[-1]
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", words)
    return (int(found[1] or found[2]), int(found[2])) if found else (1, 1)


def _number(name: str, lowest: int = 0, highest: int = 2**31 - 1) -> int:
    text = os.environ.get(name, "")
    if not text:
        raise ValueError(f"RANK is set, but {name} is not: {HOW_TO_START}")
    if not text.isdecimal() or not lowest <= int(text) <= highest:
        raise ValueError(f"{name} must be a whole number of {lowest}..{highest}, got {text!r}")
    return int(text)


def asked_for_address() -> tuple[str, int] | None:
    """The address asked of our own launcher, or None; ValueError: no port."""
    if not any(os.environ.get(name) for name in ADDRESS_VARIABLES):
        return None
    port = _number("MASTER_PORT", 1, 65535) if os.environ.get("MASTER_PORT") else DEFAULT_PORT
    return os.environ.get("MASTER_ADDR") or DEFAULT_ADDRESS, port


def check_address(host: str, port: int, *, hosted_here: bool) -> None:
    """Check early that ranks can meet at MASTER_ADDR and MASTER_PORT.

    Args:
        hosted_here: this process, or one that it starts, will listen there.

    Raises:
        ValueError: no such host; or it is another machine, or the port is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        problem = f"MASTER_ADDR {host!r} is no host that this machine can find"
        raise ValueError(f"{problem}: name rank 0's machine, or unset it") from None
    if not hosted_here:
        return
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                problem = f"MASTER_ADDR {host!r} is no address of this machine"
                raise ValueError(f"{problem}: name that of rank 0's machine") from None
            taken = error.errno == errno.EADDRINUSE
            problem = "taken by another program" if taken else str(error.strerror)
            fix = f"set another one, such as {free_port()}"
            raise ValueError(f"MASTER_PORT {port} is {problem}: {fix}") from None


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((DEFAULT_ADDRESS, 0))
        return probe.getsockname()[1]
