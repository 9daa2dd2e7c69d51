"""Decorator for test functions that run on every rank."""

import functools
from pathlib import Path

import torch

from rl_dist.process_group.world import close_world, open_world


def saves_results(function):
    """Return a function that opens a world, calls `function` and saves its result.

    The result of rank N is saved in rank_N.pt.
    """

    @functools.wraps(function)
    def run(out_dir, *args):
        world = open_world("cpu", timeout_s=60)
        results = function(world, Path(out_dir), *args)
        torch.save(results, Path(out_dir, f"rank_{world.rank}.pt"))
        close_world()

    return run
