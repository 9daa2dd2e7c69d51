"""The thread that samples what a rank uses."""

import itertools
import threading

import pytest
import torch
from fake_gpus import pretend_gpus
from train_runs import wait_until

from rl_dist.files import log_once
from rl_dist.telemetry.monitor import (
    CORE_WAIT,
    GPU,
    HOST,
    IN_A_ROW,
    CoreWait,
    Monitor,
    sources_of,
)

CPU = torch.device("cpu")


def counting():
    """A source that counts its readings."""
    numbers = itertools.count(1)
    return {("a",): lambda: {"a": float(next(numbers))}}


def taken(monitor, name):
    """Return the values of a monitor after its first sample."""
    return wait_until(lambda: (values := monitor.take())[name] is not None and values)


def test_samples_are_merged_to_their_mean_the_highest_peak_and_the_least_that_was_free():
    readings = iter([(1.0, 5.0, 4.0, None), (2.0, 7.0, 3.0, 3.0)])
    done, names = threading.Event(), ("load", "memory_peak", "free", "sometimes")

    def read():
        if (values := next(readings, None)) is None:
            done.set()
            return {}
        return dict(zip(names, values, strict=True))

    monitor = Monitor({names: read}, 0.01)
    done.wait()
    monitor.close()
    expected = {"load": 1.5, "memory_peak": 7.0, "free": 3.0, "sometimes": 3.0}
    assert monitor.take() == expected and monitor.take() == dict.fromkeys(names)


def test_it_samples_at_its_interval_until_it_is_closed_and_never_with_an_interval_of_zero():
    before = threading.active_count()
    assert Monitor(counting(), 0).take() == {} and threading.active_count() == before
    monitor = Monitor(counting(), 0.05)
    first = taken(monitor, "a")["a"]
    assert taken(monitor, "a")["a"] > first
    monitor.close()
    monitor.close()
    monitor.take()
    assert monitor.take() == {"a": None} and threading.active_count() == before


def test_a_source_that_fails_is_logged_once_and_the_others_go_on(caplog):
    def fails():
        raise OSError("the GPU fell off the bus")

    monitor = Monitor({("x", "y"): fails} | counting(), 0.02)
    for _ in range(3):
        values = taken(monitor, "a")
        assert (values["x"], values["y"]) == (None, None)
    monitor.close()
    (line,) = caplog.messages
    assert "x" in line and "OSError: the GPU fell off the bus" in line


def test_a_source_that_hangs_neither_holds_up_the_training_nor_its_end():
    hangs, released = threading.Event(), threading.Event()
    hanging = {("x",): lambda: hangs.set() or released.wait() and {}}
    monitor = Monitor(counting() | hanging, 0.01)
    hangs.wait()
    assert monitor.take() == {"a": None, "x": None}
    monitor.close()
    assert "monitor" in [thread.name for thread in threading.enumerate()]  # it was not waited for
    released.set()


def test_a_rank_on_the_cpu_uses_its_core_and_some_memory():
    monitor = Monitor(sources_of(CPU), 0.1)
    values = taken(monitor, "cpu/percent")
    monitor.close()
    assert tuple(values) == (*HOST, CORE_WAIT) and values[CORE_WAIT] >= 0
    assert 0.02 < values["ram/used_gib"] < 50 and values["ram/free_gib"] > 0


def test_a_rank_of_several_threads_that_waits_for_its_core_is_warned_once(tmp_path, caplog):
    log_once.cache_clear()
    path = tmp_path / "schedstat"
    waits = [CoreWait(1, path), CoreWait(2, path)]
    for ran_ns in range(1, 2 * IN_A_ROW + 1):
        path.write_text(f"{ran_ns} {3 * ran_ns} 7")
        assert all(wait.read() == {CORE_WAIT: 75.0} for wait in waits)
    assert caplog.text.count("--threads") == 1
    path.unlink()
    with pytest.raises(OSError):
        waits[0].read()


@pytest.mark.parametrize("error", [None, RuntimeError("NVML Shared Library Not Found")])
def test_a_rank_with_a_gpu_reads_it_and_without_nvml_its_memory(monkeypatch, error):
    live = {"utilization": error, "temperature": error, "power_draw": error} if error else {}
    pretend_gpus(monkeypatch, **live)
    monitor = Monitor(sources_of(torch.device("cuda", 1)), 0.02)
    values = taken(monitor, "gpu/memory_free_gib")
    monitor.close()
    expected = [None, 2, 3, 4, 7, None, None] if error else [50, 2, 3, 4, 7, 60, 250.5]
    assert [values[name] for name in GPU] == expected
