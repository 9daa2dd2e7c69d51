"""The speedup command: from short runs on simulated machines to rows, text and files."""

import contextlib
import json
from dataclasses import asdict, replace

import pytest
import torch

from rl_dist.launch import bench
from rl_dist.launch.bench import Reductions
from rl_dist.launch.child import ShortRuns, is_steady, round_rates
from rl_dist.machine import HostMemory
from rl_dist.process_group.world import threads_per_rank
from rl_dist.speedup import __main__ as speedup
from rl_dist.speedup import measure
from rl_dist.speedup.estimate import COLUMNS, SpeedupReport, as_text, report_of
from rl_dist.speedup.model import CARDS, MODEL_ERROR, SMALL_COLLECTIVES, Link, RankCost

TINY = [
    "--env", "Recall-v0", "--num_envs", "8", "--num_steps", "16", "--bptt_steps", "8",
    "--batch_size", "8", "--hidden_size", "8",
]  # fmt: skip
WORK = RankCost(env_steps=1000, gradient_steps=10, collect_s=1.0, update_s=1.0)


# ---- short runs


def test_training_makes_as_many_small_collectives_as_are_modelled(ranks_folder):
    """Besides a reduction for each gradient step, which announces itself as well."""
    for rank in range(2):
        calls, steps = json.loads((ranks_folder / f"calls_{rank}").read_text())
        assert calls - steps == SMALL_COLLECTIVES
    assert bench.SUMS + bench.GATHERS == SMALL_COLLECTIVES


class Machine:
    """A machine of any size: remembers what is measured, returns plausible records."""

    def __init__(self, monkeypatch, cores=2, gpus=0, copy_bytes=0, factors=(1.0, 1.0)):
        self.runs, self.sizes, self.reduced = [], [], []
        self.copy_bytes, self.device_type = copy_bytes, "cuda" if gpus else "cpu"
        self.threads = threads_per_rank(1)  # that training takes for the whole job
        self.factors = factors  # of the rate, by round
        monkeypatch.setattr(measure, "measure_short_runs", self.measure_short_runs)
        monkeypatch.setattr(measure, "time_reductions", self.time_reductions)
        monkeypatch.setattr("rl_dist.machine.available_cores", lambda: cores)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")

    def measure_short_runs(self, flags, copies, threads, iterations, **options):
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
        return ShortRuns([records] * copies, config, 4_000_000, self.copy_bytes)

    def time_reductions(self, ranks, sizes, device_type):
        self.reduced.append(ranks)
        seconds = {size: 1e-5 + size * 1e-11 for size in sizes}
        return Reductions(seconds, 1e-4)

    def measure(self, ranks, scalings=("strong", "weak"), **options):
        return measure.measure([], ranks, scalings, self.device_type, **options)


def rows_of(measured, gpu="", **options):
    """The rows of a report by number of ranks."""
    return {row["gpus"]: row for row in report_of(measured, gpu, **options).rows}


def test_gpus_that_are_here_are_measured_and_machines_beyond_modelled(monkeypatch):
    machine = Machine(monkeypatch, gpus=2)
    measured = machine.measure([2, 8], ["strong"])
    assert measured.ranks_per_machine == 2 and machine.reduced == [2]
    assert [copies for copies, _ in machine.runs] == [1, 2, 2]  # a full machine of the four
    assert machine.sizes[2] == ["--num_envs=8", "--batch_size=16"]
    rows = rows_of(measured)
    assert [row["source"] for row in rows.values()] == ["measured", "measured", "modelled"]
    assert rows[8]["steps_per_s"] > rows[2]["steps_per_s"]
    machine = Machine(monkeypatch, gpus=1)
    machine.measure([8], ["strong"])
    assert not machine.reduced and machine.runs[1] == (1, threads_per_rank(1))


@pytest.mark.parametrize("ranks", [[1, 2], [64], [1, 2, 4, 8, 16, 32, 64]])
def test_a_figure_that_is_not_measured_has_the_error_of_the_model(ranks, monkeypatch):
    machine = Machine(monkeypatch)
    for row in report_of(machine.measure(ranks)).rows:
        is_measured = row["gpus"] <= 2
        assert (row["source"] == "measured") == is_measured
        low, high = row["speedup_interval"]
        error = 0.0 if row["gpus"] == 1 or is_measured else 2 * 1.96 * MODEL_ERROR
        assert (high - low) / row["speedup"] == pytest.approx(error)
    assert max(copies for copies, _ in machine.runs) == 2


