"""Readings of GPUs, some of which do not answer."""

from types import SimpleNamespace

import pytest
from fake_nvml import GIB, FakeNvml, NVMLError, gpu

from rl_dist.hardware.gpus import GpuReading, Nvml

WHOLE = GpuReading(
    utilization_percent=51,
    memory_used_bytes=30 * GIB,
    memory_free_bytes=50 * GIB,
    memory_total_bytes=80 * GIB,
    temperature_c=61,
    power_w=250.5,
)


@pytest.mark.parametrize(
    ("properties", "handle"),
    [
        (SimpleNamespace(uuid="1"), 1),
        (SimpleNamespace(uuid="b"), 2),
        (SimpleNamespace(uuid="of another"), None),
    ],
)
def test_torchs_devices_are_matched_whatever_their_order(properties, handle, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
    assert Nvml(FakeNvml([gpu(0), gpu(1), gpu(2, UUID="MIG-b")])).find_torch_device(5) == handle


def test_a_value_that_fails_is_none_and_the_others_are_there():
    assert Nvml(FakeNvml([gpu(0), gpu(1)])).reading(1) == WHOLE
    for names, fields in {
        ("UtilizationRates",): ("utilization_percent",),
        ("MemoryInfo",): ("memory_used_bytes", "memory_free_bytes", "memory_total_bytes"),
        ("Temperature",): ("temperature_c",),
        ("PowerUsage",): ("power_w",),
    }.items():
        failing = {name: NVMLError("Insufficient Permissions") for name in names}
        found = Nvml(FakeNvml([gpu(0), gpu(1, **failing)])).reading(1)
        assert vars(found) == vars(WHOLE) | dict.fromkeys(fields)


def test_a_gpu_that_does_not_answer_does_not_hide_the_next():
    fake = Nvml(FakeNvml([NVMLError("GPU is lost"), gpu(1)]))
    assert fake.count() == 2
    assert fake.handle(0) == (None, "nvmlDeviceGetHandleByIndex: GPU is lost")
    assert fake.reading(fake.handle(0)[0]) == GpuReading()
    assert fake.reading(fake.handle(1)[0]) == WHOLE


def test_text_comes_as_text_and_what_the_library_lacks_has_its_reason():
    fake = Nvml(FakeNvml([gpu(0, Serial=UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"))]))
    assert fake.ask("nvmlDeviceGetName", 0) == ("Fake 9000", "")
    assert fake.ask("nvmlDeviceGetMigMode", 0) == (None, "nvmlDeviceGetMigMode: Not Supported")
    assert fake.ask("nvmlOfTomorrow", 0) == (None, "this nvidia-ml-py has no nvmlOfTomorrow")
    assert fake.ask("nvmlDeviceGetSerial", 0)[0] is None


def test_without_a_driver_everything_is_empty_and_says_why():
    closed = Nvml(FakeNvml([gpu(0)], failing=NVMLError("NVML Shared Library Not Found")))
    assert not closed.is_open and "NVML Shared Library Not Found" in closed.reason
    assert closed.count() == 0 and closed.handle(0) == (None, closed.reason)
    assert closed.find_torch_device(0) is None and closed.read("nvmlSystemGetDriverVersion") is None
    closed.close()


def test_the_real_library_opens_or_says_why_not():
    real = Nvml()
    assert real.is_open == (not real.reason) and real.count() >= 0
    real.close()
    assert not real.is_open and real.reason and real.count() == 0
