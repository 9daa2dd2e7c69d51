"""Calibration: which short runs stand for a number of ranks, and what follows from them."""

import json
import math

import pytest
import torch

from rl_dist.launch import bench
from rl_dist.launch.bench import Reductions
from rl_dist.launch.short_run import (
    ShortRunResult,
    ShortRunTimeoutError,
    SideBySide,
    is_steady,
    round_rates,
)
from rl_dist.machine import HostMemory
from rl_dist.process_group.world import threads_per_rank
from rl_dist.speedup import calibration
from rl_dist.speedup import command as speedup
from rl_dist.speedup.machines import LINKS
from rl_dist.speedup.model import SMALL_COLLECTIVES, Communication
from rl_dist.speedup.rank_cost import share_flags, steps_per_episode

STRONG = {"scalings": ["strong"]}


def test_a_ranks_share_has_the_totals_divided_or_the_same():
    assert share_flags(64, 128, 2, "strong") == (["--num_envs=32", "--batch_size=64"], "")
    assert share_flags(64, 128, 2, "weak") == (["--num_envs=64"], "")
    flags, problem = share_flags(64, 128, 3, "strong")
    assert not flags and "3 ranks" in problem and "--scaling weak" in problem


def test_steps_per_episode():
    records = [{"episode/count": 2, "global_step": 100 * n, "iteration": n} for n in (3, 4)]
    assert steps_per_episode(records) == 50.0
    assert math.isnan(steps_per_episode([records[0] | {"episode/count": 0}]))


def test_training_makes_as_many_small_collectives_as_are_measured(ranks_folder):
    """Besides a reduction for each gradient step, which announces itself as well."""
    for rank in range(2):
        calls, steps = json.loads((ranks_folder / f"calls_{rank}").read_text())
        assert calls - steps == SMALL_COLLECTIVES
    assert bench.SUMS + bench.GATHERS == SMALL_COLLECTIVES


# ---- injected machines


class Machine:
    """Stands for machines larger than this: remembers what was asked, gives plausible records."""

    def __init__(self, monkeypatch, cores=2, gpus=0, copy_bytes=0):
        self.asked, self.shares, self.reduced = [], [], []
        self.copy_bytes = copy_bytes
        self.too_long = False
        self.threads = threads_per_rank(1)  # that training takes for the whole job
        self.factors = (1.0, 1.0)  # of the rate, by round
        monkeypatch.setattr(calibration, "measure_short_runs", self.measure_short_runs)
        monkeypatch.setattr(calibration, "time_reductions", self.time_reductions)
        monkeypatch.setattr(calibration, "available_cores", lambda: cores)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
        self.device_type = "cuda" if gpus else "cpu"

    def measure_short_runs(self, flags, copies, threads, iterations, *, device_type, **options):
        if self.asked and self.too_long:
            raise ShortRunTimeoutError("too long")
        sizes = [flag for flag in flags if "num_envs" in flag or "batch" in flag]
        self.asked.append((copies, threads))
        self.shares.append(sizes)
        share = int(sizes[0].partition("=")[2]) / 64 if sizes else 1.0
        parts = ("collect", "forward", "backward", "optimizer")
        record = {f"time/{name}_s": 0.05 + 0.05 * share for name in parts}
        names = ("sync_s", "gradient_wait_s", "step_spread_s")
        record |= {f"time/{name}": 0.0 for name in names} | {"optim/steps": 8.0}
        steps = round(8192 * share)
        record |= {"time/sps": steps / 0.5, "global_step": steps, "iteration": 1}
        record |= {"episode/count": 32, "episode/length": 256.0}
        config = {"train": {"num_steps": 128, "batch_size": 128}, "task": {"env": "Recall-v0"}}
        config["launch"] = {"threads": self.threads}
        rounds = [record | {"time/sps": record["time/sps"] * factor} for factor in self.factors]
        return ShortRunResult([rounds] * copies, config, 4_000_000, self.copy_bytes)

    def time_reductions(self, ranks, sizes, device_type, timeout_s):
        self.reduced.append(ranks)
        gradients_s = {size: 1e-5 + size * 1e-11 for size in sizes}
        return Reductions(ranks, device_type, "gloo", 1, gradients_s, 1e-4)

    def calibrate(self, gpus, flags=(), **options):
        lines = []
        options = {"device_type": self.device_type, "say": lines.append} | options
        found = calibration.calibrate(flags, gpus, **options)
        if not self.too_long:
            assert len(lines) == len(self.asked) + len(self.reduced)
        return found


def test_gpus_that_are_here_are_measured_and_machines_beyond_modelled(monkeypatch):
    machine = Machine(monkeypatch, gpus=2)
    found = machine.calibrate([2, 8], **STRONG)
    assert found.ranks_per_machine == 2 and found.gradient_bytes == 4_000_000
    assert [copies for copies, _ in machine.asked] == [1, 2, 2]  # a full machine of the four
    assert machine.shares[1] == ["--num_envs=8", "--batch_size=16"] and machine.reduced == [2]
    two, eight = found.points[1:]
    assert two.communication == Communication(gradient_s=pytest.approx(5e-5), small_s=1e-4)
    network_s = LINKS["InfiniBand NDR"].base_s
    assert eight.communication.gradient_s > two.communication.gradient_s + network_s
    assert two.measured and not eight.measured


