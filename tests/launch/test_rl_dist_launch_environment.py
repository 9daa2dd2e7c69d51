"""Environment variables of torchrun and other launchers; how ranks connect."""

import os
import re
import signal
import subprocess
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port
from train_runs import PATIENCE_S, RECALL, only_error, printed_error, start, train_here

from rl_dist.launch.config import LaunchConfig, resolve
from rl_dist.process_group import world
from rl_dist.process_group.join import RANK_VARIABLES, open_store, part_of_this_start

BOUND = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.fixture
def environment(monkeypatch):
    def set_to(**variables):
        for name in list(os.environ):
            if name in BOUND or re.fullmatch(RANK_VARIABLES, name):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    set_to()
    return set_to


@pytest.mark.parametrize(
    "variables, says",
    [
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number, .*'two'"),
        (TORCHRUN | {"RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
        (TORCHRUN | {"MASTER_ADDR": None}, "MASTER_ADDR '' has no address"),
        (TORCHRUN | {"MASTER_PORT": "port"}, "MASTER_PORT must be .*, got .port."),
        (TORCHRUN | {"RANK": None}, "WORLD_SIZE is 2, but RANK is not set"),
        # A launcher started several copies of the command without numbering them as ranks.
        (SRUN, "SLURM_STEP_NUM_TASKS is 2.*deploy/slurm.sbatch.*unset SLURM_STEP_NUM_TASKS"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES is 1:4.*unset PET_NNODES"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "unset OMPI_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "unset PMI_SIZE"),
        ({"PMIX_RANK": "0"}, "unset PMIX_RANK"),  # the number of copies is unknown
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE must be .*, got 'x'"),
        (TORCHRUN | {"MASTER_ADDR": "h" * 70}, "MASTER_ADDR 'hhh.* has no address"),
        (TORCHRUN | {"MASTER_ADDR": "::1"}, ""),
        (TORCHRUN, ""),
        ({"SLURM_NPROCS": "2", "SLURM_PROCID": "0", "SLURM_STEPID": "0"}, "SLURM_NPROCS is 2"),
        (TORCHRUN | SRUN, ""),
    ],
)
def test_contradictory_variables_and_those_of_uncoordinated_copies_are_named(
    variables, says, environment
):
    environment(**variables)
    if says:
        with pytest.raises(ValueError, match=says):
            resolve(LaunchConfig(device="cpu"))
    else:
        assert resolve(LaunchConfig(device="cpu")).num_ranks == 2


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},  # a batch script of SLURM, without srun
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
    ],
)
def test_a_single_process_inside_an_allocation_trains(environment, variables):
    environment(**variables)
    assert resolve(LaunchConfig(device="cpu")).num_ranks == 1


@pytest.mark.parametrize("value", ["nosuch0", "^lo,docker0", "lo,nosuch0"])
def test_an_interface_that_does_not_exist_is_named_before_anything_starts(environment, value):
    environment(GLOO_SOCKET_IFNAME=value)
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME is .* lo") as refusal:
        resolve(LaunchConfig(device="cpu", num_gpus=2))
    assert repr(value) in str(refusal.value)
    # Programs that do not call `resolve` get the same message.
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME"):
        world.open_world("cpu")
    world.close_world()


