"""Measure what the scaling model needs, without training on several ranks.

One rank trains the whole job for a moment. Copies of one rank's share then train side by side
without communication, at most one per core or GPU, and ranks that only reduce show the cost of a
reduction. `rl_dist.speedup.model` gives the rest.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from rl_dist import machine
from rl_dist.launch.bench import BenchTimeoutError, time_reductions
from rl_dist.launch.short_run import (
    ROUNDS,
    ShortRunError,
    ShortRunResult,
    ShortRunTimeoutError,
    describe_rates,
    is_steady,
    measure_short_runs,
    round_rates,
)
from rl_dist.process_group.world import threads_per_rank
from rl_dist.speedup.machines import LINKS, link_of_gpu
from rl_dist.speedup.model import (
    RankCost,
    fit_link,
    interpolate,
    rank_cost,
)

logger = logging.getLogger(__name__)
QUICK_S = 42.0  # of measuring; starting Python and torch comes on top
FIRST_S = 12.0  # of training on one rank, after which two ended iterations are enough
FIT_FACTORS = (1 / 64, 1, 4)  # of the gradient's size, to separate latency from bandwidth


class Share(NamedTuple):
    """A short run that stands for one of several ranks."""

    divisor: int  # of the job's sizes
    threads: int = 0  # of a copy; 0: as training chooses
    copies: int = 1

    def __str__(self) -> str:
        return f"{self.copies} x 1/{self.divisor} of the job"


class Measurements:
    """One job on this machine: short runs and reductions, and what follows from them."""

    def __init__(
        self,
        flags: Sequence[str],
        ranks: Sequence[int],
        scalings: Sequence[str],
        device_type: str = "cpu",
        ranks_per_machine: int = 0,
    ) -> None:
        """Describe what to measure.

        Args:
            flags: of the training script.
            ranks: numbers of ranks.
            scalings: strong (the job's sizes are totals), weak (they are per rank) or both.
            ranks_per_machine: 0: the GPUs here, or on the CPU all ranks.
        """
        self.flags, self.device_type = flags, device_type
        self.ranks = sorted({1, *ranks})
        self.points = [(n, scaling) for scaling in scalings for n in self.ranks]
        self.on_cpu = device_type == "cpu"
        devices = self.ranks[-1] if self.on_cpu else torch.cuda.device_count()
        self.ranks_per_machine = ranks_per_machine or devices
        self.max_copies = self.ranks_here = min(devices, self.ranks_per_machine)
        self.cores, self.load = machine.available_cores(), os.getloadavg()[0]
        self.works: dict[Share, RankCost] = {}
        self.link = LINKS["loopback"] if self.on_cpu else link_of_gpu(self.hardware)
        self.notes: list[str] = []

    @property
    def hardware(self) -> str:
        """Return the name of the GPU, or the number of CPU cores."""
        return f"{self.cores} CPU core(s)" if self.on_cpu else torch.cuda.get_device_name(0)

    @property
    def is_steady(self) -> bool:
        """Return whether the rounds of one rank agree on a rate."""
        return is_steady(self.rates)

    def measure(self, *, thorough: bool = False, rate_is_known: bool = False) -> None:
        """Measure one rank, then a reduction and shares until time is up.

        Args:
            thorough: take the time that all of them need.
            rate_is_known: accept an unsteady rate of one rank.

        Raises:
            UserError: flags that training refuses.
            ShortRunError: a short run failed, or one rank's rate is unsteady.
            BenchError: a reduction failed.
        """
        deadline_s = time.monotonic() + (math.inf if thorough else QUICK_S)
        self._measure_one_rank(rate_is_known)
        if self.load > self.cores / 2:
            busy = f"{self.load:.1f} processes wanted the {self.cores} core(s) of this machine"
            self.notes.append(f"{busy}: its times are too long, measure again later")
        self._drop_impossible_points()
        self._measure_reductions()
        # The largest number of ranks first: its share and the whole job give those between.
        for share in [self.share(*point) for point in sorted(self.points, key=lambda p: -p[0])]:
            timeout_s = min(600.0, deadline_s - time.monotonic())
            if share not in self.works and timeout_s > 0:
                logger.info("measuring %s", share)
                with suppress(ShortRunTimeoutError):  # then it is modelled
                    runs = self._train(share, "ddp", warm_up=2 * thorough, timeout_s=timeout_s)
                    self.works[share] = rank_cost(sum(runs.records, []))
        shares = ", ".join(map(str, self.works))
        self.notes.append(f"measured: {shares}; reductions: {self.link.name}; else modelled")

    def _measure_one_rank(self, rate_is_known: bool) -> None:
        logger.info("measuring the whole job on one rank")
        first = self._train(Share(1), "default", rounds_enough_s=FIRST_S)
        (records,) = first.records
        self.rates = round_rates(records)
        if not (self.is_steady or rate_is_known):
            fix = "stop other programs and measure again, or give --sps N from a run"
            raise ShortRunError(
                f"two measurements of one rank disagreed: {describe_rates(self.rates)}: {fix}"
            )
        work, self.config = rank_cost(records), first.config
        train = first.config["train"]
        self.sizes = {
            "num_envs": work.env_steps // train["num_steps"],
            "batch_size": train["batch_size"],
        }
        self.gradient_bytes = first.gradient_bytes
        self.steps_per_episode = steps_per_episode(records)
        if self.on_cpu:
            by_memory = machine.host_memory().available // max(1, first.copy_bytes)
            self.max_copies = max(1, min(self.max_copies, self.cores, by_memory))
        self.works[self.share(1)] = work if len(records) > 1 else work.modelled()

    def _drop_impossible_points(self) -> None:
        """Drop numbers of ranks over which the sizes do not divide, with a note for each."""
        sizes = " and ".join(f"{name} {size}" for name, size in self.sizes.items())
        for ranks, scaling in self.points.copy():
            if scaling == "strong" and any(size % ranks for size in self.sizes.values()):
                self.points.remove((ranks, scaling))
                fix = f"choose multiples of {ranks}, or --scaling weak"
                self.notes.append(f"{sizes} do not divide over {ranks} ranks: {fix}")

    def _measure_reductions(self) -> None:
        """Measure the link between as many ranks as work here, at most one per core or two."""
        ranks = min(self.ranks_here, max(2, self.max_copies))
        if ranks > 1:
            logger.info("measuring reductions over %d ranks", ranks)
            sizes = [max(4, int(self.gradient_bytes * factor)) for factor in FIT_FACTORS]
            with suppress(BenchTimeoutError):  # then the link is assumed
                found = time_reductions(ranks, sizes, self.device_type, timeout_s=QUICK_S)
                self.link = fit_link(ranks, found.gradients_s)

    def _train(
        self, share: Share, strategy: str, warm_up: int = 0, **options: Any
    ) -> ShortRunResult:
        flags = [*self.flags, f"--strategy={strategy}"]
        if share.divisor > 1:
            flags += [f"--{name}={size // share.divisor}" for name, size in self.sizes.items()]
        return measure_short_runs(
            flags,
            share.copies,
            share.threads,
            ROUNDS,
            warm_up=warm_up,
            device_type=self.device_type,
            **options,
        )

    # ---- from the measurements to any number of ranks

    def threads(self, ranks: int) -> int:
        """Return the threads of one of these ranks."""
        most = threads_per_rank(min(ranks, self.ranks_per_machine))
        return min(most, self.config["launch"]["threads"])

    def crowding(self, ranks: int) -> float:
        """Return the factor by which missing cores slow this many ranks down."""
        here = min(ranks, self.ranks_per_machine)
        return max(1.0, here * self.threads(ranks) / self.cores) if self.on_cpu else 1.0

    def share(self, ranks: int, scaling: str = "strong") -> Share:
        """Return the short run that stands for one of these ranks."""
        divisor = ranks if scaling == "strong" else 1
        return Share(divisor, self.threads(ranks), min(ranks, self.max_copies))

    def work(self, ranks: int, scaling: str) -> RankCost:
        """Return the cost of one of these ranks, with cores of its own."""
        share = self.share(ranks, scaling)
        if self.is_measured(ranks, scaling):
            return self.works[share]
        # The last of each size counts: the one with the most copies.
        by_copies = sorted(self.works, key=lambda share: share.copies)
        known = {1 / other.divisor: self.works[other] for other in by_copies}
        return interpolate(known, 1 / share.divisor)

    def is_measured(self, ranks: int, scaling: str) -> bool:
        """Return whether as many copies as ranks were measured."""
        share = self.share(ranks, scaling)
        return share in self.works and share.copies == ranks


def steps_per_episode(records: Sequence[Mapping[str, Any]]) -> float:
    """Return the environment steps per ended episode; nan if none ended.

    Not the mean length: the first episodes begin at a random age, so those that end soon are short.
    """
    ended = sum(record["episode/count"] for record in records)
    steps = sum(record["global_step"] / record["iteration"] for record in records)
    return steps / ended if ended else math.nan
