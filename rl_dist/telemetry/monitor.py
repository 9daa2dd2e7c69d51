"""What this rank's GPU, CPU and memory do, sampled by a thread of its own.

The thread is on nobody's way: `Monitor.take` never waits for it, and a source that fails or hangs yields None.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from rl_dist.hardware.nvml import GpuReading, Nvml

logger = logging.getLogger(__name__)
GIB = 2**30
CLOSE_S = 1.0  # longest wait for a thread that hangs in a driver
HOST = ("cpu/percent", "ram/used_gib", "ram/free_gib")
GPU = (
    "gpu/utilization_percent",
    "gpu/memory_allocated_gib",
    "gpu/memory_reserved_gib",
    "gpu/memory_peak_gib",
    "gpu/memory_free_gib",
    "gpu/temperature_c",
    "gpu/power_w",
)
Values = dict[str, float | None]
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """Something to sample: the names it yields and how to begin reading them."""

    names: tuple[str, ...]
    begin: Callable[[], Callable[[], Values]]  # called once, in the monitor's thread


class Monitor:
    """Samples sources every `every_s` seconds, until `close`; 0: never."""

    def __init__(self, sources: Sequence[Source], every_s: float) -> None:
        self._sources = list(sources) if every_s else []
        self._every_s = every_s
        self._samples: list[Values] = []  # since the last `take`, which replaces the list
        self._told: set[str] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        if self._sources:
            self._thread.start()

    def take(self) -> Values:
        """The mean of each value since the last call, of peaks the highest."""
        samples, self._samples = self._samples, []
        found: Values = {}
        for name in (name for source in self._sources for name in source.names):
            values = [value for sample in samples if (value := sample.get(name)) is not None]
            together = max if "peak" in name else _mean
            found[name] = round(together(values), 4) if values else None
        return found

    def close(self) -> None:
        """End the thread; safe to call twice."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        begun = [(source, self._guarded(source, source.begin)) for source in self._sources]
        while not self._closed.wait(self._every_s):
            sample: Values = {}
            for source, read in begun:
                sample |= (self._guarded(source, read) if read else None) or {}
            self._samples.append(sample)

    def _guarded(self, source: Source, step: Callable[[], T]) -> T | None:
        """Whatever a source raises, the run goes on; it is told once."""
        try:
            return step()
        except Exception as error:
            if source.names[0] not in self._told:
                self._told.add(source.names[0])
                logger.warning("monitor: %s ... cannot be read: %s: %s", source.names[0], type(error).__name__, error)
            return None


def sources_of(device: torch.device, nvml_module: Any = None) -> list[Source]:
    """What there is to sample for a rank on this device."""
    sources = [Source(HOST, _read_host)]
    if device.type == "cuda":
        sources.append(Source(GPU, lambda: _read_gpu(device.index or 0, nvml_module)))
    return sources


def _read_host() -> Callable[[], Values]:
    """This process's CPU time (100 = one core busy) and memory, and what the machine has left."""
    import psutil

    process = psutil.Process(os.getpid())
    process.cpu_percent()  # counts from here

    def read() -> Values:
        with process.oneshot():
            used = process.cpu_percent(), process.memory_info().rss / GIB
        return dict(zip(HOST, (*used, psutil.virtual_memory().available / GIB), strict=True))

    return read


def _read_gpu(index: int, nvml_module: Any) -> Callable[[], Values]:
    nvml = Nvml(nvml_module)
    handle = nvml.find_torch_device(index)
    if handle is None:
        reason = nvml.reason or f"it does not know torch's device {index}"
        logger.info("monitor: no utilisation, temperature and power of the GPU: %s", reason)

    def read() -> Values:
        status = gpu_status(index, nvml.reading(handle))
        sizes = (
            status.memory_allocated_gib,
            status.memory_reserved_gib,
            status.memory_peak_gib,
            status.memory_free_gib,
        )
        values = (status.utilization_percent, *sizes, status.temperature_c, status.power_w)
        return dict(zip(GPU, values, strict=True))

    return read


@dataclass(frozen=True)
class GpuStatus:
    """What one GPU does now; None: it does not tell. Allocations are of this process."""

    index: int  # torch's; without CUDA in torch, the machine's
    name: str
    utilization_percent: float | None
    memory_allocated_gib: float  # by tensors of this process
    memory_reserved_gib: float  # held by its allocator
    memory_peak_gib: float  # highest allocation so far
    memory_free_gib: float | None  # for any process
    memory_total_gib: float | None
    temperature_c: float | None
    power_w: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def gpu_status(index: int, seen: GpuReading, name: str = "") -> GpuStatus:
    """A reading from outside beside what torch's allocator holds on its device."""
    held = torch.cuda.memory_stats(index) if torch.cuda.is_initialized() else {}
    free, total = seen.memory_free_bytes, seen.memory_total_bytes
    if free is None and held.get("reserved_bytes.all.current"):  # else asking torch would open the device
        free, total = torch.cuda.mem_get_info(index)
    return GpuStatus(
        index=index,
        name=name,
        utilization_percent=seen.utilization_percent,
        memory_allocated_gib=held.get("allocated_bytes.all.current", 0) / GIB,
        memory_reserved_gib=held.get("reserved_bytes.all.current", 0) / GIB,
        memory_peak_gib=held.get("allocated_bytes.all.peak", 0) / GIB,
        memory_free_gib=None if free is None else free / GIB,
        memory_total_gib=None if total is None else total / GIB,
        temperature_c=seen.temperature_c,
        power_w=seen.power_w,
    )


def get_multi_gpu_status(nvml_module: Any = None) -> list[GpuStatus]:
    """What every GPU does now, in torch's order; empty without any.

    A torch without CUDA sees no GPU: then those that the driver knows are listed, in its order.

        >>> from rl_dist import get_multi_gpu_status
        >>> for gpu in get_multi_gpu_status():
        ...     print(gpu.index, gpu.name, gpu.utilization_percent, gpu.memory_free_gib)
    """
    nvml = Nvml(nvml_module)
    found = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            reading = nvml.reading(nvml.find_torch_device(index))
            found.append(gpu_status(index, reading, torch.cuda.get_device_name(index)))
    else:
        for index in range(nvml.count()):
            handle, _ = nvml.handle(index)
            name = nvml.read("nvmlDeviceGetName", handle) if handle is not None else None
            found.append(gpu_status(index, nvml.reading(handle), name or "does not answer"))
    nvml.close()
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
