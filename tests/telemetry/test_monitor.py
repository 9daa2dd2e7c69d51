"""The thread that samples what a rank uses, and the use of GPUs as a function."""

import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from fake_nvml import GIB, FakeNvml, NVMLError, gpu
from train_runs import wait_until

from rl_dist.hardware.memory import clear_gpu_memory
from rl_dist.telemetry.monitor import (
    GPU,
    HOST,
    IN_A_ROW,
    CoreWait,
    Monitor,
    Source,
    get_multi_gpu_status,
    sources_of,
)

CPU = torch.device("cpu")


def counting(name="a", first=1):
    """A source that counts its readings."""
    numbers = itertools.count(first)
    return Source((name,), lambda: lambda: {name: float(next(numbers))})


def taken(monitor, name):
    """What a monitor has once it has sampled."""
    return wait_until(lambda: (found := monitor.take())[name] is not None and found)


def torch_with_a_gpu(monkeypatch, initialized=True, stats=None):
    """Let torch believe in two GPUs, whose order is not the driver's."""
    memory = {"allocated_bytes.all.current": 2 * GIB, "reserved_bytes.all.current": 3 * GIB}
    memory["allocated_bytes.all.peak"] = 4 * GIB
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: initialized,
        "device_count": lambda: 2,
        "memory_stats": lambda index: memory if stats is None else stats,
        "mem_get_info": lambda index: (7 * GIB, 9 * GIB),
        "get_device_name": lambda index: f"torch's {index}",
        "get_device_properties": lambda index: SimpleNamespace(uuid=str(1 - index)),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(f"torch.cuda.{name}", answer)


def test_a_value_is_the_mean_of_the_samples_since_it_was_last_taken_and_a_peak_their_highest():
    monitor = Monitor([], 0)
    monitor._sources = [Source(("load", "memory_peak", "sometimes"), None)]
    monitor._samples = [{"load": 1.0, "memory_peak": 5.0, "sometimes": None}]
    monitor._samples.append({"load": 2.0, "memory_peak": 7.0, "sometimes": 3.0})
    assert monitor.take() == {"load": 1.5, "memory_peak": 7.0, "sometimes": 3.0}
    assert monitor.take() == {"load": None, "memory_peak": None, "sometimes": None}


def test_it_samples_at_its_interval_until_it_is_closed_and_never_with_an_interval_of_zero():
    before = threading.active_count()
    assert Monitor([counting()], 0).take() == {} and threading.active_count() == before
    monitor = Monitor([counting()], 0.05)
    first = taken(monitor, "a")["a"]
    assert taken(monitor, "a")["a"] > first
    monitor.close()
    monitor.close()
    monitor.take()
    assert monitor.take() == {"a": None} and not monitor._thread.is_alive()


def test_a_source_that_fails_is_logged_once_and_the_others_go_on(caplog):
    def fails():
        raise OSError("the GPU fell off the bus")

    no_reading = Source(("x", "y"), lambda: fails)
    no_beginning = Source(("z",), fails)
    with caplog.at_level(logging.WARNING):
        monitor = Monitor([no_reading, no_beginning, counting()], 0.02)
        for _ in range(3):
            found = taken(monitor, "a")
            assert (found["x"], found["y"], found["z"]) == (None, None, None)
        monitor.close()
    lines = sorted(caplog.messages)
    assert [line.split()[1] for line in lines] == ["x", "z"]
    assert all("OSError: the GPU fell off the bus" in line for line in lines)


def test_a_source_that_hangs_neither_holds_up_the_training_nor_its_end():
    hangs, released = threading.Event(), threading.Event()
    hanging = Source(("x",), lambda: lambda: hangs.set() or released.wait() and {})
    monitor = Monitor([counting(), hanging], 0.01)
    hangs.wait()
    assert monitor.take() == {"a": None, "x": None}
    monitor.close()
    assert monitor._thread.is_alive()  # it has not waited for its end
    released.set()


def work(seconds):
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        sum(range(1000))


def test_a_busy_rank_on_the_cpu_uses_its_core_and_some_memory():
    monitor = Monitor(sources_of(CPU), 0.1)

    def busy():
        work(0.3)
        found = monitor.take()
        return (found["cpu/percent"] or 0.0) > 3 and found  # of a core that others may use, too

    found = wait_until(busy)
    monitor.close()
    assert tuple(found) == HOST and found["cpu/wait_percent"] >= 0
    assert found["cpu/percent"] < 150  # 100 is one core
    assert 0.02 < found["ram/used_gib"] < 50 and found["ram/free_gib"] > 0


def test_a_rank_of_several_threads_that_shares_its_core_with_a_program_is_warned_once(caplog):
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    program = [sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"]
    other = subprocess.Popen(program, stdout=subprocess.PIPE)  # on the same core
    try:
        other.stdout.readline()
        waits = [CoreWait(1), CoreWait(2)]
        for _ in range(2 * IN_A_ROW):
            work(0.3)
            assert all(25 < wait.percent() < 100 for wait in waits)
    finally:
        other.kill()
        other.communicate()
        os.sched_setaffinity(0, cores)
    assert caplog.text.count("--threads 1 may be faster") == 1
    assert CoreWait(2, Path("/proc/none")).percent() is None


def test_a_rank_with_a_gpu_reads_its_own_one_and_without_nvml_its_memory(monkeypatch, caplog):
    torch_with_a_gpu(monkeypatch)
    closed = FakeNvml([], failing=NVMLError("NVML Shared Library Not Found"))
    expected = {FakeNvml([gpu(0), gpu(1)]): [50, 2, 3, 4, 50, 60, 250.5]}
    expected[closed] = [None, 2, 3, 4, 7, None, None]
    for nvml, values in expected.items():
        with caplog.at_level(logging.INFO):
            monitor = Monitor(sources_of(torch.device("cuda", 1), nvml), 0.02)
            found = taken(monitor, "gpu/memory_free_gib")
            monitor.close()
        assert tuple(found) == HOST + GPU
        assert [found[name] for name in GPU] == values
    assert "NVML Shared Library Not Found" in caplog.text


def test_the_status_of_all_gpus_is_in_torchs_order_and_one_that_is_lost_hides_none(monkeypatch):
    torch_with_a_gpu(monkeypatch)
    fake = FakeNvml([NVMLError("GPU is lost"), gpu(1)])
    first, second = get_multi_gpu_status(fake)
    seen = [(one.index, one.name, one.utilization_percent) for one in (first, second)]
    assert seen == [(0, "torch's 0", 51), (1, "torch's 1", None)] and first.memory_free_gib == 50
    assert (second.memory_free_gib, second.memory_total_gib) == (7, 9)  # by torch
    assert first.memory_peak_gib == 4
    assert fake.closed == 1


def test_the_status_opens_no_device_that_this_process_does_not_use(monkeypatch):
    torch_with_a_gpu(monkeypatch, stats={})
    monkeypatch.setattr("torch.cuda.mem_get_info", None)  # it would open the device
    found = get_multi_gpu_status(FakeNvml([], failing=NVMLError("no driver")))
    assert [(one.memory_free_gib, one.memory_reserved_gib) for one in found] == [(None, 0)] * 2


def test_clearing_hands_back_what_no_tensor_holds_and_touches_only_devices_in_use(monkeypatch):
    torch_with_a_gpu(monkeypatch)
    reserved, touched = {0: 0, 1: 5 * GIB}, []
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda index: reserved[index])
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda index: touched.append(index))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: reserved.update({1: 2 * GIB}))
    assert clear_gpu_memory() == 3 * GIB
    assert set(touched) == {1}
