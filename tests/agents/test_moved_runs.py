"""Runs whose files move, whose environment changes the directory, or that are extended."""

import os
import sys

import pytest
from train_runs import BRIEF, RECALL, SIZES, daily_bars, evaluate_here, records, train_here

PRICES = [*SIZES, "--validate_every=0", "--episode_days=20", "--data=prices.csv", "--run_dir=run"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("named", [["--run_dir=run"], []])
def test_relative_paths_hold_although_an_environment_changes_the_directory(named, here):
    module = f"wandering_{len(named)}"
    (here / f"{module}.py").write_text("import os\nos.chdir('/')\ndef watch(moment): pass\n")
    flags = [*RECALL, *BRIEF, "--callback", f"{module}:watch", *named]
    assert train_here(*flags, "--env", f"{module}:Recall-v0") == 0
    (run,) = [path.parent for path in here.rglob("summary.json")]
    os.chdir(here)
    assert evaluate_here(run, "--json=figures.json") == 0
    assert (here / "figures.json").exists()


@pytest.fixture
def moved(here):
    """Train on prices, then rename their file; return the folder."""
    daily_bars(2).to_csv("prices.csv", index=False)
    assert train_here(*PRICES) == 0
    (here / "prices.csv").rename("moved.csv")
    return here


def test_a_run_continues_with_a_price_file_that_was_moved(moved):
    there = ["--data=moved.csv"]
    assert evaluate_here("run", *there) == 0
    assert train_here("--resume=run", "--num_episodes=16", *there) == 0


@pytest.mark.parametrize("data", ["prices.csv", "other.csv", "simulated"])
def test_a_price_file_of_other_content_is_refused(data, moved, capsys):
    daily_bars(2, 390).to_csv("other.csv", index=False)
    assert evaluate_here("run", "--data", data) == 2
    assert train_here("--resume=run", "--data", data) == 2
    assert capsys.readouterr().err.count("with --data") == 2


def test_extending_a_finished_run_prints_the_old_and_the_new_learning_rate(here, capsys):
    flags = [*RECALL, *BRIEF, "--run_dir=run", "--learning_rate=0.008"]
    assert train_here(*flags) == 0
    capsys.readouterr()
    assert train_here("--resume=run") == 0
    assert "larger --total_steps" in capsys.readouterr().out
    assert train_here("--resume=run", "--total_steps=128") == 0
    assert "0.004 with this --total_steps, 0 with" in capsys.readouterr().out
    assert records("run")[1]["optim/learning_rate"] == 0.004
