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
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rl_dist.errors import UserError
from rl_dist.hardware import memory
from rl_dist.hardware.memory import available_cores
from rl_dist.launch.all_reduce_bench import BenchTimeoutError
from rl_dist.launch.short_run import ShortRunTimeoutError, Trial, measure_short_runs, without
from rl_dist.process_group.world import threads_per_rank
from rl_dist.speedup.machines import LINKS, default_ranks_per_machine, link_of_gpu
from rl_dist.speedup.model import (
    MODEL_ERROR,
    Communication,
    Link,
    Prediction,
    RankCost,
    fit_link,
    interpolate,
    modelled_communication,
    predict,
)
from rl_dist.speedup.rank_cost import (
    rank_cost_of,
    share_flags,
    shorter_rollout,
    steps_per_episode,
)
from rl_dist.speedup.reduction_bench import Reductions, measure_reductions
from rl_dist.telemetry.progress import Stages

SCALINGS = ("strong", "weak")
QUICK_S = 42.0  # of measuring; starting Python and torch comes on top
# Of training on one rank: if by then no iteration has ended, updates of one epoch are measured; if
# some have, they are enough.
FIRST_S = 12.0
QUICK_ITERATIONS, ITERATIONS = 3, 6  # measured of every short run
REDUCTIONS = 0.3  # of the first short run's time
FIT_FACTORS = (1 / 64, 1, 4)  # of the gradient's size, to tell latency from bandwidth
# Chosen here for the short runs.
OF_RANKS = (
    "num_gpus", "gpu_ids", "strategy", "hybrid_form", "shard_size", "fallback",
    "gradient_compression", "scaling", "lr_scaling", "device",
)  # fmt: skip
BUSY_SHARE = 0.5  # of the cores, that others may want while copies are measured
COPIES_PER_CORE = 4  # more of them measure only how the machine is overrun


