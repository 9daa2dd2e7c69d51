"""Running out of memory, files or threads, told from other errors."""

from __future__ import annotations

import errno
import gc
import resource

import psutil
import torch

from rl_dist.hardware.host_memory import host_memory

WORDS = (  # of a RuntimeError, in lower case
    "out of memory",  # CUDA, NCCL
    "not enough memory",  # torch's allocator of host memory
    "can't allocate memory",  # the same on Linux
    "cannot allocate memory",  # the kernel, through whatever library
    "alloc_failed",  # cuBLAS and cuDNN
    "bad_alloc",  # C++ libraries, oneDNN among them
    "status_out_of_memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was asked for that is not there, of the device or the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS)


def other_limit(error: BaseException) -> str:
    """Which other limit of a process made this error, in words; "": none."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files (ulimit -n)"
    return "threads (ulimit -u, pids.max)" if "can't start new thread" in str(error) else ""


def free_memory_bytes(device: torch.device, sharers: int = 1) -> int:
    """What this process may still take, with what torch holds on a GPU without use.

    Args:
        sharers: processes between which what is free in the host is divided; a limit of a process is its own.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = host_memory().available // sharers
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        free = min(free, limit - psutil.Process().memory_info().vms)
    return max(free, 0)


def clear_gpu_memory() -> int:
    """Hand memory that no tensor uses back to the GPUs, for other processes.

    Tensors that are still referred to stay. Peaks are counted anew.

        >>> from rl_dist import clear_gpu_memory
        >>> del policy, rollout
        >>> print(f"{clear_gpu_memory() / 2**30:.1f} GiB handed back")

    Returns:
        Bytes handed back, of all GPUs of this process; 0 without one.
    """
    gc.collect()
    if not torch.cuda.is_initialized():
        return 0
    devices = [index for index in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(index)]
    before = sum(torch.cuda.memory_reserved(index) for index in devices)
    for index in devices:  # others are left alone: a context on them would take memory
        torch.cuda.synchronize(index)
        torch.cuda.reset_peak_memory_stats(index)
    torch.cuda.empty_cache()
    return before - sum(torch.cuda.memory_reserved(index) for index in devices)
