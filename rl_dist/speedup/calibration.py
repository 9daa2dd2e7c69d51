"""Measurements that the scaling model needs, without training on several ranks.

One rank trains the whole job for a moment. Copies of one rank's share then train side by side
without communicating, and ranks that only reduce show the cost of a reduction. The quick form has
at most as many copies as cores and stops in time: `rl_dist.speedup.model` fills in the rest. The
thorough form measures every number of ranks with as many copies.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rl_dist import machine
from rl_dist.launch.bench import BenchTimeoutError, Reductions, time_reductions
from rl_dist.launch.short_run import (
    ROUNDS,
    ShortRunError,
    ShortRunResult,
    ShortRunTimeoutError,
    describe_rates,
    is_steady,
    measure_short_runs,
    round_rates,
    without,
)
from rl_dist.machine import available_cores, duration
from rl_dist.process_group.world import threads_per_rank
from rl_dist.speedup.machines import LINKS, NETWORK, GpuModel, gpu_named, link_of_gpu
from rl_dist.speedup.model import (
    OF_UPDATE,
    Communication,
    Link,
    Prediction,
    RankCost,
    fit_link,
    interpolate,
    modelled_communication,
    predict,
)
from rl_dist.speedup.rank_cost import rank_cost_of, share_flags, steps_per_episode

SCALINGS = ("strong", "weak")
QUICK_S = 42.0  # of measuring; starting Python and torch comes on top
FIRST_S = 12.0  # of training on one rank, after which two ended iterations are enough
ITERATIONS = 6  # measured of every short run, if thorough
REDUCTIONS = 0.3  # of the first short run's time
FIT_FACTORS = (1 / 64, 1, 4)  # of the gradient's size, to tell latency from bandwidth
# Chosen here for the short runs.
OF_RANKS = (
    "num_gpus", "gpu_ids", "strategy", "hybrid_form", "shard_size", "fallback",
    "gradient_compression", "scaling", "lr_scaling", "device",
)  # fmt: skip
BUSY_SHARE = 0.5  # of the cores, that others may want while copies are measured
COPIES_PER_CORE = 4  # if thorough; more of them measure only how the machine is overrun


@dataclass(frozen=True, kw_only=True)
class Point:
    """One number of ranks and a way of scaling: measured, modelled or refused."""

    ranks: int
    scaling: str
    work: RankCost | None = None
    communication: Communication = field(default_factory=Communication)
    threads: int = 1
    crowding: float = 1.0  # how many times slower `work` is for want of cores
    measured: bool = True  # work and reductions, with as many copies and ranks as it stands for
    problem: str = ""  # why this number of ranks cannot train the job

    @property
    def prediction(self) -> Prediction:
        """The model's iteration."""
        assert self.work is not None
        return predict(self.work, self.ranks, self.communication)


class Share(NamedTuple):
    """A short run: divisor of the job's sizes, threads of a copy, copies."""

    divisor: int
    threads: int
    copies: int

    def __str__(self) -> str:
        return f"{self.copies} x 1/{self.divisor} of the job, {self.threads} thread(s) each"


