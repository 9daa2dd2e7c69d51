"""What the scaling model needs, measured without training on several ranks.

For every number of ranks N, short runs of a rank's share of the job: N copies side by side that do not communicate,
at the sizes and with the threads that a rank would have. Reductions are measured by ranks that only reduce.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from rl_dist.errors import UserError
from rl_dist.hardware.host_memory import available_cores
from rl_dist.launch.short_run import Trial, run_trial, without
from rl_dist.process_group.world import threads_per_rank
from rl_dist.speedup.machines import LINKS, link_of_gpu
from rl_dist.speedup.model import (
    Communication,
    Link,
    Prediction,
    Scaled,
    Work,
    cluster_all_reduce_s,
    fit_link,
    predict,
)
from rl_dist.speedup.rank_cost import gradient_bytes_of_log, steps_per_episode, work_of
from rl_dist.speedup.reduction_bench import Reductions, measure_reductions
from rl_dist.telemetry.progress import Stages

REDUCTIONS = 0.3  # of the first short run's time

SCALINGS = ("strong", "weak")
FIT_FACTORS = (1 / 64, 1, 4)  # of the gradient's size, to tell latency from bandwidth
# Chosen here for the short runs.
OF_RANKS = (
    "num_gpus", "gpu_ids", "strategy", "hybrid_form", "shard_size", "fallback", "gradient_compression",
    "scaling", "lr_scaling", "device",
)  # fmt: skip
BUSY_SHARE = 0.5  # of the cores, that others may want while copies are measured
COPIES_PER_CORE = 4  # more of them measure only how the machine is overrun


@dataclass(frozen=True, kw_only=True)
class Point:
    """One number of ranks and a way of scaling, measured or refused."""

    ranks: int
    scaling: str
    work: Work | None = None
    alone: Work | None = None  # the same share in one copy, none beside it; None: not asked for, or `work` is that
    communication: Communication = field(default_factory=Communication)
    copies: int = 1
    threads: int = 1
    problem: str = ""  # why this number of ranks cannot train the job

    @property
    def prediction(self) -> Prediction:
        """The model's iteration."""
        assert self.work is not None
        return predict(self.work, self.ranks, self.communication)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """All points of one job on one machine."""

    flags: list[str]
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
    cores: int = field(default_factory=available_cores)
    load: float | None = None  # processes that wanted a core before anything was measured; None: not told
    env: str = ""  # what is trained

    @property
    def was_busy(self) -> bool:
        """Whether others used the machine."""
        return self.load is not None and self.load > BUSY_SHARE * self.cores

    def scaled(self, point: Point) -> Scaled:
        """A point's prediction beside that of one rank."""
        return Scaled(self.one.prediction, point.prediction)


# ---- measuring


