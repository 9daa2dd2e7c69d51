"""Sample the GPU, CPU and memory usage of this rank in a background thread.

`Monitor.take` never waits for the thread. If a source fails or hangs, the values of this source are
None.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import psutil
import torch

from rl_dist.errors import one_line
from rl_dist.files import log_once
from rl_dist.machine import GIB, host_memory, read_gpu

CLOSE_S = 1.0  # longest wait for the thread to end; it may hang in a driver
GPU_FIELDS = (
    "utilization_percent",
    "memory_allocated_gib",
    "memory_reserved_gib",
    "memory_peak_gib",
    "memory_free_gib",
    "temperature_c",
    "power_w",
)
# The first number in this file is the time in ns for which the main thread has run on a core; the
# second number is the time in ns for which the thread has waited for a core.
SCHEDSTAT = Path("/proc/self/schedstat")
Values = dict[str, float | None]
Source = Callable[[], Values]


class Monitor:
    """Reads its sources every `every_s` seconds until `close`; if `every_s` is 0, never."""

    def __init__(self, sources: Sequence[Source], every_s: float) -> None:
        self._sources = sources
        self._every_s = every_s
        self._samples: list[Values] = []  # samples since the last call of `take`
        self._names: Values = {}  # the keys are the names of all values read so far
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        if every_s:
            self._thread.start()

    def take(self) -> Values:
        """Return the mean of each value since the last call.

        If the name of a value contains "peak", return the maximum instead; if the name contains
        "free", return the minimum. A value without samples is None.
        """
        samples = self._samples
        self._samples = []
        merged: Values = {}
        for name in list(self._names):
            values = [value for sample in samples if (value := sample.get(name)) is not None]
            combine = max if "peak" in name else min if "free" in name else fmean
            merged[name] = round(combine(values), 4) if values else None
        return merged

    def close(self) -> None:
        """Stop the thread; a second call does nothing."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            sample: Values = {}
            for read in self._sources:
                try:
                    sample |= read()
                except Exception as error:  # a failing driver must not stop the run
                    log_once(f"monitor: {one_line(error)}")
            self._names |= sample
            self._samples.append(sample)
            self._closed.wait(self._every_s)


def sources_of(device: torch.device) -> list[Source]:
    """Return the sources to sample on a rank that uses this device."""
    process = psutil.Process()
    process.cpu_percent()  # the next call measures the time since this call
    before_ns = [0, 0]

    def read_host() -> Values:
        return {
            "cpu/percent": process.cpu_percent(),  # 100 means one busy core
            "ram/used_gib": process.memory_info().rss / GIB,
            "ram/free_gib": host_memory().available / GIB,
        }

    def read_core_wait() -> Values:
        """Return how long the main thread waited for a core.

        The value is a percentage of the time in which the thread ran or waited for a core.
        """
        now_ns = [int(text) for text in SCHEDSTAT.read_text().split()[:2]]
        ran_ns, waited_ns = (now - before for now, before in zip(now_ns, before_ns, strict=True))
        before_ns[:] = now_ns
        return {"cpu/wait_percent": 100.0 * waited_ns / max(1, ran_ns + waited_ns)}

    def read_device() -> Values:
        gpu = read_gpu(device.index or 0)
        return {f"gpu/{name}": getattr(gpu, name) for name in GPU_FIELDS}

    sources = [read_host, read_core_wait]
    if device.type == "cuda":
        sources.append(read_device)
    return sources
