"""GPUs and links that one does not own: data-sheet rates and list prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from rl_dist.errors import UserError
from rl_dist.speedup.model import Link

AS_OF = "2026-11"
CARDS_PER_MACHINE, NETWORK = 8, "InfiniBand NDR"  # assumed unless the user names others
T = TypeVar("T")


@dataclass(frozen=True)
class GpuModel:
    """One card."""

    name: str
    fp32_tflops: float  # peak, without sparsity
    link: str  # between cards of one machine, a name in LINKS
    usd_per_hour: tuple[float, float]  # lowest and highest


# Rates: the makers' pages, checked in November 2026 on the pages named; the others are from memory.
# Prices: providers' pages from August to November 2026.
GPUS = {
    gpu.name: gpu
    for gpu in (
        # https://hmc-tech.com/gpus/nvidia-a100-sxm-vs-nvidia-b200
        GpuModel("A100", 19.5, "NVLink 3", (1.39, 3.43)),
        # https://glennklockwood.com/garden/processors/h100
        GpuModel("H100 SXM", 67, "NVLink 4", (2.40, 12.29)),
        GpuModel("H200", 67, "NVLink 4", (3.45, 6.31)),
        GpuModel("B200", 75, "NVLink 5", (5.00, 6.79)),
        # https://www.grafikkarten.com/de/news/nvidia-rtx-6000-grafikkarte-der-ada-generation
        GpuModel("RTX 4090", 82.6, "PCIe 4 through the host", (0.29, 0.88)),
        # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
        GpuModel("MI300X", 163.4, "Infinity Fabric", (2.59, 2.59)),
    )
}

# Latencies: NCCL's own cost constants (base 8.4 us; per hop 4.0 us NVLink, 5.7 us PCIe, 14 us
# network), https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc, which torch ships in
# torch/_inductor/comm_analysis.py. Bandwidth: four fifths of the nominal rate per direction, unless
# a source is named.
_BASE_S = 8.4e-6
LINKS = {
    name: Link(name, base_s, hop_s, bytes_per_s, name.startswith("Ethernet"))
    for name, base_s, hop_s, bytes_per_s in (
        ("NVLink 3", _BASE_S, 4.0e-6, 0.8 * 300e9),  # A100: 600 GB/s both ways
        ("NVLink 4", _BASE_S, 4.0e-6, 0.8 * 450e9),  # H100, H200: 900 GB/s
        ("NVLink 5", _BASE_S, 4.0e-6, 0.8 * 900e9),  # B200: 1800 GB/s
        ("Infinity Fabric", _BASE_S, 4.0e-6, 0.8 * 448e9),  # MI300X: 7 x 128 GB/s
        ("PCIe 4", _BASE_S, 5.7e-6, 0.8 * 32e9),
        # without peer access, through the host: 10 GB/s in torch/_inductor/comm_analysis.py
        ("PCIe 4 through the host", 15e-6, 10e-6, 10e9),
        ("InfiniBand NDR", _BASE_S, 14e-6, 0.8 * 50e9),  # 400 Gbit/s for each GPU
        ("InfiniBand HDR", _BASE_S, 14e-6, 0.8 * 25e9),  # 200 Gbit/s for each GPU
        # One port for a machine; TCP takes tens of microseconds through the kernel.
        ("Ethernet 100", 30e-6, 30e-6, 0.8 * 12.5e9),
        ("Ethernet 25", 30e-6, 30e-6, 0.8 * 3.125e9),
        ("Ethernet 10", 30e-6, 30e-6, 0.8 * 1.25e9),
        # gloo over 127.0.0.1, roughly: between ranks of one machine it is measured
        ("loopback", 200e-6, 100e-6, 1e9),
    )
}


def find(name: str, known: Mapping[str, T], flag: str) -> T:
    """Return the entry of GPUS or LINKS with this name, in any case.

    Raises:
        UserError: lists the names.
    """
    for key, value in known.items():
        if key.lower() == name.lower():
            return value
    raise UserError(f"{flag}: {name!r} is not known; choose from {', '.join(known)}")


def gpu_named(device_name: str) -> GpuModel | None:
    """Return the card that torch calls this; None: a PCIe board, or not listed."""
    if "PCIE" not in device_name.upper():
        for gpu in GPUS.values():
            if all(word in device_name for word in gpu.name.replace("SXM", "").split()):
                return gpu
    return None


def link_of_gpu(device_name: str) -> Link:
    """Return the link between cards that torch calls this, by default PCIe."""
    gpu = gpu_named(device_name)
    return LINKS[gpu.link if gpu else "PCIe 4"]
