"""Read-only facts about this machine: software, GPUs, cores, memory, disk."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from rl_dist.hardware.addresses import ADDRESS_VARIABLES, asked_for_address, check_address
from rl_dist.hardware.gpus import Gpu, GpuInfo, Nvml, read_gpus
from rl_dist.hardware.memory import available_cores, host_memory

VARIABLES = re.compile(
    r"(CUDA|NCCL|RCCL|HIP|ROCR|OMP|MKL|KMP|GLOO|TORCH|PYTORCH|MASTER|NVIDIA_VISIBLE)_?[A-Z0-9_]*|RANK|WORLD_SIZE|LOCAL_RANK"
)
FSYNC_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Software:
    """Versions, and what torch was built with."""

    python: str
    torch: str
    cuda_build: str | None  # None: torch has no CUDA
    rocm_build: str | None
    cudnn: str | None
    nccl: str | None  # RCCL's with ROCm
    gloo: bool
    architectures: tuple[str, ...]  # that torch's kernels were compiled for


@dataclass(frozen=True)
class Precision:
    """Number formats that the hardware has."""

    tf32: bool | None  # None: no GPU
    bf16: bool
    cudnn_autotune: bool | None


@dataclass(frozen=True)
class Host:
    """The machine without its GPUs; None: unknown."""

    name: str
    system: str
    cores: int  # that this process may use
    machine_cores: int
    load: float | None  # processes that wanted a core in the last minute
    threads: int  # of this process, as torch chose
    memory_total_bytes: int  # cut to the container's limit
    memory_available_bytes: int
    process_bytes: int  # resident: Python, torch and its libraries, the least that a rank takes
    shm_total_bytes: int | None
    shm_free_bytes: int | None
    open_files: int | None  # soft limit
    name_error: str  # why the host's name does not resolve; "": it does
    address: str  # MASTER_ADDR:MASTER_PORT if asked for
    address_error: str


@dataclass(frozen=True)
class Disk:
    """Where runs are written."""

    folder: str  # that exists
    free_bytes: int | None
    fsync_s: float | None  # to write 4 MiB safely
    error: str


@dataclass(frozen=True)
class Facts:
    """Everything."""

    software: Software
    gpu: GpuInfo
    precision: Precision
    host: Host
    disk: Disk
    environment: dict[str, str]  # variables that change how ranks start and talk


def read_facts(run_dir: Path) -> Facts:
    """Look at everything; takes well under a second without a GPU."""
    gpu = get_gpu_info()
    return Facts(
        software=_software(),
        gpu=gpu,
        precision=_precision(gpu),
        host=_host(),
        disk=read_disk(run_dir),
        environment={k: v for k, v in sorted(os.environ.items()) if VARIABLES.fullmatch(k)},
    )


def get_gpu_info() -> GpuInfo:
    """All GPUs and the links between them; none, and why, where there are none.

    >>> get_gpu_info().usable  # doctest: +SKIP
    (Gpu(index=0, torch_index=0, name='NVIDIA H100 80GB HBM3', ...),)
    """
    with closing(Nvml()) as nvml:
        return read_gpus(nvml, torch)


def print_gpu_info(info: GpuInfo | None = None) -> None:
    """Print one line per GPU and per link, or why there are none.

    >>> print_gpu_info()  # doctest: +SKIP
    GPU 0: NVIDIA H100 80GB HBM3, ...
    """
    info = info or get_gpu_info()
    if not info.gpus:
        print(f"no GPU: {info.torch_error or info.nvml_error or 'torch and NVML see none'}")
    for gpu in info.gpus:
        print(f"GPU {gpu.index}: {describe_gpu(gpu)}")
    for link in info.links:
        access = "peer access" if link.peer_access else "no peer access"
        parts = ["NVLink" if link.nvlink else access, *filter(None, [link.path])]
        print(f"GPU {link.first} - GPU {link.second}: {', '.join(parts)}")


def describe_gpu(gpu: Gpu) -> str:
    """One GPU in a line; unknown values are left out."""
    if gpu.error:
        return f"{gpu.name} does not answer: {gpu.error}".lstrip()
    known = [
        gpu.name,
        gpu.compute_capability and f"compute capability {gpu.compute_capability}",
        gpu.multiprocessors and f"{gpu.multiprocessors} multiprocessors",
        gpu.memory_total_bytes
        and f"{gib(gpu.memory_free_bytes)} of {gib(gpu.memory_total_bytes)} free",
        None if gpu.utilization_percent is None else f"{gpu.utilization_percent:.0f} % busy",
        None if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} C",
        "not visible to torch" if gpu.torch_index is None else None,
    ]
    return ", ".join(str(part) for part in known if part)


def gib(count: int | None) -> str:
    """Bytes in words."""
    if count is None:
        return "?"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            number = count / size
            return f"{number:,.3g} {unit}" if number < 100 else f"{number:,.0f} {unit}"
    return f"{count} bytes"


def duration(seconds: float) -> str:
    """Seconds in words."""
    units = ((1e-3, 1e-6, "us"), (1, 1e-3, "ms"), (60, 1, "s"), (3600, 60, "min"))
    for most, size, unit in (*units, (48 * 3600, 3600, "h")):
        if seconds < most:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:.3g} days"


def _software() -> Software:
    nccl = cudnn = None
    if torch.distributed.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[attr-defined]
    with suppress(RuntimeError):  # it does not start
        cudnn = torch.backends.cudnn.version()
    return Software(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda_build=torch.version.cuda,
        rocm_build=torch.version.hip,
        cudnn=None if cudnn is None else str(cudnn),
        nccl=nccl,
        gloo=torch.distributed.is_gloo_available(),
        architectures=tuple(torch.cuda.get_arch_list()),
    )


def cpu_has_bf16() -> bool:
    """Whether this CPU has units for products of bf16."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _precision(gpu: GpuInfo) -> Precision:
    if not gpu.usable:
        return Precision(tf32=None, bf16=cpu_has_bf16(), cudnn_autotune=None)
    modern = all(float(g.compute_capability or 0) >= 8.0 for g in gpu.usable) and not gpu.rocm
    bf16 = False
    with suppress(RuntimeError):  # CUDA does not start
        bf16 = torch.cuda.is_bf16_supported()
    return Precision(tf32=modern, bf16=bf16, cudnn_autotune=torch.backends.cudnn.is_available())


