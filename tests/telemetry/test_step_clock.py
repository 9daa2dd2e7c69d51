"""The clock of gradient steps: time of each phase and spread of step times."""

import itertools

import pytest
import torch

from rl_dist.process_group import clock
from rl_dist.process_group.clock import StepClock


def ticking(monkeypatch, times):
    remaining = iter(times)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(remaining)))


def take_step(clock, waited_s):
    clock.mark("forward")
    clock.waited([(0.0, waited_s)])
    clock.mark("backward")
    clock.mark("optimizer")


def test_phases_add_up_without_waiting(monkeypatch):
    ticking(monkeypatch, [100, 101, 104, 104.5, 110, 112, 115, 115.5])
    clock = StepClock(torch.device("cpu"))
    clock.start()
    take_step(clock, 1.0)  # forward 1 s, backward 3 s (1 s of it waiting), optimizer 0.5 s
    clock.mark("")  # the 5.5 s until the next step belong to no phase
    take_step(clock, 0.0)  # forward 2 s, backward 3 s, optimizer 0.5 s
    assert clock.read() == {
        "time/forward_s": 3.0,
        "time/backward_s": 5.0,
        "time/optimizer_s": 1.0,
        "time/gradient_wait_s": 1.0,
        "time/reduction_s": 0.0,
        "time/step_spread_s": pytest.approx(2**0.5),  # the steps took 3.5 s and 5.5 s
    }


def test_events_of_a_gpu_are_read_in_seconds(monkeypatch):
    ticks_ms = itertools.count(step=500.0)

    class Event:
        def __init__(self, enable_timing):
            self.at_ms = None

        def record(self):
            self.at_ms = next(ticks_ms)

        def synchronize(self):
            assert self.at_ms is not None

        def elapsed_time(self, other):
            return other.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StepClock(torch.device("cuda"))
    clock.start()
    take_step(clock, 0.25)
    found = clock.read()
    names = ("forward", "backward", "optimizer")
    assert [found[f"time/{name}_s"] for name in names] == [0.5, 0.25, 0.5]
