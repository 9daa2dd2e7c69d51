"""Verdicts on facts: can this machine train, and if not, what mends it. Pure.

Each function takes facts (`rl_dist.hardware`) or measured figures and returns checks. ok: nothing to do. warning:
it trains, but slower or less safely than it could. problem: it cannot train like this.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from rl_dist.hardware.gpus import Gpu
from rl_dist.hardware.report import Facts, describe_gpu, gib

OK, WARNING, PROBLEM = "ok", "warning", "problem"
LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 10)
HOT_C, BUSY_PERCENT, IDLE_MEMORY = 85, 10, 0.9
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
    cure: str = ""


@dataclass(frozen=True)
class Plan:
    """What the facts are held against."""

    num_ranks: int
    device_type: str  # "cpu" or "cuda"
    device_asked: str = "auto"  # the flag
    checkpoint_bytes: int = 0  # of one file
    num_checkpoints: int = 4  # kept at a time

    @property
    def over_nccl(self) -> bool:
        """Whether several GPUs must talk."""
        return self.device_type == "cuda" and self.num_ranks > 1


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


# ---- software


def software_checks(facts: Facts, plan: Plan) -> list[Check]:
    """Versions, and whether they fit each other."""
    own, gpu, found = facts.software, facts.gpu, []

    def add(name: str, verdict: str, measured: str, cure: str = "") -> None:
        found.append(Check("Software", name, verdict, measured, cure if verdict != OK else ""))

    add("Python", OK if _version(own.python) >= LEAST_PYTHON else PROBLEM, own.python, "use Python 3.11 or newer")
    add("torch", OK if _version(own.torch) >= LEAST_TORCH else PROBLEM, own.torch, "pip install 'torch>=2.10'")
    present = [g for g in gpu.gpus if not g.error]
    missed = PROBLEM if plan.device_asked == "cuda" else WARNING
    if own.rocm_build:
        add("ROCm build", OK, f"ROCm {own.rocm_build}: RCCL answers to the name nccl; NVML does not exist, so no live "
            "values of GPUs")  # fmt: skip
    elif own.cuda_build is None:
        what = "this torch has no CUDA"
        if present:
            add("CUDA build", missed, f"{what}, so the {len(present)} GPU(s) here do nothing", INSTALL)
        else:
            verdict = PROBLEM if plan.device_asked == "cuda" else OK
            add("CUDA build", verdict, f"{what}, and no NVIDIA GPU is found: training uses the CPU", "use --device cpu")
    else:
        found += _cuda_checks(facts, plan, missed)
    if plan.device_type == "cpu" and not own.gloo:
        add("gloo", PROBLEM if plan.num_ranks > 1 else OK, "this torch has no gloo: only one rank can train", INSTALL)
    return found


def _cuda_checks(facts: Facts, plan: Plan, missed: str) -> list[Check]:
    own, gpu = facts.software, facts.gpu
    built = own.cuda_build or ""
    driver = f"driver {gpu.driver or 'not told'}"
    old = gpu.driver_cuda is not None and gpu.driver_cuda[0] < _version(built)[0]
    if old and gpu.driver_cuda:
        serves = ".".join(map(str, gpu.driver_cuda))
        cure = f"update the NVIDIA driver to one for CUDA {built.split('.')[0]}, or {INSTALL}"
        first = Check("Software", "CUDA build", missed, f"CUDA {built}, but {driver} serves up to CUDA {serves}", cure)
    elif gpu.torch_error:
        cure = "check nvidia-smi; reboot after an update of the driver"
        first = Check("Software", "CUDA build", missed, f"CUDA {built} does not start: {gpu.torch_error}", cure)
    elif not gpu.gpus:
        verdict = PROBLEM if plan.device_asked == "cuda" else WARNING
        cure = "install the NVIDIA driver (in a container: start it with --gpus all), or use --device cpu"
        first = Check("Software", "CUDA build", verdict, f"CUDA {built}, but no GPU is found; {gpu.nvml_error}", cure)
    else:
        first = Check("Software", "CUDA build", OK, f"CUDA {built}, {driver}")
    checks = [first]
    if own.cudnn is None:
        checks.append(Check("Software", "cuDNN", WARNING, "missing: LSTMs run without their fast kernels", INSTALL))
    else:
        checks.append(Check("Software", "cuDNN", OK, own.cudnn))
    if own.nccl is None:
        verdict = PROBLEM if plan.over_nccl else WARNING
        checks.append(Check("Software", "NCCL", verdict, "missing: several GPUs cannot train together", INSTALL))
    else:
        checks.append(Check("Software", "NCCL", OK, own.nccl))
    return checks


# ---- GPUs


def gpu_checks(facts: Facts, plan: Plan, own_pid: int = 0) -> list[Check]:
    """Every GPU, one by one, then all together."""
    info = facts.gpu
    checks = [_gpu_check(gpu, facts, plan, own_pid) for gpu in info.gpus]
    names = sorted({gpu.name for gpu in info.usable})
    if plan.over_nccl and len(names) > 1:
        cure = "choose equal ones with CUDA_VISIBLE_DEVICES, or expect the pace of the slowest"
        checks.append(Check("GPUs", "models", WARNING, f"unequal: {', '.join(names)}", cure))
    if info.gpus and info.nvml_error and not info.rocm:
        cure = "pip install nvidia-ml-py, and check the driver with nvidia-smi"
        checks.append(Check("GPUs", "NVML", WARNING, f"silent ({info.nvml_error}): no live values", cure))
    if info.usable:
        precision = facts.precision
        has = {"TF32": precision.tf32, "bf16": precision.bf16, "cuDNN autotune": precision.cudnn_autotune}
        words = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in has.items())
        checks.append(Check("GPUs", "precision", OK, f"{words}; training computes in fp32 unless asked otherwise"))
    return checks


def _unseen_gpu(gpu: Gpu, facts: Facts) -> Check:
    """One that torch cannot use: how busy or hot it is does not matter."""
    missed = facts.software.cuda_build and "CUDA_VISIBLE_DEVICES" not in facts.environment
    verdict, cure = (WARNING, "check CUDA_VISIBLE_DEVICES and the driver") if missed else (OK, "")
    return Check("GPUs", f"GPU {gpu.index}", verdict, describe_gpu(gpu), cure)


def _gpu_check(gpu: Gpu, facts: Facts, plan: Plan, own_pid: int) -> Check:
    if gpu.torch_index is None and not gpu.error and not gpu.mig:  # with MIG torch sees slices of it
        return _unseen_gpu(gpu, facts)
    others = [process for process in gpu.processes if process.pid != own_pid]
    problems: list[tuple[str, str]] = []  # in words, and the cure
    warnings: list[tuple[str, str]] = []
    needed = plan.device_type == "cuda" and gpu.torch_index is not None and gpu.torch_index < plan.num_ranks
    if gpu.error:
        (problems if needed else warnings).append(
            ("", "check nvidia-smi and dmesg; leave it out with CUDA_VISIBLE_DEVICES, or reset it")
        )
    if gpu.compute_mode == "prohibited":
        problems.append(("compute mode prohibited", f"nvidia-smi -i {gpu.index} -c DEFAULT"))
    if gpu.compute_mode == "exclusive process" and others:
        problems.append((f"taken by process {others[0].pid} (exclusive mode)", "wait for it or use another GPU"))
    elif gpu.compute_mode == "exclusive process" and needed:
        told = "exclusive process mode: this check holds it, so what it starts on it may fail where training would not"
        warnings.append((told, f"for the check: nvidia-smi -i {gpu.index} -c DEFAULT"))
    if not _has_kernels(gpu, facts.software.architectures):
        have = ", ".join(facts.software.architectures)
        problems.append((f"torch has no kernels for it (it has {have})", INSTALL))
    if gpu.mig:
        (problems if plan.over_nccl else warnings).append(
            ("MIG is on: torch sees one slice, and NCCL does not join slices", f"nvidia-smi -i {gpu.index} -mig 0")
        )
    if gpu.ecc_uncorrected_errors:
        warnings.append((f"{gpu.ecc_uncorrected_errors} uncorrected memory errors", "reset the GPU; have it replaced"))
    if (gpu.temperature_c or 0) >= HOT_C:
        warnings.append((f"hot, it will slow down from {HOT_C} C", "check its cooling"))
    if others or (gpu.utilization_percent or 0) > BUSY_PERCENT:
        pids = f" by process {', '.join(str(p.pid) for p in others[:4])}" if others else ""
        warnings.append((f"in use{pids}", "wait for it, or leave the GPU out with CUDA_VISIBLE_DEVICES"))
    if gpu.integrated:
        warnings.append(("it shares the host's memory", "leave room for the host: see Memory"))
    verdict = PROBLEM if problems and needed else WARNING if problems or warnings else OK
    told = "; ".join([describe_gpu(gpu), *(words for words, _ in problems + warnings if words)])
    cures = "; ".join(cure for _, cure in problems + warnings)
    return Check("GPUs", f"GPU {gpu.index}", verdict, told, cures)


def _has_kernels(gpu: Gpu, architectures: Sequence[str]) -> bool:
    """Whether torch was compiled for a GPU; True where nothing is known."""
    if not gpu.compute_capability or not any(name.startswith("sm_") for name in architectures):
        return True
    major, minor = (int(part) for part in gpu.compute_capability.split("."))
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = "".join(c for c in number if c.isdecimal())
        built = (int(digits[:-1]), int(digits[-1]))
        if kind == "sm" and built[0] == major and built[1] <= minor:
            return True
        if kind == "compute" and built <= (major, minor):  # PTX, compiled when first used
            return True
    return False


def link_checks(facts: Facts, plan: Plan) -> list[Check]:
    """How the GPUs reach each other and the host."""
    if not plan.over_nccl:
        return []
    checks = []
    for link in facts.gpu.links:
        name = f"GPU {link.first}-{link.second}"
        path = "NVLink" if link.nvlink else link.path or "path not told"
        if link.peer_access is False:
            cure = "check nvidia-smi topo -p2p r, and ACS and IOMMU in the BIOS; gradients go through host memory"
            checks.append(Check("Links", name, WARNING, f"{path}, no peer access", cure))
        else:
            checks.append(Check("Links", name, OK, f"{path}, peer access" if link.peer_access else path))
    for gpu in facts.gpu.usable:
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            told = f"x{gpu.pcie_width} of x{gpu.pcie_width_max} lanes, generation {gpu.pcie_generation_max or '?'}"
            checks.append(Check("Links", f"GPU {gpu.index} PCIe", WARNING, told, "check its slot and riser"))
    return checks


# ---- host


def host_checks(facts: Facts, plan: Plan) -> list[Check]:
    """Cores, threads, shared memory, limits, names, ports and disk."""
    host, found = facts.host, []

    def add(name: str, verdict: str, measured: str, cure: str = "") -> None:
        found.append(Check("Host", name, verdict, measured, cure if verdict != OK else ""))

    each = host.cores / plan.num_ranks
    some = f"{host.cores} core(s) for {plan.num_ranks} rank(s)"
    add("cores", OK if each >= 1 else WARNING, f"{some}, of {host.machine_cores} in the machine",
        f"start no more ranks than cores: --num_gpus {host.cores}")  # fmt: skip
    found += _thread_checks(facts, each)
    if plan.over_nccl and host.shm_free_bytes is not None:
        share = host.shm_free_bytes / plan.num_ranks
        verdict = PROBLEM if share < SHM_LEAST else WARNING if share < SHM_PLENTY else OK
        add("/dev/shm", verdict, f"{gib(host.shm_free_bytes)} free, NCCL wants {gib(SHM_PLENTY)} per rank",
            "start the container with --shm-size=1g or --ipc=host")  # fmt: skip
    if host.open_files is not None and 0 <= host.open_files < OPEN_FILES_LEAST:
        add("open files", WARNING, f"limit {host.open_files}", "ulimit -n 4096")
    if host.name_error:
        told = f"{host.name} does not resolve: {host.name_error}"
        add("host name", WARNING, told, f"add a line '127.0.0.1 {host.name}' to /etc/hosts")
    if host.address:
        add("meeting point", PROBLEM if host.address_error else OK, host.address_error or f"{host.address} is free",
            "unset MASTER_ADDR and MASTER_PORT: on one machine none is needed")  # fmt: skip
    found.append(_disk_check(facts, plan))
    return found


def _thread_checks(facts: Facts, each: float) -> list[Check]:
    """Whether ranks use their cores, `each` so many, and who else does."""
    asked, load, found = facts.environment.get("OMP_NUM_THREADS", ""), facts.host.load, []
    busy = load is not None and load > 0.5 * facts.host.cores
    if asked and not (asked.isdecimal() and int(asked)):
        told = f"OMP_NUM_THREADS={asked} is no number of threads and limits nothing"
        found.append(Check("Host", "threads", WARNING, told, "unset OMP_NUM_THREADS, or name a number from 1"))
    elif asked and int(asked) < int(each) and not busy:
        told = f"OMP_NUM_THREADS={asked} keeps each rank to {asked} of the {int(each)} cores it could have"
        cure = "unset OMP_NUM_THREADS: ranks share the cores by themselves"
        found.append(Check("Host", "threads", WARNING, told, cure))
    if busy:
        cure = "times below are too long: measure again when nothing else runs"
        if each >= 2 and asked != "1":
            cure += "; beside other programs threads wait for each other, OMP_NUM_THREADS=1 is then much faster"
        found.append(Check("Host", "load", WARNING, f"{load:.1f} processes wanted a core in the last minute", cure))
    return found


def _disk_check(facts: Facts, plan: Plan) -> Check:
    disk, one = facts.disk, plan.checkpoint_bytes
    if disk.error or disk.free_bytes is None or disk.fsync_s is None:
        return Check("Host", "disk", PROBLEM, f"{disk.folder}: {disk.error}", "name a place to write with --run_dir")
    told = f"{gib(disk.free_bytes)} free in {disk.folder}, a checkpoint takes about {gib(one)}"
    told += f"; 4 MiB are safely written in {disk.fsync_s * 1000:.0f} ms"
    cure = f"free some space, lower --keep_checkpoints, or name another disk with --run_dir ({gib(one)} each)"
    if disk.free_bytes < 2 * one:
        return Check("Host", "disk", PROBLEM, told, cure)
    if disk.free_bytes < (plan.num_checkpoints + 2) * one:
        return Check("Host", "disk", WARNING, told, cure)
    if disk.fsync_s > FSYNC_SLOW_S:
        return Check("Host", "disk", WARNING, told, "a slow disk: training waits for every checkpoint, save less often")
    return Check("Host", "disk", OK, told)


# ---- environment


def environment_checks(facts: Facts) -> list[Check]:
    """Variables that change how ranks start and talk."""
    checks = []
    for name, value in facts.environment.items():
        if name in SLOWING and value.upper() == SLOWING[name][0]:
            checks.append(Check("Environment", name, WARNING, f"{value}: {SLOWING[name][1]}", f"unset {name}"))
        elif name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") and not _interface_exists(value):
            known = ", ".join(known for _, known in socket.if_nameindex())
            told = f"{value}: no such network interface"
            checks.append(Check("Environment", name, PROBLEM, told, f"unset {name}, or name one of {known}"))
        elif name == "CUDA_VISIBLE_DEVICES" and not value.strip() and facts.gpu.gpus:
            checks.append(Check("Environment", name, WARNING, "empty: hides every GPU", f"unset {name}"))
    named = {check.name for check in checks}
    others = [f"{name}={value}" for name, value in facts.environment.items() if name not in named]
    if others:
        checks.append(Check("Environment", "also set", OK, ", ".join(others)))
    elif not checks:
        checks.append(Check("Environment", "variables", OK, "none is set that changes how ranks start or talk"))
    return checks


def _interface_exists(value: str) -> bool:
    """Whether a variable of NCCL or gloo names at least one interface (prefixes; ^ excludes, = is exact)."""
    if value.startswith("^") or os.name != "posix":
        return True
    wanted = [name.lstrip("=").split(":")[0] for name in value.split(",")]
    return any(name.startswith(prefix) for prefix in wanted for _, name in socket.if_nameindex())
