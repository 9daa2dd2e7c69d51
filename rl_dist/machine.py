"""Facts about this machine: GPUs, cores and memory.

Inside a container, the container's limits on memory and cores apply.
"""

import errno
import gc
import os
import re
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from rl_dist.errors import one_line

GIB = 2**30
ROOT = Path("/")  # the folder that contains proc and sys; tests change it
# If the text of a RuntimeError, in lower case, matches this pattern, memory has run out. The texts
# are from CUDA and NCCL, torch's host memory allocator, Linux, cuBLAS and cuDNN, and C++ libraries.
# If oneDNN has no memory for its code, its message ends after "primitive"; the longer message
# "could not create a primitive descriptor ..." has other causes.
OUT_OF_MEMORY = re.compile(
    r"out[ _]of[ _]memory|not enough memory|can(no|')t allocate memory|alloc_failed|bad_alloc"
    r"|^could not create a primitive$"
)
# Memory controller in /proc/self/cgroup -> the file with the memory limit, the file with the used
# memory, and the entry of memory.stat that contains the size of cached files
CGROUPS = {
    "": ("memory.max", "memory.current", "inactive_file"),  # cgroup version 2
    "memory": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),  # cgroup version 1
}

# ---- GPUs


@dataclass(frozen=True)
class Gpu:
    """The state of a GPU that torch sees; an unknown value is None.

    Allocated, reserved and peak memory include only the memory of this process.
    """

    index: int  # torch's index of the GPU
    name: str
    utilization_percent: float | None  # % of time with kernels running, in the last sample period
    memory_allocated_gib: float  # used by tensors
    memory_reserved_gib: float  # reserved by torch's allocator
    memory_peak_gib: float  # highest memory_allocated_gib so far
    memory_free_gib: float | None  # not used by any process
    memory_total_gib: float | None
    temperature_c: float | None
    power_w: float | None
    error: str  # why a value is unknown; "" if all are known

    def __str__(self) -> str:
        """Format the values on one line."""
        shown = {name: "?" if value in (None, "") else value for name, value in vars(self).items()}
        line = (
            "{name}: {memory_free_gib:.3} of {memory_total_gib:.3} GiB free, "
            "{utilization_percent} % busy, {temperature_c} C, {power_w} W"
        ).format(**shown)
        return f"{line} ({self.error})" if self.error else line


@dataclass(frozen=True)
class GpuInfo:
    """All GPUs that torch sees."""

    gpus: tuple[Gpu, ...]
    error: str  # why torch sees no GPU; "" if it sees one


def read_gpu(index: int) -> Gpu:
    """Read the state of a GPU; a value that cannot be read is None.

    Most values come from NVML, which can read a GPU without opening it as a CUDA device.
    """
    errors: list[str] = []

    def try_to_read(read: Callable[[int], Any]) -> Any:
        try:
            return read(index)
        except Exception as error:  # torch and NVML raise many types of errors
            errors.append(one_line(error, 200, named=False))

    properties = try_to_read(torch.cuda.get_device_properties)
    used_bytes = try_to_read(torch.cuda.device_memory_used)
    power_mw = try_to_read(torch.cuda.power_draw)
    total_bytes = getattr(properties, "total_memory", None)
    free_bytes = None if total_bytes is None or used_bytes is None else total_bytes - used_bytes
    torch_memory = torch.cuda.memory_stats(index) if torch.cuda.is_initialized() else {}
    if torch_memory.get("reserved_bytes.all.current"):  # this process already uses the GPU
        free_bytes = torch.cuda.mem_get_info(index)[0]
    return Gpu(
        index=index,
        name=getattr(properties, "name", ""),
        utilization_percent=try_to_read(torch.cuda.utilization),
        memory_allocated_gib=torch_memory.get("allocated_bytes.all.current", 0) / GIB,
        memory_reserved_gib=torch_memory.get("reserved_bytes.all.current", 0) / GIB,
        memory_peak_gib=torch_memory.get("allocated_bytes.all.peak", 0) / GIB,
        memory_free_gib=None if free_bytes is None else free_bytes / GIB,
        memory_total_gib=None if total_bytes is None else total_bytes / GIB,
        temperature_c=try_to_read(torch.cuda.temperature),
        power_w=None if power_mw is None else power_mw / 1000,
        error=errors[0] if errors else "",
    )


def get_multi_gpu_status() -> list[Gpu]:
    """Return the state of every GPU that torch sees, in torch's order.

    >>> from rl_dist import get_multi_gpu_status
    >>> for gpu in get_multi_gpu_status():
    ...     print(gpu.index, gpu.name, gpu.utilization_percent, gpu.memory_free_gib)
    """
    return [read_gpu(index) for index in range(torch.cuda.device_count())]