@dataclass(kw_only=True)
class Calibration:
    """One job on one machine: what is asked, what is measured, what follows."""

    flags: list[str] = field(default_factory=list)
    gpus: list[int] = field(default_factory=lambda: [1])
    scalings: Sequence[str] = SCALINGS  # strong (the job's sizes are totals), weak (per rank)
    device_type: str = "cpu"
    ranks_per_machine: int = 1
    between: Link = LINKS[NETWORK]  # between machines
    thorough: bool = False  # measure every number of ranks, however long it takes
    say: Callable[[str], None] = lambda line: None  # gets a line for each measurement
    deadline_s: float = math.inf
    steps_per_s: float = 0.0  # of one rank, known from elsewhere; 0: it must be measured
    cores: int = 1
    load: float = 0.0  # processes that wanted a core before anything was measured
    most_threads: int = 0  # that training takes for the whole job; 0: not known yet
    # measured
    works: dict[Share, RankCost] = field(default_factory=dict)
    reductions: dict[int, Reductions] = field(default_factory=dict)  # by ranks
    copies_in_memory: int = 10**9
    rates: list[float] = field(default_factory=list)  # steps/s of one rank, by round
    env: str = ""
    gradient_bytes: int = 0
    num_envs: int = 0
    batch_size: int = 0
    steps_per_episode: float = math.nan  # nan: no episode ended
    # what follows
    link: Link = field(default_factory=lambda: Link(name="none"))  # between ranks of one machine
    points: list[Point] = field(default_factory=list)  # the first is of one rank
    sources: str = ""  # the measurements in words

    @property
    def was_busy(self) -> bool:
        """True if others used the machine."""
        return self.load > BUSY_SHARE * self.cores

    @property
    def is_steady(self) -> bool:
        """True if the rounds of one rank agree on a rate."""
        return is_steady(self.rates)

    @property
    def card(self) -> GpuModel | None:
        """The kind of GPU that was measured; None: a CPU, or a kind not listed."""
        on_gpu = self.device_type == "cuda"
        return gpu_named(torch.cuda.get_device_name(0)) if on_gpu else None

    # ---- which short run stands for a rank among N

    @property
    def _devices(self) -> int:
        """Devices that can be used here at once; on the CPU by all ranks of a machine."""
        here = torch.cuda.device_count() if self.device_type == "cuda" else self.ranks_per_machine
        return min(self.ranks_per_machine, here)

    def _share(self, ranks: int, scaling: str) -> Share:
        copies = max(1, min(ranks, self._devices))  # ranks of the fullest machine
        if self.device_type == "cpu":
            most = self.cores * (COPIES_PER_CORE if self.thorough else 1)
            copies = min(copies, most, self.copies_in_memory)
        threads = min(threads_per_rank(min(ranks, self.ranks_per_machine)), self.most_threads)
        return Share(ranks if scaling == "strong" else 1, threads, copies)

    def _crowding(self, copies: int, threads: int) -> float:
        """How many times slower so many copies are than one, for want of cores."""
        return max(1.0, copies * threads / self.cores) if self.device_type == "cpu" else 1.0

    def _share_flags(self, ranks: int, scaling: str = "strong") -> tuple[list[str], str]:
        return share_flags(self.num_envs, self.batch_size, ranks, scaling)

    # ---- measuring

    def measure_one(self) -> None:
        """Train the whole job on one rank for a moment."""
        whole = self._share(1, "strong")
        started_s = time.monotonic()
        self.say("measuring 1: the whole job on one rank")
        first = self._train(whole, [], "default", math.inf if self.thorough else FIRST_S)
        self.rates = round_rates(first.records[0])
        if not (self.is_steady or self.steps_per_s):
            fix = "stop other programs and measure again, or give --sps N from a run"
            raise ShortRunError(
                f"two measurements of one rank disagreed: {describe_rates(self.rates)}: {fix}"
            )
        self.first_s = time.monotonic() - started_s
        self.most_threads = first.config["launch"]["threads"]
        whole = self._share(1, "strong")
        work = rank_cost_of(first.records)
        self.works[whole] = work.modelled() if len(first.records[0]) == 1 else work
        train = first.config["train"]
        self.env = first.config["task"]["env"]
        self.steps_per_episode = steps_per_episode(first.records[0])
        self.batch_size = train["batch_size"]
        self.num_envs = work.env_steps // train["num_steps"]
        self.gradient_bytes = first.gradient_bytes
        free = machine.host_memory().available
        self.copies_in_memory = max(1, free // max(1, first.copy_bytes))

    def measure_shares(self) -> None:
        """Measure shares and reductions; the quick form stops in time."""
        plan = self._plan()
        costs_s = [self._cost(item) * self.first_s for item in plan]
        for number, item in enumerate(plan):
            if time.monotonic() + costs_s[number] <= self.deadline_s:
                what = item if isinstance(item, Share) else f"reductions over {item} ranks"
                left = f"about {duration(sum(costs_s[number:]))} left"
                self.say(f"measuring {number + 2} of {len(plan) + 1}: {what}, {left}")
                try:
                    if isinstance(item, Share):
                        flags, _ = self._share_flags(item.divisor)
                        self.works[item] = rank_cost_of(self._train(item, flags, "ddp").records)
                    else:
                        self._measure_reductions(item)
                except (ShortRunTimeoutError, BenchTimeoutError):
                    if self.thorough:
                        raise
        self._conclude()

    def _plan(self) -> list[Share | int]:
        """What to measure, the most informative first: shares, numbers of ranks."""
        *fewer, most = self.gpus
        limit = min(COPIES_PER_CORE * self.cores, self.copies_in_memory)
        limit = limit if self.device_type == "cpu" else most
        # over two ranks first: they show the link
        plan: list[Share | int] = [2] if min(most, self._devices) >= 2 else []
        # the smallest shares first: the whole job and they give those between
        for ranks, scaling in [(n, scaling) for n in (most, *fewer) for scaling in self.scalings]:
            share = self._share(ranks, scaling)
            if not self._share_flags(ranks, scaling)[1] and share not in (*plan, *self.works):
                plan.append(share)
        here = [n for n in self.gpus if 2 < n <= min(limit, self._devices)]
        return [*plan, *reversed(here)]

    def _cost(self, item: Share | int) -> float:
        """Expected time of a measurement, in units of the first one's."""
        if not isinstance(item, Share):
            return REDUCTIONS * max(1.0, item / self.cores)
        # half of a short run is taken to be the start, which no smaller share shortens
        return (1 + 1 / item.divisor) / 2 * max(1.0, item.copies / self.cores)

    def _train(
        self,
        share: Share,
        flags: list[str],
        strategy: str,
        rounds_enough_s: float | None = None,
    ) -> ShortRunResult:
        names = [flag[2:].partition("=")[0] for flag in flags]
        return measure_short_runs(
            [*without(self.flags, names), *flags, f"--strategy={strategy}"],
            share.copies,
            share.threads,
            ITERATIONS if self.thorough else ROUNDS,
            warm_up=2 if self.thorough else 0,
            timeout_s=min(600.0, self._left_s()) if self.works else 600.0,
            device_type=self.device_type,
            rounds_enough_s=rounds_enough_s,
        )

    def _measure_reductions(self, ranks: int) -> None:
        sizes = sorted({max(4, int(self.gradient_bytes * factor)) for factor in FIT_FACTORS})
        most_s = min(180.0, self._left_s())
        self.reductions[ranks] = time_reductions(ranks, sizes, self.device_type, timeout_s=most_s)

    def _left_s(self) -> float:
        return max(10.0, self.deadline_s - time.monotonic())

    # ---- from what was measured to every point

    def _conclude(self) -> None:
        """Set every point, measured or modelled from those that were."""
        self.link = self._find_link()
        self.points = [self._point(n, scaling) for scaling in self.scalings for n in self.gpus]
        job = ", ".join(f"{share.copies} x 1/{share.divisor}" for share in self.works)
        reduced = f"reductions assumed ({self.link.name})"
        if self.reductions:
            reduced = f"reductions over {', '.join(map(str, self.reductions))} ranks"
        more = "" if self.thorough else "; --thorough measures every number of ranks"
        self.sources = f"measured: {job} of the job; {reduced}; the rest is modelled{more}"

    def _point(self, ranks: int, scaling: str) -> Point:
        if problem := self._share_flags(ranks, scaling)[1]:
            return Point(ranks=ranks, scaling=scaling, problem=problem)
        share = self._share(ranks, scaling)
        crowding = self._crowding(max(1, min(ranks, self._devices)), share.threads)
        more = crowding / self._crowding(share.copies, share.threads)
        work = self._work(share)
        communication, reduced = self._communication(ranks)
        return Point(
            ranks=ranks,
            scaling=scaling,
            work=work if more == 1.0 else work.times(more).modelled(),
            communication=communication,
            threads=share.threads,
            crowding=crowding,
            measured=share in self.works and more == 1.0 and reduced,
        )

    def _work(self, share: Share) -> RankCost:
        """One rank's share as measured, or by its size between those that were."""
        if share in self.works:
            return self.works[share]
        known: dict[float, RankCost] = {}
        # of each size the one with the most similar number of threads
        for other in sorted(self.works, key=lambda other: -abs(other.threads - share.threads)):
            slower = other.threads / share.threads if self.device_type == "cpu" else 1.0
            known[1 / other.divisor] = self.works[other].times(slower, OF_UPDATE)
        return interpolate(known, 1 / share.divisor).modelled()

    def _find_link(self) -> Link:
        """The link inside this machine, as far as it can be measured here."""
        if min(self.gpus[-1], self.ranks_per_machine) == 1:
            return Link(name="none")
        if 2 in self.reductions:
            return fit_link(self.reductions[2].gradients_s)
        if self.device_type == "cuda":
            return link_of_gpu(torch.cuda.get_device_name(0))
        return LINKS["loopback"]

    def _communication(self, ranks: int) -> tuple[Communication, bool]:
        """Communication of `ranks` ranks, and True if it was measured."""
        if ranks == 1:
            return Communication(), True
        if ranks in self.reductions and ranks <= self.ranks_per_machine:
            measured = self.reductions[ranks]
            gradient_s = measured.gradients_s[self.gradient_bytes]
            return Communication(gradient_s=gradient_s, small_s=measured.small_s), True
        sizes = self.gradient_bytes, ranks, self.ranks_per_machine
        found = modelled_communication(*sizes, self.link, self.between)
        # ranks that share cores copy and add one after the other
        times = self._crowding(max(1, min(ranks, self._devices)), 1)
        slower = Communication(gradient_s=found.gradient_s * times, small_s=found.small_s * times)
        return slower, False


def calibrate(
    flags: Sequence[str],
    gpus: Sequence[int],
    *,
    device_type: str = "cpu",
    ranks_per_machine: int = 0,
    thorough: bool = False,
    **options: Any,
) -> Calibration:
    """Measure what the model needs for each number of ranks.

    Args:
        flags: of the training script.
        gpus: numbers of ranks.
        ranks_per_machine: 0: the GPUs here, or on the CPU all ranks.
        options: other fields of `Calibration`.

    Raises:
        UserError: flags that training refuses.
        ShortRunError: one rank's rate differs from round to round, and none is given.
    """
    gpus = sorted({1, *gpus})
    default = torch.cuda.device_count() if device_type == "cuda" else gpus[-1]
    found = Calibration(
        flags=without(flags, OF_RANKS),
        gpus=gpus,
        device_type=device_type,
        ranks_per_machine=ranks_per_machine or default,
        thorough=thorough,
        deadline_s=math.inf if thorough else time.monotonic() + QUICK_S,
        cores=available_cores(),
        load=os.getloadavg()[0],
        **options,
    )
    found.measure_one()
    found.measure_shares()
    return found
