"""What the ranks of the strategy tests run; spawned processes must be able to import it."""

import itertools
import json
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from rl_dist_ranks import make_module
from torch.nn.utils import get_total_norm

from agents.dry_run.strategy import gradient_steps
from agents.policy import PolicyConfig
from agents.run.config import RunConfig
from agents.sizes import TrainConfig
from envs.task import TaskConfig
from rl_dist.errors import UserError
from rl_dist.launch.config import LaunchConfig
from rl_dist.process_group.collectives import parameter_hash
from rl_dist.process_group.world import close_world, open_world
from rl_dist.strategies.choice import Hardware, choose_strategy, measure_mode
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy


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


def jobs_steps(world):
    """The gradient steps of a small training."""
    train = TrainConfig(num_envs=8, batch_size=8, num_steps=16, bptt_steps=8)
    policy, task = PolicyConfig(hidden_size=8), TaskConfig(env="Recall-v0")
    config = RunConfig(train=train, policy=policy, task=task, launch=LaunchConfig(device="cpu"))
    return gradient_steps(config, (), config.prepare_task(), world)


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
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    for mode in ("ddp", "hybrid"):
        assert not measure_mode(mode, jobs_steps(world), world, steps=1).problem
    found["groups left behind"] = len(groups) - before
    Path(out_dir, f"{world.rank}.json").write_text(json.dumps(found))
    close_world(world)


def norm_of_another_device(*args):
    """The gradient's norm as it is where sums are rounded differently."""
    norm = get_total_norm(*args)
    return torch.nextafter(norm, torch.full_like(norm, torch.inf))


def train_on_unequal_devices(out_dir):
    """Clip by a norm that is another one on rank 1, whose kernels are of a lesser CPU."""
    world = open_world("cpu", timeout_s=30)
    rank, hashes = world.rank, {}
    name = f"the CPU of rank {rank}"
    for mode in ("ddp", "hybrid"):
        for agreed in (True, False):
            strategy = Strategy(StrategyConfig(mode=mode), world)
            module = make_module(seed=0).float()
            with mock.patch("torch.backends.cpu.get_cpu_capability", lambda: name):
                wrapped = strategy.wrap(module)
            assert strategy.unequal_devices
            strategy.unequal_devices = agreed
            optimizer = torch.optim.SGD(strategy.parameters, lr=1.0)
            norm_of = norm_of_another_device if rank == 1 else get_total_norm
            with (
                mock.patch("rl_dist.strategies.strategy.get_total_norm", norm_of),
                mock.patch("torch.nn.utils.get_total_norm", norm_of),
            ):
                for _ in range(50):
                    optimizer.zero_grad()
                    strategy.backward(wrapped(torch.full((4, 3), 5.0 + rank)).square().mean())
                    strategy.step(optimizer, max_grad_norm=0.5)
            hashes[f"{mode} {agreed}"] = parameter_hash(module)
            strategy.close()
    Path(out_dir, f"{world.rank}.json").write_text(json.dumps(hashes))
    close_world(world)
