"""What this rank's GPU, CPU and memory do, sampled by a thread of its own.

`Monitor.take` never waits for the thread, and a source that fails or hangs yields None.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # needed where there is a GPU
    from rl_dist.hardware.gpus import GpuReading

logger = logging.getLogger(__name__)
GIB = 2**30
CLOSE_S = 1.0  # longest wait for a thread that hangs in a driver
HOST = ("cpu/percent", "cpu/wait_percent", "ram/used_gib", "ram/free_gib")
SCHEDSTAT = Path("/proc/self/schedstat")  # of the main thread: ns on a core, ns ready without one
MOST_WAIT_PERCENT = 30.0  # without a core; beyond, with several threads, a rank gets slow
IN_A_ROW = 3  # samples, before it is said
MEMORY = ("memory_allocated_gib", "memory_reserved_gib", "memory_peak_gib", "memory_free_gib")
# of the fields of GpuStatus
SAMPLED = ("utilization_percent", *MEMORY, "temperature_c", "power_w")
GPU = tuple(f"gpu/{name}" for name in SAMPLED)
Values = dict[str, float | None]


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
        self._logged: set[Source] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        if self._sources:
            self._thread.start()

    def take(self) -> Values:
        """Return the mean of each value since the last call, of peaks the highest."""
        samples, self._samples = self._samples, []
        found: Values = {}
        for name in (name for source in self._sources for name in source.names):
            values = [value for sample in samples if (value := sample.get(name)) is not None]
            merged = max if "peak" in name else fmean
            found[name] = round(merged(values), 4) if values else None
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

    def _guarded(self, source: Source, step: Callable[[], Any]) -> Any:
        """Log whatever a source raises, once; the run goes on."""
        try:
            return step()
        except Exception as error:
            if source not in self._logged:
                why = f"{type(error).__name__}: {error}"
                logger.warning("monitor: %s ... cannot be read: %s", source.names[0], why)
            self._logged.add(source)


def sources_of(device: torch.device, nvml_module: Any = None) -> list[Source]:
    """Return what there is to sample for a rank on this device."""
    threads = torch.get_num_threads()  # each thread has a number of its own
    sources = [Source(HOST, lambda: _read_host(threads))]
    if device.type == "cuda":
        sources.append(Source(GPU, lambda: _read_gpu(device.index or 0, nvml_module)))
    return sources


def _read_host(threads: int) -> Callable[[], Values]:
    """This process's CPU time (100 = one core busy) and memory, and what the machine has left."""
    import psutil

    process = psutil.Process(os.getpid())
    process.cpu_percent()  # counts from here
    waiting = CoreWait(threads)

    def read() -> Values:
        with process.oneshot():
            used = process.cpu_percent(), waiting.percent(), process.memory_info().rss / GIB
        return dict(zip(HOST, (*used, psutil.virtual_memory().available / GIB), strict=True))

    return read


class CoreWait:
    """How long the main thread had work but no core.

    Where programs share cores, threads that wait for each other spin, and all get much slower.
    """

    def __init__(self, threads: int, path: Path = SCHEDSTAT) -> None:
        self._threads = threads
        self._path = path
        self._before = self._read()
        self._in_a_row = 0

    def _read(self) -> list[int]:
        try:
            return [int(word) for word in self._path.read_text().split()[:2]]
        except (OSError, ValueError):  # not Linux, or a kernel that does not count
            return []

    def percent(self) -> float | None:
        """Return its share since the last call; None: not known.

        Warns once where fewer threads would help.
        """
        before, self._before = self._before, self._read()
        if not (before and self._before):
            return None
        ran_ns, waited_ns = (now - then for now, then in zip(self._before, before, strict=True))
        percent = 100.0 * waited_ns / max(1, ran_ns + waited_ns)
        self._in_a_row = self._in_a_row + 1 if percent > MOST_WAIT_PERCENT else 0
        if self._in_a_row == IN_A_ROW and self._threads > 1:
            fewer = max(1, int(self._threads * (1 - percent / 100)))
            logger.warning(
                "other programs share this rank's cores, and it waits %.0f %% of the time for one: "
                "its %d threads hold each other up, --threads %d may be faster",
                *(percent, self._threads, fewer),
            )
            self._threads = 1  # it is said once
        return percent


def _read_gpu(index: int, nvml_module: Any) -> Callable[[], Values]:
    from rl_dist.hardware.gpus import Nvml

    nvml = Nvml(nvml_module)
    handle = nvml.find_torch_device(index)
    if handle is None:
        reason = nvml.reason or f"it does not know torch's device {index}"
        logger.info("monitor: no utilisation, temperature and power of the GPU: %s", reason)

    def read() -> Values:
        status = _gpu_status(index, nvml.reading(handle))
        return {f"gpu/{name}": getattr(status, name) for name in SAMPLED}

    return read


@dataclass(frozen=True)
class GpuStatus:
    """The use of one GPU now; None: not known.

    Allocations are of this process.
    """

    index: int  # torch's
    name: str
    utilization_percent: float | None
    memory_allocated_gib: float  # by tensors of this process
    memory_reserved_gib: float  # held by its allocator
    memory_peak_gib: float  # highest allocation so far
    memory_free_gib: float | None  # for any process
    memory_total_gib: float | None
    temperature_c: float | None
    power_w: float | None


def _gpu_status(index: int, seen: GpuReading, name: str = "") -> GpuStatus:
    """Join a reading of the driver with what torch's allocator holds on its device."""
    held = torch.cuda.memory_stats(index) if torch.cuda.is_initialized() else {}
    free, total = seen.memory_free_bytes, seen.memory_total_bytes
    # else asking torch would open the device
    if free is None and held.get("reserved_bytes.all.current"):
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
    """Return the use now of every GPU that torch sees, in its order.

    >>> from rl_dist import get_multi_gpu_status
    >>> for gpu in get_multi_gpu_status():
    ...     print(gpu.index, gpu.name, gpu.utilization_percent, gpu.memory_free_gib)
    """
    from rl_dist.hardware.gpus import Nvml

    nvml = Nvml(nvml_module)
    indices = range(torch.cuda.device_count())
    readings = [nvml.reading(nvml.find_torch_device(index)) for index in indices]
    nvml.close()
    return [
        _gpu_status(index, reading, torch.cuda.get_device_name(index))
        for index, reading in enumerate(readings)
    ]
