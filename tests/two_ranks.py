"""Exercises that two ranks run for several test files, in one launch.

Spawned processes import this file.
"""

import os
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import agents_ranks
import faults_ranks
import pipeline_ranks
import rl_dist_ranks
import sharding_ranks
import speed_ranks
import strategy_ranks
import supervised_ranks

from examples import image_classification
from rl_dist.launch.config import LaunchConfig
from rl_dist.supervised.fit import FitConfig


def classify_images(out_dir):
    """Run the image example; write the output of each rank to a separate file."""
    fitting = FitConfig(epochs=2, progress=False)
    path = Path(out_dir, f"figures_{os.environ['RANK']}.json")
    with path.open("w") as file, redirect_stdout(file):
        assert image_classification.run_rank(fitting, LaunchConfig(), "cpu") == 0


# Test file -> exercise: a function that gets an output folder and opens and closes a world.
EXERCISES: dict[str, Callable[[str], Any]] = {
    "test_estimate": agents_ranks.count_small_collectives,
    "test_example_images": classify_images,
    "test_faults": faults_ranks.survived,
    "test_grad_accumulation": speed_ranks.exercise,
    "test_pipeline": pipeline_ranks.exercise,
    "test_rl_dist_ranks": rl_dist_ranks.exercise,
    "test_measure": strategy_ranks.choose,
    "test_supervised": supervised_ranks.exercise,
    "test_replicas": strategy_ranks.train_on_unequal_devices,
    "test_sharding": sharding_ranks.probe,
}


def exercise_in_turn(out_dir, names):
    """Run the named exercises in turn, each in a new folder and a new world.

    If one fails, each rank on which it raised saves the traceback, and the ranks end.

    This function sets a new restart count before each exercise. The name of the rendezvous file
    contains this count, so every world gets a new file.
    """
    rank = os.environ["RANK"]
    for number, name in enumerate(names):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        folder = Path(out_dir, name)
        try:
            EXERCISES[name](str(folder))
        except BaseException:
            (folder / f"rank_{rank}.error").write_text(traceback.format_exc())
            raise
        (folder / f"done_{rank}").touch()


def is_done(folder):
    """Return whether both ranks have finished the exercise of this folder."""
    return len(list(folder.glob("done_*"))) == 2
