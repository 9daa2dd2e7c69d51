"""The GPUs of this machine, as NVML and torch report them; read only.

NVML, NVIDIA's management library, reads what a GPU does from outside: no CUDA context, no waiting
for kernels. It sees every GPU of the machine, torch those that CUDA_VISIBLE_DEVICES leaves, in an
order of its own; UUIDs tell which is which. A GPU or a value that does not answer is None, or says
why in `error`, and hides nothing else.
"""

from __future__ import annotations

import importlib
import itertools
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
TOPOLOGY = {
    0: "on one board", 10: "one PCIe switch", 20: "several PCIe switches",
    30: "one PCIe host bridge", 40: "one NUMA node", 50: "across CPU sockets",
}  # fmt: skip
P2P_NVLINK = 2  # NVML's number
READ_NOW = ("memory_total_bytes", "memory_free_bytes", "utilization_percent", "temperature_c")


@dataclass(frozen=True)
class GpuReading:
    """A GPU's readings at one instant; None: unknown."""

    utilization_percent: float | None = None  # of the last sample period in which a kernel ran
    memory_used_bytes: int | None = None  # by all processes
    memory_free_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None


class Nvml:
    """NVML, open until `close`; without it all is empty, and `reason` says why.

    Args:
        module: pynvml, or something that answers like it.
    """

    def __init__(self, module: Any = None) -> None:
        self._errors: tuple[type[Exception], ...] = ()
        self._module, self.reason = None, ""
        try:
            module = module or importlib.import_module("pynvml")
            self._errors = (module.NVMLError,)
            module.nvmlInit()
            self._module = module
        except ImportError:
            self.reason = "the package nvidia-ml-py is not installed"
        except self._errors as error:
            self.reason = f"NVML does not open: {error} (no NVIDIA driver here, or a ROCm machine)"

    @property
    def is_open(self) -> bool:
        """True if there is anything to ask."""
        return self._module is not None

    def read(self, function: str, *args: Any) -> Any:
        """The answer of one NVML function; None: not supported, forbidden, GPU lost."""
        return self.ask(function, *args)[0]

    def ask(self, function: str, *args: Any) -> tuple[Any, str]:
        """The answer of one NVML function, or None and the reason in words."""
        if self._module is None:
            return None, self.reason
        try:
            answer = getattr(self._module, function)(*args)
        except AttributeError:
            return None, f"this nvidia-ml-py has no {function}"
        except self._errors as error:
            return None, f"{function}: {error}"
        except UnicodeDecodeError:
            return None, f"{function}: garbage instead of text"
        return (answer.decode(errors="replace") if isinstance(answer, bytes) else answer), ""

    def count(self) -> int:
        """GPUs of this machine, those that do not answer included."""
        return self.read("nvmlDeviceGetCount") or 0

    def handle(self, index: int) -> tuple[Any, str]:
        """The handle of the machine's GPU number `index`, or None and the reason."""
        return self.ask("nvmlDeviceGetHandleByIndex", index)

    def find_torch_device(self, index: int) -> Any:
        """The handle of torch's CUDA device `index`; None: unknown here."""
        if not self.is_open:
            return None
        import torch  # slow to import, and its devices are asked for only where it is there already

        uuid = torch.cuda.get_device_properties(index).uuid
        handle = self.read("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
        return self.read("nvmlDeviceGetHandleByUUID", f"MIG-{uuid}") if handle is None else handle

    def reading(self, handle: Any) -> GpuReading:
        """Read what a GPU does now."""
        if handle is None:
            return GpuReading()
        rates = self.read("nvmlDeviceGetUtilizationRates", handle)
        power_mw = self.read("nvmlDeviceGetPowerUsage", handle)
        memory = self.read("nvmlDeviceGetMemoryInfo", handle)
        return GpuReading(
            utilization_percent=getattr(rates, "gpu", None),
            memory_used_bytes=getattr(memory, "used", None),
            memory_free_bytes=getattr(memory, "free", None),
            memory_total_bytes=getattr(memory, "total", None),
            # 0: NVML_TEMPERATURE_GPU
            temperature_c=self.read("nvmlDeviceGetTemperature", handle, 0),
            power_w=None if power_mw is None else power_mw / 1000,
        )

    def close(self) -> None:
        """Let NVML go; safe to call twice."""
        self.read("nvmlShutdown")
        self._module, self.reason = None, self.reason or "NVML is closed"


@dataclass(frozen=True)
class GpuProcess:
    """Somebody's computation on a GPU."""

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """One GPU; None: unknown."""

    index: int  # NVML's number, or torch's where there is no NVML
    torch_index: int | None = None  # None: torch does not see it
    name: str = ""
    uuid: str = ""
    error: str = ""  # why it does not answer
    compute_capability: str | None = None
    multiprocessors: int | None = None
    threads_per_block: int | None = None
    integrated: bool | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    utilization_percent: float | None = None
    temperature_c: float | None = None
    compute_mode: str | None = None
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True)
class GpuLink:
    """Between two GPUs, by `Gpu.index`."""

    first: int
    second: int
    peer_access: bool | None  # torch: one can read the other's memory
    nvlink: bool | None
    path: str | None  # between them


