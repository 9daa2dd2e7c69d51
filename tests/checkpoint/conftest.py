"""Fixtures: a small finished run, and a copy of it for tests to damage."""

import shutil

import pytest
from train_runs import RECALL, train_here


@pytest.fixture(scope="session")
def secret():
    """Return a secret URL that the run's --on_event command contains."""
    return "https://hooks.example.org/T0KEN"


@pytest.fixture(scope="session")
def trained(tmp_path_factory, secret):
    """Train and evaluate a run of 3 iterations; validate and save in each of them."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    flags = [*RECALL, "--total_steps=192", "--validate_every=1", "--checkpoint_every=1"]
    flags += ["--eval_episodes=2", "--on_event", f": {secret}", "--run_dir", run_dir]
    assert train_here(*flags) == 0
    return run_dir


@pytest.fixture
def copy(trained, tmp_path):
    """Return a copy of the `trained` run that the test may damage."""
    return shutil.copytree(trained, tmp_path / "run")
