"""NVIDIA's management library, value by value: an unresponsive GPU hides none.

NVML reads what a GPU does from outside: no CUDA context, no waiting for kernels. It numbers all
GPUs of the machine, while torch numbers those in CUDA_VISIBLE_DEVICES, in CUDA's own order: a
device is found by its UUID or PCI bus id.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


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

        found = torch.cuda.get_device_properties(index)
        for prefix in ("GPU-", "MIG-"):
            uuid = f"{prefix}{getattr(found, 'uuid', '')}"
            if (handle := self.read("nvmlDeviceGetHandleByUUID", uuid)) is not None:
                return handle
        if not hasattr(found, "pci_bus_id"):
            return None
        domain, device = (getattr(found, f"pci_{name}_id", 0) for name in ("domain", "device"))
        bus_id = f"{domain:08x}:{found.pci_bus_id:02x}:{device:02x}.0"
        return self.read("nvmlDeviceGetHandleByPciBusId", bus_id)

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
