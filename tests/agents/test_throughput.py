"""Run the speed benchmarks with small sizes and check their output."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
from against_peers import Trainer
from train_runs import REPO
from train_runs import run_benchmark as run

# Python interpreter that can import the trainers with which our trainer is compared.
PEERS = os.environ.get("PEERS_PYTHON", sys.executable)
pytestmark = pytest.mark.timeout(1000)


@pytest.mark.slow
def test_each_task_is_measured_and_compared_with_the_newest_file_of_this_machine(tmp_path):
    command = ["throughput.py", "--turns", 1, "--threads", 1, "--folder", tmp_path]
    machine, *rows = [line for line in run(*command) if isinstance(line, dict)]
    assert [row["task"] for row in rows] == ["cartpole", "stocks", "main"]
    assert all(row["steps_per_gflop"][0] > 0 for row in rows)
    (first,) = tmp_path.iterdir()
    assert json.loads(first.read_text()) == {"machine": machine, "rows": rows}
    compared = [line for line in run(*command, "--tasks", "cartpole") if isinstance(line, str)]
    assert first.name in compared[0]


@pytest.mark.slow
def test_every_installed_trainer_is_compared_with_ours():
    flags = ["--python", PEERS, "--tasks", "cartpole", "--threads", 2, "--ranks", 2]
    _, *rows = run("against_peers.py", *flags, "--minutes", 0, "--fewest", 1, "--warm_up", 0)
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
    assert "throughput.py --device cuda" in printed
