"""Verdicts of the setup checker on injected facts: every one, with its fix."""

import dataclasses
import types

import pytest
from fake_nvml import FakeNvml, NVMLError
from fake_nvml import gpu as fake_gpu

from rl_dist.hardware.gpus import (
    Gpu,
    GpuInfo,
    GpuLink,
    GpuProcess,
    Nvml,
    read_gpus,
)
from rl_dist.hardware.report import (
    Disk,
    Facts,
    Host,
    Precision,
    Software,
    describe_gpu,
    duration,
    print_gpu_info,
    read_disk,
)
from rl_dist.launch.bench import Reductions
from rl_dist.setup_check.checks import Plan, check_facts
from rl_dist.setup_check.measured import (
    MemoryFigures,
    TimeFigures,
    command_line,
    communication_check,
    memory_checks,
    time_checks,
    worst,
)

GIB = 2**30
H100 = Gpu(
    index=0, torch_index=0, name="NVIDIA H100", uuid="GPU-0", compute_capability="9.0",
    memory_total_bytes=80 * GIB, memory_free_bytes=79 * GIB, utilization_percent=0,
    temperature_c=40, compute_mode="default",
)  # fmt: skip
SECOND = dataclasses.replace(H100, index=1, torch_index=1, uuid="GPU-1")
NO_GPU = GpuInfo((), (), None, None, None, "NVML does not open: library not found")
GPUS = GpuInfo(
    (H100, SECOND), (GpuLink(0, 1, True, True, "one PCIe switch"),), "550.54", (12, 4), None, ""
)
CPU_BUILD = Software("3.11.7", "2.13.0+cpu", None, None, None, None, True, ())
CUDA_BUILD = Software(
    "3.11.7", "2.13.0+cu126", "12.6", None, "90800", "2.27.3", True, ("sm_80", "sm_90")
)
HOST = Host("box", "Linux", 8, 8, 0.1, 8, 64 * GIB, 60 * GIB, GIB // 4, GIB, GIB, 1024, "", "", "")
FACTS = Facts(
    CPU_BUILD, NO_GPU, Precision(None, False, None), HOST, Disk("/data", 100 * GIB, 0.01, ""), {}
)
GPU_FACTS = dataclasses.replace(
    FACTS, software=CUDA_BUILD, gpu=GPUS, precision=Precision(True, True, True)
)
CPU_PLAN = Plan(2, "cpu")
GPU_PLAN = Plan(2, "cuda", checkpoint_bytes=GIB)
ASKED_PLAN = Plan(1, "cpu", "cuda")
ONE_GPU_PLAN = Plan(1, "cuda")


def changed(facts, **sections):
    """Facts with fields of some sections replaced."""
    parts = {
        name: dataclasses.replace(getattr(facts, name), **fields)
        for name, fields in sections.items()
    }
    return dataclasses.replace(facts, **parts)


def cpu(**sections):
    return changed(FACTS, **sections)


def gpu(**sections):
    return changed(GPU_FACTS, **sections)


def with_first_gpu(**fields):
    return gpu(gpu={"gpus": (dataclasses.replace(H100, **fields), SECOND)})


def with_variable(name, value, facts=FACTS):
    return dataclasses.replace(facts, environment={name: value})


def all_checks(facts, plan):
    return [check for found in check_facts(facts, plan, own_pid=42).values() for check in found]


def verdicts(checks, name):
    (found,) = (check for check in checks if check.name == name)
    # every complaint has its fix, nothing else has one
    assert bool(found.fix) == (found.verdict != "ok")
    return found.verdict, f"{found.measured} -> {found.fix}"


def test_a_healthy_machine_has_nothing_but_oks():
    for facts, plan in ((FACTS, CPU_PLAN), (GPU_FACTS, GPU_PLAN)):
        checks = all_checks(facts, plan)
        assert {check.verdict for check in checks} == {"ok"}, checks
    assert worst([]) == worst(checks) == "ok"


OTHERS = {"processes": (GpuProcess(7, GIB),)}
EXCLUSIVE = {"compute_mode": "exclusive process"}
HIDDEN = {"torch_index": None, "temperature_c": 99, "compute_mode": "prohibited", **OTHERS}
SECOND_IS_PROHIBITED = gpu(
    gpu={"gpus": (H100, dataclasses.replace(SECOND, compute_mode="prohibited"))}
)
FREE = {"address": "127.0.0.1:29500"}
TAKEN = FREE | {"address_error": "MASTER_PORT 29500 is taken"}
NO_ACCESS = {"links": (GpuLink(0, 1, False, False, "across CPU sockets"),)}


def built_for(*architectures, capability):
    facts = with_first_gpu(compute_capability=capability)
    return changed(facts, software={"architectures": architectures})


@pytest.mark.parametrize(
    ("name", "verdict", "words", "plan", "facts"),
    [
        # software
        ("Python", "problem", "3.11 or newer", CPU_PLAN, cpu(software={"python": "3.10.2"})),
        ("torch", "problem", "torch>=2.10", CPU_PLAN, cpu(software={"torch": "2.9rc1"})),
        ("CUDA build", "problem", "pytorch.org", ASKED_PLAN, cpu(gpu={"gpus": (H100,)})),
        ("CUDA build", "warning", "CUDA 11.4", GPU_PLAN, gpu(gpu={"driver_cuda": (11, 4)})),
        ("CUDA build", "warning", "nvidia-smi", GPU_PLAN, gpu(gpu={"torch_error": "no init"})),
        ("CUDA build", "warning", "--gpus all", CPU_PLAN, gpu(gpu=vars(NO_GPU))),
        ("NCCL", "problem", "cannot train together", GPU_PLAN, gpu(software={"nccl": None})),
        ("cuDNN", "warning", "fast kernels", GPU_PLAN, gpu(software={"cudnn": None})),
        ("gloo", "problem", "only one rank", CPU_PLAN, cpu(software={"gloo": False})),
        ("ROCm build", "ok", "RCCL", GPU_PLAN, cpu(software={"rocm_build": "6.4"})),
        # one GPU
        ("GPU 0", "problem", "GPU is lost", GPU_PLAN, with_first_gpu(error="GPU is lost")),
        ("GPU 0", "problem", "-c DEFAULT", GPU_PLAN, with_first_gpu(compute_mode="prohibited")),
        ("GPU 0", "problem", "taken by process 7", GPU_PLAN, with_first_gpu(**EXCLUSIVE, **OTHERS)),
        ("GPU 0", "warning", "-c DEFAULT", GPU_PLAN, with_first_gpu(**EXCLUSIVE)),
        ("GPU 0", "warning", "cooling", GPU_PLAN, with_first_gpu(temperature_c=90)),
        ("GPU 0", "warning", "in use by process 7", GPU_PLAN, with_first_gpu(**OTHERS)),
        ("GPU 0", "ok", "", GPU_PLAN, with_first_gpu(processes=(GpuProcess(42, GIB),))),  # our own
        ("GPU 0", "warning", "host's memory", GPU_PLAN, with_first_gpu(integrated=True)),
        ("GPU 0", "warning", "CUDA_VISIBLE_DEVICES", GPU_PLAN, with_first_gpu(torch_index=None)),
        ("GPU 0", "warning", "CUDA_VISIBLE_DEVICES", GPU_PLAN, with_first_gpu(**HIDDEN)),
        ("GPU 0", "ok", "", GPU_PLAN,
         with_variable("CUDA_VISIBLE_DEVICES", "1", with_first_gpu(**HIDDEN))),
        ("GPU 0", "ok", "", ONE_GPU_PLAN, built_for("sm_80", capability="8.6")),
        ("GPU 0", "problem", "no kernels", ONE_GPU_PLAN, built_for("sm_86", capability="8.0")),
        ("GPU 0", "ok", "", ONE_GPU_PLAN, built_for("sm_80", "compute_80", capability="12.0")),
        ("GPU 1", "ok", "", GPU_PLAN, with_first_gpu(error="GPU is lost")),  # not hidden by it
        ("GPU 1", "problem", "prohibited", GPU_PLAN, SECOND_IS_PROHIBITED),
        ("GPU 1", "warning", "prohibited", ONE_GPU_PLAN, SECOND_IS_PROHIBITED),  # not needed
        # all of them
        ("models", "warning", "unequal: NVIDIA A1", GPU_PLAN, with_first_gpu(name="NVIDIA A100")),
        ("NVML", "warning", "silent", GPU_PLAN, gpu(gpu={"nvml_error": "not installed"})),
        ("GPU 0-1", "warning", "across CPU sockets", GPU_PLAN, gpu(gpu=NO_ACCESS)),
        # the host
        ("cores", "warning", "--num_gpus 2", Plan(4, "cpu"), cpu(host={"cores": 2})),
        ("load", "warning", "too long", CPU_PLAN, cpu(host={"load": 7.0})),
        ("open files", "warning", "ulimit -n", CPU_PLAN, cpu(host={"open_files": 64})),
        ("host name", "warning", "/etc/hosts", CPU_PLAN, cpu(host={"name_error": "unknown"})),
        ("meeting point", "problem", "unset MASTER_ADDR", CPU_PLAN, cpu(host=TAKEN)),
        ("meeting point", "ok", "is free", CPU_PLAN, cpu(host=FREE)),
        ("/dev/shm", "problem", "--shm-size", GPU_PLAN, gpu(host={"shm_free_bytes": 20 * 2**20})),
        ("/dev/shm", "warning", "--shm-size", GPU_PLAN, gpu(host={"shm_free_bytes": 64 * 2**20})),
        ("disk", "problem", "--run_dir", GPU_PLAN, gpu(disk={"free_bytes": GIB})),
        ("disk", "warning", "--keep_checkpoints", GPU_PLAN, gpu(disk={"free_bytes": 4 * GIB})),
        ("disk", "warning", "slow disk", GPU_PLAN, gpu(disk={"fsync_s": 3.0})),
        ("threads", "warning", "unset OMP", CPU_PLAN, with_variable("OMP_NUM_THREADS", "1")),
    ],
)  # fmt: skip
def test_what_is_missing_broken_or_slow_has_its_verdict(name, verdict, words, plan, facts):
    checks = all_checks(facts, plan)
    found, text = verdicts(checks, name)
    assert found == verdict and words in text
    assert verdict == "ok" or worst(checks) in (verdict, "problem")


@pytest.mark.parametrize(("asked", "advised"), [("", True), ("2", True), ("1", False)])
def test_on_a_busy_machine_fewer_threads_are_advised_and_no_more(asked, advised):
    facts = changed(with_variable("OMP_NUM_THREADS", asked), host={"load": 7.0})
    checks = all_checks(facts, CPU_PLAN)
    assert "threads" not in [check.name for check in checks]
    assert ("OMP_NUM_THREADS=1" in verdicts(checks, "load")[1]) == advised


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("NCCL_P2P_DISABLE", "1", "warning"),
        ("TORCH_DISTRIBUTED_DEBUG", "detail", "warning"),
        ("GLOO_SOCKET_IFNAME", "no_such_interface", "problem"),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok"),
        ("CUDA_VISIBLE_DEVICES", "", "warning"),
        ("CUDA_VISIBLE_DEVICES", "1", "ok"),
    ],
)
def test_variables_that_change_behaviour(name, value, verdict):
    (check,) = check_facts(with_variable(name, value, GPU_FACTS), GPU_PLAN)["Environment"]
    assert check.verdict == verdict and value in check.measured
    assert (check.name == name) == (verdict != "ok")


