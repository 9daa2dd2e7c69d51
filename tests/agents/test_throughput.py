"""Run the speed benchmarks with small sizes and check their output."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec

import pytest
import return_by_seconds
from against_peers import Trainer
from return_by_seconds import curve_of
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


def test_a_curve_has_the_mean_of_the_last_100_episodes_by_seconds():
    points = [(1.0, 64, 0.0, 60), (2.0, 128, None, 0), (3.0, 192, 2.0, 60), (4.0, 256, 2.0, 50)]
    assert curve_of(points) == [[3.0, 1.2], [4.0, 2.0]]
    assert curve_of(points[:2]) == []  # fewer than 100 episodes
    many = curve_of([(float(n), n, float(n), 100) for n in range(1000)])
    assert len(many) == 60 and many[0] == [0.0, 0.0] and many[-1] == [999.0, 999.0]


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("sb3_contrib"), reason="needs sb3-contrib")
def test_two_trainers_take_turns_and_are_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(return_by_seconds, "RESULTS", tmp_path / "results")
    tasks = {"CartPolePositions-v1": (2048, 475, "sb3_cartpole")}
    monkeypatch.setattr(return_by_seconds, "TASKS", tasks)
    picture = tmp_path / "seconds.png"
    for _ in range(2):  # the second call uses the stored results
        return_by_seconds.main(["--seeds", "1", "--turn_s", "5", "--picture", str(picture)])
    rows = [line for line in capsys.readouterr().out.splitlines() if "CartPole" in line]
    assert len(rows) == 4 and "| ours | 1 |" in rows[0] and "| peer | 1 |" in rows[1]
    assert picture.stat().st_size > 1000
    assert len((tmp_path / "results").read_text().splitlines()) == 2