@pytest.mark.parametrize("local_size", [None, "1", "2"])
def test_ranks_that_may_be_on_several_machines_are_not_bound_to_loopback(
    environment, monkeypatch, local_size
):
    environment(RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE=local_size)
    bound = []

    def nobody_there(*_, **options):
        bound.extend(os.environ.get(name, "") for name in BOUND)
        raise ValueError("nobody there")

    monkeypatch.setattr(world, "open_store", lambda *_: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", nobody_there)
    monkeypatch.setattr(world, "leave_with_parent", lambda parent: None)
    with pytest.raises(ValueError, match="nobody there"):
        world.open_world("cpu")
    world.close_world()
    # Child processes must not inherit the loopback setting: if a notebook starts torchrun, for
    # example, its ranks may be on several machines.
    assert not set(BOUND) & os.environ.keys()
    assert bound == (["lo", "lo"] if local_size == "2" else ["", ""])


@pytest.mark.parametrize("local_size", [None, "3"])
def test_given_threads_win_over_torchruns_variable(environment, local_size):
    environment(RANK="0", WORLD_SIZE="1", OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE=local_size)
    threads = torch.get_num_threads()
    assert world.open_world("cpu", threads=threads + 2).local_size == int(local_size or 1)
    assert torch.get_num_threads() == threads + 2
    world.close_world()
    assert torch.get_num_threads() == threads


def test_only_the_first_of_torchruns_ranks_prints_a_mistake_that_all_share(
    environment, capsys, tmp_path
):
    (tmp_path / "attempt_0").mkdir()
    for rank in (1, 0):
        error_file = str(tmp_path / "attempt_0" / str(rank) / "error.json")
        numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment(**TORCHRUN | numbers, TORCHELASTIC_ERROR_FILE=error_file)
        assert train_here("--num_envs", "-4") == 2
        printed = capsys.readouterr().err
        assert only_error(printed) if rank == 1 else printed == ""


def test_torchrun_with_restarts_needs_a_run_directory(environment, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    environment(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", TORCHELASTIC_MAX_RESTARTS="1")
    assert train_here(*RECALL) == 2
    assert "--max-restarts needs --run_dir DIR" in printed_error(capsys)
    assert not list(tmp_path.iterdir())


# ---- how ranks find each other through the store


# 192.0.2.1 belongs to no machine (RFC 5737).
@pytest.mark.parametrize("rank, host", [(0, "127.0.0.1"), (1, "127.0.0.1"), (0, "192.0.2.1")])
def test_a_rank_that_finds_no_other_rank_names_the_address_that_it_tried(
    environment, rank, host, capfd
):
    port = str(get_free_port())
    environment(**TORCHRUN | {"RANK": str(rank), "MASTER_ADDR": host, "MASTER_PORT": port})
    says = f"rank {rank} .*MASTER_ADDR {host}, MASTER_PORT {port} within 1 s"
    with pytest.raises(ValueError, match=says):
        open_store(rank, 2, 1.0)
    assert capfd.readouterr().err == ""  # torch must print nothing


def test_a_rank_that_joins_the_store_but_never_connects_is_named(environment):
    """Rank 1 joins the store of rank 0, but never opens its connections."""
    variables = TORCHRUN | {"MASTER_PORT": str(get_free_port())}
    environment(**variables | {"RANK": "0", "LOCAL_RANK": "0"})
    opening = "world.open_world('cpu', startup_timeout_s=2)"
    job = start("-c", f"from rl_dist.process_group import world; {opening}")
    environment(**variables)
    store = open_store(1, 2, 60.0)
    _, stderr = job.communicate(timeout=PATIENCE_S)
    line = stderr.splitlines()[-1]
    assert "in 'connection of the ranks'" in line and "rank 1, which never came" in line
    assert "(--startup_timeout 2)" in line and job.returncode == 1
    del store


def test_ranks_use_a_part_of_the_store_without_keys_of_dead_ranks():
    store, size, parts = dist.HashStore(), 3, {}

    def meet(rank):
        parts[rank] = part_of_this_start(store, rank, size, time.monotonic() + 60)

    for turn in range(2):  # in the second start, the store still holds all keys of the first start
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


def test_a_rank_stopped_by_others_waits_for_the_signal_of_its_torchrun(environment):
    """A rank that exits before torchrun has sent it a signal would count as failed.

    Torchrun would then use up a restart or end the job, although a host has only joined or left.
    """
    environment(RANK="0", WORLD_SIZE="1", TORCHELASTIC_RUN_ID="job")
    job = start("-c", STOPPED)
    assert job.stdout.readline() == "stopped\n"
    with pytest.raises(subprocess.TimeoutExpired):
        job.wait(0.5)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 143
