"""A small finished run, which tests copy and damage."""

import shutil

import pytest
from train_runs import RECALL, train_here


@pytest.fixture(scope="session")
def secret():
    """A word in the command for events of the run."""
    return "https://hooks.example.org/T0KEN"


@pytest.fixture(scope="session")
def trained(tmp_path_factory, secret):
    """A run of three iterations with validation and a checkpoint after each, evaluated."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    flags = [*RECALL, "--total_steps", 192, "--validate_every", 1, "--checkpoint_every", 1]
    flags += ["--eval_episodes", 2, "--on_event", f": {secret}", "--run_dir", run_dir]
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert train_here(monkeypatch, *flags) == 0
    return run_dir


@pytest.fixture
def copy(trained, tmp_path):
    """The same, to be damaged."""
    return shutil.copytree(trained, tmp_path / "run")
