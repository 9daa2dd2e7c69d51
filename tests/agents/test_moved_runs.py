"""Runs whose files move, whose environment changes the directory, or that are extended."""

import os
import sys

import pytest
from train_runs import RECALL, SIZES, daily_bars, evaluate_here, records, train_here

BRIEF = ["--validate_every", "0", "--eval_episodes", "2"]
PRICES = [*SIZES, *BRIEF[:2], "--episode_days", "20", "--data", "prices.csv"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("named", [["--run_dir", "run"], []])
def test_relative_paths_hold_although_an_environment_changes_the_directory(
    named, here, monkeypatch
):
    module = f"wandering_{len(named)}"
    (here / f"{module}.py").write_text("import os\nos.chdir('/')\ndef watch(moment): pass\n")
    flags = [*RECALL, *BRIEF, "--total_steps", "64", "--callback", f"{module}:watch", *named]
    assert train_here(monkeypatch, *flags, "--env", f"{module}:Recall-v0") == 0
    (run,) = [path.parent for path in here.rglob("summary.json")]
    os.chdir(here)
    assert evaluate_here(monkeypatch, run, "--json", "figures.json") == 0
    assert (here / "figures.json").exists()


@pytest.fixture
def moved(here, monkeypatch):
    """Train on prices, then rename their file; return the folder."""
    daily_bars(2).to_csv("prices.csv", index=False)
    assert train_here(monkeypatch, *PRICES, "--run_dir", "run") == 0
    (here / "prices.csv").rename("moved.csv")
    return here


def test_a_run_continues_with_a_price_file_that_was_moved(moved, monkeypatch):
    there = ["--data", "moved.csv"]
    assert evaluate_here(monkeypatch, "run", *there) == 0
    assert train_here(monkeypatch, "--resume", "run", "--num_episodes", "16", *there) == 0


@pytest.mark.parametrize("given", [[], ["--data", "other.csv"], ["--data", "simulated"]])
def test_a_price_file_of_other_content_is_refused(given, moved, monkeypatch, capsys):
    daily_bars(2, 390).to_csv("other.csv", index=False)
    assert evaluate_here(monkeypatch, "run", *given) == 2
    assert train_here(monkeypatch, "--resume", "run", *given) == 2
    errors = capsys.readouterr().err.splitlines()
    assert sum("with --data" in line for line in errors) == 2


def test_extending_a_finished_run_prints_the_old_and_the_new_learning_rate(
    here, monkeypatch, capsys
):
    flags = [*RECALL, *BRIEF, "--run_dir", "run", "--learning_rate", "0.008"]
    assert train_here(monkeypatch, *flags, "--total_steps", "128") == 0
    capsys.readouterr()
    assert train_here(monkeypatch, "--resume", "run") == 0
    assert "larger --total_steps" in capsys.readouterr().out
    assert train_here(monkeypatch, "--resume", "run", "--total_steps", "256") == 0
    assert "0.004 with this --total_steps, 0 with" in capsys.readouterr().out
    assert records("run")[2]["optim/learning_rate"] == 0.004
