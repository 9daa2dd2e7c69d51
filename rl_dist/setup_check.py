"""Check if this machine can train with given flags, by rules and a short run.

ok: nothing to do. warning: it trains, but slower or less safely than it could. problem: it cannot
train with these flags.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rl_dist.errors import one_line
from rl_dist.launch.bench import time_reductions
from rl_dist.launch.child import (
    ChildError,
    ChildTimeoutError,
    Record,
    describe_rates,
    is_steady,
    measure_short_runs,
    round_rates,
)
from rl_dist.launch.config import LaunchConfig, ResolvedLaunch, resolve
from rl_dist.machine import GIB, GpuInfo, available_cores, duration, get_gpu_info, host_memory
from rl_dist.speedup.model import steps_per_episode, steps_per_iteration

OK, WARNING, PROBLEM = "ok", "warning", "problem"
HOT_C, BUSY_PERCENT = 85, 10
LITTLE_DISK_GIB = 1.0
SHM_GIB = 1 / 16  # shared memory that NCCL needs for each rank
REDUCED_BYTES = (2**10, 2**20, 2**26)
SHORT_RUN_S = 180.0  # longest short run, with its start
ENOUGH_S = 12.0  # seconds of training after which two iterations are enough
TIGHT_SHARE = 0.1  # share of the memory that should stay free
WAITING_SHARE, ROLLOUT_SHARE = 0.2, 0.7  # shares of an iteration; more is a warning
NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    verdict: str  # OK, WARNING or PROBLEM
    measured: str
    fix: str  # "": nothing to do


def worst(verdicts: Iterable[str]) -> str:
    """Return the gravest verdict."""
    return max(verdicts, key=(OK, WARNING, PROBLEM).index, default=OK)


def check(name: str, measured: str, *rules: tuple[object, str, str]) -> Check:
    """Return a figure's check: the gravest verdict, and the fixes of broken rules.

    Args:
        rules: for each one if it is broken, its verdict, and the fix.
    """
    broken = [(verdict, fix) for is_broken, verdict, fix in rules if is_broken]
    verdict = worst(verdict for verdict, _ in broken)
    return Check(name, verdict, measured, "; ".join(fix for _, fix in broken))


def check_setup(
    launch: LaunchConfig,
    flags: Sequence[str],
    run_dir: Path,
    budget: tuple[int, str],
    figures: dict[str, Any],
) -> Iterator[Check]:
    """Yield every check of a planned training as soon as it is made.

    Args:
        flags: of training; `launch` holds some of them.
        budget: length of the training, and its unit: episodes or steps.
        figures: receives facts and measurements, for --json.
    """
    # the ranks and the machine
    facts = read_facts(run_dir)
    figures |= {"facts": asdict(facts), "reductions_s": None, "measured": None}
    try:
        plan = resolve(launch)
    except (ValueError, RuntimeError) as error:  # RuntimeError: CUDA does not start
        reason = one_line(error, named=False)
        yield Check("ranks", PROBLEM, reason, "change the flags that the message names")
        yield from check_facts(facts, ResolvedLaunch(num_ranks=1, device_type="cpu", message=""))
        return
    yield check("ranks", plan.message)
    yield from check_facts(facts, plan)

    # ranks that reduce, and a short run
    step = "reductions"
    try:
        if plan.num_ranks > 1:
            print("checking: ranks that reduce gradients", file=sys.stderr)
            seconds = time_reductions(
                plan.num_ranks, REDUCED_BYTES, plan.device_type, gpu_ids=plan.gpu_ids
            ).gradients_s
            figures["reductions_s"] = seconds
            times = [f"{size // 2**10:,} KiB in {duration(s)}" for size, s in seconds.items()]
            yield check(step, f"all sums are right: {', '.join(times)}")
        step = "short run"
        print("checking: a short run of this training", file=sys.stderr)
        (records,) = measure_short_runs(
            [*flags, "--monitor_every=0.2"],
            num_gpus=None,
            timeout_s=SHORT_RUN_S,
            enough_s=ENOUGH_S,
            steady=True,
        ).records
    except ChildError as error:
        only_slow = step == "short run" and isinstance(error, ChildTimeoutError)
        fix = "choose smaller sizes, or see the lines above; NCCL_DEBUG=INFO prints more"
        yield Check(step, WARNING if only_slow else PROBLEM, str(error), fix)
        return
    figures["measured"] = measured = figures_of(records, budget)
    yield from check_figures(measured, facts, budget, plan.device_type == "cuda")


# ---- facts


@dataclass(frozen=True)
class Facts:
    """Facts that are read before anything is measured."""

    software: dict[str, str]  # versions by name
    gpu: GpuInfo
    nvidia_gpus: int  # known to the NVIDIA driver, with or without torch
    cores: int  # allowed to this process
    load: float  # processes that wanted a core in the last minute
    memory_total_gib: float  # cut to the container's limit
    shm_free_gib: float  # in /dev/shm
    folder: str  # existing folder in which the run would be
    disk_free_gib: float
    disk_error: str  # why nothing can be written there


def read_facts(run_dir: Path) -> Facts:
    """Look at this machine; takes well under a second without a GPU."""
    path = run_dir.absolute()
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir())
    disk_error = ""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        disk_error = str(error)
    return Facts(
        software={"Python": platform.python_version(), "torch": torch.__version__},
        gpu=get_gpu_info(),
        nvidia_gpus=len(list(NVIDIA_DEVICES.glob("*"))),
        cores=available_cores(),
        load=os.getloadavg()[0],
        memory_total_gib=host_memory().total / GIB,
        shm_free_gib=shutil.disk_usage("/dev/shm").free / GIB,
        folder=str(folder),
        disk_free_gib=shutil.disk_usage(folder).free / GIB,
        disk_error=disk_error,
    )


def check_facts(facts: Facts, plan: ResolvedLaunch) -> Iterator[Check]:
    """Yield the checks of what is known before anything is measured."""
    # GPUs
    info, ranks, on_gpu = facts.gpu, plan.num_ranks, plan.device_type == "cuda"
    if info.error:
        reason = f"{info.error}; the NVIDIA driver lists {facts.nvidia_gpus} GPU(s)"
        fix = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, and install the torch for your driver"
        yield check("GPUs", reason, (facts.nvidia_gpus, WARNING, fix))
    for gpu in info.gpus:
        is_used = on_gpu and gpu.index in (plan.gpu_ids or range(ranks))
        is_hot = is_used and (gpu.temperature_c or 0) >= HOT_C
        is_busy = is_used and (gpu.utilization_percent or 0) > BUSY_PERCENT
        fix = "wait for the program that uses it, or choose others with --gpu_ids"
        yield check(
            f"GPU {gpu.index}",
            str(gpu),
            (is_used and gpu.error, WARNING, "look at nvidia-smi, and pip install nvidia-ml-py"),
            (is_hot, WARNING, f"check its cooling: it slows down from {HOT_C} C"),
            (is_busy, WARNING, fix),
        )
    if on_gpu and ranks > 1:  # the ranks communicate over NCCL
        names = {gpu.name for gpu in info.gpus}
        fix = "expect the pace of the slowest, or choose equal ones with --gpu_ids"
        yield check("models", ", ".join(names), (len(names) > 1, WARNING, fix))
        free = f"{facts.shm_free_gib:.3g} GiB free; NCCL wants {SHM_GIB:.2g} for each rank"
        fix = "start the container with --shm-size=1g or --ipc=host"
        yield check("/dev/shm", free, (facts.shm_free_gib < ranks * SHM_GIB, WARNING, fix))

    # cores and disk
    few, busy = facts.cores < ranks, facts.load > 0.5 * facts.cores
    yield check(
        "cores",
        f"{facts.cores} for {ranks} rank(s), load {facts.load:.1f}",
        (few, WARNING, f"start no more ranks than cores: --num_gpus {facts.cores}"),
        (busy, WARNING, "times below are too long: check again when nothing else runs"),
    )
    full = facts.disk_free_gib < LITTLE_DISK_GIB
    yield check(
        "disk",
        f"{facts.folder}: {facts.disk_error or f'{facts.disk_free_gib:.3g} GiB free'}",
        (facts.disk_error, PROBLEM, "name a place to write with --run_dir"),
        (full, WARNING, "free some space, or name another disk with --run_dir"),
    )


# ---- measurements


def figures_of(records: Sequence[Record], budget: tuple[int, str]) -> dict[str, Any]:
    """Return the figures of a short run from its metrics; None: not known."""
    steps, rates, (length, unit) = steps_per_iteration(records), round_rates(records), budget
    iteration_s = steps / median(record["time/sps"] for record in records)
    total_steps = length * (1.0 if unit == "steps" else steps_per_episode(records))
    total_s = total_steps * iteration_s / steps  # without its start and its evaluations
    ranks = [rank for record in records for rank in record["ranks"]]
    memory_gib = {}  # by place: the most that a rank used, the least that was free
    for place, use, free in (
        ("memory", "ram/used_gib", "ram/free_gib"),
        ("GPU memory", "gpu/memory_peak_gib", "gpu/memory_free_gib"),
    ):
        if sampled := [rank for rank in ranks if rank.get(use) and rank.get(free)]:
            memory_gib[place] = (
                max(rank[use] for rank in sampled),
                min(rank[free] for rank in sampled),
            )
    return {
        "iterations": len(records),
        "steps_per_second": steps / iteration_s,  # all ranks together
        "rates": rates,  # steps/s by round
        "total_s": None if math.isnan(total_s) or not is_steady(rates) else total_s,
        "rollout_share": median(record["time/collect_s"] for record in records) / iteration_s,
        "waiting_share": median(record["time/idle_share"] for record in records),
        "memory_gib": memory_gib,
    }


def check_figures(
    figures: dict[str, Any], facts: Facts, budget: tuple[int, str], on_gpu: bool
) -> Iterator[Check]:
    """Check memory and pace of a short run; without a steady rate there is no time."""
    totals = [gpu.memory_total_gib for gpu in facts.gpu.gpus if gpu.memory_total_gib]
    total_gib = {"memory": facts.memory_total_gib, "GPU memory": min(totals, default=0.0)}
    for place, (used, free) in figures["memory_gib"].items():
        text = f"a rank used up to {used:.3g} GiB, {free:.3g} GiB stayed free"
        tight = free < TIGHT_SHARE * total_gib[place]
        fix = "long episodes or other programs may need the rest: choose smaller sizes"
        yield check(place, text, (tight, WARNING, fix))
    if is_steady(figures["rates"]):
        pace = f"{figures['steps_per_second']:,.0f} steps/s in {figures['iterations']} iterations"
        yield check("pace", pace)
        total_s, (length, unit) = figures["total_s"], budget
        time = f"{duration(total_s)} for {length:,} {unit}" if total_s else "no episode ended"
        fix = "give --total_steps to know the time"
        yield check("training", time, (not total_s, WARNING, fix))
    else:
        fix = "check again when nothing else runs"
        yield Check("pace", WARNING, describe_rates(figures["rates"]), fix)
    rollouts, waiting = figures["rollout_share"], figures["waiting_share"]
    starved = on_gpu and rollouts > ROLLOUT_SHARE
    yield check(
        "spent on",
        f"rollouts {rollouts:.0%}, waiting for other ranks {waiting:.0%}",
        (waiting > WAITING_SHARE, WARNING, "raise --batch_size, or use fewer ranks"),
        (starved, WARNING, "raise --num_envs, or compare with --device cpu"),
    )
