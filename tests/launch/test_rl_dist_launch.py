"""Starting, stopping and failing: whatever happens, one clear message and no process left."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import rl_dist_ranks
import torch
from train_runs import PATIENCE_S, REPO, assert_nobody_left, start, wait_until

from rl_dist.errors import UserError
from rl_dist.launch.ranks import launch, store_in_memory
from rl_dist.machine import available_cores
from rl_dist.process_group.join import open_store
from rl_dist.process_group.world import close_world, open_world, stop_flag, threads_per_rank


def pids_of(folder):
    """Process ids of the ranks, in rank order, once both work."""
    files = [Path(folder, f"pid_{rank}") for rank in range(2)]
    return all(path.exists() and path.read_text() for path in files) and [
        int(path.read_text()) for path in files
    ]


def start_job(mode, out_dir):
    """Start a two-rank job in its own process group and wait until both ranks work."""
    job = start(REPO / "tests/rl_dist_ranks.py", mode, out_dir)
    return job, wait_until(lambda: pids_of(out_dir), job)


@pytest.mark.parametrize(
    ("to", "signum"),
    [
        ("group", signal.SIGINT),
        ("launcher", signal.SIGKILL),  # the ranks then get SIGTERM
        pytest.param("launcher", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("rank 1", signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_stop_signal_or_a_killed_launcher_lets_all_ranks_save_and_leaves_no_process(
    tmp_path, to, signum
):
    job, ranks = start_job("loop", tmp_path)
    if to == "group":
        os.killpg(job.pid, signum)
    else:
        os.kill({"launcher": job.pid, "rank 1": ranks[1]}[to], signum)
    _, stderr = job.communicate(timeout=PATIENCE_S)
    assert_nobody_left(job.pid)
    killed = signum == signal.SIGKILL
    assert job.returncode == (-signum if killed else 128 + signum), stderr
    saved = signal.SIGTERM if killed else signum
    assert (tmp_path / "saved.json").read_text() == f'{{"signum": {int(saved)}}}'
    assert "Traceback" not in stderr and "Error" not in stderr, stderr


def test_a_stop_signal_to_one_rank_alone_ends_the_final_evaluation_of_all(tmp_path, capfd):
    def stop_one():
        os.kill(wait_until(lambda: pids_of(tmp_path))[1], signal.SIGTERM)

    threading.Thread(target=stop_one, daemon=True).start()
    assert launch(rl_dist_ranks.evaluate_forever, (str(tmp_path),), num_ranks=2) == 143
    stderr = capfd.readouterr().err
    assert "SIGTERM" in stderr and "error" not in stderr, stderr
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_even_ranks_that_hang(tmp_path):
    job, _ = start_job("hang", tmp_path)
    os.killpg(job.pid, signal.SIGINT)
    time.sleep(1.0)
    assert job.poll() is None
    os.killpg(job.pid, signal.SIGINT)
    _, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 130
    assert "stopped immediately" in stderr and "Traceback" not in stderr
    assert_nobody_left(job.pid)


@pytest.mark.parametrize(
    ("work", "args", "ranks", "code", "says", "tracebacks"),
    [
        # rank 1 is the cause, although rank 0 misses it first and fails, too
        ("loop", ["fail slowly"], 2, 1, "rank 1 failed with RuntimeError: the roof", 1),
        ("loop", ["fail at length"], 2, 1, "rank 1 failed with RuntimeError: the roof", 0),
        ("loop", ["mistake"], 2, 2, "num_envs must be at least 1, got 0", 0),
        ("loop", ["exit"], 2, 1, "ended with code 0", 0),
        # if no report names a cause, the one that names a rank is shown
        ("halt", [], 3, 1, "rank 1: waited", 0),
        pytest.param("hang", [1], 2, 1, "rank 1 failed", 1, marks=pytest.mark.slow),
        pytest.param("end_slowly", None, 2, 1, "rank 0: too late", 0, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_or_dies_ends_the_job_and_is_named_in_one_line(
    work, args, ranks, code, says, tracebacks, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr("rl_dist.launch.ranks.FAILED_GRACE_S", 2.0)
    args = () if args is None else (str(tmp_path), *args)
    restarts = code - 1  # with code 2, a mistake of the user, there is none
    assert (
        launch(getattr(rl_dist_ranks, work), args, num_ranks=ranks, max_restarts=restarts) == code
    )
    stderr = capfd.readouterr().err
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert says in line and stderr.count("Traceback (") == tracebacks and "restart" not in stderr
    assert not multiprocessing.active_children()
    if work == "halt":
        assert "for rank 2" in line
        assert "connection broke" in (tmp_path / "logs/rank_0.log").read_text()


def test_errors_of_a_single_rank_have_the_same_exit_codes(monkeypatch, capfd):
    def fail(error):
        raise error

    assert launch(fail, (UserError("too many cooks"),), num_ranks=1) == 2
    assert launch(fail, (UserError("no disk", exit_code=1),), num_ranks=1) == 1
    assert launch(fail, (ValueError("two\nlines"),), num_ranks=1) == 2
    assert capfd.readouterr().err == "error: too many cooks\nerror: no disk\nerror: two lines\n"
    assert launch(fail, (KeyError("lost"),), num_ranks=1) == 1
    assert "Traceback" in capfd.readouterr().err
    for code in (0, 3):
        assert launch(sys.exit, (code,), num_ranks=1) == 1
    assert launch(lambda: 7, (), num_ranks=1) == 7
    monkeypatch.setenv("RANK", "1")  # those of torchrun run in their process
    assert launch(lambda: 7, (), num_ranks=2) == 7


def test_a_stop_signal_only_sets_a_flag_and_handlers_are_put_back():
    def stopped_by(signum):
        os.kill(os.getpid(), signum)
        return stop_flag.signum

    before = signal.getsignal(signal.SIGTERM)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        assert launch(stopped_by, (signum,), num_ranks=1) == signum
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_world_of_one_rank_has_an_open_process_group():
    world = open_world("cpu")
    assert torch.distributed.is_initialized()
    assert (world.rank, world.size, world.is_main_process, world.backend) == (0, 1, True, "gloo")
    for _ in range(2):
        close_world(world)
        assert not torch.distributed.is_initialized()


def test_threads_are_the_cores_shared_out_and_never_more_than_the_limit(monkeypatch):
    for limit, ranks, threads in (
        ("", 1, available_cores()),
        ("", 10_000, 1),
        ("1", 1, 1),
        *((wrong, 1, available_cores()) for wrong in ("0", "abc", "-4")),
    ):
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
        assert threads_per_rank(ranks) == threads


@pytest.mark.parametrize(
    ("by_user", "expected"),
    [
        ({}, ("PASSIVE", "1000")),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None)),
        ({"GOMP_SPINCOUNT": "5"}, (None, "5")),
    ],
)
def test_waiting_threads_yield_unless_the_user_has_decided(by_user, expected):
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    code = f"import os, sys, rl_dist; print([os.environ.get(name) for name in {names}]);"
    code += "print('torch' in sys.modules)"  # OpenMP reads them when torch is loaded
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, env=inherited | by_user, capture_output=True, text=True).stdout
    assert out.splitlines() == [str(list(expected)), "False"]


def test_ranks_meet_though_the_disk_of_their_folder_is_full(small_disk, monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    folder = small_disk("4k")
    with store_in_memory(f"{folder}/store_0"):
        first, second = (open_store(rank, 2, str(folder), 20.0) for rank in range(2))
        first.set("key", "x" * 20_000)
        assert second.get("key") == b"x" * 20_000
