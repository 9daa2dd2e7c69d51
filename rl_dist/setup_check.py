"""Check whether this machine can train with the given flags, using rules and one short run.

Each check has one of three verdicts:

- ok
- warning: the machine can train, but slower or less safely than possible
- problem: the machine cannot train with these flags
"""

import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from rl_dist.errors import one_line
from rl_dist.files import Record
from rl_dist.launch.bench import time_reductions
from rl_dist.launch.child import (
    ChildError,
    ChildTimeoutError,
    measure_short_runs,
    round_rates,
    unsteady,
)
from rl_dist.launch.config import LaunchConfig, ResolvedLaunch, resolve
from rl_dist.machine import (
    GIB,
    GpuInfo,
    available_cores,
    get_gpu_info,
    host_memory,
    nvidia_driver,
    torch_build,
)
from rl_dist.speedup.model import steps_per_episode

VERDICTS = OK, WARNING, PROBLEM = "ok", "warning", "problem"  # from best to worst
BUSY_PERCENT = 10  # a GPU with a higher utilization is used by another program
LITTLE_DISK_GIB = 1.0  # warn if less disk space is free
SHM_GIB = 1 / 16  # shared memory that NCCL needs for each rank
# sizes of the gradients whose reduction is timed
REDUCED_BYTES = (2**10, 2**20, 2**26)
SHORT_RUN_S = 180.0  # time limit of the short run, including its start
TIGHT_SHARE = 0.1  # warn if a smaller fraction of the memory remains free


@dataclass(frozen=True)
class Check:
    """The result of one check, which is one line of the report."""

    name: str
    verdict: str  # OK, WARNING or PROBLEM
    measured: str
    fix: str  # "" if there is nothing to fix


def check(name: str, measured: str, *rules: tuple[object, str]) -> Check:
    """Apply rules to a measurement; the verdict is a warning if a rule is broken.

    Args:
        measured: the measurement as text.
        rules: tuples of two elements: a value that is true if the rule is broken, and a text that
            says how to fix the problem. The first broken rule decides.
    """
    fix = next((fix for is_broken, fix in rules if is_broken), "")
    return Check(name, WARNING if fix else OK, measured, fix)


def check_setup(
    launch: LaunchConfig,
    flags: Sequence[str],
    run_dir: Path,
    budget: tuple[int, str],
    figures: Record,
) -> Iterator[Check]:
    """Check whether this machine can train with `flags`; yield each result immediately.

    Args:
        flags: all flags of the training run, including the flags in `launch`.
        budget: length of the training run, and the unit of this length: episodes or steps.
        figures: dict to which this function adds facts and measurements, for --json.
    """
    # check the number of ranks and the machine
    facts = read_facts(run_dir)
    figures |= {"facts": asdict(facts), "reductions_s": None, "measured": None}
    try:
        plan = resolve(launch)
    except (ValueError, RuntimeError) as error:  # RuntimeError: CUDA cannot start
        reason = one_line(error, named=False)
        yield Check("ranks", PROBLEM, reason, "change the flags that the message mentions")
        yield from check_facts(facts, ResolvedLaunch(num_ranks=1, device_type="cpu", message=""))
        return
    yield check("ranks", plan.message)
    yield from check_facts(facts, plan)

    # measure reductions between ranks, then a short run
    check_name = "reductions"
    try:
        if plan.num_ranks > 1:
            seconds = time_reductions(
                plan.num_ranks, REDUCED_BYTES, plan.device_type, plan.gpu_ids, plan.backend
            )
            figures["reductions_s"] = seconds
            times = [f"{size // 2**10:,} KiB in {1e3 * s:.3g} ms" for size, s in seconds.items()]
            yield check(check_name, f"all sums are correct: {', '.join(times)}")
        check_name = "short run"
        print("checking: training briefly with these flags", file=sys.stderr)
        (records,) = measure_short_runs(
            [[*flags, "--monitor_every=0.2"]], timeout_s=SHORT_RUN_S
        ).records
    except ChildError as error:
        only_slow = check_name == "short run" and isinstance(error, ChildTimeoutError)
        fix = "choose smaller sizes, or read the lines above; NCCL_DEBUG=INFO prints more details"
        yield Check(check_name, WARNING if only_slow else PROBLEM, str(error), fix)
        return
    yield from check_run(records, facts, budget, figures)


# ---- facts


@dataclass(frozen=True)
class Facts:
    """Facts about this machine that are known without a measurement."""

    gpu: GpuInfo
    torch: str  # version of torch, and of the CUDA for which it was built
    driver: str  # version of the NVIDIA driver; "" if there is none
    nccl: str  # version of NCCL; "" if torch sees no GPU
    cores: int  # number of cores that this process may use
    load: float  # mean number of running and waiting processes in the last minute
    memory_total_gib: float  # memory of the machine, or memory limit of its container
    shm_free_gib: float  # free space in /dev/shm
    folder: str  # the run directory, or its nearest existing parent
    disk_free_gib: float
    disk_error: str  # why the folder is not writable; "" if it is


