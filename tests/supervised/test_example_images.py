"""Test examples/image_classification.py, started as a user would start it."""

import json

import pytest
from train_runs import run_here

from examples import image_classification


def test_two_ranks_report_exactly_the_figures_of_one_rank(ranks_folder, capsys):
    flags = ["--device=cpu", "--num_gpus=1", "--epochs=2", "--no-progress"]
    assert run_here(image_classification.main, *flags) == 0
    one = json.loads(capsys.readouterr().out)
    two = json.loads((ranks_folder / "figures_0.json").read_text())
    assert one["samples"] == two["samples"] == 1001
    assert one == pytest.approx(two, rel=1e-5) and one["accuracy"] > 0.6