@dataclass(frozen=True)
class GpuInfo:
    """All GPUs of this machine."""

    gpus: tuple[Gpu, ...]
    links: tuple[GpuLink, ...]
    driver: str | None  # NVIDIA's
    driver_cuda: tuple[int, int] | None  # the newest CUDA it can serve
    rocm: str | None  # torch is built for AMD: RCCL answers to the name nccl, and there is no NVML
    nvml_error: str  # why NVML is silent; "": it is not
    torch_error: str = ""  # why torch's CUDA does not start; "": it does, or is not built in

    @property
    def usable(self) -> tuple[Gpu, ...]:
        """Those that torch can train on, in its order."""
        seen = (gpu for gpu in self.gpus if gpu.torch_index is not None and not gpu.error)
        return tuple(sorted(seen, key=lambda gpu: gpu.torch_index or 0))


def read_gpus(nvml: Nvml, torch: Any) -> GpuInfo:
    """Ask NVML and torch (the module, or what answers like it) about every GPU."""
    handles: dict[int, Any] = {}
    gpus: list[Gpu] = []
    for index in range(nvml.count()):
        handles[index], reason = nvml.handle(index)
        known = handles[index] is not None
        gpus.append(_from_nvml(nvml, index, handles[index]) if known else Gpu(index, error=reason))
    torch_error = _add_torch(gpus, torch)
    version = nvml.read("nvmlSystemGetCudaDriverVersion")
    return GpuInfo(
        gpus=tuple(gpus),
        links=tuple(_link(a, b, handles, nvml, torch) for a, b in itertools.combinations(gpus, 2)),
        driver=nvml.read("nvmlSystemGetDriverVersion"),
        driver_cuda=None if version is None else (version // 1000, version % 1000 // 10),
        rocm=getattr(torch.version, "hip", None),
        nvml_error="" if nvml.is_open else nvml.reason,
        torch_error=torch_error,
    )


def _from_nvml(nvml: Nvml, index: int, handle: Any) -> Gpu:
    def get(name: str) -> Any:
        return nvml.read(f"nvmlDeviceGet{name}", handle)

    reading = nvml.reading(handle)
    name, silent = nvml.ask("nvmlDeviceGetName", handle)
    capability = get("CudaComputeCapability")
    mode = get("ComputeMode")
    return Gpu(
        index=index,
        name=name or "",
        error=silent if reading.memory_total_bytes is None and name is None else "",
        uuid=get("UUID") or "",
        compute_capability=capability and "{}.{}".format(*capability),
        **{field: getattr(reading, field) for field in READ_NOW},
        compute_mode=None if mode is None else COMPUTE_MODES.get(mode, str(mode)),
        processes=tuple(
            GpuProcess(each.pid, getattr(each, "usedGpuMemory", None))
            for each in get("ComputeRunningProcesses") or []
        ),
    )


def _add_torch(gpus: list[Gpu], torch: Any) -> str:
    """Add what torch knows; return why it knows nothing."""
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except RuntimeError as error:
        return _line(error)
    by_uuid = {_bare(gpu.uuid): place for place, gpu in enumerate(gpus) if gpu.uuid}
    for number in range(count):
        try:
            found = torch.cuda.get_device_properties(number)
        except (RuntimeError, AssertionError) as error:
            problem = f"torch: {_line(error)}"
            gpus.append(Gpu(index=len(gpus), torch_index=number, error=problem))
            continue
        place = by_uuid.get(_bare(str(getattr(found, "uuid", ""))))
        if place is None:  # without NVML, or a MIG slice
            place = len(gpus)
            gpus.append(Gpu(index=place, name=found.name))
        gpu = gpus[place]
        free, problem = gpu.memory_free_bytes, gpu.error
        if free is None:
            try:
                free = torch.cuda.mem_get_info(number)[0]
            except RuntimeError as error:
                problem = problem or f"torch: {_line(error)}"
        gpus[place] = replace(
            gpu,
            torch_index=number,
            error=problem,
            name=gpu.name or found.name,
            compute_capability=gpu.compute_capability or f"{found.major}.{found.minor}",
            multiprocessors=found.multi_processor_count,
            threads_per_block=getattr(found, "max_threads_per_block", None),
            integrated=bool(getattr(found, "is_integrated", False)),
            memory_total_bytes=gpu.memory_total_bytes or found.total_memory,
            memory_free_bytes=free,
        )
    return ""


def _link(first: Gpu, second: Gpu, handles: dict[int, Any], nvml: Nvml, torch: Any) -> GpuLink:
    peer = status = path = None
    numbers = first.torch_index, second.torch_index
    if None not in numbers and not (first.error or second.error):
        with suppress(RuntimeError, AssertionError):
            peer = bool(torch.cuda.can_device_access_peer(*numbers))
    pair = handles.get(first.index), handles.get(second.index)
    if None not in pair:
        status = nvml.read("nvmlDeviceGetP2PStatus", *pair, P2P_NVLINK)
        path = nvml.read("nvmlDeviceGetTopologyCommonAncestor", *pair)
    return GpuLink(
        first=first.index,
        second=second.index,
        peer_access=peer,
        nvlink=None if status is None else status == 0,
        path=None if path is None else TOPOLOGY.get(path, str(path)),
    )


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