# ---- reading GPUs


def nvml(count=2):
    """GPU 1 is lost, and GPU 0 does not know its temperature."""
    answers = {
        "Name": "NVIDIA H100", "ComputeMode": 3, "Temperature": NVMLError("Not Supported"),
        "MemoryInfo": types.SimpleNamespace(total=80 * GIB, used=GIB, free=79 * GIB),
        "ComputeRunningProcesses": [types.SimpleNamespace(pid=7, usedGpuMemory=None)],
    }  # fmt: skip
    lost = NVMLError("GPU is lost")
    gpus = [lost if number == 1 else fake_gpu(number, **answers) for number in range(count)]
    fake = FakeNvml(gpus)
    fake.nvmlSystemGetDriverVersion = lambda: b"550.54"
    fake.nvmlSystemGetCudaDriverVersion = lambda: 12040
    return Nvml(fake)


def fake_torch(devices, hip=None):
    """Answers like torch's `cuda` and `version`."""

    def properties(index):
        if devices[index] is None:
            raise RuntimeError("CUDA error: unknown error\nmore")
        size = {"multi_processor_count": 132, "total_memory": 80 * GIB}
        return types.SimpleNamespace(name="card", uuid=devices[index], major=9, minor=0, **size)

    cuda = types.SimpleNamespace(
        is_available=lambda: bool(devices),
        device_count=lambda: len(devices),
        get_device_properties=properties,
        can_device_access_peer=lambda a, b: True,
        mem_get_info=lambda index: (60 * GIB, 80 * GIB),
    )
    return types.SimpleNamespace(cuda=cuda, version=types.SimpleNamespace(hip=hip))


