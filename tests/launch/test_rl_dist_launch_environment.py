"""Variables and the meeting point: torchrun's variables, other launchers, restarts, hosts."""

import os
import re
import signal
import socket
import subprocess
import threading
import time

import pytest
import rl_dist_ranks
import torch
import torch.distributed as dist
from train_runs import PATIENCE_S, RECALL, REPO, only_error, start, train_here

from rl_dist import errors as console
from rl_dist.launch.config import LaunchConfig, resolve
from rl_dist.launch.ranks import launch, restart_count
from rl_dist.process_group import world
from rl_dist.process_group.join import (
    COPIES,
    check_address,
    free_port,
    open_store,
    part_of_this_start,
)

BOUND = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
OWN = dict.fromkeys([*TORCHRUN, "LOCAL_WORLD_SIZE"])
OWN |= dict.fromkeys(["TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"])
OWN |= dict.fromkeys(["TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", *COPIES])
STANDALONE = ("-m", "torch.distributed.run", "--standalone")


@pytest.fixture
def environment(monkeypatch):
    def set_to(**variables):
        for name, value in (OWN | variables).items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)

    set_to()
    return set_to


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (TORCHRUN | {"WORLD_SIZE": None}, "WORLD_SIZE is not: start with torchrun"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number .*'two'"),
        (TORCHRUN | {"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        (TORCHRUN | {"LOCAL_RANK": "x"}, "LOCAL_RANK must be"),
        (TORCHRUN | {"MASTER_ADDR": None}, "MASTER_ADDR is not"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT must be .* 1..65535, got '70000'"),
        (TORCHRUN | {"RANK": None}, "WORLD_SIZE is 2, but RANK is not set"),
        # copies of a command that know no ranks
        ({"SLURM_NTASKS": "2"}, "SLURM_NTASKS is 2.*deploy/slurm.sbatch.*unset SLURM_NTASKS"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES is 1:4.*torchrun, which reads.*unset PET_NNODES"),
    ],
)
def test_variables_that_contradict_or_would_train_copies_are_named(variables, says, environment):
    environment(**variables)
    with pytest.raises(ValueError, match=says):
        resolve(LaunchConfig(device="cpu"))
    if "RANK" not in variables:
        with pytest.raises(ValueError, match=says):
            launch(int, (7,), num_ranks=1)
        assert launch(int, (7,), num_ranks=1, copies=True) == 7
        environment(**TORCHRUN | variables)
        assert resolve(LaunchConfig(device="cpu")).num_ranks == 2


@pytest.mark.parametrize("local_size", [None, "1", "2"])
def test_ranks_that_may_be_on_several_machines_are_not_bound_to_loopback(
    environment, monkeypatch, local_size
):
    environment(RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE=local_size, **dict.fromkeys(BOUND))
    bound = []

    def nobody_there(**options):
        bound.extend(os.environ.get(name, "") for name in BOUND)
        raise ValueError("nobody there")

    monkeypatch.setattr(world, "open_store", lambda *_: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", nobody_there)
    monkeypatch.setattr(world, "leave_with_parent", lambda parent: None)
    with pytest.raises(ValueError, match="nobody there"):
        world.open_world("cpu")
    assert not set(BOUND) & os.environ.keys()
    assert bound == (["lo", "lo"] if local_size == "2" else ["", ""])


def test_given_threads_win_over_torchruns_variable_and_loopback_is_left_again(environment):
    environment(RANK="0", WORLD_SIZE="1", OMP_NUM_THREADS="1", **dict.fromkeys(BOUND))
    threads = torch.get_num_threads()
    try:
        opened = world.open_world("cpu", threads=3)
        assert torch.get_num_threads() == 3
        bound = [os.environ.get(name) for name in BOUND]
        world.close_world(opened)
        # programs started from here, such as torchrun from a notebook, may need other machines
        assert bound == ["lo", "lo"] and not set(BOUND) & os.environ.keys()
    finally:
        torch.set_num_threads(threads)
    assert resolve(LaunchConfig(device="cpu", threads=3)).threads == 3


SHARING = """
import sys, time, torch
ahead_s, threads, now = float(sys.argv[1]), int(sys.argv[2]), time.time
time.time = lambda: now() + ahead_s  # the host's clock
from rl_dist.process_group.world import close_world, open_world
world = open_world("cpu", threads=threads)
world.log_warnings()
print(torch.get_num_threads())
close_world(world)
"""
CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("local_size", "threads", "expected"),
    [("1", 0, CORES), (None, CORES + 1, CORES + 1)],
)
def test_hosts_that_share_cores_and_clocks_that_differ_are_warned_of(
    environment, local_size, threads, expected
):
    """Agents on one machine each give their rank all cores; mpirun sets no LOCAL_WORLD_SIZE."""
    own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": local_size, "MASTER_PORT": str(free_port())}
    jobs = []
    for rank in range(2):
        environment(**TORCHRUN | own | {"RANK": str(rank)})
        jobs.append(start("-c", SHARING, 100 * rank, threads))
    warnings = []
    for job in jobs:
        out, err = job.communicate(timeout=120)
        assert out.split() == [str(expected)], err
        warnings.append(err)
    assert warnings[1] == "" and len(warnings[0].splitlines()) == 2, warnings
    assert f"{2 * expected} threads of this job share {CORES} core(s)" in warnings[0]
    assert f"--threads {max(1, CORES // 2)}" in warnings[0] and "100 s apart" in warnings[0]


def test_of_torchruns_ranks_the_first_prints_a_mistake_and_the_others_only_what_it_did_not(
    environment, monkeypatch, capsys, tmp_path
):
    def printed_by(rank, patience_s):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        own["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / str(rank) / "error.json")
        environment(**TORCHRUN | own)
        monkeypatch.setattr(console, "FIRST_RANK_S", patience_s)
        assert train_here(monkeypatch, "--num_envs", "-4") == 2
        return capsys.readouterr().err

    assert only_error(printed_by(1, 0.01))  # the first has not failed
    assert only_error(printed_by(0, 1e6))
    assert printed_by(1, 1e6) == ""


@pytest.mark.slow
@pytest.mark.parametrize("alone", ["yes", ""])
def test_under_torchrun_what_ends_a_run_on_one_rank_or_all_is_printed_once(alone, tmp_path):
    script = [REPO / "tests" / "rl_dist_ranks.py", "refuse", tmp_path, alone]
    job = start(*STANDALONE, "--nproc-per-node=2", *script, cwd=tmp_path)
    _, err = job.communicate(timeout=120)
    assert err.splitlines().count("error: this cannot be") == 1 and job.returncode == 1


def test_torchrun_with_restarts_wants_a_name_for_the_run(
    environment, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    environment(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", TORCHELASTIC_MAX_RESTARTS="1")
    assert train_here(monkeypatch, *RECALL) == 2
    assert "--max-restarts needs --run_dir DIR" in only_error(capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


# ---- where to meet


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_an_address_where_ranks_cannot_meet_is_refused_with_the_fix(environment, taken_port):
    for host, port in (
        ("127.0.0.1", taken_port),
        ("no-such-host.invalid", 29500),
        ("192.0.2.7", 29500),  # of another machine
    ):
        says = rf"MASTER_ADDR '{host}', MASTER_PORT {port}: .*such as \d+"
        with pytest.raises(ValueError, match=says):
            check_address(host, port, hosted_here=True)
    check_address("127.0.0.1", taken_port, hosted_here=False)
    # our own launcher looks before it starts ranks
    environment(MASTER_PORT=str(taken_port))
    with pytest.raises(ValueError, match=f"MASTER_PORT {taken_port}: "):
        resolve(LaunchConfig(num_gpus=2, device="cpu"))
    assert resolve(LaunchConfig(num_gpus=1, device="cpu")).num_ranks == 1  # it meets nobody
    port = free_port()
    environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    assert f"MASTER_PORT {port}" in resolve(LaunchConfig(num_gpus=2, device="cpu")).message


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_meets_nobody_says_where_it_looked(environment, rank, capfd):
    port = str(free_port())
    environment(**TORCHRUN | {"RANK": str(rank), "MASTER_PORT": port})
    says = f"rank {rank} did not meet all 2 ranks at MASTER_ADDR 127.0.0.1, MASTER_PORT {port}"
    with pytest.raises(ValueError, match=rf"{says} within 1 s \(--startup_timeout\)"):
        open_store(rank, 2, "", 1.0)
    assert capfd.readouterr().err == ""  # and torch adds no pages


def test_a_rank_that_meets_the_others_but_never_connects_is_named(environment):
    """Rank 1 meets rank 0 in the store, and then hangs."""
    port = str(free_port())
    environment(**TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": port})
    opening = "world.open_world('cpu', startup_timeout_s=2)"
    job = start("-c", f"from rl_dist.process_group import world; {opening}")
    environment(**TORCHRUN | {"MASTER_PORT": port})
    store = open_store(1, 2, "", 60.0)
    _, err = job.communicate(timeout=PATIENCE_S)
    line = err.splitlines()[-1]
    assert "in 'connection of the ranks'" in line and "rank 1, which never came" in line
    assert "(--startup_timeout 2)" in line and job.returncode == 1
    del store


def test_ranks_share_a_part_of_the_store_that_no_dead_rank_has_written_to():
    store, size, parts = dist.HashStore(), 3, {}

    def meet(rank):
        parts[rank] = part_of_this_start(store, rank, size, time.monotonic() + 60)

    for turn in range(2):  # the second finds everything that the first has left
        ranks = [threading.Thread(target=meet, args=(rank,)) for rank in reversed(range(size))]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert not parts[0].check(["who"])
        parts[2].set("who", f"start {turn}")
        assert [parts[rank].get("who") for rank in range(size)] == [f"start {turn}".encode()] * size


STOPPED = """
import sys
from rl_dist.launch.ranks import launch
def stop():
    print("stopped", flush=True)
    return 143
sys.exit(launch(stop, (), 1))
"""


def test_a_rank_that_others_have_stopped_waits_for_the_signal_of_its_own_torchrun(environment):
    """Else torchrun would count a restart, or give up, where a host has only come or gone."""
    environment(RANK="0", WORLD_SIZE="1", TORCHELASTIC_RUN_ID="job")
    job = start("-c", STOPPED)
    assert job.stdout.readline() == "stopped\n"
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(0.5)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 143


@pytest.mark.slow
@pytest.mark.parametrize("port", [None, "free"])
def test_ranks_meet_at_the_users_address_or_else_open_no_port(
    port, environment, tmp_path, monkeypatch
):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    port = port and str(free_port())
    environment(MASTER_PORT=port)
    assert launch(rl_dist_ranks.report_environment, (str(tmp_path),), num_ranks=2) == 0
    for rank in range(2):
        found = (tmp_path / f"variables_{rank}").read_text()
        assert found == (f"127.0.0.1 {port} INFO" if port else "- - INFO")


# ---- restarts


def fall(times):
    if restart_count() < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0


@pytest.mark.parametrize(("times", "code"), [(1, 0), pytest.param(9, 1, marks=pytest.mark.slow)])
def test_one_rank_restarts_too_and_only_as_many_times_as_it_may(times, code, capfd):
    assert launch(fall, (times,), num_ranks=1, max_restarts=1) == code
    died = r"rank 0 \(process \d+\) was ended by SIGKILL"
    error = f"error: {died}\n" * code
    assert re.fullmatch(rf"{died}: restart 1 of 1\n{error}", capfd.readouterr().err)
