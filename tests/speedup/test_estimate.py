"""The speedup command on simulated machines: rows, text and JSON."""

import json
import re
from dataclasses import asdict

import pytest
import torch
from train_runs import printed_error

from rl_dist.launch.child import ShortRuns
from rl_dist.process_group.world import threads_per_rank
from rl_dist.speedup import __main__ as speedup
from rl_dist.speedup import measure
from rl_dist.speedup.__main__ import as_text, estimate_training_speedup
from rl_dist.speedup.model import SMALL_COLLECTIVES

STEPS = 360_000  # environment steps of a training run


def test_training_has_as_many_small_collectives_as_the_model_assumes(ranks_folder):
    """All collectives count as small, except the reduction in each gradient step."""
    for rank in range(2):
        calls, steps = json.loads((ranks_folder / f"calls_{rank}").read_text())
        assert calls - steps == SMALL_COLLECTIVES


class Machine:
    """Fake machine that records what is measured and returns plausible metrics.

    In each iteration, a rank collects for 0.05 + 0.05 * share seconds and updates for
    0.05 + 0.35 * share seconds; `share` is its number of environments divided by 64.
    """

    def __init__(self, monkeypatch, cores=2, gpus=0, byte_s=1e-11, rates=(1.0, 1.0), episodes=32):
        self.runs, self.reduced = [], []
        self.byte_s, self.rates, self.episodes = byte_s, rates, episodes
        monkeypatch.setattr(measure, "measure_short_runs", self.measure_short_runs)
        monkeypatch.setattr(measure, "time_reductions", self.time_reductions)
        monkeypatch.setattr(measure, "available_cores", lambda: cores)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")

    def measure_short_runs(self, copies):
        sizes = [int(flag.partition("=")[2]) for flag in copies[0] if "num_envs" in flag]
        num_envs = (sizes or [64])[0]
        self.runs.append((len(copies), num_envs))
        share, steps = num_envs / 64, 128 * num_envs
        rank = {
            "time/collect_s": 0.05 + 0.05 * share,
            "time/update_own_s": 0.05 + 0.35 * share,
            "time/step_spread_s": 0.0,
        }
        record = {"global_step": steps, "iteration": 1, "optim/steps": 8.0, "ranks": [rank]}
        record["episode/count"] = self.episodes
        config = {
            "train": {"num_steps": 128, "batch_size": 128},
            "task": {"env": "Recall-v0"},
            "launch": {"threads": threads_per_rank(1), "backend": "gloo"},
        }
        records = [record | {"time/sps": steps / 0.5 * rate} for rate in self.rates]
        return ShortRuns([records] * len(copies), config, 4_000_000)

    def time_reductions(self, ranks, sizes, device_type, backend):
        assert backend == "gloo"  # the backend of the measured run
        self.reduced.append(ranks)
        return {size: 1e-5 + size * self.byte_s for size in sizes}


def rows_of(*gpus, scaling="strong", **options):
    """Estimate the speedup; return {number of ranks: row of the report}."""
    report = estimate_training_speedup(gpus=gpus, scaling=scaling, **options)
    json.dumps(asdict(report), allow_nan=False)
    return {row["gpus"]: row for row in report.rows}


# ---- measured and modelled rows


@pytest.mark.parametrize(
    "machine, gpus, runs, reduced",
    [
        ({"gpus": 2}, [2, 8], [(1, 64), (2, 32), (2, 8)], [2]),
        ({"gpus": 1}, [8], [(1, 64), (1, 8)], []),
        ({"cores": 2}, [64], [(1, 64), (2, 1)], [2]),  # at most one training copy per core
    ],
)
def test_ranks_that_this_machine_can_run_are_measured_and_others_are_modelled(
    monkeypatch, machine, gpus, runs, reduced
):
    simulated = Machine(monkeypatch, **machine)
    rows = rows_of(*gpus)
    assert simulated.runs == runs and simulated.reduced == reduced
    most = max(copies for copies, _ in runs)
    for ranks, row in rows.items():
        assert row["source"] == ("measured" if ranks <= most else "modelled")


