"""Functions that ranks run for the rl_dist tests; spawned processes import them.

Run as a script, it launches one function on two ranks: rl_dist_ranks.py MODE OUT_DIR.
"""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rl_dist.checkpoint.store import Best, save_agreed
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

# The signals that are blocked during this import, before the rank has signal handlers.
BLOCKED = signal.pthread_sigmask(signal.SIG_BLOCK, [])


def make_module(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def exercise(out_dir):
    """Run all checks; both ranks call this function."""
    world = open_world("cpu", timeout_s=30)
    check_process(world)
    check_collectives(world)
    check_errors(world)
    check_threads(world)
    check_wrapping(world)
    check_checkpoints(world, Path(out_dir))
    close_world()


def check_process(world):
    """Check process ids, threads, the loopback interface and the in-memory store."""
    assert (world.size, world.rank) == (2, int(os.environ["RANK"]))
    assert len(set(all_gather_json(os.getpid(), world))) == 2
    assert torch.get_num_threads() == 1 == int(os.environ["OMP_NUM_THREADS"])
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    # The store is a file in memory, because a file on a full disk may be truncated.
    assert os.path.realpath(f"{os.environ['RL_DIST_JOB_DIR']}/store_0").startswith("/memfd:")


def check_collectives(world):
    rank = world.rank
    values = {"b": torch.full((2, 2), rank + 1.0), "a": 10.0**rank}
    sums = all_reduce_sum(dict(sorted(values.items(), reverse=bool(rank))), world)
    assert sums["a"].item() == 11.0
    assert torch.equal(sums["b"], torch.full((2, 2), 3.0, dtype=torch.float64))
    assert all_reduce_max(3 - 5 * rank, world) == 3
    texts = all_gather_json({"text": "é" * (1 + 5 * rank)}, world)
    assert texts == [{"text": "é"}, {"text": "éééééé"}]
    assert 0 < world.sync_seconds < 60
    uneven = {
        "x": torch.arange(2 + rank) + 10 * rank,
        "flag": torch.tensor([rank == 0]),
        "y": torch.full((1, 2), 0.5 + rank, dtype=torch.float64),
        "none": torch.zeros(2, 3, 0),
    }
    if gathered := gather_dicts(uneven, world):
        assert gathered["x"].tolist() == [0, 1, 10, 11, 12]
        assert gathered["flag"].tolist() == [True, False]
        assert gathered["y"].tolist() == [[0.5, 0.5], [1.5, 1.5]]
        assert gathered["y"].dtype == torch.float64 and gathered["none"].shape == (4, 3, 0)
    assert (gathered is None) == bool(rank)


def check_errors(world):
    """Check that all ranks get an error that names the difference between them."""
    rank = world.rank
    name = {f"name {rank}": 1.0}
    module = dict(make_module(seed=rank).named_parameters())
    more = {"x": torch.zeros(2)} | ({"y": torch.zeros(2)} if rank else {})
    wrong = {"x": torch.zeros(1, 2 + rank)}
    for call, values, says in (
        (all_reduce_sum, name, "rank 0 in 'sum of name 0' .*; rank 1 in 'sum of name 1' "),
        (gather_dicts, wrong, "rank 1 gathers"),
        (check_in_sync, module, r"rank 1 differs in 0.weight, 0.bias, 2.weight; "),
        (check_in_sync, more, "rank 1 differs in y; "),
    ):
        with pytest.raises(UserError, match=says):
            call(values, world)
    # From here on, as with NCCL, ranks do not compare their calls.
    world.backend = "without announcements"
    with pytest.raises(UserError, match="names or shapes"):
        all_reduce_sum(name, world)
    world.backend = "gloo"


def check_threads(world):
    """Check that large gathers start no second OpenMP team, which would slow kernels."""
    torch.set_num_threads(2)
    torch.ones(10**6).exp_().sum()  # start the thread pool
    before = psutil.Process().num_threads()
    length = 3 * 16_384 + 5
    gathered = gather_dicts({"x": torch.arange(length + world.rank)}, world)
    assert world.rank == 1 or gathered["x"].tolist() == [*range(length), *range(length + 1)]
    assert all_gather_json(list(range(100_000 + world.rank)), world)[1] == list(range(100_001))
    counts = []
    for _ in range(10):  # the minimum of the counts ignores short-lived threads
        counts.append(psutil.Process().num_threads())
        time.sleep(0.05)
    assert min(counts) <= before
    torch.set_num_threads(1)


def check_wrapping(world):
    """Check that `wrap` gives every rank the parameters of rank 0."""
    module = make_module(seed=world.rank)
    Strategy(StrategyConfig(), world).wrap(module)
    check_in_sync(dict(module.named_parameters()), world)
    assert parameter_hash(module) == parameter_hash(make_module(seed=0))


def check_checkpoints(world, run_dir):
    """Check that all ranks agree on the best value, on paths and on a save that fails."""

    def best():
        return Best(["score"], run_dir / "checkpoints", world)

    def save(iteration, best):
        state = {"iteration": iteration} if world.is_main_process else None
        options = {"keep": 1, "measured": best.measured, "best": best.improved}
        return save_agreed(run_dir, state, world, iteration=iteration, **options)

    first = best()
    assert first.update({"score": 5.0 - world.rank})  # the value of rank 0 counts
    assert save(1, first) == run_dir / "checkpoints/iteration_00000001.pt"
    resumed = best()
    assert resumed.value == 5.0
    assert not resumed.update({"score": 4.0 + 2 * world.rank})
    if world.is_main_process:  # a folder where the file of the next checkpoint should be
        (run_dir / "checkpoints/iteration_00000002.pt/full").mkdir(parents=True)
    with pytest.raises(UserError, match="cannot write checkpoint"):
        save(2, resumed)


def started(out_dir):
    """Open the world; write the process id of this rank to a file for the test."""
    world = open_world("cpu", timeout_s=30)
    setup_logging(out_dir, world.rank)
    Path(out_dir, f"pid_{world.rank}").write_text(str(os.getpid()))
    return world


def wait_for_end_of(rank, out_dir):
    """Wait until the launcher has noticed the end of a rank: then, its process id is free."""
    path, pid = Path(out_dir, f"pid_{rank}"), ""
    while not pid or psutil.pid_exists(int(pid)):
        time.sleep(0.05)
        pid = path.read_text() if path.exists() else ""


def loop(out_dir, way=""):
    """Loop until all ranks agree to stop; `way` may make rank 1 fail, exit or hang."""
    assert set(STOP_SIGNALS) <= BLOCKED, "stop signals must be blocked until their handlers are set"
    if way == "start":  # the launcher dies before this rank opens the store
        Path(out_dir, f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))
        time.sleep(3.0)
    world = started(out_dir)
    if way == "evaluation":  # the run is saved, so stop signals may have their default action
        stop_flag.replace(signal.SIG_DFL)
    while True:
        if world.rank == 1 or way == "fail slowly" or way.endswith("while others hang"):
            end_this_rank(way, world.rank, out_dir)
        time.sleep(0.02)
        if signum := all_reduce_max(stop_flag.signum, world):
            if world.is_main_process:
                Path(out_dir, "saved").write_text(str(signum))
            close_world()
            return 128 + signum


