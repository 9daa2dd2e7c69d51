"""Verdicts on facts: can this machine train, and if not, how to fix it. Pure.

Each function takes facts (`rl_dist.hardware`) and returns checks. ok: nothing to do. warning: it
trains, but slower or less safely than it could. problem: it cannot train like this.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from rl_dist.hardware.gpus import Gpu
from rl_dist.hardware.report import Facts, describe_gpu, duration, gib

OK = "ok"
WARNING = "warning"
PROBLEM = "problem"
LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 10)
HOT_C = 85
BUSY_PERCENT = 10
SHM_LEAST, SHM_PLENTY = 16 * 2**20, 64 * 2**20  # per rank over NCCL
FSYNC_SLOW_S, OPEN_FILES_LEAST = 1.0, 256
SLOWING = {
    "NCCL_P2P_DISABLE": ("1", "GPUs then copy through host memory"),
    "NCCL_SHM_DISABLE": ("1", "ranks of one machine then talk through sockets"),
    "NCCL_IB_DISABLE": ("1", "machines then talk over Ethernet instead of InfiniBand"),
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel is then waited for"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is then checked"),
}
INSTALL = "install the build for your driver, see pytorch.org/get-started"


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    section: str
    name: str
    verdict: str  # OK, WARNING or PROBLEM
    measured: str
    fix: str = ""


class _Section(list[Check]):
    """Checks of one section; what is ok needs no fix."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def add(self, name: str, verdict: str, measured: str, fix: str = "") -> None:
        self.append(Check(self.name, name, verdict, measured, "" if verdict == OK else fix))


@dataclass(frozen=True)
class Plan:
    """The job that the facts are held against."""

    num_ranks: int
    device_type: str  # "cpu" or "cuda"
    device_asked: str = "auto"  # the flag
    checkpoint_bytes: int = 0  # of one file
    num_checkpoints: int = 4  # kept at a time

    @property
    def over_nccl(self) -> bool:
        """Several GPUs must talk."""
        return self.device_type == "cuda" and self.num_ranks > 1


def check_facts(facts: Facts, plan: Plan, own_pid: int = 0) -> dict[str, list[Check]]:
    """All checks of facts by section."""
    return {
        "Software": _software_checks(facts, plan),
        "GPUs": _gpu_checks(facts, plan, own_pid),
        "Links": _link_checks(facts, plan),
        "Host": _host_checks(facts, plan),
        "Environment": _environment_checks(facts),
    }


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _software_checks(facts: Facts, plan: Plan) -> list[Check]:
    own, found = facts.software, _Section("Software")
    old_python = _version(own.python) < LEAST_PYTHON
    found.add("Python", PROBLEM if old_python else OK, own.python, "use Python 3.11 or newer")
    old_torch = _version(own.torch) < LEAST_TORCH
    found.add("torch", PROBLEM if old_torch else OK, own.torch, "pip install 'torch>=2.10'")
    # a GPU that is asked for and not there
    missed = PROBLEM if plan.device_asked == "cuda" else WARNING
    if own.rocm_build:
        words = "RCCL answers to the name nccl; NVML does not exist, so no live values of GPUs"
        found.add("ROCm build", OK, f"ROCm {own.rocm_build}: {words}")
    elif own.cuda_build:
        _add_cuda(found, own.cuda_build, facts, plan, missed)
    else:
        present = sum(not gpu.error for gpu in facts.gpu.gpus)
        verdict = missed if present or missed == PROBLEM else OK
        words = f"this torch has no CUDA, and {present} NVIDIA GPU(s) are here: it uses the CPU"
        found.add("CUDA build", verdict, words, f"{INSTALL}, or use --device cpu")
    if plan.device_type == "cpu" and not own.gloo:
        verdict = PROBLEM if plan.num_ranks > 1 else OK
        found.add("gloo", verdict, "this torch has no gloo: only one rank can train", INSTALL)
    return found


def _add_cuda(found: _Section, built: str, facts: Facts, plan: Plan, missed: str) -> None:
    own, gpu = facts.software, facts.gpu
    driver = f"driver {gpu.driver or 'unknown'}"
    verdict, words, fix = missed, f"CUDA {built}, {driver}", ""
    if gpu.driver_cuda is not None and gpu.driver_cuda[0] < _version(built)[0]:
        words += f", which serves up to CUDA {'.'.join(map(str, gpu.driver_cuda))}"
        fix = f"update the NVIDIA driver to one for CUDA {built.split('.')[0]}, or {INSTALL}"
    elif gpu.torch_error:
        words += f": it does not start: {gpu.torch_error}"
        fix = "check nvidia-smi; reboot after an update of the driver"
    elif not gpu.gpus:
        words += f": no GPU is found; {gpu.nvml_error}"
        fix = "install the NVIDIA driver (a container: --gpus all), or use --device cpu"
    else:
        verdict = OK
    found.add("CUDA build", verdict, words, fix)
    slow = "missing: LSTMs run without their fast kernels"
    found.add("cuDNN", OK if own.cudnn else WARNING, own.cudnn or slow, INSTALL)
    verdict = PROBLEM if plan.over_nccl else WARNING
    lost = "missing: several GPUs cannot train together"
    found.add("NCCL", OK if own.nccl else verdict, own.nccl or lost, INSTALL)


