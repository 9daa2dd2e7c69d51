"""The speedup command: bad usage, and from measurements to rows, tables and files."""

import contextlib
import json
from dataclasses import asdict, replace

import pytest
import torch

from rl_dist.speedup import __main__ as speedup
from rl_dist.speedup.machines import GPUS, LINKS
from rl_dist.speedup.measure import Measurements
from rl_dist.speedup.model import Link, RankCost
from rl_dist.speedup.report import COLUMNS, report_of, table

TINY = [
    "--env", "Recall-v0", "--num_envs", "4", "--num_steps", "16", "--bptt_steps", "8",
    "--batch_size", "4", "--hidden_size", "8",
]  # fmt: skip
WORK = RankCost(env_steps=1000, gradient_steps=10, collect_s=1.0, update_s=1.0)
RARE = 2**40  # bytes/s: small collectives cost nothing


def measured(cores=2, rates=(500.0,), works=(WORK, WORK), device_type="cpu", ranks=2):
    """Measurements of one rank and of two that train the same job each."""
    found = Measurements([], [1, ranks], ["weak"], device_type)
    found.config = {"launch": {"threads": 1}, "task": {"env": "Recall-v0"}}
    found.cores, found.rates, found.gradient_bytes = cores, rates, 10**6
    found.sizes = {"num_envs": 64, "batch_size": 128}
    found.works = dict(zip([found.share(1), found.share(ranks, "weak")], works, strict=True))
    found.link = Link("x", bytes_per_s=1e6 / 0.05)  # 10 reductions of 0.05 s over two ranks
    return found


def report(found=None, cards=(), **options):
    options = {"env_steps": 360_000.0} | options
    cards = [GPUS[name] for name in cards]
    return report_of(found or measured(), cards, LINKS["InfiniBand NDR"], **options)


def test_rows_hold_speedup_time_cost_and_source():
    one, two = report(price_per_hour=2.0).rows
    assert (one["speedup"], one["efficiency"], one["source"]) == (1.0, 1.0, "measured")
    assert two["steps_per_s"] == pytest.approx(2000 / 2.5, rel=1e-3)
    assert (two["speedup"], two["efficiency"]) == pytest.approx((1.6, 0.8), rel=1e-3)
    assert two["shares"]["communication"] == pytest.approx(0.2, rel=1e-3)
    assert one["hours"] == pytest.approx(360_000 / 500 / 3600)
    assert one["cost"] == pytest.approx([0.4, 0.4])
    assert two["cost"] == pytest.approx([2 * 2.0 * two["hours"]] * 2)


@pytest.mark.parametrize(
    ("options", "known"),
    [
        ({}, (True, True, False)),
        ({"price_per_hour": 1.0}, (True, True, True)),
        ({"env_steps": float("nan"), "price_per_hour": 1.0}, (True, False, False)),
        ({"found": measured(rates=[300.0, 600.0]), "price_per_hour": 1.0}, (False, False, False)),
    ],
)
def test_what_is_not_known_is_none(options, known):
    found = report(**options)
    for row in found.rows:
        assert tuple(row[name] is not None for name in ("steps_per_s", "hours", "cost")) == known
    assert bool(found.notes) != known[1]
    json.dumps(asdict(found), allow_nan=False)


def test_cards_one_does_not_own_have_a_speedup_and_cores_of_their_own():
    """Four ranks on one core are each four times slower, which no card's owner would see."""
    work = replace(WORK, update_s=0.0)
    found = report(measured(1, works=(work, work), ranks=4), cards=["A100", "H100 SXM"])
    here, a100, h100 = (row for row in found.rows if row["gpus"] == 4)
    assert here["speedup"] < 1.0 and h100["speedup"] == pytest.approx(4.0, rel=0.01)
    assert (h100["source"], h100["efficiency"]) == ("estimate", h100["speedup"] / 4)
    for name in ("steps_per_s", "iteration_s", "hours", "cost"):
        assert a100[name] is h100[name] is None
    assert here["hours"] is not None and "A100, H100 SXM" in found.notes[-1]


@pytest.mark.parametrize("cards", [[], ["H100 SXM"]])
def test_a_rate_that_is_given_sets_time_and_cost_of_the_card_or_else_of_this_machine(cards):
    """Reductions take as long as before, so that faster ranks lose more of their time in them."""
    found = report(measured(rates=[300.0, 600.0]), cards, sps=5000.0)
    one, two = found.rows[-2:]
    assert one["steps_per_s"] == pytest.approx(5000.0)
    assert one["hours"] == pytest.approx(360_000 / 5000 / 3600)
    if cards:
        prices = GPUS[cards[0]].usd_per_hour
        assert two["cost"] == pytest.approx([2 * two["hours"] * price for price in prices])
        assert found.rows[0]["hours"] is None  # this machine's rate is not known
    else:
        assert two["speedup"] == pytest.approx(2 / (1 + 10 * 0.05 / 0.2), rel=1e-3)


def test_a_card_that_was_measured_has_its_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    rows = report(measured(device_type="cuda"), cards=["H100 SXM", "H200"]).rows
    assert [row["hours"] is None for row in rows] == [False] * 4 + [True] * 2


def test_the_table_holds_every_column_and_one_rank_once():
    one, two = report(price_per_hour=1.0).rows
    found = replace(report(), rows=[one, two, one | {"scaling": "strong"}], notes=["mind this"])
    text = table(found)
    for part in (*COLUMNS, "1.60x", "80%", "800", "7.5 min", "0.25", "mind this"):
        assert part in text
    rows = [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| ")]
    assert rows == ["ranks", "1", "2"]


# ---- the command


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--gpus 0", ["--gpus", "0"]),
        ("--gpus two", ["--gpus", "two"]),
        ("--gpu H1000", ["--gpu", "H1000", "A100"]),
        ("--between string --gpus 2", ["--between", "string", "NVLink 3"]),
        ("--num_gpus banana", ["--num_gpus", "--gpus"]),
        ("--lr-scaling sqrt", ["--lr_scaling"]),
        ("--gpu A100 --gpu H200 --sps 9000", ["--sps", "9000", "--gpu"]),
        (f"--out {__file__}", [__file__]),
        ("nowhere", ["nowhere"]),
        ("--gpus 2 --scaling weak stray", ["stray"]),
        ("--device cuda", ["--device cuda"]),
        pytest.param(" ".join(TINY[:-1]) + " none", ["hidden_size"], marks=pytest.mark.slow),
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
    *_, line = err.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words)


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
        assert sum(row["shares"].values()) == pytest.approx(1.0)
