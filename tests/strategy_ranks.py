"""Functions that ranks run for the strategy tests; spawned processes import them."""

import itertools
import os
import time
from unittest import mock

import torch
from on_ranks import saves_results
from rl_dist_ranks import make_module
from torch.nn.utils import get_total_norm

from rl_dist.errors import UserError
from rl_dist.process_group.collectives import parameter_hash
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.measure import Candidate, fastest, fastest_batch_size
from rl_dist.strategies.strategy import Strategy

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
BROKEN = UserError("shard_size 3 does not divide 2 ranks")


def sleeping(seconds):
    """Simulate steps and yield after each; all but the first take `seconds` seconds."""
    for number in itertools.count():
        time.sleep(seconds if number else 0)
        yield


def ddp_steps(world, error=None):
    """Take gradient steps in mode ddp, or raise `error` at the start."""
    if error:
        raise error
    yield
    strategy = Strategy(StrategyConfig(mode="ddp"), world)
    module = strategy.wrap(make_module(seed=0))
    optimizer = torch.optim.Adam(module.parameters())
    while True:
        strategy.backward(module(torch.ones(4, 3).double()).square().mean())
        strategy.step(optimizer)
        yield


def batch_step(size):
    """Simulate a step with `size` samples; rank 1 has memory for at most 300."""
    if int(os.environ["RANK"]) == 1 and size > 300:
        raise FULL
    time.sleep(0.02)


@saves_results
def choose(world, _):
    """Choose the fastest candidate and batch size; some fail on one rank only."""
    slow = 0.001 if world.rank else 0.08
    steps = {
        "ddp, full": lambda: ddp_steps(world, FULL if world.rank == 1 else None),
        "broken": lambda: ddp_steps(world, BROKEN if world.rank == 0 else None),
        "ddp": lambda: ddp_steps(world),
        "slow on rank 0": lambda: sleeping(slow),
    }
    best, results = fastest([Candidate(name, start) for name, start in steps.items()], world)
    found = {result.name: vars(result) for result in results}
    found["chosen"] = best.name
    found["size"] = fastest_batch_size(batch_step, [16, 64, 256, 512], world)
    return found


def norm_of_another_device(*args):
    """Return the gradient norm as a device with different rounding would compute it."""
    return get_total_norm(*args) * (1 + 1e-6)


@saves_results
def train_on_unequal_devices(world, _):
    """Train on CPUs that seem to differ: rank 1 computes a different gradient norm.

    Return two parameter hashes: one of a training in which the ranks agree on the norm, and one of
    a training in which they do not.
    """
    norm_of = norm_of_another_device if world.rank == 1 else get_total_norm
    hashes = {}
    for agreed in (True, False):
        strategy, module = Strategy(StrategyConfig(mode="ddp"), world), make_module(seed=0).float()
        kind = f"the CPU of rank {world.rank}"
        with mock.patch("torch.backends.cpu.get_cpu_capability", lambda kind=kind: kind):
            wrapped = strategy.wrap(module)
        assert strategy.unequal_devices
        strategy.unequal_devices = agreed
        optimizer = torch.optim.SGD(strategy.parameters, lr=1.0)
        with mock.patch("rl_dist.strategies.strategy.get_total_norm", norm_of):
            for _ in range(50):
                optimizer.zero_grad()
                strategy.backward(wrapped(torch.full((4, 3), 5.0 + world.rank)).square().mean())
                strategy.step(optimizer, max_grad_norm=0.5)
        hashes[str(agreed)] = parameter_hash(module)
    return hashes
