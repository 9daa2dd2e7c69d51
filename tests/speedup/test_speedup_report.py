"""The speedup command: bad usage, and from points to rows, tables and files."""

import contextlib
import json
from dataclasses import asdict, replace

import pytest
import torch

from rl_dist.speedup import command as speedup
from rl_dist.speedup.calibration import Calibration, Point
from rl_dist.speedup.machines import GPUS, LINKS
from rl_dist.speedup.model import Communication, RankCost
from rl_dist.speedup.report import COLUMNS, Budget, report_of, table

TINY = [
    "--env", "Recall-v0", "--num_envs", "4", "--num_steps", "16", "--bptt_steps", "8",
    "--batch_size", "4", "--hidden_size", "8",
]  # fmt: skip
WORK = RankCost(env_steps=1000, gradient_steps=10, collect_s=1.0, update_s=1.0)
ONE = Point(ranks=1, scaling="strong", work=WORK)
TWO = Point(ranks=2, scaling="weak", work=WORK, communication=Communication(gradient_s=0.05))
THREE = Point(ranks=3, scaling="strong", problem="num_envs 64 does not divide")
LENGTH = {"num_episodes": 7200, "steps_per_episode": 50.0}
BUDGET = Budget(**LENGTH, price_per_hour=2.0)


def report(*points, budget=BUDGET, cards=(), **changes):
    facts = {
        "ranks_per_machine": 2, "link": LINKS["loopback"],
        "gradient_bytes": 10**6, "num_envs": 64, "batch_size": 128, "cores": 2, "rates": [500.0],
    } | changes  # fmt: skip
    calibration = Calibration(points=list(points), **facts)
    return report_of(calibration, budget, [GPUS[name] for name in cards])


def test_rows_hold_speedup_time_cost_and_source():
    one, two, three = report(ONE, replace(TWO, measured=False), THREE).rows
    assert (one["speedup"], one["efficiency"], one["source"]) == (1.0, 1.0, "measured")
    assert two["steps_per_s"] == pytest.approx(2000 / 2.5) and two["source"] == "modelled"
    assert (two["speedup"], two["efficiency"]) == (pytest.approx(1.6), pytest.approx(0.8))
    assert two["shares"]["communication"] == pytest.approx(0.2)
    assert one["hours"] == pytest.approx(360_000 / 500 / 3600)
    assert one["cost"] == pytest.approx([0.4, 0.4])
    assert two["cost"] == pytest.approx([2 * 2.0 * two["hours"]] * 2)
    assert three["problem"] and "speedup" not in three


def test_without_a_price_or_an_episode_cost_and_time_are_unknown():
    assert report(ONE, budget=Budget(**LENGTH)).rows[0]["cost"] is None
    endless = report(ONE, budget=Budget(num_episodes=1))
    assert endless.rows[0]["hours"] is None and "no episode ended" in table(endless)


def test_cards_one_does_not_own_have_a_speedup_and_cores_of_their_own():
    """Four ranks on one core are each four times slower, which no card's owner would see."""
    one = replace(ONE, work=replace(WORK, update_s=0.0))
    slow = replace(WORK, collect_s=4.0, update_s=0.0)
    four = Point(ranks=4, scaling="weak", work=slow, crowding=4.0)
    found = report(one, four, cards=["A100", "H100 SXM"], ranks_per_machine=4)
    here, a100, h100 = (row for row in found.rows if row["gpus"] == 4)
    assert [row["estimate"] for row in (here, a100, h100)] == [False, True, True]
    assert here["speedup"] == pytest.approx(1.0) and h100["speedup"] == pytest.approx(4.0, rel=0.01)
    assert (here["unit"], a100["unit"]) == ("ranks", "GPUs")
    assert h100["efficiency"] == h100["speedup"] / 4 and (h100["source"] == "estimate")
    for name in ("steps_per_s", "iteration_s", "interval_s", "parts_s", "hours", "cost"):
        assert here[name] is not None and a100[name] is h100[name] is None
    assert "no time or cost for A100, H100 SXM" in found.notes[-1]


@pytest.mark.parametrize("cards", [[], ["H100 SXM"]])
def test_a_rate_that_is_given_sets_time_and_cost_of_the_card_or_else_of_this_machine(cards):
    """Reductions take as long as before, so that faster ranks lose more of their time in them."""
    unsteady = {"rates": [300.0, 600.0], "steps_per_s": 5000.0}
    found = report(ONE, TWO, cards=cards, budget=Budget(**LENGTH), **unsteady)
    one, two = (row for row in found.rows if row["estimate"] == bool(cards))
    assert one["steps_per_s"] == pytest.approx(5000.0)
    assert one["hours"] == pytest.approx(360_000 / 5000 / 3600)
    assert one["hours_interval"] == pytest.approx([one["hours"]] * 2)
    assert (one["cost"] is None) == (cards == [])
    if cards:
        prices = GPUS[cards[0]].usd_per_hour
        assert two["cost"] == pytest.approx([2 * two["hours"] * price for price in prices])
        assert found.rows[0]["hours"] is None  # this machine's rate is not known
    else:
        assert two["speedup"] == pytest.approx(2 / (1 + 10 * 0.05 / 0.2))