def read_facts(run_dir: Path) -> Facts:
    """Read facts about this machine; without a GPU, this takes well under 1 s."""
    path = run_dir.absolute()
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    disk_error = ""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        disk_error = str(error)
    return Facts(
        gpu=get_gpu_info(),
        torch=torch_build(),
        driver=nvidia_driver(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",
        cores=available_cores(),
        load=os.getloadavg()[0],
        memory_total_gib=host_memory().total / GIB,
        shm_free_gib=shutil.disk_usage("/dev/shm").free / GIB,
        folder=str(folder),
        disk_free_gib=shutil.disk_usage(folder).free / GIB,
        disk_error=disk_error,
    )


def check_facts(facts: Facts, plan: ResolvedLaunch) -> Iterator[Check]:
    """Yield the checks that need no measurement: torch, GPUs, cores and disk."""
    # torch and GPUs
    info = facts.gpu
    ranks = plan.num_ranks
    reason = info.error or "these flags choose it"
    backend = f"NCCL {facts.nccl}" if plan.backend == "nccl" else f"gloo, because {reason}"
    driver = facts.driver or "none"
    yield check("torch", f"{facts.torch}; NVIDIA driver: {driver}; ranks connect over {backend}")
    for gpu in info.gpus:
        is_used = plan.device_type == "cuda" and gpu.index in (plan.gpu_ids or range(ranks))
        is_busy = is_used and (gpu.utilization_percent or 0) > BUSY_PERCENT
        fix = "wait for the program that uses it, or choose other GPUs with --gpu_ids"
        yield check(
            f"GPU {gpu.index}",
            str(gpu),
            (is_used and gpu.error, "check nvidia-smi, and run pip install nvidia-ml-py"),
            (is_busy, fix),
        )
    if plan.backend == "nccl" and ranks > 1:
        free = f"{facts.shm_free_gib:.3g} GiB free; NCCL needs {SHM_GIB:.2g} for each rank"
        fix = "start the container with --shm-size=1g or --ipc=host"
        yield check("/dev/shm", free, (facts.shm_free_gib < ranks * SHM_GIB, fix))

    # cores and disk
    too_few_cores = facts.cores < ranks
    cores_are_busy = facts.load > 0.5 * facts.cores
    yield check(
        "cores",
        f"{facts.cores} for {ranks} rank(s), load {facts.load:.1f}",
        (too_few_cores, f"start at most one rank per core: --num_gpus {facts.cores}"),
        (cores_are_busy, "other programs will slow down the short run: stop them and check again"),
    )
    is_full = facts.disk_free_gib < LITTLE_DISK_GIB
    free = f"{facts.folder}: {facts.disk_free_gib:.3g} GiB free"
    disk = check("disk", free, (is_full, "free some space, or choose another disk with --run_dir"))
    if facts.disk_error:
        problem = f"{facts.folder}: {facts.disk_error}"
        disk = Check("disk", PROBLEM, problem, "choose a writable directory with --run_dir")
    yield disk


# ---- measurements


def check_run(
    records: Sequence[Record],
    facts: Facts,
    budget: tuple[int, str],
    figures: Record,
) -> Iterator[Check]:
    """Check the memory use and the speed of a short run; add them to `figures`."""
    # memory: the highest use by a single rank, and the lowest amount of free memory
    rank_records = [rank for record in records for rank in record["ranks"]]
    gpu_totals = [gpu.memory_total_gib for gpu in facts.gpu.gpus if gpu.memory_total_gib]
    memory_gib = {}
    for memory, use_name, free_name, total in (
        ("memory", "ram/used_gib", "ram/free_gib", facts.memory_total_gib),
        ("GPU memory", "gpu/memory_peak_gib", "gpu/memory_free_gib", min(gpu_totals, default=0.0)),
    ):
        if sampled := [rank for rank in rank_records if rank.get(use_name) and rank.get(free_name)]:
            used = max(rank[use_name] for rank in sampled)
            free = min(rank[free_name] for rank in sampled)
            memory_gib[memory] = used, free
            text = f"highest use by one rank: {used:.3g} GiB; lowest free memory: {free:.3g} GiB"
            fix = "long episodes or other programs may need more memory: choose smaller sizes"
            yield check(memory, text, (free < TIGHT_SHARE * total, fix))

    # speed and duration of the training run; the duration is a range if the speed is not steady
    rates = round_rates(records)
    length, unit = budget
    steps_per_s = median(record["time/sps"] for record in records)  # summed over all ranks
    total_steps = length * (1.0 if unit == "steps" else steps_per_episode(records))
    problem = unsteady(rates)
    pace = problem or f"{steps_per_s:,.0f} steps/s in {len(records)} iterations"
    yield check("pace", pace, (problem, "stop other programs and check again"))
    # durations at the median, highest and lowest speed; start-up and evaluations are not included
    total_s, *range_s = (total_steps / rate for rate in (steps_per_s, max(rates), min(rates)))
    hours = " to ".join(f"{seconds / 3600:.3g}" for seconds in (range_s if problem else [total_s]))
    unknown = math.isnan(total_steps)
    time = "no episode ended" if unknown else f"{hours} h for {length:,} {unit}"
    yield check("training", time, (unknown, "set --total_steps to get an estimate"))
    figures["measured"] = {
        "iterations": len(records),
        "steps_per_second": steps_per_s,
        "rates": rates,  # steps/s in equally long parts of the run
        "total_s": None if unknown or problem else total_s,
        "total_range_s": None if unknown else range_s,
        "memory_gib": memory_gib,
    }