def test_a_lost_gpu_and_values_that_are_unknown_hide_nothing_else():
    info = read_gpus(nvml(3), fake_torch(["0", "2"]))
    assert [gpu.error for gpu in info.gpus] == ["", "nvmlDeviceGetHandleByIndex: GPU is lost", ""]
    first = info.gpus[0]
    assert (first.name, first.memory_free_bytes) == ("NVIDIA H100", 79 * GIB)
    assert first.temperature_c is None
    assert (
        first.multiprocessors == 132
        and first.compute_mode == "exclusive process"
        and first.processes == (GpuProcess(7, None),)
    )
    assert [(gpu.index, gpu.torch_index) for gpu in info.usable] == [(0, 0), (2, 1)]
    assert (info.driver, info.driver_cuda) == ("550.54", (12, 4))
    peers = {(link.first, link.second): link.peer_access for link in info.links}
    assert peers == {(0, 1): None, (0, 2): True, (1, 2): None}


def test_torch_finds_its_devices_whatever_their_order_and_reports_those_it_cannot_open():
    info = read_gpus(nvml(3), fake_torch(["2", "0"]))
    assert [(gpu.index, gpu.torch_index) for gpu in info.gpus] == [(0, 1), (1, None), (2, 0)]
    assert [gpu.index for gpu in info.usable] == [2, 0]
    info = read_gpus(nvml(0), fake_torch(["a", None]))
    assert [gpu.error for gpu in info.gpus] == ["", "torch: CUDA error: unknown error more"]