def test_a_card_that_was_measured_has_its_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
    rows = report(ONE, cards=["H100 SXM", "H200"], device_type="cuda").rows
    assert [row["hours"] is None for row in rows] == [False, False, True]


def test_notes_name_busy_and_shared_cores_and_an_assumed_network():
    crowd = {"cores": 4, "ranks_per_machine": 16, "load": 3.0, "sources": "measured: 1 x the job"}
    points = ONE, replace(TWO, ranks=16)
    found = report(*points, cards=["H100 SXM"], **crowd)
    notes = " ".join(found.notes)
    for words in ("measured: 1 x", "was busy, 3.0", "more than 4 ranks", "InfiniBand NDR"):
        assert words in notes
    assert not report(ONE, TWO).notes


def test_the_table_holds_every_column_and_remark():
    unsure = replace(TWO, work=replace(WORK, relative_error=0.1))
    found = report(ONE, unsure, THREE, replace(unsure, ranks=4), replace(ONE, scaling="weak"))
    text = table(found)
    heads = (*COLUMNS, "time", "cost (as asked)")
    for part in (*heads, "num_envs 64 does", "7.5 min (6.03 min to", "1.60x", "80%", "800"):
        assert part in text
    assert text.count("raise --batch_size, or use") == 1
    rows = [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| ")]
    assert rows == ["ranks", "1", "2", "4"]  # one rank once
    json.dumps(asdict(found), allow_nan=False)


def test_a_table_without_any_rate_has_no_columns_of_time():
    text = table(report(ONE, TWO, rates=[300.0, 600.0]))
    assert "1.60x" in text and "steps/s |" not in text and "7.5 min" not in text


# ---- the command


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--gpus 0", "--gpus: must be at least 1, got 0"),
        ("--gpus two", "invalid int value: 'two'"),
        ("--gpu H1000", "'H1000' is not known; there are A100"),
        ("--between string --gpus 2", "'string' is not known; there are NVLink 3"),
        ("--num_gpus banana", "--num_gpus does nothing here: use --gpus"),
        ("--lr-scaling sqrt", "--lr_scaling does nothing here"),
        ("--gpu A100 --gpu H200 --sps 9000", "--sps 9000"),
        (f"--out {__file__}", __file__),
        ("nowhere", "nowhere is no run directory"),
        ("--device cuda", "torch sees no CUDA GPU"),
        pytest.param(" ".join(TINY[:-1]) + " none", "hidden_size", marks=pytest.mark.slow),
    ],
)
def test_bad_usage_is_one_line(argv, words, capsys):
    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    try:
        code = speedup.main([*argv.split(), "--json"])
    except SystemExit as leaving:
        code = leaving.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1] and err.splitlines()[-1].startswith("error: ")


@pytest.mark.slow
def test_the_command_measures_and_prints_one_short_report(tmp_path):
    """A tiny job on four numbers of ranks: short runs and reductions, all real.

    A rate is given, so that a busy machine passes.
    """
    flags = "--gpus 1 2 4 8 --num_episodes 1000 --price_per_hour 1 --sps 90000"
    argv = [*TINY, *flags.split(), "--batch_size=8", "--num_envs=8", "--gpu", "H100 SXM"]
    argv += ["--out", str(tmp_path)]
    with (tmp_path / "stdout").open("w") as out, contextlib.redirect_stdout(out):
        assert speedup.main(argv) == 0
    printed = (tmp_path / "stdout").read_text()
    assert printed == (tmp_path / "speedup.md").read_text() and len(printed.splitlines()) <= 25
    found = json.loads((tmp_path / "speedup.json").read_text())
    card = [row for row in found["rows"] if row["machine"] == "H100 SXM"]
    assert [row["gpus"] for row in card] == [1, 2, 4, 8] * 2
    assert card[0]["steps_per_s"] == pytest.approx(90_000)
    for row in card:
        assert row["hours"] > 0 and row["cost"][0] > 0
        assert row["env_steps"] == 128 * (row["gpus"] if row["scaling"] == "weak" else 1)
        assert sum(row["shares"].values()) == pytest.approx(1.0)
    assert found["calibration"]["gradient_bytes"] > 1000
