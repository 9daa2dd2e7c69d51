"""The example of the general-purpose API, run as a user runs it."""

import json

import pytest
from train_runs import run_here

from examples import image_classification


def classified(path, monkeypatch, *flags):
    """The figures of the command."""
    argv = ["--device", "cpu", "--epochs", "2", "--json", path, *flags]
    assert run_here(image_classification.main, argv, monkeypatch) == 0
    return json.loads(path.read_text())


def test_the_example_tells_the_same_on_two_ranks_to_the_last_image(
    ranks_folder, tmp_path, monkeypatch
):
    one = classified(tmp_path / "one.json", monkeypatch, "--num_gpus", "1")
    two = json.loads((ranks_folder / "figures.json").read_text())
    assert one["samples"] == two["samples"] == 1001
    assert one["accuracy"] == two["accuracy"] and one["accuracy"] > 0.6
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
