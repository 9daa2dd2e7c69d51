"""The ranks of the rl_dist tests; spawned processes must be able to import it.

As a script it is a job with two ranks: rl_dist_ranks.py MODE OUT_DIR.
"""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn

from rl_dist.errors import UserError
from rl_dist.launch.ranks import launch
from rl_dist.process_group.collectives import (
    all_gather_json,
    all_reduce_max,
    all_reduce_sum,
    check_in_sync,
    gather_dicts,
    parameter_hash,
)
from rl_dist.process_group.process_ends import STOP_SIGNALS
from rl_dist.process_group.watchdog import end_rank
from rl_dist.process_group.world import close_world, open_world, stop_flag
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy
from rl_dist.telemetry.metrics import setup_logging

# while this is imported, before it is known what the rank will do
BLOCKED = signal.pthread_sigmask(signal.SIG_BLOCK, [])


def make_module(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def exercise(out_dir):
    """Use everything on this rank; the results go to rank_N.pt."""
    world = open_world("cpu", timeout_s=30)
    variables = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    results = {"size": world.size, "pid": os.getpid(), "threads": torch.get_num_threads()}
    results["environment"] = {name: os.environ.get(name) for name in variables}
    results["store"] = os.path.realpath(f"{os.environ['RL_DIST_JOB_DIR']}/store_0")
    results |= use_collectives(world) | use_ddp(world)
    results["sync_seconds"] = world.sync_seconds
    torch.save(results, Path(out_dir, f"rank_{world.rank}.pt"))
    all_reduce_max(0, world)
    close_world(world)


def use_collectives(world):
    rank = world.rank
    sums = all_reduce_sum({"b": torch.full((2, 2), rank + 1.0), "a": 10.0**rank}, world)
    reversed_order = {"b": 1.0, "a": 2.0} if rank else {"a": 2.0, "b": 1.0}
    results = {"sums": sums, "same_names_in_any_order": all_reduce_sum(reversed_order, world)}
    others = {f"name {rank}": 1.0}
    results["desync"] = error_of(all_reduce_sum, others, world)
    other_shapes = {"x": torch.zeros(1 + 999 * rank)}
    results["other_shapes"] = error_of(all_reduce_sum, other_shapes, world)
    world.backend = "without announcements"  # as over NCCL
    results["desync_later"] = error_of(all_reduce_sum, others, world)
    world.backend = "gloo"
    uneven = {
        "x": torch.arange(2 + rank) + 10 * rank,
        "flag": torch.tensor([rank == 0]),
        "y": torch.full((1, 2), 0.5 + rank, dtype=torch.float64),
        "none": torch.zeros(0, 3),
    }
    results["gathered"] = gather_dicts(uneven, world)
    results["wrong_gather"] = error_of(gather_dicts, {"x": torch.zeros(1, 2 + rank)}, world)
    torch.set_num_threads(2)
    torch.ones(10**6).exp_().sum()  # the pool has started
    before = psutil.Process().num_threads()
    long = {"x": torch.arange(3 * 16_384 + 5 + rank), "b": torch.ones(3, dtype=torch.bool)}
    results["long"] = gather_dicts(long, world)
    numbers = all_gather_json(list(range(100_000 + rank)), world)[1]
    counts = []
    for _ in range(10):  # a thread that only comes and goes does not count
        counts.append(psutil.Process().num_threads())
        time.sleep(0.05)
    results["new_threads"] = min(counts) - before
    torch.set_num_threads(1)
    results["long_json"] = numbers == list(range(100_001))
    results["json"] = all_gather_json({"rank": rank, "text": "é" * (1 + 5 * rank)}, world)
    results["largest"] = all_reduce_max(3 - 5 * rank, world)
    return results


def use_ddp(world):
    results = {"reference": parameter_hash(make_module(seed=0))}
    module = make_module(seed=world.rank)  # ranks start apart, and are made equal
    parameters = dict(module.named_parameters())
    results["apart"] = error_of(check_in_sync, parameters, world)
    more = {"x": torch.zeros(2)} | ({"y": torch.zeros(2)} if world.rank else {})
    results["more"] = error_of(check_in_sync, more, world)
    Strategy(StrategyConfig(), world).wrap(module)
    results["together"] = error_of(check_in_sync, parameters, world)
    results["start"] = parameter_hash(module)
    return results


def error_of(call, *args):
    try:
        call(*args)
    except UserError as error:
        return str(error)
    return ""


def started(out_dir):
    """Open the world of a job, and write this rank's process number to a file for the test."""
    world = open_world("cpu", timeout_s=30)
    setup_logging(out_dir, world.rank)
    Path(out_dir, f"pid_{world.rank}").write_text(str(os.getpid()))
    return world


def loop(out_dir, way="", victim=1):
    """Iterate until all ranks agree to stop; one may fail or die in some way."""
    assert set(STOP_SIGNALS) <= BLOCKED, "a signal could meet a rank before its handlers are set"
    world = started(out_dir)
    if way == "evaluation":  # all is saved, and nothing handles stop signals any more
        stop_flag.replace(signal.SIG_DFL)
    while True:
        if way and world.rank == victim:
            end_this_rank(way)
        time.sleep(0.02)
        if signum := all_reduce_max(stop_flag.signum, world):
            if world.is_main_process:
                Path(out_dir, "saved").write_text(str(signum))
            close_world(world)
            return 128 + signum


def end_this_rank(way):
    if way in ("fail", "fail at length"):
        raise RuntimeError("the roof is on fire" + "\0" * (10**6 if way != "fail" else 0))
    if way == "mistake":
        raise UserError("num_envs must be at least 1, got 0")
    if way == "fail slowly":  # the other rank complains first, from where this one closes
        try:
            end_this_rank("fail")
        finally:
            dist.destroy_process_group()
            time.sleep(1.0)
    if way == "exit":
        os._exit(0)


def hang(out_dir, failing=-1):
    """Never reach the end of an iteration, while one rank may fail."""
    if started(out_dir).rank == failing:
        end_this_rank("fail")
    time.sleep(1000)


def halt(out_dir):
    """Rank 2 is halted; rank 1 gives it up first, and rank 0 then loses its connection."""
    world = open_world("cpu", timeout_s=4 if os.environ["RANK"] == "1" else 15)
    setup_logging(out_dir, world.rank)
    world.set_phase("work")
    all_gather_json(world.rank, world)
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_gather_json(world.rank, world)


def end_slowly(out_dir):
    """Rank 0 reports that it ends itself, and is kept from it; rank 1 ends meanwhile."""
    if os.environ["RANK"] == "1":
        time.sleep(1.0)
        return
    sys.stdout.flush = lambda: time.sleep(60)
    end_rank("too late")


def refuse(out_dir, alone):
    """Raise UserError on rank 1 alone, while rank 0 waits for it, or on both."""
    world = started(out_dir)
    if world.rank == 1 or not alone:
        raise UserError("this cannot be", exit_code=1)
    all_gather_json(world.rank, world)


if __name__ == "__main__":
    mode, *args = sys.argv[1:]
    sys.exit(launch(globals()[mode], tuple(args), num_ranks=2))