def test_rocm_has_gpus_without_nvml():
    closed = Nvml(FakeNvml([], failing=NVMLError("Shared Library Not Found")))
    info = read_gpus(closed, fake_torch(["a"], hip="6.4"))
    assert info.rocm == "6.4" and "Shared Library" in info.nvml_error
    (found,) = info.usable
    assert (found.name, found.memory_free_bytes) == ("card", 60 * GIB)
    facts = dataclasses.replace(GPU_FACTS, gpu=info)
    # nobody misses NVML there
    assert {check.verdict for check in all_checks(facts, ONE_GPU_PLAN)} == {"ok"}


def test_gpus_are_printed_one_by_line_and_their_absence_with_its_reason(capsys):
    print_gpu_info(GPUS)
    first, _, link = capsys.readouterr().out.splitlines()
    assert "79 GiB of 80 GiB free" in first and link.endswith("NVLink, one PCIe switch")
    print_gpu_info(NO_GPU)
    assert capsys.readouterr().out == "no GPU: NVML does not open: library not found\n"
    assert describe_gpu(Gpu(index=3, error="lost")) == "does not answer: lost"


def test_a_disk_is_tried_where_the_run_would_be(tmp_path):
    disk = read_disk(tmp_path / "not" / "there")
    assert disk.folder == str(tmp_path) and not disk.error
    assert disk.free_bytes > 0 and disk.fsync_s > 0 and list(tmp_path.iterdir()) == []


# ---- what was measured


def reduced(ranks=2, latency_s=0.0005):
    return Reductions(ranks, "cpu", "gloo", 1, {1024: latency_s, 2**26: 0.1}, 0.001)


