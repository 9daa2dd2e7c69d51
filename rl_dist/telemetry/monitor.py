"""The use of this rank's GPU, CPU and memory, sampled by a thread.

`Monitor.take` never waits for the thread; a source that fails or hangs yields None.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean

import psutil
import torch

from rl_dist.files import log_once
from rl_dist.machine import GIB, host_memory, read_gpu

logger = logging.getLogger(__name__)
CLOSE_S = 1.0  # longest wait for a thread that hangs in a driver
HOST = ("cpu/percent", "ram/used_gib", "ram/free_gib")
CORE_WAIT = "cpu/wait_percent"
SAMPLED = (  # fields of a Gpu
    *("utilization_percent", "memory_allocated_gib", "memory_reserved_gib", "memory_peak_gib"),
    *("memory_free_gib", "temperature_c", "power_w"),
)
GPU = tuple(f"gpu/{name}" for name in SAMPLED)
SCHEDSTAT = Path("/proc/self/schedstat")  # main thread: ns on a core, ns ready without a core
MOST_WAIT_PERCENT = 30.0  # without a core; above it several threads get slow
IN_A_ROW = 3  # samples above it, before the warning
Values = dict[str, float | None]
Sources = Mapping[tuple[str, ...], Callable[[], Values]]  # names, and the function that reads them


class Monitor:
    """Samples sources every `every_s` seconds, until `close`; 0: never."""

    def __init__(self, sources: Sources, every_s: float) -> None:
        self._sources = sources if every_s else {}
        self._every_s = every_s
        self._samples: list[Values] = []  # since the last `take`, which replaces the list
        self._failed: set[tuple[str, ...]] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        if self._sources:
            self._thread.start()

    def take(self) -> Values:
        """Return means since the last call; the highest of peaks, the least of free."""
        samples, self._samples = self._samples, []
        merged: Values = {}
        for name in (name for names in self._sources for name in names):
            values = [value for sample in samples if (value := sample.get(name)) is not None]
            merge = max if "peak" in name else min if "free" in name else fmean
            merged[name] = round(merge(values), 4) if values else None
        return merged

    def close(self) -> None:
        """End the thread; safe to call twice."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            sample: Values = {}
            for names, read in self._sources.items():
                try:
                    sample |= read()
                except Exception as error:  # whatever it is, the run continues
                    if names not in self._failed:
                        reason = f"{type(error).__name__}: {error}"
                        logger.warning("monitor: no %s ...: %s", names[0], reason)
                    self._failed.add(names)
            self._samples.append(sample)


def sources_of(device: torch.device) -> Sources:
    """Return the sources to sample for a rank on this device."""
    process = psutil.Process()
    process.cpu_percent()  # it counts from here

    def read_host() -> Values:
        return {
            "cpu/percent": process.cpu_percent(),  # 100: one core is busy
            "ram/used_gib": process.memory_info().rss / GIB,
            "ram/free_gib": host_memory().available / GIB,
        }

    def read_device() -> Values:
        gpu = read_gpu(device.index or 0)
        return {f"gpu/{name}": getattr(gpu, name) for name in SAMPLED}

    # get_num_threads answers for the thread that asks
    sources = {HOST: read_host, (CORE_WAIT,): CoreWait(torch.get_num_threads()).read}
    return sources | ({GPU: read_device} if device.type == "cuda" else {})


class CoreWait:
    """Measures how long the main thread had work but no core.

    If programs share cores, threads that wait for each other spin, and all get much slower.
    """

    def __init__(self, threads: int, path: Path = SCHEDSTAT) -> None:
        self._threads, self._path = threads, path
        self._ran_ns = self._waited_ns = 0
        self._high = 0  # samples in a row with a long wait

    def read(self) -> Values:
        """Return its share since the last call; warn once if fewer threads may help.

        Raises:
            OSError: this kernel does not count it.
        """
        ran_ns, waited_ns = map(int, self._path.read_text().split()[:2])
        waited = waited_ns - self._waited_ns
        percent = 100.0 * waited / max(1, waited + ran_ns - self._ran_ns)
        self._ran_ns, self._waited_ns = ran_ns, waited_ns
        self._high = self._high + 1 if percent > MOST_WAIT_PERCENT else 0
        if self._high == IN_A_ROW and self._threads > 1:
            log_once(
                "other programs share this machine's cores, and the first rank waits for one much "
                "of the time: fewer --threads may be faster"
            )
        return {CORE_WAIT: percent}