def _gpu_checks(facts: Facts, plan: Plan, own_pid: int) -> list[Check]:
    info, found = facts.gpu, _Section("GPUs")
    for gpu in info.gpus:
        found.add(f"GPU {gpu.index}", *_gpu_verdict(gpu, facts, plan, own_pid))
    names = sorted({gpu.name for gpu in info.usable})
    if plan.over_nccl and len(names) > 1:
        fix = "choose equal ones with CUDA_VISIBLE_DEVICES, or expect the pace of the slowest"
        found.add("models", WARNING, f"unequal: {', '.join(names)}", fix)
    if info.gpus and info.nvml_error and not info.rocm:
        fix = "pip install nvidia-ml-py, and check the driver with nvidia-smi"
        found.add("NVML", WARNING, f"silent ({info.nvml_error}): no live values", fix)
    if info.usable:
        has = facts.precision
        formats = {"TF32": has.tf32, "bf16": has.bf16, "cuDNN autotune": has.cudnn_autotune}
        words = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in formats.items())
        found.add("precision", OK, words)
    return found


def _gpu_verdict(gpu: Gpu, facts: Facts, plan: Plan, own_pid: int) -> tuple[str, str, str]:
    """Verdict, words and fix."""
    index = gpu.torch_index
    # torch cannot use it: its state does not matter
    if index is None and not gpu.error:
        missed = facts.software.cuda_build and "CUDA_VISIBLE_DEVICES" not in facts.environment
        fix = "check CUDA_VISIBLE_DEVICES and the driver"
        return WARNING if missed else OK, describe_gpu(gpu), fix
    others = [process for process in gpu.processes if process.pid != own_pid]
    needed = plan.device_type == "cuda" and index is not None and index < plan.num_ranks
    exclusive = gpu.compute_mode == "exclusive process"
    busy = others or (gpu.utilization_percent or 0) > BUSY_PERCENT
    pids = f" by process {', '.join(str(p.pid) for p in others[:4])}" if others else ""
    architectures = facts.software.architectures
    default_mode = f"nvidia-smi -i {gpu.index} -c DEFAULT"
    # each: does it apply, can it not train at all, words, fix
    rules = (
        (gpu.error, needed, "",
         "check nvidia-smi and dmesg; leave it out with CUDA_VISIBLE_DEVICES, or reset it"),
        (gpu.compute_mode == "prohibited", True, "compute mode prohibited", default_mode),
        (exclusive and others, True, f"taken{pids} (exclusive mode)",
         "wait for it or use another GPU"),
        (exclusive and not others and needed, False,
         "exclusive process mode: held by this check, so what it starts may fail",
         f"for the check: {default_mode}"),
        (not _has_kernels(gpu, architectures), True,
         f"torch has no kernels for it (it has {', '.join(architectures)})", INSTALL),
        ((gpu.temperature_c or 0) >= HOT_C, False, f"hot, it will slow down from {HOT_C} C",
         "check its cooling"),
        (busy, False, f"in use{pids}",
         "wait for it, or leave the GPU out with CUDA_VISIBLE_DEVICES"),
        (gpu.integrated, False, "it shares the host's memory",
         "leave room for the host: see Memory"),
    )  # fmt: skip
    broken = [rule for rule in rules if rule[0]]
    fatal = needed and any(rule[1] for rule in broken)
    words = [describe_gpu(gpu), *(rule[2] for rule in broken if rule[2])]
    verdict = PROBLEM if fatal else WARNING if broken else OK
    return verdict, "; ".join(words), "; ".join(rule[3] for rule in broken)


def _has_kernels(gpu: Gpu, architectures: Sequence[str]) -> bool:
    """True if torch was compiled for a GPU, or nothing is known."""
    if not gpu.compute_capability or not any(name.startswith("sm_") for name in architectures):
        return True
    own = _version(gpu.compute_capability)
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = "".join(c for c in number if c.isdecimal())
        built = (int(digits[:-1]), int(digits[-1]))
        # kernels run on their generation; PTX is compiled on all newer ones when first used
        if built <= own and (kind == "compute" or (kind == "sm" and built[0] == own[0])):
            return True
    return False


def _link_checks(facts: Facts, plan: Plan) -> list[Check]:
    found = _Section("Links")
    if not plan.over_nccl:
        return []
    for link in facts.gpu.links:
        path = "NVLink" if link.nvlink else link.path or "path unknown"
        access = {True: ", peer access", False: ", no peer access", None: ""}[link.peer_access]
        fix = "it goes through the host: check nvidia-smi topo -p2p r, and ACS in the BIOS"
        verdict = WARNING if link.peer_access is False else OK
        found.add(f"GPU {link.first}-{link.second}", verdict, path + access, fix)
    return found