def get_gpu_info() -> GpuInfo:
    """Return all GPUs that torch sees, or the reason why it sees none.

    >>> get_gpu_info().gpus  # doctest: +SKIP
    (Gpu(index=0, name='NVIDIA H100 80GB HBM3', ...),)
    """
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, no GPU, or torch without CUDA
        return GpuInfo((), one_line(error, 500, named=False))
    return GpuInfo(tuple(get_multi_gpu_status()), "")


def nvidia_driver() -> str:
    """Return the version of the NVIDIA driver; "" if Linux has not loaded it."""
    version = re.search(r"\d+\.[\d.]+", read_text("proc/driver/nvidia/version"))
    return version[0] if version else ""


def torch_build() -> str:
    """Return the version of torch, and the version of CUDA for which it was built."""
    return f"{torch.__version__} (CUDA {torch.version.cuda or 'not included'})"


def print_gpu_info() -> None:
    """Print one line for every GPU, or the reason why torch sees no GPU.

    >>> print_gpu_info()  # doctest: +SKIP
    GPU 0: NVIDIA H100 80GB HBM3, ...
    """
    info = get_gpu_info()
    if info.error:
        print(f"no GPU: {info.error}")
    for gpu in info.gpus:
        print(f"GPU {gpu.index}: {gpu}")


def clear_gpu_memory() -> int:
    """Free cached GPU memory for other processes, and reset the peak statistics.

    Tensors that are still referenced stay in memory.

        >>> from rl_dist import clear_gpu_memory
        >>> print(f"{clear_gpu_memory() / 2**30:.1f} GiB freed")

    Returns:
        Bytes that were freed on all GPUs; 0 if this process uses no GPU.
    """
    gc.collect()
    if not torch.cuda.is_initialized():
        return 0
    devices = range(torch.cuda.device_count())
    before = sum(map(torch.cuda.memory_reserved, devices))
    torch.cuda.empty_cache()
    for index in devices:
        torch.cuda.reset_peak_memory_stats(index)
    return before - sum(map(torch.cuda.memory_reserved, devices))


# ---- cores and memory


class HostMemory(NamedTuple):
    """Total and available memory of this machine, in bytes."""

    total: int
    available: int


def host_memory() -> HostMemory:
    """Return total and available memory, after applying all cgroup limits.

    Available memory includes the memory of cached files.
    """
    installed = available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):  # /proc/meminfo is missing
        machine = psutil.virtual_memory()
        installed = machine.total
        available = machine.available
    total = installed
    for line in read_text("proc/self/cgroup").splitlines():
        _, controller, path = line.split(":", 2)
        if controller not in CGROUPS:
            continue
        limit_file, use_file, cache_entry = CGROUPS[controller]
        group = ROOT / "sys/fs/cgroup" / controller / path.lstrip("/")
        # The limits of all parent groups apply, too. Inside a container, the group itself may be
        # mounted at the top of the tree.
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # the file is missing or contains "max"
                limit, used = (int((folder / name).read_text()) for name in (limit_file, use_file))
                if limit < installed:
                    lines = read_text(folder / "memory.stat").splitlines()
                    cached = int(dict(line.split() for line in lines).get(cache_entry, 0))
                    total = min(total, limit)
                    available = min(available, max(0, limit - max(0, used - cached)))
    return HostMemory(total, available)


def read_text(name: str | Path) -> str:
    """Return the content of a file below ROOT, or "" if it cannot be read."""
    with suppress(OSError):
        return (ROOT / name).read_text()
    return ""


def available_cores() -> int:
    """Return the number of CPU cores that this process's affinity and quota allow."""
    cores = len(os.sched_getaffinity(0))
    with suppress(ValueError):  # there is no quota
        quota, period = map(int, read_text("sys/fs/cgroup/cpu.max").split())
        cores = max(1, min(cores, round(quota / period)))
    return cores


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that a GPU or this machine is out of memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return bool(OUT_OF_MEMORY.search(str(error).lower().strip()))
    return isinstance(error, MemoryError)


def free_memory_bytes(device: torch.device, sharers: int = 1) -> int:
    """Return how many more bytes this process can allocate.

    On a GPU, this includes memory that torch has reserved but that no tensor uses.

    Args:
        sharers: number of processes that share the free memory of this machine. They do not share
            the limit on this process's address space, so this limit is not divided.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    free = host_memory().available // sharers
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        free = min(free, limit - psutil.Process().memory_info().vms)
    return max(free, 0)


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory in bytes; on a GPU, the peak of its tensors."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
