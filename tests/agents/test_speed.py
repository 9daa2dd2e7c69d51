"""Run the speed benchmarks with small sizes and check their output."""

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack

import pytest
from against_peers import Trainer, main
from train_runs import REPO
from train_runs import run_benchmark as run

# Python interpreter that can import the trainers with which our trainer is compared.
PEERS = os.environ.get("PEERS_PYTHON", sys.executable)
pytestmark = pytest.mark.timeout(1000)
QUICK = ("--minutes", 0, "--fewest", 1, "--warm_up", 0, "--threads", 2, "--ranks", 2)


@pytest.mark.slow
def test_speed_is_measured_without_peers_and_beside_another_checkout(tmp_path):
    _, *rows = run("against_peers.py", "--peers", *QUICK)
    assert [row["task"] for row in rows] == ["cartpole", "stocks", "main"]
    assert all(row["steps_per_s"] > 0 and row["part_of_product"] > 0 for row in rows)

    base, unused = tmp_path / "base", shutil.ignore_patterns(".*", "docs", "runs", "tests")
    shutil.copytree(REPO, base, ignore=unused)
    (base / "agents/rank.py").write_text("raise ValueError('the code of the base')")
    _, skipped, ours = run(
        "against_peers.py", "--peers", "--base", base, "--tasks", "cartpole", *QUICK
    )
    assert "the code of the base" in skipped["reason"] and ours["trainer"] == "ours"


@pytest.mark.parametrize("flags", [["--base", "tests"], ["--ranks", "0"], ["--python", "absent"]])
def test_a_bad_flag_of_the_comparison_is_one_line(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["against_peers.py", *flags])
    with pytest.raises(SystemExit, match="2"):
        main()
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert last_line.startswith("against_peers.py: error: --") and flags[0] in last_line


@pytest.mark.slow
def test_every_installed_trainer_is_compared_with_ours():
    _, *rows = run("against_peers.py", "--python", PEERS, "--tasks", "cartpole", *QUICK)
    ours, *peers = [row for row in rows if "skipped" not in row]
    assert ours["trainer"] == "ours" and len(rows) == 5 and peers
    assert all(row["steps_per_s"] > 0 and row["ours is faster"][0] > 0 for row in peers)


@pytest.mark.parametrize("driver", ["ours", "clean"])
def test_a_driver_trains_on_the_device_that_it_is_given(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with ExitStack() as held, pytest.raises(RuntimeError, match="GPU|CUDA"):
        Trainer(held, sys.executable, driver, "cartpole", "--device", "cuda").report()


def test_make_bench_passes_the_device_on():
    command = ["make", "--dry-run", "bench", f"VENV={sys.prefix}", "DEVICE=cuda"]
    printed = subprocess.check_output(command, cwd=REPO, text=True)
    assert "against_peers.py --peers --device cuda" in printed