def test_ranks_that_share_cores_take_as_many_times_longer(monkeypatch):
    measured = Machine(monkeypatch).measure([2, 8], ["strong"])
    rows = rows_of(measured)
    assert rows[8]["iteration_s"] == pytest.approx(4 * (0.1 + 0.4 / 8), rel=0.01)
    assert rows[2]["iteration_s"] == pytest.approx(0.1 + 0.4 / 2, rel=0.01)
    # the ranks of cards share no cores
    assert rows_of(measured, "A100")[8]["efficiency"] > 2 * rows[8]["efficiency"]


@pytest.mark.parametrize(
    ("cores", "memory_gib", "copies"), [(2, 30, 2), (40, 30, 30), (40, 100, 40), (2, 0, 1)]
)
def test_far_more_copies_than_cores_or_memory_are_never_started(
    cores, memory_gib, copies, monkeypatch
):
    host = HostMemory(2**40, memory_gib * 2**30)
    monkeypatch.setattr("rl_dist.machine.host_memory", lambda: host)
    machine = Machine(monkeypatch, cores=cores, copy_bytes=2**30)
    machine.measure([64])
    assert max(number for number, _ in machine.runs) == copies
    assert machine.reduced == [max(2, copies)]


def test_sizes_that_do_not_divide_are_a_note(monkeypatch):
    measured = Machine(monkeypatch).measure([2, 3])  # 64 environments
    points = [(point.ranks, point.scaling) for point in measured.points]
    assert (3, "strong") not in points and (3, "weak") in points
    assert any("3 ranks" in note and "--scaling weak" in note for note in measured.notes)


@pytest.mark.parametrize(
    ("sps", "rates"),
    [([4.0, 2.0], [4.0, 2.0]), ([5.0] * 3 + [4.0] * 4, [5.0, 4.5, 4.0]), ([7.0], [7.0])],
)
def test_rounds_are_of_as_many_iterations(sps, rates):
    rounds = round_rates([{"time/sps": value} for value in sps])
    assert rounds == pytest.approx(rates, rel=0.02) and is_steady(rounds) == (rates != [4.0, 2.0])


def test_an_unsteady_rate_is_refused_with_the_rates_unless_one_is_given(monkeypatch, capsys):
    machine = Machine(monkeypatch, factors=(1.0, 0.4))
    assert speedup.main(["--gpus", "1", "2", "--device", "cpu", "--json"]) == 1
    out, err = capsys.readouterr()
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert out == "" and "16,384, 6,554 steps/s" in error and "--sps" in error
    rows = rows_of(machine.measure([2], rate_is_known=True), sps=9000.0)
    assert rows[1]["steps_per_s"] == pytest.approx(9000.0)


# ---- the report

STEPS = 360_000.0  # of a training


@pytest.fixture
def measured(monkeypatch):
    """One rank, and two that train the same job each and reduce for a sixth of the time."""
    link = Link(bytes_per_s=4e6 / 0.0125)
    return replace(Machine(monkeypatch).measure([2], ["weak"]), link=link)


def test_rows_hold_speedup_time_cost_and_source_and_the_text_shows_them(measured):
    report = report_of(measured, env_steps=STEPS, price_per_hour=1000.0)
    one, two = report.rows
    assert (one["speedup"], one["efficiency"], one["source"]) == (1.0, 1.0, "measured")
    assert two["steps_per_s"] == pytest.approx(16384 / 0.6, rel=1e-3)
    assert (two["speedup"], two["efficiency"]) == pytest.approx((1 / 0.6, 0.5 / 0.6), rel=1e-3)
    assert two["shares"]["communication"] == pytest.approx(1 / 6, rel=1e-3)
    assert one["hours"] == pytest.approx(STEPS / 16384 / 3600)
    assert two["cost"] == pytest.approx(2 * 1000.0 * two["hours"])
    # weak and strong scaling share the row of one rank
    rows = [one, two, one | {"scaling": "strong"}]
    text = as_text(replace(report, rows=rows, notes=["mind this"]))
    for part in (*COLUMNS, "1.67x", "83%", "27,307", "13.2 s", "7.32", "mind this"):
        assert part in text
    assert text.count("| 1  ") == 1 and text.count("| 2  ") == 1