def test_ranks_that_share_a_core_are_slower_in_proportion_but_cards_share_nothing(monkeypatch):
    Machine(monkeypatch)
    rows = rows_of(2, 8)
    steps = 64 * 128  # environment steps of one iteration
    assert rows[8]["steps_per_s"] == pytest.approx(steps / (4 * (0.1 + 0.4 / 8)), rel=0.01)
    assert rows[2]["steps_per_s"] == pytest.approx(steps / (0.1 + 0.4 / 2), rel=0.01)
    card = rows_of(8, scaling="weak", gpu="H100 SXM")[8]
    assert card["speedup"] == pytest.approx(8.0, rel=0.02) and card["source"] == "estimate"


def test_an_unsteady_rate_is_refused_unless_a_rate_is_given(monkeypatch, capsys):
    Machine(monkeypatch, rates=(1.0, 0.4))
    assert speedup.main(["--gpus", "1", "2", "--device", "cpu", "--json"]) == 1
    out, err = capsys.readouterr()
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert out == "" and "16,384, 6,554 steps/s" in error and "--sps" in error
    assert rows_of(2, sps=9000.0)[1]["steps_per_s"] == pytest.approx(9000.0)


# ---- the report


def test_rows_hold_speedup_time_cost_and_source_and_the_text_shows_them(monkeypatch):
    # Reductions take a sixth of the time.
    Machine(monkeypatch, byte_s=0.0125 / 4e6)
    report = estimate_training_speedup(gpus=[2], total_steps=STEPS, price_per_hour=1000.0)
    one, two = (row for row in report.rows if row["scaling"] == "weak")
    assert (one["speedup"], one["efficiency"], one["source"]) == (1.0, 1.0, "measured")
    assert two["steps_per_s"] == pytest.approx(16384 / 0.6, rel=1e-3)
    assert (two["speedup"], two["efficiency"]) == pytest.approx((1 / 0.6, 0.5 / 0.6), rel=1e-3)
    assert two["bottleneck"] == "reducing gradients 17%"
    assert one["hours"] == pytest.approx(STEPS / 16384 / 3600)
    assert two["cost"] == pytest.approx(2 * 1000.0 * two["hours"])
    assert all(name in as_text(report) for name in two)


@pytest.mark.parametrize(
    "episodes, options, known",
    [
        (32, {}, (True, True, False)),
        (0, {"price_per_hour": 1.0}, (True, False, False)),
        (32, {"gpu": "A100"}, (False, False, False)),
        (32, {"gpu": "A100", "sps": 9.0}, (True, True, True)),
    ],
)
def test_unknown_figures_are_none(monkeypatch, episodes, options, known):
    Machine(monkeypatch, episodes=episodes)
    report = estimate_training_speedup(**options)
    for row in report.rows:
        assert tuple(row[name] is not None for name in ("steps_per_s", "hours", "cost")) == known
    assert any("no time or cost" in note for note in report.notes) != known[1]


@pytest.mark.parametrize(
    "byte_s, load, says",
    [(1e-11, 0.5, "--num_gpus 2"), (1e-11, 1.5, "--num_gpus 2.*again"), (1e-6, 0.5, "one rank")],
)
def test_the_last_line_advises_and_a_note_says_how_busy_the_machine_was(
    monkeypatch, byte_s, load, says
):
    Machine(monkeypatch, byte_s=byte_s)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(speedup, "available_cores", lambda: 2)
    *_, note, advice = as_text(estimate_training_speedup(gpus=[2])).splitlines()
    assert f"{load} on 2 core" in note and re.search(says, advice)
    assert ("again" in advice) == (load > 1)


# ---- the command


@pytest.mark.parametrize(
    "flag, value",
    [("gpus", "0"), ("gpu", "H1000")],
)
def test_bad_usage_is_one_line(flag, value, capsys):
    assert speedup.main([f"--{flag}", value]) == 2
    line = printed_error(capsys)
    assert flag in line and value in line
