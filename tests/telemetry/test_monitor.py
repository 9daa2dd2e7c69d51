"""The thread that samples the CPU, memory and GPU use of a rank."""

import threading

import pytest
import torch
from fake_gpus import pretend_gpus
from train_runs import wait_until

from rl_dist.telemetry.monitor import Monitor, sources_of


def test_merged_samples_have_the_mean_load_the_highest_peak_and_the_least_free_memory():
    readings = [
        {"load": 1.0, "memory_peak": 7.0, "free": 4.0, "sometimes": None},
        {"load": 2.0, "memory_peak": 5.0, "free": 3.0, "sometimes": 3.0},
    ]
    monitor = Monitor([lambda: readings.pop(0) if readings else {}], 0.01)
    wait_until(lambda: not readings)
    monitor.close()
    expected = {"load": 1.5, "memory_peak": 7.0, "free": 3.0, "sometimes": 3.0}
    assert monitor.take() == expected and monitor.take() == dict.fromkeys(expected)


def test_a_source_that_fails_or_hangs_loses_its_figure_but_does_not_delay_training(caplog):
    before = threading.active_count()
    assert Monitor([dict], 0).take() == {} and threading.active_count() == before
    released, hangs = threading.Event(), iter([False] * 5)

    def fails():
        raise OSError("the GPU fell off the bus")

    def hangs_later():
        if next(hangs, True):
            released.wait()
        return {"b": 1.0}

    monitor = Monitor([fails, lambda: {"a": 1.0}, hangs_later], 0.01)
    wait_until(lambda: monitor.take() == {"a": None, "b": None})
    monitor.close()
    assert threading.active_count() == before + 1  # close does not wait for the hung thread
    released.set()
    (line,) = caplog.messages
    assert "OSError: the GPU fell off the bus" in line
    wait_until(lambda: threading.active_count() == before)


@pytest.mark.parametrize("error", [None, RuntimeError("NVML Shared Library Not Found")])
def test_without_nvml_a_rank_with_a_gpu_still_reads_its_memory(monkeypatch, error):
    live = {"utilization": error, "temperature": error, "power_draw": error} if error else {}
    pretend_gpus(monkeypatch, **live)
    monitor = Monitor(sources_of(torch.device("cuda", 1)), 0.02)
    free = "gpu/memory_free_gib"
    values = wait_until(lambda: (sample := monitor.take()).get(free) is not None and sample)
    monitor.close()
    expected = [None, 2, 3, 4, 7, None, None] if error else [50, 2, 3, 4, 7, 60, 250.5]
    assert [value for name, value in values.items() if name.startswith("gpu/")] == expected
