"""Which GPUs a job takes: --gpu_ids, dp, ranks of torchrun. No GPU is used here."""

import pytest
import torch
from torch.distributed import HashStore
from train_runs import only_error, train_here

from agents.run.config import SECTIONS, RunConfig
from agents.run.resumed import resumed_config
from rl_dist.errors import UserError
from rl_dist.flags import parse_flags
from rl_dist.launch.config import LaunchConfig, resolve
from rl_dist.process_group.world import _refuse_shared_gpu, open_world

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def machine(monkeypatch):
    def with_gpus(count, visible="", ranks=0):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        values = ("0", f"{ranks}", "0", f"{ranks}", "127.0.0.1", "29500")
        for name, value in zip(VARIABLES, values, strict=True):
            monkeypatch.setenv(name, value) if ranks else monkeypatch.delenv(name, raising=False)

    return with_gpus


@pytest.mark.parametrize(
    ("ranks_of_torchrun", "flags", "num_ranks", "gpu_ids"),
    [
        (0, {"gpu_ids": "0,2,3"}, 3, (0, 2, 3)),
        (0, {"gpu_ids": "3, 1", "num_gpus": 2, "device": "cuda"}, 2, (3, 1)),
        (0, {"num_gpus": 2}, 2, ()),
        (0, {"strategy": "dp"}, 1, (0, 1, 2, 3)),
        (0, {"strategy": "dp", "num_gpus": 2}, 1, (0, 1)),
        (0, {"strategy": "auto"}, 4, ()),
        (2, {"gpu_ids": "1,3"}, 2, (1, 3)),
        (1, {"strategy": "dp"}, 1, (0, 1, 2, 3)),
        (1, {"strategy": "auto", "gpu_ids": "0,1"}, 1, (0, 1)),
    ],
)
def test_ranks_follow_the_gpus_that_are_named(
    machine, ranks_of_torchrun, flags, num_ranks, gpu_ids
):
    machine(4, ranks=ranks_of_torchrun)
    resolved = resolve(LaunchConfig(**flags))
    assert (resolved.num_ranks, resolved.gpu_ids) == (num_ranks, gpu_ids)
    assert resolved.device_type == "cuda"
    named = f"GPU {', '.join(map(str, gpu_ids))}: Card {gpu_ids[0]}" if gpu_ids else "Card 0"
    assert named in resolved.message


@pytest.mark.parametrize(
    ("gpus", "ranks_of_torchrun", "flags", "words"),
    [
        (4, 0, {"gpu_ids": "0,2,0"}, "gpu_ids has 0 more than once"),
        (4, 0, {"gpu_ids": "0,,2"}, "whole numbers with commas between"),
        (4, 0, {"gpu_ids": "0,4"}, r"gpu_ids has 4, but torch sees 0\.\.3"),
        (0, 0, {"gpu_ids": "0"}, "torch sees no CUDA GPU"),
        (4, 0, {"gpu_ids": "0,2", "num_gpus": 3}, "names 2 GPU.s., but num_gpus is 3"),
        (4, 0, {"gpu_ids": "0", "device": "cpu"}, "contradicts device cpu"),
        (4, 0, {"gpu_ids": "0", "num_gpus": 0}, "contradicts num_gpus 0"),
        (4, 0, {"gpu_ids": "0,1", "strategy": "none"}, "none works in one process"),
        (4, 0, {"gpu_ids": "2", "strategy": "dp"}, "needs at least 2 GPUs, got 1"),
        (0, 0, {"strategy": "dp", "num_gpus": 2}, "there is none here"),
        (4, 2, {"gpu_ids": "0,1,2"}, r"names 3 GPU.s., but the launcher started 2 rank"),
        (4, 2, {"strategy": "dp"}, "works in one process, got 2 ranks"),
    ],
)
def test_gpus_that_cannot_be_taken_are_refused(machine, gpus, ranks_of_torchrun, flags, words):
    machine(gpus, ranks=ranks_of_torchrun)
    with pytest.raises(ValueError, match=words) as caught:
        resolve(LaunchConfig(**flags))
    assert "\n" not in str(caught.value)


def test_ids_count_the_gpus_that_the_variable_leaves_visible(machine):
    machine(2, visible="5,6")
    assert resolve(LaunchConfig(gpu_ids="1")).gpu_ids == (1,)
    with pytest.raises(ValueError, match="has 5, but torch sees 0..1 in CUDA_VISIBLE_DEVICES=5,6"):
        resolve(LaunchConfig(gpu_ids="5"))


@pytest.mark.parametrize(("local_rank", "gpu_ids", "gpu"), [(1, (0, 3), 3), (1, (), 1)])
def test_each_rank_takes_the_gpu_at_its_place_in_the_list(
    machine, monkeypatch, local_rank, gpu_ids, gpu
):
    machine(4, ranks=2)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))

    def stop_here(device):
        raise InterruptedError(str(device))

    monkeypatch.setattr(torch.cuda, "set_device", stop_here)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr("rl_dist.process_group.world.die_with_parent", lambda parent: None)
    monkeypatch.setattr("rl_dist.process_group.world.leave_when_orphaned", lambda *_: None)
    with pytest.raises(InterruptedError, match=f"cuda:{gpu}"):
        open_world("cuda", gpu_ids=gpu_ids)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError, match="needs its own GPU, but torch sees 1"):
        open_world("cuda", gpu_ids=gpu_ids)


def test_a_rank_takes_the_only_gpu_that_it_is_let_see(machine, monkeypatch):
    machine(1, visible="3", ranks=2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr("rl_dist.process_group.world.leave_with_parent", lambda parent: None)

    def stop_here(device):
        raise InterruptedError(str(device))

    monkeypatch.setattr(torch.cuda, "set_device", stop_here)
    with pytest.raises(InterruptedError, match="cuda:0"):
        open_world("cuda")


def test_two_ranks_with_the_same_gpu_are_refused_by_number():
    store = HashStore()
    for rank, uuid in enumerate(("GPU-a", "GPU-b")):
        _refuse_shared_gpu(uuid, store, rank)
    with pytest.raises(UserError, match="ranks 1 and 2 have the same GPU"):
        _refuse_shared_gpu("GPU-b", store, 2)


def resumed(saved, *argv):
    config = RunConfig(launch=LaunchConfig(**saved))
    return resumed_config(config, parse_flags(SECTIONS, argv, description="")).launch


def test_a_resumed_run_may_take_other_gpus_by_either_flag():
    named = resumed({"num_gpus": 2}, "--gpu_ids", "1,2,3")
    assert (named.num_gpus, named.gpu_ids) == (-1, "1,2,3")
    counted = resumed({"gpu_ids": "0,1"}, "--num_gpus", "4")
    assert (counted.num_gpus, counted.gpu_ids) == (4, "")
    assert resumed({"gpu_ids": "0,1"}, "--device", "cpu").gpu_ids == ""
    assert resumed({"gpu_ids": "0,1"}, "--num_episodes", "9").gpu_ids == "0,1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_command_refuses_in_one_line_and_writes_nothing(tmp_path, monkeypatch, capfd):
    run_dir = tmp_path / "run"
    assert train_here(monkeypatch, "--strategy", "dp", "--run_dir", run_dir) == 2
    assert "strategy dp needs CUDA GPUs" in only_error(capfd.readouterr().err)
    assert not run_dir.exists()
