"""Names, memory and use of GPUs, including GPUs that do not answer."""

from dataclasses import asdict

import pytest
from fake_gpus import GIB, pretend_gpus

from rl_dist.machine import clear_gpu_memory, get_gpu_info, get_multi_gpu_status, print_gpu_info

LOST = RuntimeError("GPU is lost")
WHOLE = {
    "index": 1, "name": "Fake 9000", "utilization_percent": 50,
    "memory_allocated_gib": 2, "memory_reserved_gib": 3, "memory_peak_gib": 4, "memory_free_gib": 7,
    "memory_total_gib": 80, "temperature_c": 60, "power_w": 250.5, "error": "",
}  # fmt: skip


@pytest.mark.parametrize(
    "answers, changed",
    [
        ({}, {}),
        ({"power_draw": LOST}, {"power_w": None, "error": "GPU is lost"}),
        # If the driver does not report the used memory, torch does, so no value is missing.
        ({"device_memory_used": LOST}, {"error": "GPU is lost"}),
        # mem_get_info must not be called: it would open a device that this process does not use.
        ({"memory_stats": {}, "mem_get_info": LOST},
         {"memory_allocated_gib": 0, "memory_reserved_gib": 0, "memory_peak_gib": 0,
          "memory_free_gib": 50}),
        ({"get_device_properties": LOST},
         {"name": "", "memory_total_gib": None, "error": "GPU is lost"}),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_read_is_none_and_the_others_are_reported(
    monkeypatch, answers, changed
):
    # GPU 0 does not answer; GPU 1 must be shown nevertheless.
    pretend_gpus(monkeypatch, **{"utilization": [LOST, 50]} | answers)
    assert asdict(get_multi_gpu_status()[1]) == WHOLE | changed


def test_gpus_are_printed_one_per_line(monkeypatch, capsys):
    pretend_gpus(monkeypatch, temperature=LOST)
    assert len(get_gpu_info().gpus) == 2
    print_gpu_info()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "Fake 9000" in lines[0] and "GPU is lost" in lines[0]


def test_clearing_frees_unused_memory_and_resets_the_peaks(monkeypatch):
    reserved, reset = {0: 0, 1: 5 * GIB}, set()
    pretend_gpus(monkeypatch)
    monkeypatch.setattr("torch.cuda.memory_reserved", reserved.__getitem__)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", reset.add)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: reserved.update({1: 2 * GIB}))
    assert clear_gpu_memory() == 3 * GIB and reset == {0, 1}
