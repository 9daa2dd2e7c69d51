"""The example of the general-purpose API, run as a user runs it."""

import json

import pytest
from train_runs import run_here

from examples import image_classification


def test_the_example_tells_the_same_on_two_ranks_to_the_last_image(tmp_path, monkeypatch, capsys):
    found = []
    for ranks in ("1", "2"):
        path = tmp_path / f"{ranks}.json"
        argv = ["--device", "cpu", "--num_gpus", ranks, "--epochs", "3", "--json", path]
        assert run_here(image_classification.main, argv, monkeypatch) == 0
        found.append(json.loads(path.read_text()))
    one, two = found
    assert one["samples"] == two["samples"] == 1001
    assert one["accuracy"] == two["accuracy"] and one["accuracy"] > 0.6
    assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