@dataclass(frozen=True, kw_only=True)
class Point:
    """One number of ranks and a way of scaling: measured, modelled or refused."""

    ranks: int
    scaling: str
    work: RankCost | None = None
    alone: RankCost | None = None  # the same with nothing beside it; None: `work` is that
    communication: Communication = field(default_factory=Communication)
    copies: int = 1  # that were measured side by side; 0: none of this share
    threads: int = 1
    measured: bool = True  # work and reductions, with as many copies and ranks as it stands for
    problem: str = ""  # why this number of ranks cannot train the job

    @property
    def prediction(self) -> Prediction:
        """The model's iteration."""
        assert self.work is not None
        return predict(self.work, self.ranks, self.communication)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All points of one job on one machine."""

    device_type: str
    ranks_per_machine: int
    link: Link  # between ranks of one machine
    between: Link | None  # between machines; None: not named
    gradient_bytes: int
    num_envs: int
    batch_size: int
    steps_per_episode: float  # nan: no episode ended
    one: Point
    points: list[Point]
    cores: int
    # processes that wanted a core before anything was measured; None: unknown
    load: float | None = None
    env: str = ""
    sources: str = ""  # the measurements in words

    @property
    def was_busy(self) -> bool:
        """True if others used the machine."""
        return self.load is not None and self.load > BUSY_SHARE * self.cores


def calibrate(
    flags: Sequence[str],
    gpus: Sequence[int],
    *,
    on_first: Callable[[Calibration], None] = lambda first: None,
    **options: Any,
) -> Calibration:
    """Measure what the model needs for each number of ranks.

    Args:
        flags: of the training script.
        gpus: numbers of ranks.
        on_first: called with the first figures, as soon as one rank is measured; not if thorough.
        options: other fields of `Bench`.

    Raises:
        UserError: flags that training refuses, or numbers of ranks that cannot be measured here.
    """
    bench = Bench(flags=without(flags, OF_RANKS), gpus=sorted({1, *gpus}), **options)
    bench.check()
    bench.measure_one()
    if not bench.thorough:
        on_first(bench.result())
    bench.measure_shares()
    return bench.result()


# Divisor of the job's sizes, threads and copies of a short run.
_Key = tuple[int, int, int]


@dataclass(kw_only=True)
class Bench:
    """The measurements of one job so far, and how they are made."""

    flags: list[str]
    gpus: list[int]
    scalings: Sequence[str] = SCALINGS  # strong (the job's sizes are totals), weak (per rank)
    iterations: int = 0  # measured of every short run; 0: few, or more if thorough
    device_type: str = "cpu"
    ranks_per_machine: int = 0  # 0: the GPUs here, or on the CPU all ranks
    link: Link | None = None  # inside a machine; None: measured, where two devices are here
    between: Link | None = None  # between machines, needed where there are several
    uncontended: bool = False  # measure shares in one copy alone, too
    thorough: bool = False  # measure every number of ranks, however long it takes
    stages: Stages = field(default_factory=lambda: Stages(shown=False))
    works: dict[_Key, RankCost] = field(default_factory=dict)
    reductions: dict[int, Reductions] = field(default_factory=dict)  # by ranks
    copies_in_memory: int = 10**9
    epochs: int = 1  # of the job's updates, for each that is measured

    def __post_init__(self) -> None:
        self.iterations = self.iterations or (ITERATIONS if self.thorough else QUICK_ITERATIONS)
        self.deadline_s = math.inf if self.thorough else time.monotonic() + QUICK_S
        self.cores = available_cores()
        self.load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        default = default_ranks_per_machine(self.device_type, self.gpus[-1])
        self.per_machine = self.ranks_per_machine or default
        # that can be used here at once; on the CPU by all ranks of a machine
        self.devices = self.per_machine
        if self.device_type == "cuda":
            self.devices = min(self.per_machine, torch.cuda.device_count())

    def check(self) -> None:
        """Refuse numbers of ranks that cannot be; raises UserError, which names the fix."""
        most = self.gpus[-1]
        if self.gpus[0] < 1:
            raise UserError(f"--gpus {self.gpus[0]} must be at least 1")
        if self.between is None and most > self.per_machine:
            fix = f"name the network between them: {', '.join(LINKS)}"
            raise UserError(f"--between: {most} GPUs are more than {self.per_machine}; {fix}")
        limit = COPIES_PER_CORE * self.cores
        if self.thorough and self.device_type == "cpu" and self._copies(most) > limit:
            many = f"{most} trainings side by side are too many for {self.cores} core(s)"
            raise UserError(f"--gpus {most}: {many}, at most {limit}: {_fewer(limit)}")

    # ---- which short run stands for a rank among N

    def _copies(self, ranks: int) -> int:
        """Ranks of the fullest machine, as far as there are devices here."""
        return max(1, min(ranks, self.devices))

    def _key(self, ranks: int, scaling: str, *, alone: bool = False) -> _Key:
        divisor = ranks if scaling == "strong" else 1
        if alone or ranks == 1:
            return divisor, threads_per_rank(1), 1
        copies = self._copies(ranks)
        if not self.thorough and self.device_type == "cpu":
            copies = min(copies, self.cores, self.copies_in_memory)
        return divisor, threads_per_rank(min(ranks, self.per_machine)), copies

    def _crowding(self, ranks: int, key: _Key) -> float:
        """How many times slower so many ranks are than the copies measured, cores being shared."""
        _, threads, copies = key
        if self.device_type != "cpu" or ranks == 1:
            return 1.0
        counts = self._copies(ranks), copies
        wanted, had = (max(1.0, count * threads / self.cores) for count in counts)
        return wanted / had

    # ---- measuring

    def measure_one(self) -> None:
        """Train the whole job on one rank for a moment."""
        self.stages.expect(1.0)
        started_s = time.monotonic()
        key = self._key(1, "strong")
        enough_s = math.inf if self.thorough else FIRST_S
        try:
            self.first = self._train(key, [], "default", first_s=enough_s, enough_s=enough_s)
        except ShortRunTimeoutError as late:
            if self.thorough or not late.config:
                raise
            # A large job or a busy machine: no rollout is spent on filling the normalisers, and all
            # epochs of an update take equally long.
            less: dict[str, Any] = {"normalize_obs": False, "normalize_rewards": False}
            ppo = late.config.get("ppo", {})
            if ppo.get("update_epochs", 1) > 1 and not ppo.get("target_kl"):
                self.epochs = ppo["update_epochs"]
                less["update_epochs"] = 1
            self.flags = without(self.flags, [*less])
            self.flags += [f"--{name}={value}" for name, value in less.items()]
            self.stages.expect(1.0)
            started_s = time.monotonic()
            self.first = self._train(key, [], "default", enough_s=enough_s)
        self.first_s = time.monotonic() - started_s
        self.one = rank_cost_of(self.first.records).repeated(self.epochs)
        if self.epochs > 1 or len(self.first.records[0]) == 1:
            self.one = _modelled(self.one)
        self.works[key] = self.one
        train = self.first.config["train"]
        self.batch_size = train["batch_size"]
        self.num_envs = self.one.env_steps // train["num_steps"]
        self.gradient_bytes = self.first.gradient_bytes
        self._check_memory()
        self.shorter = 1 if self.thorough else shorter_rollout(train, self.num_envs)

    def _check_memory(self) -> None:
        """Measure no more copies side by side than fit in memory.

        Raises:
            UserError: a thorough measurement would need more; names the fix.
        """
        free, copy_bytes = memory.host_memory().available, max(1, self.first.copy_bytes)
        self.copies_in_memory = max(1, free // copy_bytes)
        if self.thorough and self._copies(self.gpus[-1]) > self.copies_in_memory:
            each = f"about {copy_bytes / 2**30:.2g} GiB each do not fit in {free / 2**30:.2g} GiB"
            raise UserError(f"--gpus: trainings of {each}: {_fewer(self.copies_in_memory)}")

    def measure_shares(self) -> None:
        """Measure shares and reductions; the quick form stops in time."""
        plan = self._plan()
        self.stages.expect(*(cost for cost, _ in plan))
        for number, (cost, measure) in enumerate(plan):
            if time.monotonic() + cost * self.first_s <= self.deadline_s:
                try:
                    measure()
                except (ShortRunTimeoutError, BenchTimeoutError):
                    if self.thorough:
                        raise
            self.stages.expect(*(cost for cost, _ in plan[number + 1 :]))

    def _plan(self) -> list[tuple[float, Callable[[], None]]]:
        """Measurements, the most telling first, and their times in units of the first run's."""
        plan: list[tuple[float, Callable[[], None]]] = []
        reduced = {n for n in self.gpus if 1 < n <= self.devices} if self.link is None else set()
        if self.link is None and min(self.gpus[-1], self.devices) >= 2:
            plan.append(self._reduction(2))  # shows the link
        planned = {self._key(1, "strong")}
        several = [n for n in self.gpus if n > 1]
        # the smallest shares first: with the whole job, they tell those between
        by_worth = [(n, s) for n in [*several[-1:], *several[:-1]] for s in self.scalings]
        for ranks, scaling in by_worth:
            if self._share_flags(ranks, scaling)[1]:
                continue
            keys = [self._key(ranks, scaling)]
            if self.uncontended and self._copies(ranks) > 1:
                keys.append(self._key(ranks, scaling, alone=True))
            for key in keys:
                if key not in planned:
                    plan.append(self._share(key, scaling))
                    planned.add(key)
        return [*plan, *map(self._reduction, sorted(reduced - {2}, reverse=True))]

    def _share_flags(self, ranks: int, scaling: str) -> tuple[list[str], str]:
        return share_flags(self.num_envs, self.batch_size, ranks, scaling)

    def _share(self, key: _Key, scaling: str) -> tuple[float, Callable[[], None]]:
        divisor, _, copies = key

        def measure() -> None:
            share, _ = self._share_flags(divisor, scaling)
            if self.shorter > 1:
                steps = self.first.config["train"]["num_steps"] // self.shorter
                share = [*share, f"--num_steps={steps}"]
            work = rank_cost_of(self._train(key, share, "ddp").records)
            self.works[key] = work.lengthened(self.shorter).repeated(self.epochs)

        # half of a short run is taken to be the start, which no smaller share shortens
        cost = (1 + 1 / divisor / self.shorter) / 2 * max(1.0, copies / self.cores)
        return cost, measure

    def _train(self, key: _Key, share: list[str], strategy: str, **patience: float) -> Trial:
        _, threads, copies = key
        what = f"{copies} cop{'ies' if copies > 1 else 'y'} with {threads} thread(s)"
        self.stages.begin(f"{what}, {' '.join(share) or 'sizes as given'}")
        names = [flag[2:].partition("=")[0] for flag in share]
        left_s = max(10.0, self.deadline_s - time.monotonic())
        return measure_short_runs(
            [*without(self.flags, names), *share, f"--strategy={strategy}"],
            copies,
            threads,
            self.iterations,
            warm_up=2 if self.thorough else 0,
            timeout_s=min(600.0, left_s) if self.works else 600.0,
            device_type=self.device_type,
            on_wait=self.stages.advance,
            **patience,
        )

    def _reduction(self, ranks: int) -> tuple[float, Callable[[], None]]:
        sizes = sorted({max(4, int(self.gradient_bytes * f) // 4 * 4) for f in FIT_FACTORS})

        def measure() -> None:
            self.stages.begin(f"reductions over {ranks} ranks")
            left_s = max(10.0, self.deadline_s - time.monotonic())
            threads = threads_per_rank(ranks)
            self.reductions[ranks] = measure_reductions(
                ranks, sizes, self.device_type, threads, timeout_s=min(180.0, left_s)
            )

        return REDUCTIONS * max(1.0, ranks / self.cores), measure

    # ---- from what was measured to every point

    def result(self) -> Calibration:
        """Every point, measured or modelled from those that were."""
        link = self._link()
        points = [self._point(n, scaling, link) for scaling in self.scalings for n in self.gpus]
        same = (
            "device_type",
            "between",
            "gradient_bytes",
            "num_envs",
            "batch_size",
            "cores",
            "load",
        )
        return Calibration(
            ranks_per_machine=self.per_machine,
            link=link,
            steps_per_episode=steps_per_episode(self.first.records[0]),
            one=points[0],
            points=points,
            env=self.first.config["task"]["env"],
            sources=self._sources(link),
            **{name: getattr(self, name) for name in same},
        )

    def _point(self, ranks: int, scaling: str, link: Link) -> Point:
        if problem := self._share_flags(ranks, scaling)[1]:
            return Point(ranks=ranks, scaling=scaling, problem=problem)
        key = self._key(ranks, scaling)
        if ranks == 1:
            return Point(ranks=1, scaling=scaling, work=self.one, threads=key[1])
        work, crowding = self._work(key), self._crowding(ranks, key)
        if crowding != 1.0:
            work = _modelled(work.scaled(crowding, crowding))
        alone = None
        if self.uncontended and self._copies(ranks) > 1:
            alone = self._work(self._key(ranks, scaling, alone=True))
        communication, reduced = self._communication(ranks, link)
        return Point(
            ranks=ranks,
            scaling=scaling,
            work=work,
            alone=alone,
            communication=communication,
            copies=key[2] if key in self.works else 0,
            threads=key[1],
            measured=key in self.works and crowding == 1.0 and reduced,
        )

    def _work(self, key: _Key) -> RankCost:
        """One rank's share as measured, or by its size between those that were."""
        if key in self.works:
            return self.works[key]
        divisor, threads, copies = key
        known: dict[float, RankCost] = {}
        # of each size the one with the most similar number of threads
        for other in sorted(self.works, key=lambda other: -abs(other[1] - threads)):
            if copies > 1 or other[2] == 1:
                slower = other[1] / threads if self.device_type == "cpu" else 1.0
                known[1 / other[0]] = self.works[other].scaled(update=slower)
        return _modelled(interpolate(known, 1 / divisor))

    def _link(self) -> Link:
        """The link inside this machine, as far as it can be measured here."""
        if self.link is not None:
            return self.link
        if min(self.gpus[-1], self.per_machine) == 1:
            return Link(name="none")
        if 2 in self.reductions:
            found = fit_link(self.reductions[2].gradients_s, 2)
            # a ring of two has two hops
            return replace(found, base_s=0.0, hop_s=found.base_s / 2)
        if self.device_type == "cuda":
            return link_of_gpu(torch.cuda.get_device_name(0))
        return LINKS["loopback"]

    def _communication(self, ranks: int, link: Link) -> tuple[Communication, bool]:
        """Communication of `ranks` ranks, and True if it was measured."""
        if ranks in self.reductions and self.link is None and ranks <= self.per_machine:
            measured = self.reductions[ranks]
            gradient_s = measured.gradients_s[self.gradient_bytes // 4 * 4]
            return Communication(gradient_s=gradient_s, small_s=measured.small_s), True
        found = modelled_communication(
            self.gradient_bytes, ranks, self.per_machine, link, self.between or link
        )
        # ranks that share cores copy and add one after the other
        times = self._crowding(ranks, (1, 1, 1))
        slower = Communication(gradient_s=found.gradient_s * times, small_s=found.small_s * times)
        return slower, False

    def _sources(self, link: Link) -> str:
        shares = [f"{copies} x 1/{divisor}" for divisor, _, copies in self.works]
        talk = ", ".join(map(str, self.reductions))
        reduced = f"reductions over {talk} ranks" if talk else f"reductions assumed ({link.name})"
        epochs = f" with 1 epoch of {self.epochs}" if self.epochs > 1 else ""
        more = "" if self.thorough else "; --thorough measures every number of ranks"
        job = f"{', '.join(shares)} of the job{epochs}"
        return f"measured: {job}; {reduced}; the rest is modelled{more}"


def _modelled(work: RankCost) -> RankCost:
    return replace(work, relative_error=max(work.relative_error, MODEL_ERROR))


def _fewer(most: int) -> str:
    return f"give fewer --gpus, or --gpus_per_machine {most} (or fewer) and --between NAME"
