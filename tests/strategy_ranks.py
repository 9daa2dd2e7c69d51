"""What the ranks of the strategy tests run; spawned processes must be able to import it."""

import itertools
import json
import time
from pathlib import Path

import torch
from rl_dist_ranks import make_module

from rl_dist.errors import UserError
from rl_dist.parallel.choice import Hardware, choose_strategy, measure_mode
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.world import close_world, open_world


def sleeping(seconds):
    """A mode whose gradient step takes so long."""

    def start(mode):
        for number in itertools.count():
            time.sleep(seconds if number > 2 else 0)
            yield

    return start


def ddp_or_not(world):
    """Start ddp; "full" is out of memory on rank 1, "broken" cannot be set up on rank 0."""

    def start(mode):
        if mode == "broken" and world.rank == 0:
            raise UserError("shard_size 3 does not divide 2 ranks")
        strategy = Strategy(StrategyConfig(mode="ddp"), world)
        module = make_module(seed=0)
        optimizer = torch.optim.Adam(module.parameters())

        def backward(last):
            with strategy.accumulating(last):
                strategy.backward(strategy.module(torch.ones(4, 3).double()).square().mean())

        yield
        strategy.wrap(module)
        yield
        if mode == "full" and world.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        backward(last=False)
        while True:
            yield
            backward(last=True)
            strategy.step(optimizer)

    return start


def choose(out_dir):
    """Let two ranks choose, where modes fail on one of them only."""
    world = open_world("cpu", timeout_s=30)
    start = ddp_or_not(world)
    found = {mode: vars(measure_mode(mode, start, world)) for mode in ("full", "broken", "ddp")}
    slow = sleeping(0.001 if world.rank else 0.08)
    found["slow on rank 0"] = vars(measure_mode("ddp", slow, world, steps=1))
    auto, hardware = StrategyConfig(mode="auto"), Hardware(world.size)
    modes = {"ddp": start, "hybrid": slow}
    chosen = choose_strategy(
        auto, hardware, lambda mode: measure_mode(mode, modes[mode], world, steps=1)
    )
    found["chosen"] = vars(chosen)
    Path(out_dir, f"{world.rank}.json").write_text(json.dumps(found))
    close_world(world)
