"""Flags, the machine and torchrun determine the number of ranks and their GPUs.

The GPUs are faked.
"""

import pytest
import torch
from fake_gpus import pretend_gpus

from agents.config import RunConfig
from agents.run.choice import parse_training, resumed_config
from rl_dist.errors import UserError
from rl_dist.launch.config import LaunchConfig, resolve
from rl_dist.machine import available_cores
from rl_dist.process_group import world

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def machine(monkeypatch):
    """Return a function that fakes GPUs and, if `ranks` is set, torchrun's variables."""

    def with_gpus(count, ranks=0, local_rank=0):
        pretend_gpus(monkeypatch, count)
        values = (local_rank, ranks, local_rank, ranks, "127.0.0.1", 29500)
        for name, value in zip(VARIABLES, values, strict=True):
            monkeypatch.setenv(name, f"{value}") if ranks else monkeypatch.delenv(name, False)

    return with_gpus


@pytest.mark.parametrize(
    "gpus, torchrun_ranks, flags, num_ranks, gpu_ids",
    [
        (0, 0, {"num_gpus": 4}, 4, None),
        (2, 0, {}, 2, ()),
        (2, 0, {"num_gpus": 0}, 1, None),
        (0, 2, {}, 2, None),
        (4, 0, {"gpu_ids": "3, 1", "num_gpus": 2, "device": "cuda"}, 2, (3, 1)),
        (4, 0, {"strategy": "dp"}, 1, (0, 1, 2, 3)),
        (4, 2, {"gpu_ids": "1,3"}, 2, (1, 3)),
        (4, 1, {"strategy": "auto", "gpu_ids": "0,1"}, 1, (0, 1)),
        (2, 0, {"num_gpus": 3, "backend": "gloo"}, 3, (0, 1, 0)),
        (2, 0, {"num_gpus": 3, "backend": "gloo", "gpu_ids": "1,0"}, 3, (1, 0, 1)),
        (1, 2, {"backend": "gloo"}, 2, (0, 0)),
        (2, 2, {"backend": "gloo"}, 2, ()),
    ],
)
def test_ranks_and_devices_follow_flags_machine_and_torchrun(
    machine, gpus, torchrun_ranks, flags, num_ranks, gpu_ids
):
    machine(gpus, torchrun_ranks)
    resolved = resolve(LaunchConfig(**flags))
    on_gpu = gpu_ids is not None
    assert (resolved.num_ranks, resolved.device_type) == (num_ranks, "cuda" if on_gpu else "cpu")
    assert resolved.gpu_ids == (gpu_ids or ()) and "\n" not in resolved.message
    assert ("Fake 9000" in resolved.message) == on_gpu
    assert ("sharing" in resolved.message) == (num_ranks > gpus > 0)
    assert resolved.backend == flags.get("backend", "nccl" if on_gpu else "gloo")