def _host() -> Host:
    memory, shm = host_memory(), None
    with suppress(OSError):
        shm = shutil.disk_usage("/dev/shm")
    name_error = ""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        name_error = error.strerror or str(error)
    # where the user asks ranks to meet, and why they cannot
    address = ":".join(os.environ.get(name, "") for name in ADDRESS_VARIABLES).strip(":")
    address_error = ""
    try:
        if asked := asked_for_address():
            address = "{}:{}".format(*asked)
            check_address(*asked, hosted_here=True)
    except ValueError as error:
        address_error = str(error)
    return Host(
        name=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=available_cores(),
        machine_cores=os.cpu_count() or 1,
        load=os.getloadavg()[0],
        threads=torch.get_num_threads(),
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        process_bytes=psutil.Process().memory_info().rss,
        shm_total_bytes=shm and shm.total,
        shm_free_bytes=shm and shm.free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        name_error=name_error,
        address=address,
        address_error=address_error,
    )


def read_disk(run_dir: Path) -> Disk:
    """Free space where a run would be, and how long a safe write takes."""
    path = run_dir.absolute()
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    free = None
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder) as file:
            started_s = time.perf_counter()
            file.write(bytes(FSYNC_BYTES))
            file.flush()
            os.fsync(file.fileno())
            return Disk(str(folder), free, time.perf_counter() - started_s, "")
    except OSError as error:
        return Disk(str(folder), free, None, error.strerror or str(error))