@pytest.mark.parametrize(
    ("is_steady", "options", "known"),
    [
        (True, {}, (True, True, False)),
        (True, {"price_per_hour": 1.0}, (True, True, True)),
        (True, {"env_steps": float("nan"), "price_per_hour": 1.0}, (True, False, False)),
        (False, {"price_per_hour": 1.0}, (False, False, False)),
        (False, {"sps": 9.0}, (True, True, False)),
        (True, {"gpu": "A100"}, (False, False, False)),
        (False, {"gpu": "A100", "sps": 9.0}, (True, True, True)),
    ],
)
def test_what_is_not_known_is_none(measured, is_steady, options, known):
    steady = replace(measured, is_steady=is_steady)
    report = report_of(steady, **{"env_steps": STEPS} | options)
    for row in report.rows:
        assert tuple(row[name] is not None for name in ("steps_per_s", "hours", "cost")) == known
    assert ("no time or cost" in str(report.notes)) != known[1]
    json.dumps(asdict(report), allow_nan=False)


def test_cards_one_does_not_own_have_a_speedup_and_cores_of_their_own(monkeypatch):
    """Four ranks on one core are each four times slower, which no card's owner would see."""
    crowded = Machine(monkeypatch, cores=1).measure([4], ["weak"])
    here, card = rows_of(crowded)[4], rows_of(crowded, "H100 SXM")[4]
    assert here["speedup"] <= 1.0 and card["speedup"] == pytest.approx(4.0, rel=0.02)
    assert (card["source"], card["efficiency"]) == ("estimate", card["speedup"] / 4)


def test_a_rate_that_is_given_sets_time_and_cost(measured):
    """Reductions take as long as before, so that faster ranks lose more of their time in them."""
    one, two = report_of(measured, sps=81920.0, env_steps=STEPS).rows
    assert one["steps_per_s"] == pytest.approx(81920.0)
    assert two["speedup"] == pytest.approx(2 / (1 + 0.1 / 0.1), rel=1e-2)
    two = report_of(measured, "H100 SXM", sps=5000.0, env_steps=STEPS).rows[1]
    assert two["cost"] == pytest.approx(2 * two["hours"] * CARDS["H100 SXM"].usd_per_hour)


# ---- the command


def error_of(argv, capsys):
    """The line of bad usage."""
    try:
        code = speedup.main(argv)
    except SystemExit as leaving:
        code = leaving.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    *_, line = err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--gpus 0", ["--gpus", "0"]),
        ("--gpus two", ["--gpus", "two"]),
        ("--gpu H1000", ["--gpu", "H1000", "A100"]),
        ("nowhere", ["nowhere"]),
        ("--gpus 2 --scaling weak stray", ["stray"]),
        ("--device cuda", ["--device cuda"]),
        pytest.param(" ".join(TINY[:-1]) + " none", ["hidden_size"], marks=pytest.mark.slow),
    ],
)
def test_bad_usage_is_one_line(argv, words, capsys):
    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    line = error_of([*argv.split(), "--json"], capsys)
    assert all(word in line for word in words)


@pytest.mark.parametrize(
    "content", [b'{"train": {', b"\xff", b"[1, 2]", b'{"train": 5}', b'{"train": {}}', None]
)
def test_what_is_no_run_of_this_version_is_reported_at_once(content, tmp_path, capsys):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert str(tmp_path / "config.json") in error_of([str(tmp_path)], capsys)


@pytest.mark.slow
def test_the_command_measures_and_prints_one_short_report(tmp_path):
    """A tiny job on four numbers of ranks: short runs and reductions, all real.

    A rate is given, so that a busy machine passes.
    """
    flags = "--gpus 1 2 4 8 --num_episodes 1000 --price_per_hour 1 --sps 90000 --json"
    with (tmp_path / "stdout").open("w") as out, contextlib.redirect_stdout(out):
        assert speedup.main([*TINY, *flags.split(), "--gpu", "H100 SXM"]) == 0
    printed = SpeedupReport(**json.loads((tmp_path / "stdout").read_text()))
    assert len(as_text(printed).splitlines()) <= 25
    rows = printed.rows
    assert [row["gpus"] for row in rows] == [1, 2, 4, 8] * 2
    assert rows[0]["steps_per_s"] == pytest.approx(90_000)
    for row in rows:
        assert row["hours"] > 0 and row["cost"] > 0
        assert sum(row["shares"].values()) == pytest.approx(1.0)
