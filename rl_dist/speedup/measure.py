"""Measure the inputs of the scaling model without training on several ranks.

First, one rank trains the whole job for some seconds. Then several processes reduce gradients,
without training, to measure how long a reduction takes. Finally, several copies of a rank train at
the same time, each with one rank's share of the job. The copies do not communicate, but like real
ranks, they compete for cores and memory. From these measurements, `rl_dist.speedup.model` predicts
the speed of training on several ranks.
"""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.benchmark import Timer

from rl_dist.files import Record
from rl_dist.launch.bench import time_reductions
from rl_dist.launch.child import (
    ChildError,
    ShortRuns,
    measure_short_runs,
    round_rates,
    unsteady,
)
from rl_dist.machine import available_cores
from rl_dist.process_group.world import threads_per_rank
from rl_dist.speedup.model import Card, Link, Network, RankCost, fit_link, rank_cost

logger = logging.getLogger(__name__)
# Sizes of the timed reductions, as multiples of the gradient's size. Two sizes are needed to
# separate latency from bandwidth.
FIT_FACTORS = (1 / 64, 4)


@dataclass(frozen=True)
class Share:
    """The work of one rank when several ranks share a job."""

    ranks: int
    scaling: str  # strong: num_envs and batch_size are totals; weak: they are per rank
    work: RankCost  # cost of one rank on a machine with enough cores
    communication_s: float  # communication time of an iteration, without waits for slow ranks
    crowding: float  # slowdown factor; above 1 if the ranks need more cores than there are
    # how `work` was found. measured: one copy was timed for each rank; modelled: fewer copies were
    # timed; estimate: the times are computed for a GPU model that this machine may not have
    source: str


@dataclass(frozen=True, kw_only=True)
class MeasuredJob:
    """Measurements of a job on this machine."""

    records: list[Record]  # metrics of the run on one rank
    title: str  # name of the job
    shares: list[Share]  # one for each scaling and number of ranks, in ascending order of ranks
    notes: list[str]


def measure_job(
    flags: Sequence[str],
    device_type: str,
    gpus: Sequence[int],
    scalings: Sequence[str],
    *,
    steady: bool,
    card: Card | None,
) -> MeasuredJob:
    """Time a job on one rank, then reductions, then copies of one rank's work.

    The copies train at the same time, at most one per core or GPU. A number of ranks that does not
    divide num_envs and batch_size is skipped and reported in the notes.

    Args:
        gpus: numbers of ranks to measure, in addition to 1.
        steady: raise an error if the speed keeps changing.
        card: GPU model for which to estimate the times; None: measure them for this machine.
    """
    flags = [*flags, "--num_gpus=1", f"--device={device_type}", "--gpu_ids="]
    whole_job = measure_one_rank(flags, steady)
    (records,) = whole_job.records
    config = whole_job.config
    cost = rank_cost(records)
    sizes = {
        "num_envs": cost.env_steps // config["train"]["num_steps"],
        "batch_size": config["train"]["batch_size"],
    }
    most_threads = config["launch"]["threads"]

    # number of ranks that can run on this machine, and of copies that are timed at the same time
    on_cpu = device_type == "cpu"
    cores = available_cores()
    rank_numbers = sorted({1, *gpus})
    most_copies = min(rank_numbers[-1], cores if on_cpu else torch.cuda.device_count())
    ranks_here = rank_numbers[-1] if on_cpu else most_copies
    network = card.network if card else Network(Link())
    # duration of an update on the card, divided by its duration on one CPU thread or GPU
    ratio = _fp32_tflops(device_type) / card.fp32_tflops if card else 1.0
    if not card and ranks_here > 1:
        ranks = max(2, most_copies)
        logger.info("measuring reductions over %d ranks", ranks)
        num_bytes = [max(4, int(whole_job.gradient_bytes * factor)) for factor in FIT_FACTORS]
        backend = config["launch"]["backend"]
        link = fit_link(ranks, time_reductions(ranks, num_bytes, device_type, backend=backend))
        network = Network(link, ranks_here)

    shares: list[Share] = []
    notes: list[str] = []
    costs = {(1, most_threads, 1): cost}  # keys: divisor of the sizes, threads per copy, copies
    for scaling, ranks in itertools.product(scalings, rank_numbers):
        divisor = ranks if scaling == "strong" else 1
        if any(size % divisor for size in sizes.values()):
            notes.append(f"{sizes} are not divisible by {ranks} ranks: use --scaling weak")
            continue
        threads = min(threads_per_rank(min(ranks, ranks_here)), most_threads)
        copies = min(ranks, most_copies)
        key = divisor, threads, copies
        if key not in costs:
            logger.info("measuring %d copies of 1/%d of the job", copies, divisor)
            size_flags = [f"--{name}={size // divisor}" for name, size in sizes.items()]
            share_flags = [*flags, "--strategy=ddp", f"--threads={threads}", *size_flags]
            gpu_ids = [[] if on_cpu else [f"--gpu_ids={number}"] for number in range(copies)]
            runs = measure_short_runs([[*share_flags, *gpu_id] for gpu_id in gpu_ids])
            costs[key] = rank_cost(sum(runs.records, []))
        work = costs[key]
        crowding = max(1.0, ranks * threads / cores) if on_cpu else 1.0
        source = "modelled" if copies < ranks else "measured"
        if card:  # assume that machines with this card have enough cores
            work = work.scaled(1.0, ratio * (threads if on_cpu else 1))
            crowding = 1.0
            source = "estimate"
        communication_s = network.iteration_s(work.gradient_steps, whole_job.gradient_bytes, ranks)
        shares.append(Share(ranks, scaling, work, communication_s, crowding, source))
    return MeasuredJob(
        records=records,
        title=f"{config['task']['env']}, {sizes['num_envs']} environments",
        shares=shares,
        notes=notes,
    )


def _fp32_tflops(device_type: str) -> float:
    """Measure the fp32 TFLOP/s of one CPU thread, or of one GPU."""
    matrix = torch.randn(768, 768, device=device_type)
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=1)
    return 2 * 768**3 / timer.timeit(8).median / 1e12


def measure_one_rank(flags: Sequence[str], steady: bool) -> ShortRuns:
    """Train the whole job briefly; if `steady`, raise a ChildError if its speed changes."""
    logger.info("measuring the whole job on one rank")
    whole_job = measure_short_runs([[*flags, "--strategy=default"]])
    problem = unsteady(round_rates(whole_job.records[0]))
    if steady and problem:
        raise ChildError(
            f"the speed of one rank keeps changing: {problem}: stop other programs "
            "and measure again, or pass the steps/s of a longer run with --sps N"
        )
    return whole_job
