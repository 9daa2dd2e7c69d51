"""Measure what the scaling model needs, without training on several ranks.

One rank trains the whole job for a moment. Ranks that only reduce show the cost of a reduction.
Copies of one rank's share then train side by side without communication, so that they compete for
cores and memory as ranks do. `rl_dist.speedup.model` gives the rest.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from rl_dist import machine
from rl_dist.launch.bench import time_reductions
from rl_dist.launch.child import (
    ROUNDS,
    ChildError,
    ShortRuns,
    describe_rates,
    is_steady,
    measure_short_runs,
    round_rates,
)
from rl_dist.process_group.world import threads_per_rank
from rl_dist.speedup.model import Link, RankCost, fit_link, rank_cost, steps_per_episode

logger = logging.getLogger(__name__)
ENOUGH_S = 12.0  # seconds on one rank after which two ended iterations are enough
FIT_FACTORS = (1 / 64, 1, 4)  # sizes relative to the gradient, to separate latency from bandwidth


@dataclass(frozen=True, kw_only=True)
class Point:
    """A number of ranks that share the job."""

    ranks: int
    scaling: str  # strong: the job's sizes are totals; weak: they are per rank
    threads: int  # per rank
    work: RankCost  # cost of a rank that shares its cores with no other
    crowding: float  # factor by which missing cores slow these ranks down
    is_measured: bool  # one copy ran for each rank


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """One job on this machine: short runs and reductions."""

    device_type: str
    hardware: str
    job: str
    points: list[Point]
    ranks_per_machine: int
    link: Link  # between ranks of this machine
    gradient_bytes: int
    steps_per_episode: float  # NaN: no episode ended
    is_steady: bool  # the rounds of one rank agree on a rate
    notes: list[str]


def measure(
    flags: Sequence[str],
    gpus: Sequence[int],
    scalings: Sequence[str],
    device_type: str,
    *,
    rate_is_known: bool = False,
) -> Measurements:
    """Measure one rank, reductions, and the share of every number of ranks.

    Args:
        flags: of the training script.
        gpus: numbers of ranks.
        rate_is_known: accept an unsteady rate of one rank.

    Raises:
        UserError: flags that training refuses.
        ChildError: a short run or a reduction failed, or one rank's rate is unsteady.
    """
    on_cpu = device_type == "cpu"
    cores, numbers = machine.available_cores(), sorted({1, *gpus})
    devices = numbers[-1] if on_cpu else torch.cuda.device_count()
    train = partial(measure_short_runs, iterations=ROUNDS, device_type=device_type)
    whole = _measure_whole_job(train, flags, rate_is_known)
    (records,) = whole.records
    max_copies = min(numbers[-1], devices)
    if on_cpu:
        by_memory = machine.host_memory().available // max(1, whole.copy_bytes)
        max_copies = max(1, min(max_copies, cores, by_memory))

    link = Link()
    if devices > 1:
        reducing = min(numbers[-1], devices, max(2, max_copies))
        logger.info("measuring reductions over %d ranks", reducing)
        num_bytes = [max(4, int(whole.gradient_bytes * factor)) for factor in FIT_FACTORS]
        link = fit_link(reducing, time_reductions(reducing, num_bytes, device_type).gradients_s)

    work, config = rank_cost(records), whole.config
    num_envs = work.env_steps // config["train"]["num_steps"]
    sizes = {"num_envs": num_envs, "batch_size": config["train"]["batch_size"]}
    works = {(1, config["launch"]["threads"], 1): work}  # by divisor of sizes, threads, copies
    points, notes = [], []
    for scaling, ranks in itertools.product(scalings, numbers):
        divisor = ranks if scaling == "strong" else 1
        if any(size % divisor for size in sizes.values()):
            shown = " and ".join(f"{name} {size}" for name, size in sizes.items())
            fix = f"choose multiples of {ranks}, or --scaling weak"
            notes.append(f"{shown} do not divide over {ranks} ranks: {fix}")
            continue
        threads = min(threads_per_rank(min(ranks, devices)), config["launch"]["threads"])
        copies = min(ranks, max_copies)
        share = divisor, threads, copies
        if share not in works:
            logger.info("measuring %d x 1/%d of the job", copies, divisor)
            small = [f"--{name}={size // divisor}" for name, size in sizes.items()]
            runs = train([*flags, "--strategy=ddp", *small], copies, threads)
            works[share] = rank_cost(sum(runs.records, []))
        point = Point(
            ranks=ranks,
            scaling=scaling,
            threads=threads,
            work=works[share] if copies == ranks else works[share].modelled(),
            crowding=max(1.0, ranks * threads / cores) if on_cpu else 1.0,
            is_measured=copies == ranks,
        )
        points.append(point)
    return Measurements(
        device_type=device_type,
        hardware=f"{cores} CPU core(s)" if on_cpu else torch.cuda.get_device_name(0),
        job=f"{config['task']['env']}, {num_envs} environments",
        points=points,
        ranks_per_machine=devices,
        link=link,
        gradient_bytes=whole.gradient_bytes,
        steps_per_episode=steps_per_episode(records),
        is_steady=is_steady(round_rates(records)),
        notes=notes,
    )


def _measure_whole_job(
    train: Callable[..., ShortRuns], flags: Sequence[str], rate_is_known: bool
) -> ShortRuns:
    logger.info("measuring the whole job on one rank")
    whole = train(
        [*flags, "--strategy=default"],
        copies=1,
        threads=0,
        enough_s=ENOUGH_S,
        steady=True,
    )
    rates = round_rates(whole.records[0])
    if not (is_steady(rates) or rate_is_known):
        fix = "stop other programs and measure again, or give --sps N from a run"
        raise ChildError(f"two measurements of one rank disagreed: {describe_rates(rates)}: {fix}")
    return whole
