"""A stand-in for pynvml with GPUs of one's own making, for machines without any."""

from types import SimpleNamespace

GIB = 2**30


class NVMLError(Exception):
    """As in pynvml."""


class FakeNvml:
    """Answers as pynvml does; a value that is an exception is raised.

    Args:
        gpus: what they answer, by function name without `nvmlDeviceGet`, beside "UUID"; one that is
            an exception is a GPU that does not answer at all.
        failing: raised by nvmlInit.
    """

    NVMLError = NVMLError

    def __init__(self, gpus, failing=None):
        self.gpus, self.failing = gpus, failing
        self.opened = self.closed = 0

    def nvmlInit(self):
        if self.failing:
            raise self.failing
        self.opened += 1

    def nvmlShutdown(self):
        self.closed += 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self._handle(lambda number, gpu: number == index)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._handle(lambda number, gpu: gpu.get("UUID") == uuid)

    def _handle(self, matches):
        for number, gpu in enumerate(self.gpus):
            if matches(number, {} if isinstance(gpu, Exception) else gpu):
                if isinstance(gpu, Exception):
                    raise gpu
                return number
        raise NVMLError("Not Found")

    def __getattr__(self, name):
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def answer(handle, *args):
            value = self.gpus[handle].get(
                name.removeprefix("nvmlDeviceGet"), NVMLError("Not Supported")
            )
            if isinstance(value, Exception):
                raise value
            return value

        return answer


def gpu(number, **changes):
    """One GPU's answers."""
    return {
        "UUID": f"GPU-{number}", "Name": b"Fake 9000",
        "UtilizationRates": SimpleNamespace(gpu=50 + number, memory=10),
        "MemoryInfo": SimpleNamespace(total=80 * GIB, used=30 * GIB, free=50 * GIB),
        "Temperature": 60 + number, "PowerUsage": 250_500,
    } | changes  # fmt: skip