def _host_checks(facts: Facts, plan: Plan) -> list[Check]:
    host, found = facts.host, _Section("Host")
    each = host.cores / plan.num_ranks
    words = f"{host.cores} core(s) of {host.machine_cores} for {plan.num_ranks} rank(s)"
    fix = f"start no more ranks than cores: --num_gpus {host.cores}"
    found.add("cores", OK if each >= 1 else WARNING, words, fix)
    _add_threads(found, facts, each)
    if plan.over_nccl and host.shm_free_bytes is not None:
        share = host.shm_free_bytes / plan.num_ranks
        verdict = PROBLEM if share < SHM_LEAST else WARNING if share < SHM_PLENTY else OK
        words = f"{gib(host.shm_free_bytes)} free, NCCL wants {gib(SHM_PLENTY)} per rank"
        fix = "start the container with --shm-size=1g or --ipc=host"
        found.add("/dev/shm", verdict, words, fix)
    if host.open_files is not None and 0 <= host.open_files < OPEN_FILES_LEAST:
        found.add("open files", WARNING, f"limit {host.open_files}", "ulimit -n 4096")
    if host.name_error:
        words = f"{host.name} does not resolve: {host.name_error}"
        found.add("host name", WARNING, words, f"add '127.0.0.1 {host.name}' to /etc/hosts")
    if host.address:
        verdict = PROBLEM if host.address_error else OK
        fix = "unset MASTER_ADDR and MASTER_PORT: on one machine none is needed"
        found.add("meeting point", verdict, host.address_error or f"{host.address} is free", fix)
    _add_disk(found, facts, plan)
    return found


def _add_threads(found: _Section, facts: Facts, each: float) -> None:
    """Check that each rank uses its cores, and that nobody else does."""
    asked, load = facts.environment.get("OMP_NUM_THREADS", ""), facts.host.load or 0.0
    busy = load > 0.5 * facts.host.cores
    if asked.isdecimal() and 0 < int(asked) < int(each) and not busy:
        words = f"OMP_NUM_THREADS={asked} keeps each rank to {asked} of {int(each)} cores"
        fix = "unset OMP_NUM_THREADS: ranks share the cores by themselves"
        found.add("threads", WARNING, words, fix)
    if busy:
        fix = "times below are too long: measure again when nothing else runs"
        if each >= 2 and asked != "1":
            fix += "; OMP_NUM_THREADS=1 is much faster beside other programs"
        words = f"{load:.1f} processes wanted a core in the last minute"
        found.add("load", WARNING, words, fix)


def _add_disk(found: _Section, facts: Facts, plan: Plan) -> None:
    disk, one = facts.disk, plan.checkpoint_bytes
    if disk.error or disk.free_bytes is None or disk.fsync_s is None:
        fix = "name a place to write with --run_dir"
        found.add("disk", PROBLEM, f"{disk.folder}: {disk.error}", fix)
        return
    words = f"{gib(disk.free_bytes)} free in {disk.folder}, a checkpoint takes about {gib(one)}"
    words += f"; 4 MiB are safely written in {duration(disk.fsync_s)}"
    fix = "free some space, lower --keep_checkpoints, or name another disk with --run_dir"
    verdict = OK
    if disk.free_bytes < (plan.num_checkpoints + 2) * one:
        verdict = PROBLEM if disk.free_bytes < 2 * one else WARNING
    elif disk.fsync_s > FSYNC_SLOW_S:
        verdict = WARNING
        fix = "a slow disk: training waits for every checkpoint, save less often"
    found.add("disk", verdict, words, fix)


def _environment_checks(facts: Facts) -> list[Check]:
    found, harmless = _Section("Environment"), []
    for name, value in facts.environment.items():
        if name in SLOWING and value.upper() == SLOWING[name][0]:
            found.add(name, WARNING, f"{value}: {SLOWING[name][1]}", f"unset {name}")
        elif name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") and not _interface_exists(value):
            known = ", ".join(known for _, known in socket.if_nameindex())
            fix = f"unset {name}, or name one of {known}"
            found.add(name, PROBLEM, f"{value}: no such network interface", fix)
        elif name == "CUDA_VISIBLE_DEVICES" and not value.strip() and facts.gpu.gpus:
            found.add(name, WARNING, "empty: hides every GPU", f"unset {name}")
        else:
            harmless.append(f"{name}={value}")
    if harmless:
        found.add("also set", OK, ", ".join(harmless))
    elif not found:
        found.add("variables", OK, "none is set that changes how ranks start or talk")
    return found


def _interface_exists(value: str) -> bool:
    """True if NCCL's or gloo's variable names an interface (^ excludes, = is exact)."""
    if value.startswith("^"):
        return True
    wanted = [name.lstrip("=").split(":")[0] for name in value.split(",")]
    return any(name.startswith(prefix) for prefix in wanted for _, name in socket.if_nameindex())
