"""What a figure was measured on, and the fixed matrix product that it is compared by."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

SIDE, PRODUCTS = 1024, 8  # of the fixed product
KIND = ("cpu", "instructions", "torch", "threads")  # figures compare where these are the same


def cpu_name() -> str:
    """Return the model of the processor; Python knows only its architecture on Linux."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def describe(threads: int) -> dict[str, Any]:
    """Return what speed depends on, and how busy the machine is."""
    return {
        "cpu": cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": threads,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def product_gflops() -> float:
    """Return GFLOP/s of a fixed product of matrices right now: the best of a few."""
    left = torch.ones(SIDE, SIDE)
    best_s = float("inf")
    for _ in range(PRODUCTS):
        began = time.perf_counter()
        left @ left
        best_s = min(best_s, time.perf_counter() - began)
    return 2.0 * SIDE**3 / best_s / 1e9
