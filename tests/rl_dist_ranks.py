"""What the ranks of the rl_dist tests run; spawned processes must be able to import it.

As a script it is a job with two ranks that loops until it is stopped: rl_dist_ranks.py MODE OUT_DIR.
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
from rl_dist.launch.launcher import launch, restart_count
from rl_dist.launch.rank import mark_failure
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.collectives import (
    DesyncError,
    agree_max,
    check_in_sync,
    gather_dicts,
    gather_json,
    sum_over_ranks,
)
from rl_dist.process_group.hashes import parameter_hash
from rl_dist.process_group.watchdog import end_rank
from rl_dist.process_group.world import close_world, open_world, stop_flag
from rl_dist.telemetry.metrics import close_logging, open_writer, setup_logging


def make_module(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def data_of_rank(rank):
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + rank))


def loss_of(module, rank):
    return module(data_of_rank(rank)).square().mean()


def exercise(out_dir):
    """Use everything on this rank; the results go to rank_N.pt for the tests to judge."""
    world = open_world("cpu", timeout_s=30)
    setup_logging(out_dir, world.rank)
    results = {"size": world.size, "pid": os.getpid(), "threads": torch.get_num_threads()}
    results |= {"environment": {k: os.environ.get(k) for k in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")}}
    results |= use_collectives(world) | use_ddp(world)
    writer = open_writer(out_dir, world, total=2, unit="episodes")
    ranks = gather_json({"rank": world.rank, "episode/return": float(world.rank)}, world)
    for iteration in (1, 2):
        writer.write({"iteration": iteration, "global_step": 8 * iteration, "ranks": ranks}, done=iteration)
    writer.close()
    results["sync_seconds"] = world.sync_seconds
    torch.save(results, Path(out_dir, f"rank_{world.rank}.pt"))
    agree_max(0, world)
    close_logging()
    close_world(world)


def use_collectives(world):
    rank = world.rank
    sums = sum_over_ranks({"b": torch.full((2, 2), rank + 1.0), "a": 10.0**rank}, world)
    reversed_order = {"b": 1.0, "a": 2.0} if rank else {"a": 2.0, "b": 1.0}
    results = {"sums": sums, "same_names_in_any_order": sum_over_ranks(reversed_order, world)}
    results["desync"] = error_of(lambda: sum_over_ranks({f"name {rank}": 1.0}, world))
    results["other_shapes"] = error_of(lambda: sum_over_ranks({"x": torch.zeros(1 + 999 * rank)}, world))
    world.backend = "without announcements"  # as over NCCL
    results["desync_later"] = error_of(lambda: sum_over_ranks({f"name {rank}": 1.0}, world))
    world.backend = "gloo"
    uneven = {
        "x": torch.arange(2 + rank) + 10 * rank,
        "flag": torch.tensor([rank == 0]),
        "y": torch.full((1, 2), 0.5 + rank, dtype=torch.float64),
        "none": torch.zeros(0, 3),
    }
    results["gathered"] = gather_dicts(uneven, world)
    results["wrong_gather"] = error_of(lambda: gather_dicts({"x": torch.zeros(1, 2 + rank)}, world))
    results["long"] = gather_dicts(
        {"x": torch.arange(3 * 16_384 + 5 + rank), "b": torch.ones(3, dtype=torch.bool)}, world
    )
    results["long_json"] = gather_json(list(range(100_000 + rank)), world)[1] == list(range(100_001))
    results["json"] = gather_json({"rank": rank, "text": "é" * (1 + 5 * rank)}, world)
    results["largest"] = agree_max(3 - 5 * rank, world)
    return results


def use_ddp(world):
    module = make_module(seed=world.rank)  # ranks start apart, and are made equal
    results = {"apart": error_of(lambda: check_in_sync(dict(module.named_parameters()), world))}
    more = {"x": torch.zeros(2)} | ({"y": torch.zeros(2)} if world.rank else {})
    results["more"] = error_of(lambda: check_in_sync(more, world))
    wrapped = Strategy(StrategyConfig(), world).wrap(module)
    results["together"] = error_of(lambda: check_in_sync(dict(module.named_parameters()), world))
    results["start"] = parameter_hash(module)
    results["none_refused"] = error_of(lambda: Strategy(StrategyConfig(mode="none"), world))
    loss_of(wrapped, world.rank).backward()
    results["gradient"] = [p.grad.clone() for p in module.parameters()]
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    results["hashes"] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(wrapped, world.rank).backward()
        optimizer.step()
        results["hashes"].append(parameter_hash(wrapped))
    return results


def error_of(call):
    try:
        call()
    except (DesyncError, UserError) as error:
        return str(error)
    return ""


def loop(out_dir, raising="", victim=1):
    """Iterate until all ranks agree to stop; one rank fails or dies in its first life if asked to."""
    world = open_world("cpu", timeout_s=30)
    setup_logging(out_dir, world.rank)
    Path(out_dir, f"pid_{world.rank}").write_text(str(os.getpid()))
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if raising and world.rank == victim and not restart_count():
            die(raising)
        time.sleep(0.02)
        signum = agree_max(stop_flag.signum, world)
        if signum:
            saved = Path(out_dir, "saved.json")
            if world.main:
                saved.write_text(json.dumps({"signum": signum}))
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


def live_twice(out_dir, way, victim):
    """One rank dies in its first life; in their second all end well."""
    if restart_count():
        return 0
    return loop(out_dir, way, victim)


def close_slowly(out_dir):
    """Rank 1 fails; what it closes on its way takes longer than rank 0 needs to miss it."""
    world = open_world("cpu", timeout_s=30)
    gather_json(world.rank, world)
    if world.rank == 1:
        try:
            fail()
        except RuntimeError:
            mark_failure()
            dist.destroy_process_group()  # the other one complains from here on
            time.sleep(1.0)
            raise
    gather_json(world.rank, world)


def hang(out_dir, failing=-1):
    """Never reach the end of an iteration, while one rank may fail."""
    rank = int(os.environ["RANK"])
    Path(out_dir, f"pid_{rank}").write_text(str(os.getpid()))
    if rank == failing:
        while not Path(out_dir, f"pid_{1 - rank}").exists():  # the other one begins later on a busy machine
            time.sleep(0.05)
        fail()
    time.sleep(60)
    return 0


def adopt(out_dir):
    """What a rank under torchrun does."""
    world = open_world("cpu", timeout_s=30)
    Path(out_dir, f"pid_{world.rank}").write_text(str(os.getpid()))
    return 0 if gather_json(world.rank, world) == [0, 1] else 1


def refuse_alone(out_dir):
    """Rank 1 refuses what rank 0 does not see, which then misses it."""
    world = open_world("cpu", timeout_s=30)
    gather_json(world.rank, world)
    if world.rank == 1:
        raise UserError("only rank 1 sees this")
    gather_json(world.rank, world)


def refuse_together(out_dir):
    """All ranks see what ends the run."""
    gather_json(0, open_world("cpu", timeout_s=30))
    raise UserError("all ranks see this", exit_code=1)


if __name__ == "__main__":
    MODES = {"loop": loop, "hang": hang, "adopt": adopt, "refuse_alone": refuse_alone}
    MODES["refuse_together"] = refuse_together
    sys.exit(launch(MODES[sys.argv[1]], (sys.argv[2],), num_ranks=2))