@pytest.mark.parametrize(
    "gpus, torchrun_ranks, flags, says",
    [
        (2, 0, {"num_gpus": 3}, "num_gpus is 3, .* 1 or 2:"),
        (2, 0, {"num_gpus": 3, "backend": "nccl"}, "num_gpus is 3, .* 1 or 2:"),
        (2, 0, {"num_gpus": 3, "backend": "gloo", "strategy": "dp"}, "num_gpus is 3, .* 1 or 2:"),
        (0, 0, {"backend": "nccl"}, "backend nccl .* GPUs.*: use gloo"),
        (2, 0, {"device": "cuda", "num_gpus": 0}, "num_gpus is 0"),
        (4, 0, {"gpu_ids": "0,2,0"}, "gpu_ids.*'0,2,0'"),
        (4, 0, {"gpu_ids": "0,4"}, "gpu_ids .0,4..* below 4,.*VISIBLE_DEVICES: 5,6"),
        (4, 2, {"gpu_ids": "0,1,2"}, "3 GPU.* 2 rank"),
        (0, 2, {"num_gpus": 3}, "num_gpus is 3, .* 2:"),
        (0, 2, {"max_restarts": 1}, "max_restarts.*torchrun"),
    ],
)
def test_gpus_and_ranks_that_do_not_exist_are_refused(
    machine, monkeypatch, gpus, torchrun_ranks, flags, says
):
    machine(gpus, torchrun_ranks)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    with pytest.raises(ValueError, match=says):
        resolve(LaunchConfig(**flags))


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Make a root directory in which the NVIDIA driver is loaded."""
    file = tmp_path / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5\n")
    monkeypatch.setattr("rl_dist.machine.ROOT", tmp_path)


@pytest.mark.parametrize("flags", [{}, {"num_gpus": 2}])
def test_a_torch_that_cannot_use_the_driver_is_refused(machine, driver, flags):
    machine(0)
    with pytest.raises(ValueError, match="550.54.15.*--device cpu") as refusal:
        resolve(LaunchConfig(**flags))
    assert torch.__version__ in str(refusal.value)


@pytest.mark.parametrize("flags", [{"device": "cpu"}, {"num_gpus": 0}])
def test_a_flag_chooses_the_cpu_of_a_machine_with_gpus(machine, driver, flags):
    machine(0)
    assert resolve(LaunchConfig(**flags)).device_type == "cpu"


def test_a_variable_chooses_the_cpu_of_a_machine_with_gpus(machine, driver, monkeypatch):
    machine(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve(LaunchConfig()).device_type == "cpu"


@pytest.mark.parametrize(
    "flags, shares",
    [({"num_gpus": 4}, True), ({"num_gpus": 4, "device": "cpu"}, False), ({}, False)],
)
def test_ranks_without_the_gpus_that_were_asked_for_are_announced(
    machine, tmp_path, monkeypatch, flags, shares
):
    machine(0)
    monkeypatch.setattr("rl_dist.machine.ROOT", tmp_path)
    message = resolve(LaunchConfig(**flags)).message
    assert ("no GPU: 4 CPU" in message and f"{available_cores()} core" in message) == shares


@pytest.mark.parametrize(
    "visible, gpus, gpu_ids, taken",
    [
        (None, 4, (0, 3), "cuda:3"),
        ("3", 1, (), "cuda:0"),  # index 0 is the only visible GPU
        (None, 1, (0, 3), "needs GPU 3"),
    ],
)
def test_each_rank_uses_the_gpu_at_its_position_in_the_list(
    machine, monkeypatch, visible, gpus, gpu_ids, taken
):
    machine(gpus, ranks=2, local_rank=1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    def stop_here(device):
        raise UserError(str(device))

    monkeypatch.setattr("torch.cuda.set_device", stop_here)
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    monkeypatch.setattr(world, "leave_with_parent", lambda pid: None)
    with pytest.raises(UserError, match=taken):
        world.open_world("cuda", gpu_ids=gpu_ids)


def test_ranks_on_gpus_are_connected_by_the_named_backend(machine, monkeypatch):
    def stop_here(backend, *, device_id, **options):
        raise UserError(f"{backend} {device_id}")

    machine(1)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    monkeypatch.setattr("torch.distributed.init_process_group", stop_here)
    with pytest.raises(UserError, match="gloo None"):
        world.open_world("cuda", backend="gloo")
    world.close_world()


@pytest.mark.parametrize(
    "saved, flag, num_gpus, gpu_ids",
    [
        ({"num_gpus": 2}, "--gpu_ids=1,2,3", -1, "1,2,3"),
        ({"gpu_ids": "0,1"}, "--num_gpus=4", 4, ""),
        ({"gpu_ids": "0,1"}, "--device=cpu", -1, ""),
    ],
)
def test_either_flag_may_select_other_gpus_for_a_resumed_run(saved, flag, num_gpus, gpu_ids):
    config = RunConfig(launch=LaunchConfig(**saved))
    launch = resumed_config(config, parse_training([flag]).given).launch
    assert (launch.num_gpus, launch.gpu_ids) == (num_gpus, gpu_ids)
