"""What the ranks of the strategy tests run; spawned processes must be able to import it."""

import json
import time
from pathlib import Path

import torch
from rl_dist_ranks import loss_of, make_module

from rl_dist.errors import UserError
from rl_dist.parallel.choice import Trying, fastest, first_working
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.world import close_world, open_world


def nothing():
    pass


def sleeping(seconds):
    """A mode whose gradient step takes so long, by its name."""
    return lambda mode: Trying(nothing, nothing, step=lambda: time.sleep(seconds[mode]))


def ddp_or_not(world):
    """Starts ddp for real; "full" is out of memory on rank 1, "broken" cannot be set up on rank 0."""

    def out_of_memory():
        if world.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def start(mode):
        if mode == "broken" and world.rank == 0:
            raise UserError("shard_size 3 does not divide 2 ranks")
        strategy = Strategy(StrategyConfig(mode="ddp"), world)
        module = make_module(seed=0)
        optimizer = torch.optim.Adam(module.parameters())

        def backward(last):
            with strategy.accumulating(last):
                strategy.backward(loss_of(strategy.module, world.rank))

        def step():
            backward(last=True)
            strategy.step(optimizer)

        alone = out_of_memory if mode == "full" else lambda: backward(last=False)
        return Trying(lambda: strategy.wrap(module), alone, step)

    return start


def choose(out_dir):
    """Let two ranks choose, where modes fail on one of them only."""
    world = open_world("cpu", timeout_s=30)
    start = ddp_or_not(world)
    slow = {"ddp": 0.001, "hybrid": 0.001 if world.rank else 0.08}  # one slow rank keeps all waiting
    found = {
        "fitting": vars(fastest(["full", "ddp"], start, world)),
        "stepped down": vars(first_working(["broken", "full", "ddp"], start, world)),
        "slowest rank": vars(fastest(["hybrid", "ddp"], sleeping(slow), world)),
    }
    try:
        first_working(["broken", "full"], start, world)
    except UserError as error:
        found["none"] = {"reason": str(error), "exit_code": error.exit_code}
    Path(out_dir, f"{world.rank}.json").write_text(json.dumps(found))
    close_world(world)
