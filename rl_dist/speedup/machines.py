"""GPUs and links that one does not own: data-sheet rates, for estimates.

Rates are the makers' peaks, without sparsity. `source` is the maker's page; `seen` tells which figures were read in
November 2026, and where. What is not in `seen` was written down from memory: check it before you rely on it.
Prices are the lowest and highest list prices per GPU-hour seen on providers' pages from August to November 2026; None:
none was seen, so give --price_per_hour.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_dist.errors import UserError
from rl_dist.speedup.model import Link

AS_OF = "2026-11"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One card."""

    name: str
    fp32_tflops: float
    bf16_tflops: float  # dense, tensor cores
    memory_gib: float
    memory_gb_s: float
    power_w: float  # board limit
    link: str  # between cards of one machine, a name in LINKS
    usd_per_hour: tuple[float, float] | None  # lowest and highest
    source: str
    seen: str


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="A100", fp32_tflops=19.5, bf16_tflops=312, memory_gib=80, memory_gb_s=2039, power_w=400,
            link="NVLink 3", usd_per_hour=(1.39, 3.43),
            source="https://www.nvidia.com/en-us/data-center/a100/ (SXM, 80 GB)",
            seen="https://hmc-tech.com/gpus/nvidia-a100-sxm-vs-nvidia-b200: 19.49 and 311.9 TFLOPS, "
            "80 GB, 2.04 TB/s, 400 W",
        ),
        Gpu(
            name="H100 SXM", fp32_tflops=67, bf16_tflops=989, memory_gib=80, memory_gb_s=3350, power_w=700,
            link="NVLink 4", usd_per_hour=(2.40, 12.29),
            source="https://www.nvidia.com/en-us/data-center/h100/",
            seen="https://glennklockwood.com/garden/processors/h100: 66.9 and 989.4 TFLOPS, "
            "80 GB, 3.35 TB/s, 700 W, NVLink 900 GB/s",
        ),
        Gpu(
            name="H200", fp32_tflops=67, bf16_tflops=989, memory_gib=141, memory_gb_s=4800, power_w=700,
            link="NVLink 4", usd_per_hour=(3.45, 6.31),
            source="https://www.nvidia.com/en-us/data-center/h200/ (SXM)",
            seen="https://www.saulelectric.com/nvidia-h200.html: 141 GB, 4.8 TB/s, 700 W, NVLink 900 GB/s",
        ),
        Gpu(
            name="B200", fp32_tflops=75, bf16_tflops=2250, memory_gib=180, memory_gb_s=8000, power_w=1000,
            link="NVLink 5", usd_per_hour=(5.00, 6.79),
            source="https://www.nvidia.com/en-us/data-center/dgx-b200/ (one of eight)",
            seen="https://hmc-tech.com/gpus/nvidia-a100-sxm-vs-nvidia-b200: 75.02 and 2250 TFLOPS, 1000 W; "
            "https://glennklockwood.com/garden/processors/B200: 80 and 2250 TFLOPS, 8 TB/s, 1000 W, NVLink 1800 GB/s",
        ),
        Gpu(
            name="RTX 4090", fp32_tflops=82.6, bf16_tflops=165, memory_gib=24, memory_gb_s=1008, power_w=450,
            link="PCIe 4 through the host", usd_per_hour=(0.29, 0.88),
            source="NVIDIA Ada GPU Architecture white paper, appendix A",
            seen="https://www.grafikkarten.com/de/news/nvidia-rtx-6000-grafikkarte-der-ada-generation: 82.6 TFLOPS "
            "fp32, 24 GB, 1008 GB/s, 450 W",
        ),
        Gpu(
            name="RTX 6000 Ada", fp32_tflops=91.1, bf16_tflops=364, memory_gib=48, memory_gb_s=960, power_w=300,
            link="PCIe 4", usd_per_hour=None,
            source="https://www.nvidia.com/en-us/design-visualization/rtx-6000/",
            seen="https://www.grafikkarten.com/de/news/nvidia-rtx-6000-grafikkarte-der-ada-generation: 91.1 TFLOPS "
            "fp32, 48 GB, 960 GB/s, 300 W",
        ),
        Gpu(
            name="MI300X", fp32_tflops=163.4, bf16_tflops=1307, memory_gib=192, memory_gb_s=5300, power_w=750,
            link="Infinity Fabric", usd_per_hour=(2.59, 2.59),
            source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
            seen="https://www.emergentmind.com/topics/amd-instinct-mi300x-gpus: 192 GB, 5.3 TB/s; MLCommons' "
            "inference_results_v4.1, AMD/systems/8xMI300X_2xEPYC-9374F.json: 192 GB, 750 W",
        ),
        Gpu(
            name="MI325X", fp32_tflops=163.4, bf16_tflops=1307, memory_gib=256, memory_gb_s=6000, power_w=1000,
            link="Infinity Fabric", usd_per_hour=None,
            source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi325x.html",
            seen="https://wiaix.com/amd-instincttm-mi325x-accelerators: 256 GB (eight are 2 TB), 6 TB/s",
        ),
    )
}  # fmt: skip