def machine_load() -> float | None:
    """Processes that wanted a core in the last minute; None: nobody tells."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def default_ranks_per_machine(device_type: str, most: int) -> int:
    """GPUs here; on the CPU all ranks share this machine."""
    return torch.cuda.device_count() if device_type == "cuda" else most


def calibrate(
    flags: Sequence[str],
    gpus: Sequence[int],
    *,
    scalings: Sequence[str] = SCALINGS,
    iterations: int = 6,
    device_type: str = "cpu",
    ranks_per_machine: int = 0,
    link: Link | None = None,
    between: Link | None = None,
    uncontended: bool = False,
    stages: Stages | None = None,
) -> Calibration:
    """Measure what the model needs for each number of ranks.

    Args:
        flags: of the training script.
        gpus: numbers of ranks.
        scalings: strong (the job's sizes are totals) and weak (they are per rank).
        iterations: measured of every short run.
        ranks_per_machine: 0: the GPUs here, or on the CPU all ranks.
        link: between ranks of one machine; None: measured, where two devices are here.
        between: between machines, needed where there are several.
        uncontended: measure each share in one copy alone, too.
        stages: told what is measured, and how far it is.

    Raises:
        UserError: flags that training refuses, a number of ranks that cannot be, or too many for this machine.
    """
    gpus, load = sorted({1, *gpus}), machine_load()
    if gpus[0] < 1:
        raise UserError(f"--gpus {gpus[0]} must be at least 1")
    per_machine = ranks_per_machine or default_ranks_per_machine(device_type, gpus[-1])
    if between is None:
        _check_one_machine(gpus[-1], per_machine)
    short = _Short(without(flags, OF_RANKS), iterations, device_type, per_machine, stages or Stages(shown=False))
    short.check_cores(gpus[-1])
    short.stages.expect(1.0, *short.plan(gpus, scalings, lambda *_: True, link, uncontended))
    first = short.run(1, [])
    short.check_memory(gpus[-1], first.copy_bytes, divided="weak" not in scalings)
    one = work_of(first.records)
    num_steps, batch_size = first.config["train"]["num_steps"], first.config["train"]["batch_size"]
    num_envs = one.env_steps // num_steps
    shares = {(n, scaling): share_flags(num_envs, batch_size, n, scaling) for scaling in scalings for n in gpus}
    short.stages.expect(*short.plan(gpus, scalings, lambda *point: not shares[point][1], link, uncontended))
    gradient_bytes = gradient_bytes_of_log(first.log)
    talk = _Talk(gradient_bytes, short)
    link = link or talk.link(gpus[-1])
    points = []
    for (ranks, scaling), (share, problem) in shares.items():
        point = Point(ranks=ranks, scaling=scaling, work=one, threads=threads_per_rank(1))
        if problem:
            point = Point(ranks=ranks, scaling=scaling, problem=problem)
        elif ranks > 1:
            point = replace(
                point,
                work=work_of(short.run(ranks, share).records),
                alone=short.alone(ranks, share, one if scaling == "weak" else None) if uncontended else None,
                communication=talk.of(ranks, link, between or link),
                copies=short.copies(ranks),
                threads=threads_per_rank(short.copies(ranks)),
            )
        points.append(point)
    return Calibration(
        flags=list(flags),
        device_type=device_type,
        ranks_per_machine=per_machine,
        link=link,
        between=between,
        gradient_bytes=gradient_bytes,
        num_envs=num_envs,
        batch_size=batch_size,
        steps_per_episode=steps_per_episode(first.records[0]),
        one=points[0],
        points=points,
        load=load,
        env=first.config["task"]["env"],
    )


def _check_one_machine(ranks: int, per_machine: int) -> None:
    if ranks > per_machine:
        raise UserError(
            f"--between: {ranks} GPUs are {-(-ranks // per_machine)} machines of {per_machine}; "
            f"name the network between them: {', '.join(LINKS)}"
        )


@dataclass(frozen=True)
class _Short:
    """Short runs of a rank's share on this machine."""

    job: list[str]
    iterations: int
    device_type: str
    per_machine: int
    stages: Stages

    def copies(self, ranks: int) -> int:
        """Ranks of the fullest machine, as far as there are devices here."""
        here = min(ranks, self.per_machine)
        return here if self.device_type == "cpu" else max(1, min(here, torch.cuda.device_count()))

    def reduces(self, ranks: int) -> bool:
        """Whether so many ranks can be started here, as on one machine of the job."""
        here = self.per_machine if self.device_type == "cpu" else min(self.per_machine, torch.cuda.device_count())
        return 1 < ranks <= here

    def plan(
        self,
        gpus: Sequence[int],
        scalings: Sequence[str],
        divides: Callable[[int, str], bool],
        link: Link | None,
        uncontended: bool,
    ) -> list[float]:
        """Expected times of all that follows the first short run, as multiples of that."""
        reduced = {ranks for ranks in (2, *gpus) if self.reduces(ranks)} if link is None and gpus[-1] > 1 else set()
        return expected_times(
            gpus,
            scalings,
            divides=divides,
            copies=self.copies,
            cores=available_cores(),
            reduced=reduced,
            uncontended=uncontended,
        )

    def check_cores(self, ranks: int) -> None:
        """Refuse far more copies than there are cores.

        Raises:
            UserError: names the cure.
        """
        copies, most = self.copies(ranks), COPIES_PER_CORE * available_cores()
        if self.device_type == "cpu" and copies > most:
            raise UserError(
                f"--gpus {ranks}: {copies} trainings side by side are too many for {available_cores()} core(s), "
                f"at most {most}: {_fewer(most)}"
            )

    def check_memory(self, ranks: int, copy_bytes: int, *, divided: bool) -> None:
        """Refuse more copies than fit in what memory is left.

        Args:
            copy_bytes: that one copy of the whole job took.
            divided: a rank's share is smaller than the job; the program itself (about as large as this one) is not.

        Raises:
            UserError: names the cure.
        """
        import psutil  # training imports this module, and goes without

        from rl_dist.hardware.host_memory import host_memory

        copies, free = self.copies(ranks), host_memory().available
        if divided:
            program = min(copy_bytes, psutil.Process().memory_full_info().uss)
            copy_bytes = program + (copy_bytes - program) // ranks
        if copies > 1 and copies * copy_bytes > free:
            raise UserError(
                f"--gpus {ranks}: {copies} trainings side by side of about {copy_bytes / 2**30:.2g} GiB each do not "
                f"fit in the {free / 2**30:.2g} GiB of memory available: {_fewer(max(1, free // copy_bytes))}"
            )

    def alone(self, ranks: int, share: list[str], same: Work | None) -> Work | None:
        """A rank's share with nothing beside it; `same`: what is known to be equal; None: `run` measures that."""
        if self.copies(ranks) == 1:
            return None
        return same or work_of(self._trial(1, threads_per_rank(1), share, "ddp").records)

    def run(self, ranks: int, share: list[str]) -> Trial:
        """As many copies as ranks would share this machine; those of several with DDP."""
        threads = threads_per_rank(min(ranks, self.per_machine))
        return self._trial(self.copies(ranks), threads, share, "ddp" if ranks > 1 else "default")

    def _trial(self, copies: int, threads: int, share: list[str], strategy: str) -> Trial:
        what = f"{copies} cop{'ies' if copies > 1 else 'y'} with {threads} thread(s)"
        self.stages.begin(f"{what}, {' '.join(share) or 'sizes as given'}")
        names = [flag[2:].partition("=")[0] for flag in share]
        flags = [*without(self.job, names), *share, f"--strategy={strategy}"]
        on_wait = self.stages.advance
        return run_trial(flags, copies, threads, self.iterations, device_type=self.device_type, on_wait=on_wait)


def _fewer(most: int) -> str:
    """How to have at most so many copies."""
    return f"give fewer --gpus, or --gpus_per_machine {most} (or fewer) and --between NAME"


@dataclass(frozen=True)
class _Talk:
    """Communication of N ranks: measured as far as they fit here, else modelled."""

    gradient_bytes: int
    short: _Short
    found: dict[int, Reductions] = field(default_factory=dict)  # by ranks

    def measured(self, ranks: int) -> Reductions:
        """Reductions over ranks of this machine, of the gradient and of sizes around it."""
        if ranks not in self.found:
            sizes = sorted({max(4, int(self.gradient_bytes * factor) // 4 * 4) for factor in FIT_FACTORS})
            from rl_dist.hardware.report import gib  # with psutil, which training goes without

            self.short.stages.begin(f"reductions of {', '.join(map(gib, sizes))} over {ranks} ranks")
            self.found[ranks] = measure_reductions(ranks, sizes, self.short.device_type, threads_per_rank(ranks))
        return self.found[ranks]

    def link(self, most: int) -> Link:
        """The link inside this machine, as far as it can be measured here."""
        if min(most, self.short.per_machine) == 1:
            return Link(name="none")
        if not self.short.reduces(2):
            return link_of_gpu(torch.cuda.get_device_name(0))
        return fit_link(self.measured(2).gradients_s, 2)

    def of(self, ranks: int, link: Link, between: Link) -> Communication:
        """What an iteration of `ranks` ranks pays."""
        if link.name == "measured" and self.short.reduces(ranks):
            found = self.measured(ranks)
            return Communication(gradient_s=found.gradients_s[self.gradient_bytes // 4 * 4], small_s=found.small_s)
        return modelled_communication(self.gradient_bytes, ranks, self.short.per_machine, link, between)


def modelled_communication(num_bytes: int, ranks: int, per_machine: int, inside: Link, between: Link) -> Communication:
    """Reductions by the links' latency and bandwidth."""

    def seconds(size: int) -> float:
        return cluster_all_reduce_s(size, ranks, per_machine, inside, between)

    return Communication(gradient_s=seconds(num_bytes), small_s=SMALL_COLLECTIVES * seconds(64))


SMALL_COLLECTIVES = 7  # of an iteration: SUMS, AGREEMENTS and two for each gather, see rl_dist.speedup.reduction_bench


def share_flags(num_envs: int, batch_size: int, ranks: int, scaling: str) -> tuple[list[str], str]:
    """The sizes of one rank among `ranks` as flags, or why they cannot be shared out."""
    if scaling == "weak":
        return [f"--num_envs={num_envs}"], ""
    if num_envs % ranks or batch_size % ranks:
        what = f"num_envs {num_envs} and batch_size {batch_size} do not divide over {ranks} ranks"
        return [], f"{what}: choose multiples of {ranks}, or --scaling weak"
    return [f"--num_envs={num_envs // ranks}", f"--batch_size={batch_size // ranks}"], ""


def expected_times(
    gpus: Sequence[int],
    scalings: Sequence[str],
    *,
    divides: Callable[[int, str], bool],
    copies: Callable[[int], int],
    cores: int,
    reduced: set[int],
    uncontended: bool,
) -> list[float]:
    """Expected times of all measurements after the first, in units of the first.

    Half of a short run is taken to be the start of the program, which no smaller share shortens.

    Args:
        gpus: numbers of ranks.
        divides: whether the job can be shared out over so many ranks, scaled so.
        copies: trainings side by side that stand for so many ranks.
        reduced: numbers of ranks whose reductions can be measured.
        uncontended: the share of several copies is measured in one copy as well.
    """
    found, left = [], set(reduced)

    def reduce(ranks: int) -> None:
        if ranks in left:
            left.remove(ranks)
            found.append(REDUCTIONS * max(1.0, ranks / cores))

    if reduced:
        reduce(2)  # tells the link
    for scaling in scalings:
        for ranks in (number for number in gpus if number > 1 and divides(number, scaling)):
            alone = 1.0 if scaling == "weak" else (1 + 1 / ranks) / 2
            found.append(alone * max(1.0, copies(ranks) / cores))
            if uncontended and scaling != "weak" and copies(ranks) > 1:
                found.append(alone)
            reduce(ranks)
    return found