def end_this_rank(way, rank, out_dir):
    if way == "fail slowly":
        if rank == 0:
            raise dist.DistNetworkError("the connection to rank 1 is lost")
        wait_for_end_of(0, out_dir)
        time.sleep(1.0)  # the launcher would now end this rank if it did not wait for a cause
        # The text is longer than a report may be.
        raise RuntimeError("the roof is on fire" + "\0" * 10**6)
    if way == "hang" or rank == 0:
        time.sleep(1000)
    if way == "fail while others hang":
        raise RuntimeError("the roof is on fire")
    if way == "mistake":
        raise UserError("num_envs must be at least 1, got 0")
    if way == "exit while others hang":
        os._exit(0)


def fall_in_turn(out_dir, way=""):
    """End rank 1, silently by default, and then silently rank 0."""
    rank = int(os.environ["RANK"])
    Path(out_dir, f"pid_{rank}").write_text(str(os.getpid()))
    if rank == 0:
        wait_for_end_of(1, out_dir)
    elif way == "fail":
        raise RuntimeError("the roof is on fire")
    os._exit(0)


def hang_at_work(out_dir):
    """Hang in the work of rank 1; rank 0 waits for it and times out first."""
    rank = int(os.environ["RANK"])
    world = open_world("cpu", timeout_s=1.5 + 2 * rank, watches_work=True)
    world.set_phase("work")
    if rank == 1:
        time.sleep(1000)
    all_gather_json(rank, world)


def halt(out_dir):
    """Halt rank 2: rank 1 times out first, then rank 0 loses its link to rank 1."""
    world = open_world("cpu", timeout_s=4 if os.environ["RANK"] == "1" else 15)
    setup_logging(out_dir, world.rank)
    all_gather_json(world.rank, world)  # with the longer time limit of the start-up
    world.set_phase("work")
    if world.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_gather_json(world.rank, world)


def end_slowly(out_dir):
    """Let rank 0 report an error and then hang, while rank 1 exits."""
    if os.environ["RANK"] == "1":
        time.sleep(1.0)
        return
    sys.stdout.flush = lambda: time.sleep(60)
    end_rank("too late")


if __name__ == "__main__":
    mode, *args = sys.argv[1:]
    sys.exit(launch(globals()[mode], tuple(args), num_ranks=2))
