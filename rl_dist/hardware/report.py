"""Read-only facts about this machine: software, GPUs, cores, memory, disk.

info = get_gpu_info()  # GPUs and links, through NVML and torch
print_gpu_info()       # the same in lines
facts = read_facts(Path("runs"))  # all facts; `as_dict` makes them fit for JSON
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from rl_dist.hardware.addresses import asked_for_address, check_address
from rl_dist.hardware.gpus import Gpu, GpuInfo, read_gpus
from rl_dist.hardware.host_memory import available_cores, host_memory
from rl_dist.hardware.nvml import Nvml

if sys.platform != "win32":
    import resource

VARIABLES = re.compile(
    r"(CUDA|NCCL|RCCL|HIP|ROCR|OMP|MKL|KMP|GLOO|TORCH|PYTORCH|MASTER|NVIDIA_VISIBLE)_?[A-Z0-9_]*|RANK|WORLD_SIZE|LOCAL_RANK"
)
FSYNC_BYTES = 4 * 2**20
GIB = 2**30


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
    """The machine without its GPUs; None: it does not tell."""

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


def as_dict(facts: Any) -> dict[str, Any]:
    """Plain values, fit for JSON."""
    return dataclasses.asdict(facts)


def read_facts(run_dir: Path) -> Facts:
    """Look at everything; takes well under a second without a GPU."""
    gpu = get_gpu_info()
    return Facts(
        software=_software(),
        gpu=gpu,
        precision=_precision(gpu),
        host=_host(),
        disk=read_disk(run_dir),
        environment={name: os.environ[name] for name in sorted(os.environ) if VARIABLES.fullmatch(name)},
    )


def get_gpu_info() -> GpuInfo:
    """All GPUs and the links between them; none, and why, where there are none.

    >>> get_gpu_info().usable  # doctest: +SKIP
    (Gpu(index=0, torch_index=0, name='NVIDIA H100 80GB HBM3', ...),)
    """
    nvml = Nvml()
    try:
        return read_gpus(nvml, torch)
    finally:
        nvml.close()


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
        parts = ["NVLink" if link.nvlink else "", link.path or "", "" if link.peer_access else "no peer access"]
        print(f"GPU {link.first} - GPU {link.second}: {', '.join(filter(None, parts)) or 'peer access'}")


def describe_gpu(gpu: Gpu) -> str:
    """One GPU in a line; what it does not tell is left out."""
    if gpu.error:
        return f"{gpu.name} does not answer: {gpu.error}".lstrip()
    known = [
        gpu.name,
        gpu.compute_capability and f"compute capability {gpu.compute_capability}",
        gpu.multiprocessors and f"{gpu.multiprocessors} multiprocessors",
        gpu.memory_total_bytes and f"{gib(gpu.memory_free_bytes)} of {gib(gpu.memory_total_bytes)} free",
        None if gpu.utilization_percent is None else f"{gpu.utilization_percent:.0f} % busy",
        None if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} C",
        gpu.power_limit_w and f"limit {gpu.power_limit_w:.0f} W",
        "ECC" if gpu.ecc else None,
        gpu.pcie_width and f"PCIe {gpu.pcie_generation_max or '?'} x{gpu.pcie_width}",
        f"{gpu.nvlinks} NVLinks" if gpu.nvlinks else None,
        "not visible to torch" if gpu.torch_index is None else None,
    ]
    return ", ".join(str(part) for part in known if part)


def gib(count: int | None) -> str:
    """Bytes in words."""
    if count is None:
        return "?"
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.3g} {unit}" if count < 100 * size else f"{count / size:,.0f} {unit}"
    return f"{count} bytes"


def _software() -> Software:
    nccl = None
    if torch.distributed.is_nccl_available():
        version: Any = torch.cuda.nccl.version()  # type: ignore[attr-defined]
        nccl = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    cudnn = _ask(torch.backends.cudnn.version)
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


def _precision(gpu: GpuInfo) -> Precision:
    if not gpu.usable:
        bf16 = bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
        return Precision(tf32=None, bf16=bf16, cudnn_autotune=None)
    modern = all(float(g.compute_capability or 0) >= 8.0 for g in gpu.usable) and not gpu.rocm
    bf16 = bool(_ask(torch.cuda.is_bf16_supported))
    return Precision(tf32=modern, bf16=bf16, cudnn_autotune=torch.backends.cudnn.is_available())


def _ask(question: Callable[[], Any]) -> Any:
    """torch's answer; None where CUDA or a library of it does not start."""
    try:
        return question()
    except RuntimeError:
        return None


def _host() -> Host:
    memory = host_memory()
    shm = Path("/dev/shm")
    shm_usage = shutil.disk_usage(shm) if shm.is_dir() else None
    address, address_error = _address()
    return Host(
        name=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=available_cores(),
        machine_cores=os.cpu_count() or 1,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        threads=torch.get_num_threads(),
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        process_bytes=psutil.Process().memory_info().rss,
        shm_total_bytes=shm_usage and shm_usage.total,
        shm_free_bytes=shm_usage and shm_usage.free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0] if sys.platform != "win32" else None,
        name_error=_name_error(),
        address=address,
        address_error=address_error,
    )


def _name_error() -> str:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _address() -> tuple[str, str]:
    """MASTER_ADDR:MASTER_PORT if the user asks for it, and why ranks cannot meet there."""
    try:
        asked = asked_for_address()
        if asked is None:
            return "", ""
        check_address(*asked, hosted_here=True)
    except ValueError as error:
        return f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}", str(error)
    return "{}:{}".format(*asked), ""


def read_disk(run_dir: Path) -> Disk:
    """Free space where a run would be, and how long a safe write takes."""
    folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.is_dir())
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Disk(str(folder), None, None, error.strerror or str(error))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            started_s = time.perf_counter()
            file.write(bytes(FSYNC_BYTES))
            file.flush()
            os.fsync(file.fileno())
            return Disk(str(folder), free, time.perf_counter() - started_s, "")
    except OSError as error:
        return Disk(str(folder), free, None, error.strerror or str(error))
