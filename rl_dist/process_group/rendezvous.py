"""Where ranks find each other: a private file, or MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from rl_dist.hardware.addresses import check_address

GREETING_EVERY_S = 0.05
NOTICE_AFTER_S = 15.0


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
