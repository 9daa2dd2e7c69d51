"""Which short runs stand for a number of ranks, and what follows from them."""

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
from rl_dist.speedup import __main__ as speedup
from rl_dist.speedup import measure
from rl_dist.speedup.machines import GPUS, LINKS
from rl_dist.speedup.measure import Measurements, steps_per_episode
from rl_dist.speedup.model import MODEL_ERROR, SMALL_COLLECTIVES
from rl_dist.speedup.report import report_of

NETWORK = LINKS["InfiniBand NDR"]


def test_steps_per_episode():
    records = [{"episode/count": 2, "global_step": 100 * n, "iteration": n} for n in (3, 4)]
    assert steps_per_episode(records) == 50.0
    assert math.isnan(steps_per_episode([records[0] | {"episode/count": 0}]))


def test_training_makes_as_many_small_collectives_as_are_modelled(ranks_folder):
    """Besides a reduction for each gradient step, which announces itself as well."""
    for rank in range(2):
        calls, steps = json.loads((ranks_folder / f"calls_{rank}").read_text())
        assert calls - steps == SMALL_COLLECTIVES
    assert bench.SUMS + bench.GATHERS == SMALL_COLLECTIVES


# ---- simulated machines


class Machine:
    """A machine of any size: remembers what is measured, returns plausible records."""

    def __init__(self, monkeypatch, cores=2, gpus=0, copy_bytes=0):
        self.runs, self.sizes, self.reduced = [], [], []
        self.copy_bytes, self.device_type = copy_bytes, "cuda" if gpus else "cpu"
        self.too_long = False
        self.threads = threads_per_rank(1)  # that training takes for the whole job
        self.factors = (1.0, 1.0)  # of the rate, by round
        monkeypatch.setattr(measure, "measure_short_runs", self.measure_short_runs)
        monkeypatch.setattr(measure, "time_reductions", self.time_reductions)
        monkeypatch.setattr("rl_dist.machine.available_cores", lambda: cores)
        monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")

    def measure_short_runs(self, flags, copies, threads, iterations, **options):
        if self.runs and self.too_long:
            raise ShortRunTimeoutError("too long")
        sizes = [flag for flag in flags if "num_envs" in flag or "batch" in flag]
        self.runs.append((copies, threads))
        self.sizes.append(sizes)
        share = int(sizes[0].partition("=")[2]) / 64 if sizes else 1.0
        entry = {"time/collect_s": 0.05 + 0.05 * share, "time/update_own_s": 0.05 + 0.35 * share}
        entry["time/step_spread_s"] = 0.0
        steps = round(8192 * share)
        record = {"global_step": steps, "iteration": 1, "optim/steps": 8.0, "ranks": [entry]}
        config = {"train": {"num_steps": 128, "batch_size": 128}, "task": {"env": "Recall-v0"}}
        config["launch"] = {"threads": self.threads}
        record["episode/count"] = 32
        records = [record | {"time/sps": steps / 0.5 * factor} for factor in self.factors]
        return ShortRunResult([records] * copies, config, 4_000_000, self.copy_bytes)

    def time_reductions(self, ranks, sizes, device_type, timeout_s):
        self.reduced.append(ranks)
        seconds = {size: 1e-5 + size * 1e-11 for size in sizes}
        return Reductions(ranks, device_type, "gloo", 1, seconds, 1e-4)

    def measure(self, ranks, scalings=("strong", "weak"), ranks_per_machine=0, **options):
        found = Measurements([], ranks, scalings, self.device_type, ranks_per_machine)
        found.measure(**options)
        return found


def rows_of(found, **options):
    """The rows of a report by machine and number of ranks."""
    report = report_of(found, options.pop("cards", ()), NETWORK, **options)
    return {(row["machine"], row["gpus"]): row for row in report.rows}


def test_gpus_that_are_here_are_measured_and_machines_beyond_modelled(monkeypatch):
    machine = Machine(monkeypatch, gpus=2)
    found = machine.measure([2, 8], ["strong"])
    assert found.ranks_per_machine == 2 and machine.reduced == [2]
    assert [copies for copies, _ in machine.runs] == [1, 2, 2]  # a full machine of the four
    assert machine.sizes[1] == ["--num_envs=8", "--batch_size=16"]
    rows = rows_of(found)
    assert [row["source"] for row in rows.values()] == ["measured", "measured", "modelled"]
    assert rows["this machine", 8]["steps_per_s"] > rows["this machine", 2]["steps_per_s"]


