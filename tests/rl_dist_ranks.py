"""The ranks of the rl_dist tests; spawned processes must be able to import it.

As a script it is a job with two ranks: rl_dist_ranks.py MODE OUT_DIR.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

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
    long = {"x": torch.arange(3 * 16_384 + 5 + rank), "b": torch.ones(3, dtype=torch.bool)}
    results["long"] = gather_dicts(long, world)
    numbers = all_gather_json(list(range(100_000 + rank)), world)[1]
    results["long_json"] = numbers == list(range(100_001))
    results["json"] = all_gather_json({"rank": rank, "text": "é" * (1 + 5 * rank)}, world)
    results["largest"] = all_reduce_max(3 - 5 * rank, world)
    return results


def use_ddp(world):
    module = make_module(seed=world.rank)  # ranks start apart, and are made equal
    parameters = dict(module.named_parameters())
    results = {"apart": error_of(check_in_sync, parameters, world)}
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


def loop(out_dir, raising="", victim=1):
    """Iterate until all ranks agree to stop; one may fail or die."""
    assert set(STOP_SIGNALS) <= BLOCKED, "a signal could meet a rank before its handlers are set"
    world = open_world("cpu", timeout_s=30)
    setup_logging(out_dir, world.rank)
    note_pid(out_dir)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if raising and world.rank == victim:
            die(raising)
        time.sleep(0.02)
        signum = all_reduce_max(stop_flag.signum, world)
        if signum:
            if world.is_main_process:
                Path(out_dir, "saved.json").write_text(json.dumps({"signum": signum}))
            close_world(world)
            return 128 + signum
    return 1


def fail():
    raise RuntimeError("the roof is on fire")


def fail_at_length():
    raise RuntimeError("\0" * 10**6)


def end_slowly():
    """Rank 0 reports that it ends itself, and is kept from it; rank 1 ends meanwhile."""
    if os.environ["RANK"] == "1":
        time.sleep(1.0)
        return
    sys.stdout.flush = lambda: time.sleep(60)
    end_rank("too late")


def mistake():
    raise UserError("num_envs must be at least 1, got 0")


def die(way):
    if way.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[way])
    elif way.isdigit():
        os._exit(int(way))
    else:
        {"error": fail, "user": mistake}[way]()


def close_slowly(out_dir):
    """Rank 1 fails; what it closes on its way takes longer than rank 0 needs to miss it."""
    world = open_world("cpu", timeout_s=30)
    setup_logging(out_dir, world.rank)
    all_gather_json(world.rank, world)
    if world.rank == 1:
        try:
            fail()
        finally:
            dist.destroy_process_group()  # the other one complains from here on
            time.sleep(1.0)
    all_gather_json(world.rank, world)


def hang(out_dir, failing=-1):
    """Never reach the end of an iteration, while one rank may fail."""
    rank = int(os.environ["RANK"])
    note_pid(out_dir)
    if rank == failing:
        # the other one begins later on a busy machine
        while not Path(out_dir, f"pid_{1 - rank}").exists():
            time.sleep(0.05)
        fail()
    time.sleep(1000)
    return 0


def halt(out_dir):
    """Rank 2 is halted; rank 1 gives it up first, and rank 0 then loses its connection."""
    world = open_world("cpu", timeout_s=4 if os.environ["RANK"] == "1" else 15)
    setup_logging(out_dir, world.rank)
    world.set_phase("work")
    all_gather_json(world.rank, world)
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_gather_json(world.rank, world)


def note_pid(out_dir):
    Path(out_dir, f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))


def evaluate_forever(out_dir):
    """All is saved, and nothing handles stop signals any more."""
    world = open_world("cpu", timeout_s=30)
    stop_flag.replace(signal.SIG_DFL)
    note_pid(out_dir)
    while True:
        all_reduce_max(0, world)


def adopt(out_dir):
    """Meet the other rank, under torchrun for example."""
    world = open_world("cpu", timeout_s=30)
    note_pid(out_dir)
    return 0 if all_gather_json(world.rank, world) == [0, 1] else 1


def refuse_alone(out_dir):
    """Rank 1 refuses what rank 0 does not see, which then misses it."""
    world = open_world("cpu", timeout_s=30)
    all_gather_json(world.rank, world)
    if world.rank == 1:
        raise UserError("only rank 1 sees this")
    all_gather_json(world.rank, world)


def refuse_together(out_dir):
    """All ranks see what ends the run."""
    all_gather_json(0, open_world("cpu", timeout_s=30))
    raise UserError("all ranks see this", exit_code=1)


if __name__ == "__main__":
    sys.exit(launch(globals()[sys.argv[1]], (sys.argv[2],), num_ranks=2))
