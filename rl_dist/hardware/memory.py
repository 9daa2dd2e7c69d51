"""Memory that this process can have in its container, and how its end looks.

torch is imported only where a GPU is asked, for commands that read run directories do without.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

WORDS = (  # of a RuntimeError, in lower case
    *("out of memory", "status_out_of_memory"),  # CUDA, NCCL
    *("not enough memory", "can't allocate memory"),  # torch's allocator of host memory
    "cannot allocate memory",  # the kernel, through whatever library
    *("alloc_failed", "bad_alloc"),  # cuBLAS and cuDNN, C++ libraries
)


@dataclass(frozen=True)
class HostMemory:
    """Bytes."""

    total: int
    available: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Memory within all control groups; cached files count as free."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    # this process's groups, by version; in a container its own is mounted at the top
    own = {"": "/", "memory": "/"}
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            own |= {kind: path for kind in kinds.split(",") if kind in own}
    for kind, limit_file, use_file, cache in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        group = Path(own[kind].lstrip("/"))
        for folder in (group, *group.parents):
            place = root / "sys/fs/cgroup" / kind / folder
            try:
                limit, used = (int((place / name).read_text()) for name in (limit_file, use_file))
                lines = (place / "memory.stat").read_text().splitlines()
                stat = dict(line.split() for line in lines)
            except (OSError, ValueError):  # not there, not ours to read, or "max"
                continue
            if limit < machine.total:
                free = limit - max(0, used - int(stat.get(cache, 0)))
                total, available = min(total, limit), min(available, max(0, free))
    return HostMemory(total, available)


def available_cores() -> int:
    """CPU cores this process may use: its affinity, cut to the container's quota."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the memory of the device or the host ran out."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    # oneDNN has no room for its code; of a "primitive descriptor" it says so for other reasons
    no_code = text.strip() == "could not create a primitive"
    return isinstance(error, RuntimeError) and (no_code or any(words in text for words in WORDS))


def free_memory_bytes(device: torch.device, sharers: int = 1) -> int:
    """Bytes that this process may still take, with torch's unused ones on a GPU.

    Args:
        sharers: processes between which what is free in the host is divided; a limit of a process
            is its own.
    """
    if device.type == "cuda":
        import torch  # slow

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = host_memory().available // sharers
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        free = min(free, limit - psutil.Process().memory_info().vms)
    return max(free, 0)


def clear_gpu_memory() -> int:
    """Hand memory that no tensor uses back to the GPUs, for other processes.

    Tensors that are still referred to stay. Peaks are reset.

        >>> from rl_dist import clear_gpu_memory
        >>> print(f"{clear_gpu_memory() / 2**30:.1f} GiB handed back")

    Returns:
        Bytes handed back, of all GPUs of this process; 0 without one.
    """
    import torch  # slow

    gc.collect()
    if not torch.cuda.is_initialized():
        return 0
    reserved = torch.cuda.memory_reserved
    devices = [index for index in range(torch.cuda.device_count()) if reserved(index)]
    before = sum(map(reserved, devices))
    for index in devices:  # others are left alone: a context on them would take memory
        torch.cuda.synchronize(index)
        torch.cuda.reset_peak_memory_stats(index)
    torch.cuda.empty_cache()
    return before - sum(map(reserved, devices))
