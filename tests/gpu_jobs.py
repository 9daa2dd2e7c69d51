"""Small training jobs on a device, for the GPU tests; ranks import this file.

The command `gpu_jobs.py FUNCTION` runs that function of this file on two GPUs.
"""

import functools
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from agents_ranks import CASES, ENV_IDS, Recording, finish, make_job, tiny_markets

from envs import make_vector_env
from envs.trading.config import TradingConfig
from envs.trading.environment import TradingVectorEnv
from rl_dist.launch.ranks import launch
from rl_dist.process_group.collectives import all_reduce_max, parameter_hash
from rl_dist.process_group.world import close_world, open_world
from rl_dist.strategies.config import StrategyConfig

DEVICE = "cuda"
TRADING, CARTPOLE = "trading, clstm", "cartpole, clstm"
ITERATIONS = 3


@contextmanager
def world_on(device):
    """Open a world of one rank on a device, with one torch thread."""
    world = open_world(device)
    torch.set_num_threads(1)
    try:
        yield world
    finally:
        close_world()


def make_env_on(device, task, num_envs, env_offset=0):
    """Return the environment of a task; the trading environment runs on the device."""
    if task == "trading":
        markets, span = tiny_markets()
        config = TradingConfig(episode_days=7)
        return TradingVectorEnv(
            num_envs, markets=markets, span=span, train_span=span, config=config, device=device
        )
    return make_vector_env(ENV_IDS[task], num_envs, env_offset=env_offset, device=device)


def job_on(device, name=TRADING, run_dir="", *, strategy=None, **options):
    """Return a job of `agents_ranks` with its environments on a device.

    Args:
        strategy: fields of StrategyConfig.
    """
    return replace(
        make_job(name, run_dir, **options),
        make_env=functools.partial(make_env_on, device, CASES[name].task),
        strategy=StrategyConfig(**(strategy or {})),
    )


def trained(world, resume_from="", **options):
    """Train to the end on the device of the world; return the Training object."""
    return finish(Recording(job_on(str(world.device), **options), world), resume_from)


def parameters_on_cpu(training):
    return torch.cat([p.detach().flatten().cpu() for p in training.policy.parameters()])


def largest_difference(first, second):
    return (first - second).abs().max().item()


def train_rank(out_dir, strategy, gpu_ids=(), backend="auto"):
    """Train on the GPU of this rank; save parameters and their hash in rank_N.pt."""
    world = open_world(DEVICE, timeout_s=120, gpu_ids=gpu_ids, backend=backend)
    torch.set_num_threads(1)
    sizes = {"iterations": ITERATIONS, "run_dir": Path(out_dir, "run")}
    training = trained(world, strategy=strategy, **sizes)
    record = {"parameters": parameters_on_cpu(training), "hash": parameter_hash(training.policy)}
    torch.save(record, Path(out_dir, f"rank_{world.rank}.pt"))
    all_reduce_max(0, world)
    close_world()
    return 0


def fail():
    """Raise an error on rank 1 while rank 0 waits for rank 1 in a collective call."""
    world = open_world(DEVICE, timeout_s=60)
    all_reduce_max(0, world)
    if world.rank == 1:
        raise RuntimeError("the roof is on fire")
    all_reduce_max(0, world)


def hang():
    """Let rank 1 sleep while rank 0 waits for rank 1 in a collective call."""
    world = open_world(DEVICE, timeout_s=6)
    world.set_phase("update")
    all_reduce_max(0, world)
    time.sleep(1000.0 * world.rank)
    all_reduce_max(0, world)


if __name__ == "__main__":
    sys.exit(launch(globals()[sys.argv[1]], (), num_ranks=2))