# Latencies: NCCL's own cost constants, https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc (base 8.4 us;
# per hop 4.0 us NVLink, 5.7 us PCIe, 14 us network), which torch ships in torch/_inductor/comm_analysis.py.
# Bandwidth: four fifths of the nominal rate per direction, but where a source is named.
_BASE_S = 8.4e-6
LINKS = {
    link.name: link
    for link in (
        Link(name="NVLink 3", base_s=_BASE_S, hop_s=4.0e-6, bytes_per_s=0.8 * 300e9),  # A100: 600 GB/s both ways
        Link(name="NVLink 4", base_s=_BASE_S, hop_s=4.0e-6, bytes_per_s=0.8 * 450e9),  # H100, H200: 900 GB/s
        Link(name="NVLink 5", base_s=_BASE_S, hop_s=4.0e-6, bytes_per_s=0.8 * 900e9),  # B200: 1800 GB/s
        Link(name="Infinity Fabric", base_s=_BASE_S, hop_s=4.0e-6, bytes_per_s=0.8 * 448e9),  # MI300X: 7 x 128 GB/s
        Link(name="PCIe 5", base_s=_BASE_S, hop_s=5.7e-6, bytes_per_s=0.8 * 64e9),
        Link(name="PCIe 4", base_s=_BASE_S, hop_s=5.7e-6, bytes_per_s=0.8 * 32e9),
        # Without peer access, through the host's memory: 10 GB/s in torch/_inductor/comm_analysis.py.
        Link(name="PCIe 4 through the host", base_s=15e-6, hop_s=10e-6, bytes_per_s=10e9),
        Link(name="InfiniBand NDR", base_s=_BASE_S, hop_s=14e-6, bytes_per_s=0.8 * 50e9),  # 400 Gbit/s for each GPU
        Link(name="InfiniBand HDR", base_s=_BASE_S, hop_s=14e-6, bytes_per_s=0.8 * 25e9),  # 200 Gbit/s for each GPU
        # TCP: tens of microseconds through the kernel, an order of magnitude and no data-sheet figure.
        Link(name="Ethernet 100", base_s=30e-6, hop_s=30e-6, bytes_per_s=0.8 * 12.5e9),
        Link(name="Ethernet 25", base_s=30e-6, hop_s=30e-6, bytes_per_s=0.8 * 3.125e9),
        Link(name="Ethernet 10", base_s=30e-6, hop_s=30e-6, bytes_per_s=0.8 * 1.25e9),
        # gloo over 127.0.0.1: an order of magnitude; between ranks of one machine it is measured.
        Link(name="loopback", base_s=200e-6, hop_s=100e-6, bytes_per_s=1e9),
    )
}


def find_link(name: str) -> Link:
    """A link by its name.

    Raises:
        UserError: lists the names there are.
    """
    return LINKS[_known(name, list(LINKS), "--link and --between")]


def find_gpus(name: str) -> list[Gpu]:
    """The cards named, "A + B" for unequal ones together.

    Raises:
        UserError: lists the names there are.
    """
    return [GPUS[_known(part.strip(), list(GPUS), "--gpu")] for part in name.split("+")]


def gpu_named(device_name: str) -> Gpu | None:
    """The card that torch gives this name; None: not one of ours."""
    for gpu in GPUS.values():
        if all(word in device_name for word in gpu.name.replace("SXM", "").split()):
            return gpu
    return None


def link_of_gpu(device_name: str) -> Link:
    """The link between cards of this kind, by the name that torch gives it.

    Raises:
        UserError: it is not known.
    """
    if gpu := gpu_named(device_name):
        return LINKS[gpu.link if "PCIe" not in device_name else "PCIe 4"]
    raise UserError(f"--link: name the link between GPUs like {device_name}: {', '.join(LINKS)}")


def slowest(gpus: list[Gpu]) -> Gpu:
    """The card that sets the pace: ranks meet in every gradient step."""
    return min(gpus, key=lambda gpu: gpu.fp32_tflops)


def _known(name: str, names: list[str], flag: str) -> str:
    found = [known for known in names if known.lower() == name.lower()]
    if not found:
        raise UserError(f"{flag}: {name!r} is not known; there are {', '.join(names)}")
    return found[0]
