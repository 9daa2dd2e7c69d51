"""Starting, stopping and failing: whatever happens, one clear message and no process left."""

import multiprocessing
import os
import re
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
from rl_dist.launch.config import LaunchConfig, resolve
from rl_dist.launch.rank import run_guarded
from rl_dist.launch.ranks import launch
from rl_dist.machine import available_cores
from rl_dist.process_group.process_ends import ReportPage
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


SIGNALS = [  # to whom: the launcher, the process group or a rank
    ("group", signal.SIGINT),
    pytest.param("launcher", signal.SIGTERM, marks=pytest.mark.slow),
    pytest.param("rank 1", signal.SIGUSR1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("to", "signum"), SIGNALS)
def test_a_stop_signal_lets_all_ranks_save_and_leaves_no_process(tmp_path, to, signum):
    job, ranks = start_job("loop", tmp_path)
    if to == "group":
        os.killpg(job.pid, signum)
    else:
        os.kill({"launcher": job.pid, "rank 1": ranks[1]}[to], signum)
    _, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 128 + signum, stderr
    assert (tmp_path / "saved.json").read_text() == f'{{"signum": {int(signum)}}}'
    assert "Traceback" not in stderr and "Error" not in stderr, stderr
    assert_nobody_left(job.pid)


def test_a_stop_signal_to_one_rank_alone_ends_the_final_evaluation_of_all(tmp_path, capfd):
    def stop_one():
        os.kill(wait_until(lambda: pids_of(tmp_path))[1], signal.SIGTERM)

    threading.Thread(target=stop_one, daemon=True).start()
    assert launch(rl_dist_ranks.evaluate_forever, (str(tmp_path),), num_ranks=2) == 143
    stderr = capfd.readouterr().err
    assert "SIGTERM" in stderr and "error" not in stderr, stderr
    assert not multiprocessing.active_children()


def test_ranks_leave_when_their_launcher_is_killed(tmp_path):
    job, _ = start_job("loop", tmp_path)
    job.kill()
    job.wait()
    assert_nobody_left(job.pid)
    assert (tmp_path / "saved.json").exists()
    job.communicate()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_even_ranks_that_hang(tmp_path):
    job, _ = start_job("hang", tmp_path)
    os.killpg(job.pid, signal.SIGINT)
    time.sleep(1.0)
    assert job.poll() is None
    os.killpg(job.pid, signal.SIGINT)
    _, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 130
    assert "stopped at once" in stderr and "Traceback" not in stderr
    assert_nobody_left(job.pid)


def test_a_failing_rank_ends_the_job_with_its_traceback_and_rank_once(tmp_path, capfd):
    """It is the cause, although another one misses it first and fails, too."""
    assert launch(rl_dist_ranks.close_slowly, (str(tmp_path),), num_ranks=2) == 1
    stderr = capfd.readouterr().err
    assert stderr.count("Traceback") == 1 and "rank 0" not in stderr
    assert stderr.endswith("error: rank 1 failed with RuntimeError: the roof is on fire\n")
    assert "the roof is on fire" in (tmp_path / "logs/rank_1.log").read_text()
    assert not multiprocessing.active_children()


def test_a_users_mistake_found_by_one_rank_is_one_line(tmp_path, capfd):
    assert launch(rl_dist_ranks.loop, (str(tmp_path), "user"), num_ranks=2) == 2
    # it may see the end first
    lines = [line for line in capfd.readouterr().err.splitlines() if "Gloo" not in line]
    assert lines == ["error: num_envs must be at least 1, got 0"]


@pytest.mark.slow
def test_ranks_that_hang_while_another_fails_are_ended_soon(tmp_path, capfd):
    assert launch(rl_dist_ranks.hang, (str(tmp_path), 1), num_ranks=2) == 1
    assert "rank 1 failed" in capfd.readouterr().err
    assert not multiprocessing.active_children()


def test_a_rank_that_dies_without_a_report_is_named(tmp_path, capfd):
    assert launch(rl_dist_ranks.loop, (str(tmp_path), "0", 1), num_ranks=2) == 1
    # gloo may complain first
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert re.fullmatch(r"error: rank 1 \(process \d+\) ended with code 0.*", line)
    assert not multiprocessing.active_children()


def test_of_reports_that_name_no_cause_the_one_that_names_a_rank_is_printed(tmp_path, capfd):
    assert launch(rl_dist_ranks.halt, (str(tmp_path),), num_ranks=3) == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error: " in line]
    assert line.startswith("error: rank 1: waited") and "for rank 2" in line
    assert "connection broke" in (tmp_path / "logs/rank_0.log").read_text()


def test_a_failure_with_a_giant_message_fits_on_the_page_of_a_report():
    page = ReportPage()
    page.write(**vars(run_guarded(rl_dist_ranks.fail_at_length, ())))
    assert page.read()["failed"] and page.read()["summary"].startswith("rank 0 failed")


@pytest.mark.slow
def test_a_rank_that_is_still_ending_itself_is_no_riddle(monkeypatch, capfd):
    monkeypatch.setattr("rl_dist.launch.ranks.FAILED_GRACE_S", 2.0)
    assert launch(rl_dist_ranks.end_slowly, (), num_ranks=2) == 1
    assert capfd.readouterr().err == "error: rank 0: too late\n"


def test_one_rank_and_those_of_torchrun_run_in_this_process(monkeypatch):
    assert launch(lambda: 7, (), num_ranks=1) == 7
    monkeypatch.setenv("RANK", "1")
    assert launch(lambda: 7, (), num_ranks=2) == 7


def test_errors_of_a_single_rank_have_the_same_exit_codes(capfd):
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


def test_threads_are_the_cores_shared_out_and_never_more_than_asked_for(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_per_rank(1) == available_cores()
    assert threads_per_rank(10_000) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_per_rank(1) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "abc")
    assert threads_per_rank(1) == available_cores()
    for limit in ("0", "abc", "-4"):
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
        assert threads_per_rank(1) == available_cores()
        assert f"OMP_NUM_THREADS is '{limit}'" in resolve(LaunchConfig(device="cpu")).message


@pytest.fixture
def machine(monkeypatch):
    def with_gpus(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return with_gpus


@pytest.mark.parametrize(
    ("gpus", "flags", "expected"),
    [
        (0, {}, (1, "cpu")),
        (0, {"num_gpus": 0}, (1, "cpu")),
        (0, {"num_gpus": 4}, (4, "cpu")),
        (2, {}, (2, "cuda")),
        (2, {"num_gpus": 1}, (1, "cuda")),
        (2, {"num_gpus": 0}, (1, "cpu")),
        (2, {"num_gpus": 4, "device": "cpu"}, (4, "cpu")),
        (2, {"device": "cpu"}, (1, "cpu")),
    ],
)
def test_ranks_and_device_follow_the_machine(machine, gpus, flags, expected):
    machine(gpus)
    resolved = resolve(LaunchConfig(**flags))
    assert (resolved.num_ranks, resolved.device_type) == expected
    assert "\n" not in resolved.message
    assert ("no CUDA GPU found" in resolved.message) == (gpus == 0)


@pytest.mark.parametrize(
    ("gpus", "flags", "message"),
    [
        (2, {"num_gpus": 3}, "has 2"),
        (0, {"device": "cuda"}, "no CUDA GPU"),
        (2, {"device": "cuda", "num_gpus": 0}, "contradicts"),
        (0, {"num_gpus": 4, "strategy": "hybrid", "shard_size": 3}, "use --shard_size 2, 4"),
    ],
)
def test_what_the_machine_cannot_do_is_an_error(machine, gpus, flags, message):
    machine(gpus)
    with pytest.raises(ValueError, match=message):
        resolve(LaunchConfig(**flags))


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