@pytest.mark.parametrize(
    ("measured", "needed", "verdict", "words"),
    [
        (reduced(), True, "ok", "1 KiB 500 us, 64 MiB 100 ms"),
        (reduced(latency_s=0.05), True, "warning", "wait for cores"),
        (reduced(latency_s=0.05), False, "ok", "sums are right"),  # not timed alone, and not needed
        (None, True, "problem", "a rank hung"),
        (None, False, "warning", "a rank hung"),
    ],
)
def test_ranks_that_reduce_slowly_or_not_at_all(measured, needed, verdict, words):
    check = communication_check("gloo", measured, "a rank hung", needed)
    assert check.verdict == verdict and words in f"{check.measured} -> {check.fix}"


FIGURES = MemoryFigures(
    {"parameters": GIB, "rollout": GIB}, "collect", None, "it is long", GIB, 10 * GIB, 2, 64, 128
)


@pytest.mark.parametrize(
    ("fields", "verdict", "words"),
    [
        ({}, "ok", "3 GiB with the process, 10 GiB are free for each rank"),
        ({"limit": 3.5 * GIB}, "warning", "tight"),
        ({"limit": 2 * GIB}, "problem", "--num_envs 64"),
        # what is measured counts
        ({"measured_peak": 12 * GIB}, "problem", "13 GiB with the process"),
    ],
)
def test_what_does_not_fit_is_a_problem_with_the_largest_that_does(fields, verdict, words):
    found, text = verdicts(memory_checks(dataclasses.replace(FIGURES, **fields)), "fits")
    assert found == verdict and words in text


def test_memory_says_what_was_measured_and_what_failed():
    def words(**fields):
        checks = memory_checks(dataclasses.replace(FIGURES, **fields))
        return " ".join(f"{check.verdict} {check.measured}" for check in checks)

    assert "a dry run took 2.5 GiB (computed: -20%)" in words(measured_peak=int(2.5 * GIB))
    assert "not measured: it is long" in words()
    assert "problem CUDA out of memory" in words(not_measured="", failure="CUDA out of memory")


TIME = TimeFigures(1.0, 0.3, 0.0, 1000, 50.0, 7200, "episodes", 1, (900.0, 1100.0), True)


def test_time_follows_from_pace_length_and_budget():
    assert TIME.total_s == dataclasses.replace(TIME, own_s=0.75, reduction_s=0.25).total_s == 360.0
    assert dataclasses.replace(TIME, unit="steps").total_s == 7.2
    for unknown in ({"rates": (900.0, 300.0)}, {"as_asked": False}, {"steps_per_episode": None}):
        assert dataclasses.replace(TIME, **unknown).total_s is None
    assert "6 min for 7,200 episodes" in verdicts(time_checks(TIME, False), "training")[1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2e-6, "2 us"), (0.0251, "25.1 ms"), (59, "59 s"), (600, "10 min"), (864_000, "10 days")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("fields", "on_gpu", "name", "words"),
    [
        ({"steps_per_episode": None}, False, "training", "--total_steps"),
        ({"rates": (900.0, 300.0)}, False, "pace", "900, 300 steps/s"),
        ({"as_asked": False}, False, "training", "see Plan"),
        ({"own_s": 0.5, "reduction_s": 0.5}, False, "spent on", "raise --batch_size"),
        ({"collect_s": 0.9}, True, "spent on", "raise --num_envs"),
    ],
)
def test_what_training_waits_for_is_a_warning(fields, on_gpu, name, words):
    found, text = verdicts(time_checks(dataclasses.replace(TIME, **fields), on_gpu), name)
    assert found == "warning" and words in text


def test_the_command_keeps_what_was_given_and_changes_what_must_be():
    given = ["--num-gpus", "8", "--env=CartPole-v1", "--env_kwargs", '{"a": 1}']
    assert command_line(given, {"num_gpus": 2}, [], "train.py") == (
        "python train.py --env=CartPole-v1 --env_kwargs '{\"a\": 1}' --num_gpus 2"
    )
    command = command_line([], {}, ["MASTER_PORT"], "/a b/train.py")
    assert command == "env -u MASTER_PORT python '/a b/train.py'"
