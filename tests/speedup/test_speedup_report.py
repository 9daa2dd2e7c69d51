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
        "gradient_bytes": 10**6, "num_envs": 64, "batch_size": 128, "cores": 2,
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


def test_cards_one_does_not_own_are_marked_and_have_cores_of_their_own():
    """Four ranks on one core are each four times slower, which no card's owner would see."""
    one = replace(ONE, work=replace(WORK, update_s=0.0))
    slow = replace(WORK, collect_s=4.0, update_s=0.0)
    four = Point(ranks=4, scaling="weak", work=slow, crowding=4.0)
    sizes = {"ranks_per_machine": 4, "budget": Budget(**LENGTH)}
    found = report(one, four, cards=["A100", "H100 SXM"], **sizes)
    here, a100, h100 = (row for row in found.rows if row["gpus"] == 4)
    assert [row["estimate"] for row in (here, a100, h100)] == [False, True, True]
    assert here["speedup"] == pytest.approx(1.0) and h100["speedup"] == pytest.approx(4.0, rel=0.01)
    assert (here["unit"], a100["unit"]) == ("ranks", "GPUs")
    assert here["cost"] is None and a100["cost"][0] < h100["cost"][0]
    assert "estimate" in table(found)


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
    heads = ("ranks", *COLUMNS, "cost (as asked)")
    for part in (*heads, "num_envs 64 does", "7.5 min (6.03 min to", "1.60x", "80%", "800"):
        assert part in text
    assert text.count("-> raise --batch_size, or use") == 1
    rows = [line.split()[1] for line in text.splitlines() if line.startswith("| ")]
    assert rows == ["ranks", "1", "2", "3", "4"]  # one rank once
    json.dumps(asdict(found), allow_nan=False)


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
def test_the_command_measures_prints_twice_and_writes_everything(tmp_path):
    """A tiny job on one and two ranks: short runs and reductions, all real."""
    flags = "--gpus 2 --scaling weak --num_episodes 1000 --price_per_hour 1"
    argv = [*TINY, *flags.split(), "--gpu", "H100 SXM", "--out", str(tmp_path)]
    with (tmp_path / "stdout").open("w") as out, contextlib.redirect_stdout(out):
        assert speedup.main(argv) == 0
    printed = (tmp_path / "stdout").read_text()
    assert printed.startswith("FIRST FIGURES") and "REFINED FIGURES" in printed
    found = json.loads((tmp_path / "speedup.json").read_text())
    here = [row for row in found["rows"] if row["machine"] == "this machine"]
    assert [row["gpus"] for row in here] == [1, 2]
    for row in here:
        assert row["steps_per_s"] > 0 and row["hours"] > 0 and row["cost"][0] > 0
        assert row["env_steps"] == 64 * row["gpus"]
        assert sum(row["shares"].values()) == pytest.approx(1.0)
    assert found["calibration"]["gradient_bytes"] > 1000
    assert "H100 SXM, an estimate" in (tmp_path / "speedup.md").read_text()
    assert (tmp_path / "speedup.png").read_bytes()[:4] == b"\x89PNG"