def test_one_gpu_stands_for_a_machine_of_eight_by_the_link_of_its_kind(monkeypatch):
    machine = Machine(monkeypatch, gpus=1)
    found = machine.measure([8], ["strong"], ranks_per_machine=8)
    assert found.link == LINKS["NVLink 4"] and not machine.reduced
    assert machine.runs[1] == (1, max(1, threads_per_rank(8)))


def test_copies_take_the_threads_that_training_takes_for_the_whole_job(monkeypatch):
    machine = Machine(monkeypatch, cores=8)
    machine.threads = 1  # as for a small network
    machine.measure([2, 4], ["strong"])
    assert machine.runs[0] == (1, 0) and {threads for _, threads in machine.runs[1:]} == {1}


def test_thorough_measures_every_share_without_a_limit_of_time(monkeypatch):
    machine = Machine(monkeypatch, cores=8)
    monkeypatch.setattr(measure, "QUICK_S", 0.0)
    found = machine.measure([2, 4, 8], thorough=True)
    assert sorted(copies for copies, _ in machine.runs) == [1, 2, 2, 4, 4, 8, 8]
    assert all(found.is_measured(*point) for point in found.points)


@pytest.mark.parametrize("ranks", [[1, 2], [64], [1, 2, 4, 8, 16, 32, 64]])
def test_a_figure_that_is_not_measured_has_the_error_of_the_model(ranks, monkeypatch):
    machine = Machine(monkeypatch)
    for row in report_of(machine.measure(ranks), (), NETWORK).rows:
        measured = row["gpus"] <= 2
        assert (row["source"] == "measured") == measured
        low, high = row["speedup_interval"]
        least = 0.0 if measured else 2 * 1.96 * MODEL_ERROR
        assert (high - low) / row["speedup"] == pytest.approx(least)
    assert max(copies for copies, _ in machine.runs) == 2


def test_ranks_that_share_cores_take_as_many_times_longer(monkeypatch):
    rows = rows_of(Machine(monkeypatch).measure([2, 8], ["strong"]), cards=[GPUS["A100"]])
    two, eight = (rows["this machine", n]["iteration_s"] for n in (2, 8))
    assert eight == pytest.approx(4 * (0.1 + 0.4 / 8), rel=0.01)
    assert two == pytest.approx(0.1 + 0.4 / 2, rel=0.01)
    # cards have cores of their own
    assert rows["A100", 8]["efficiency"] > 2 * rows["this machine", 8]["efficiency"]


@pytest.mark.parametrize("too_long", [False, True])
def test_when_the_time_is_used_up_one_rank_is_enough(too_long, monkeypatch):
    machine = Machine(monkeypatch)
    machine.too_long = too_long
    monkeypatch.setattr(measure, "QUICK_S", 60.0 if too_long else 0.0)
    found = machine.measure([1, 2, 8])
    assert len(machine.runs) == 1
    sources = [row["source"] for row in report_of(found, (), NETWORK).rows if row["gpus"] > 1]
    assert sources == ["modelled"] * 4


@pytest.mark.parametrize(
    ("cores", "memory_gib", "copies"), [(2, 30, 2), (40, 30, 30), (40, 100, 40), (2, 0, 1)]
)
def test_far_more_copies_than_cores_or_memory_are_never_started(
    cores, memory_gib, copies, monkeypatch
):
    host = HostMemory(2**40, memory_gib * 2**30)
    monkeypatch.setattr("rl_dist.machine.host_memory", lambda: host)
    machine = Machine(monkeypatch, cores=cores, copy_bytes=2**30)
    machine.measure([64], thorough=True)
    assert max(number for number, _ in machine.runs) == copies
    assert machine.reduced == [max(2, copies)]


def test_sizes_that_do_not_divide_are_a_note(monkeypatch):
    machine = Machine(monkeypatch)
    found = machine.measure([2, 3])  # 64 environments
    assert (3, "strong") not in found.points and (3, "weak") in found.points
    assert any("3 ranks" in note and "--scaling weak" in note for note in found.notes)


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
    rows = rows_of(machine.measure([2], rate_is_known=True), sps=9000.0)
    assert rows["this machine", 1]["steps_per_s"] == pytest.approx(9000.0)