def test_one_gpu_stands_for_a_machine_of_eight_by_the_link_of_its_kind(monkeypatch):
    machine = Machine(monkeypatch, gpus=1)
    found = machine.calibrate([8], ranks_per_machine=8, **STRONG)
    assert found.link == LINKS["NVLink 4"] and not machine.reduced
    assert machine.asked[1] == (1, max(1, threads_per_rank(8)))
    assert found.points[1].communication.gradient_s == LINKS["NVLink 4"].all_reduce_s(4_000_000, 8)


def test_copies_take_the_threads_that_training_takes_for_the_whole_job(monkeypatch):
    machine = Machine(monkeypatch, cores=8)
    machine.threads = 1  # as for a small network
    machine.calibrate([2, 4], **STRONG)
    assert machine.asked[0] == (1, 0) and {threads for _, threads in machine.asked[1:]} == {1}


# ---- quick: as many copies as cores, the rest modelled


@pytest.mark.parametrize("gpus", [[1, 2], [64], [1, 2, 4, 8, 16, 32, 64]])
def test_no_list_of_gpus_needs_more_copies_than_cores(monkeypatch, gpus):
    machine = Machine(monkeypatch)
    found = machine.calibrate(gpus)
    assert max(copies for copies, _ in machine.asked) == 2
    for point in found.points:
        assert point.measured == (point.ranks <= 2)
        error = 0.0 if point.measured else 0.1
        assert point.prediction.relative_error == error and point.prediction.iteration_s > 0


def test_ranks_that_share_cores_take_as_many_times_longer(monkeypatch):
    found = Machine(monkeypatch).calibrate([2, 8], **STRONG)
    two, eight = found.points[1:]
    assert two.work.collect_s == pytest.approx(0.05 + 0.05 / 2)
    assert eight.work.collect_s == pytest.approx((0.05 + 0.05 / 8) * 4)
    assert (two.crowding, eight.crowding) == (1.0, 4.0)


def test_when_the_time_is_used_up_one_rank_is_enough(monkeypatch):
    machine = Machine(monkeypatch)
    machine.too_long = True
    monkeypatch.setattr(calibration, "QUICK_S", 0.0)
    found = machine.calibrate([1, 2, 8])
    assert len(machine.asked) == 1 and not machine.reduced
    assert [point.ranks for point in found.points if point.measured] == [1, 1]
    assert "reductions assumed" in found.sources


# ---- a rate that changes from round to round


@pytest.mark.parametrize(
    ("sps", "rates"),
    [([4.0, 2.0], [4.0, 2.0]), ([5.0] * 3 + [4.0] * 4, [5.0, 4.5, 4.0]), ([7.0], [7.0])],
)
def test_rounds_are_of_as_many_iterations(sps, rates):
    found = round_rates([{"time/sps": value} for value in sps])
    assert found == pytest.approx(rates, rel=0.02) and is_steady(found) == (rates != [4.0, 2.0])


@pytest.mark.parametrize(("second", "tries"), [([9.0, 9.0], 1), ([9.0, 3.0], 2)])
def test_rounds_that_differ_are_measured_once_more(second, tries, monkeypatch):
    results = [[[{"time/sps": value} for value in sps]] for sps in (second, [8.0, 2.0], [1.0, 1.0])]
    side, asked = SideBySide([], 1, 1), iter(results)
    monkeypatch.setattr(side, "measure", lambda *_: next(asked))
    assert side.measure_rounds() is results[tries - 1]


def test_an_unsteady_rate_is_refused_with_the_rates_unless_one_is_given(monkeypatch, capsys):
    machine = Machine(monkeypatch)
    machine.factors = (1.0, 0.4)
    assert speedup.main(["--gpus", "1", "2", "--device", "cpu", "--json"]) == 1
    out, err = capsys.readouterr()
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert out == "" and "16,384, 6,554 steps/s" in error and "--sps" in error
    found = calibration.calibrate([], [1, 2], steps_per_s=9000.0)
    assert not found.is_steady and found.points[-1].work


# ---- thorough: every number of ranks with as many copies


def test_thorough_measures_every_number_of_ranks(monkeypatch):
    machine = Machine(monkeypatch)
    found = machine.calibrate([2, 4, 8], thorough=True)
    assert sorted(copies for copies, _ in machine.asked) == [1, 2, 2, 4, 4, 8, 8]
    assert sorted(machine.reduced) == [2, 4, 8] and all(point.measured for point in found.points)


def test_what_cannot_be_divided_is_not_in_the_plan(monkeypatch):
    machine = Machine(monkeypatch)
    found = machine.calibrate([2, 3], thorough=True)  # 64 environments
    assert [point.problem != "" for point in found.points] == [False, False, True] + 3 * [False]
    assert sorted(copies for copies, _ in machine.asked) == [1, 2, 2, 3]


@pytest.mark.parametrize(
    ("thorough", "cores", "copies"), [(True, 2, 8), (True, 8, 30), (False, 2, 2), (False, 40, 30)]
)
def test_far_more_copies_than_cores_or_memory_are_never_started(
    monkeypatch, thorough, cores, copies
):
    monkeypatch.setattr("rl_dist.machine.host_memory", lambda: HostMemory(2**36, 30 * 2**30))
    machine = Machine(monkeypatch, cores=cores, copy_bytes=2**30)
    found = machine.calibrate([64], thorough=thorough, **STRONG)
    assert max(copies for copies, _ in machine.asked) == copies and machine.reduced == [2]
    assert not found.points[1].measured
