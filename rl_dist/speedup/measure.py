"""Measure the inputs of the scaling model without training on several ranks.

First, one rank trains the whole job for some seconds. Then processes that only reduce gradients
show the cost of a reduction. Finally, independent copies of one rank's share of the job train at
the same time: like real ranks, they compete for cores and memory. `rl_dist.speedup.model` predicts
the rest.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from rl_dist.launch.bench import time_reductions
from rl_dist.launch.child import (
    ChildError,
    describe_rates,
    is_steady,
    measure_short_runs,
    round_rates,
)
from rl_dist.machine import available_cores
from rl_dist.process_group.world import threads_per_rank
from rl_dist.speedup.model import MODEL_ERROR, Link, Network, RankCost, fit_link, rank_cost

logger = logging.getLogger(__name__)
# Time reductions of these sizes, relative to the gradient, to separate latency from bandwidth.
FIT_FACTORS = (1 / 64, 4)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The work of one rank when several ranks share a job."""

    ranks: int
    scaling: str  # strong: num_envs and batch_size are totals; weak: they are per rank
    work: RankCost  # cost of one rank if the machine has enough cores
    processors: int  # CPU threads of a rank; 1 on a GPU
    crowding: float  # slowdown factor if the ranks need more cores than there are
    source: str  # "measured": a copy ran for each rank; "modelled": fewer copies ran


class MeasuredJob:
    """Measurements of a job, which one rank of this machine trains for some seconds.

    Args:
        flags: flags of the training script.
        gpus: numbers of ranks to measure, in addition to 1.
        rate_is_known: accept measured steps/s that keep changing.

    Raises:
        UserError: training does not accept the flags.
        ChildError: a short run or a reduction failed, or the steps/s keep changing.
    """

    def __init__(
        self, flags: Sequence[str], device_type: str, gpus: Sequence[int], rate_is_known: bool
    ) -> None:
        self.flags = [*flags, "--num_gpus=1", f"--device={device_type}", "--gpu_ids="]
        self.device_type = device_type
        self.on_cpu = device_type == "cpu"
        logger.info("measuring the whole job on one rank")
        whole = measure_short_runs([[*self.flags, "--strategy=default"]])
        (self.records,) = whole.records
        rates = round_rates(self.records)
        if not (is_steady(rates) or rate_is_known):
            problem = f"the rate of one rank keeps changing: {describe_rates(rates)}"
            fix = "stop other programs and measure again, or give --sps N from a run"
            raise ChildError(f"{problem}: {fix}")
        work, config = rank_cost(self.records), whole.config
        self.gradient_bytes = whole.gradient_bytes
        self.threads = config["launch"]["threads"]
        self.sizes = {
            "num_envs": work.env_steps // config["train"]["num_steps"],
            "batch_size": config["train"]["batch_size"],
        }
        self.title = f"{config['task']['env']}, {self.sizes['num_envs']} environments"
        self.cores = available_cores()
        self.hardware = (
            f"{self.cores} CPU core(s)" if self.on_cpu else torch.cuda.get_device_name(0)
        )
        self.numbers = sorted({1, *gpus})
        most_ranks = self.numbers[-1]
        self.most_copies = min(most_ranks, self.cores if self.on_cpu else torch.cuda.device_count())
        # number of ranks in one machine
        self.ranks_here = most_ranks if self.on_cpu else self.most_copies
        self.notes: list[str] = []
        # measured costs; the key is (divisor of the sizes, threads, copies)
        self._works = {(1, self.threads, 1): work}

    def network(self) -> Network:
        """Time reductions between ranks of this machine and fit a network model."""
        if self.ranks_here == 1:
            return Network(Link(), 1)
        ranks = max(2, self.most_copies)
        logger.info("measuring reductions over %d ranks", ranks)
        num_bytes = [max(4, int(self.gradient_bytes * factor)) for factor in FIT_FACTORS]
        seconds = time_reductions(ranks, num_bytes, self.device_type)
        return Network(fit_link(ranks, seconds), self.ranks_here)

    def shares(self, scalings: Sequence[str]) -> Iterator[Share]:
        """Measure and yield one rank's work for each scaling and each number of ranks.

        Copies of the rank's share train at the same time, at most one per core or GPU. If the
        job's sizes are not divisible by a number of ranks, skip this number and add a note.
        """
        for scaling, ranks in itertools.product(scalings, self.numbers):
            divisor = ranks if scaling == "strong" else 1
            if any(size % divisor for size in self.sizes.values()):
                sizes = " and ".join(f"{name} {size}" for name, size in self.sizes.items())
                fix = f"choose multiples of {ranks}, or --scaling weak"
                self.notes.append(f"{sizes} do not divide over {ranks} ranks: {fix}")
                continue
            threads = min(threads_per_rank(min(ranks, self.ranks_here)), self.threads)
            copies = min(ranks, self.most_copies)
            key = divisor, threads, copies
            if key not in self._works:
                logger.info("measuring %d x 1/%d of the job", copies, divisor)
                smaller = [f"--{name}={size // divisor}" for name, size in self.sizes.items()]
                share = [*self.flags, "--strategy=ddp", f"--threads={threads}", *smaller]
                gpu_ids = [[] if self.on_cpu else [f"--gpu_ids={n}"] for n in range(copies)]
                runs = measure_short_runs([[*share, *gpu_id] for gpu_id in gpu_ids])
                self._works[key] = rank_cost(sum(runs.records, []))
            work = self._works[key]
            if copies < ranks:
                work = replace(work, relative_error=max(work.relative_error, MODEL_ERROR))
            yield Share(
                ranks=ranks,
                scaling=scaling,
                work=work,
                processors=threads if self.on_cpu else 1,
                crowding=max(1.0, ranks * threads / self.cores) if self.on_cpu else 1.0,
                source="modelled" if copies < ranks else "measured",
            )
