"""What the scaling model needs, measured without training on several ranks.

For every number of ranks N, short runs of a rank's share of the job: N copies side by side that do not communicate,
at the sizes and with the threads that a rank would have. Reductions are measured by ranks that only reduce.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_dist.launch import UserError
from rl_dist.machines import LINKS, link_of_gpu
from rl_dist.reduction_bench import Reductions, measure_reductions
from rl_dist.scaling_model import Communication, Link, Prediction, Scaled, Work, cluster_all_reduce_s, fit_link, predict
from rl_dist.strategy import GRADIENT_BYTES_LOGGED
from rl_dist.trial import Trial, run_trial, without
from rl_dist.world import available_cores, threads_per_rank

SCALINGS = ("strong", "weak")
FIT_FACTORS = (1 / 64, 1, 4)  # of the gradient's size, to tell latency from bandwidth
# Chosen here for the short runs.
OF_RANKS = (
    "num_gpus", "gpu_ids", "strategy", "hybrid_form", "shard_size", "fallback", "gradient_compression",
    "scaling", "lr_scaling", "device",
)  # fmt: skip
PARTS = ("collect", "forward", "backward", "optimizer")  # of an iteration's own seconds, and then the rest
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


# ---- from records of metrics to the model's terms


def work_of(copies: Sequence[Sequence[dict[str, Any]]]) -> Work:
    """One rank's own work, from the metrics of independent one-rank runs."""
    records = [record for records in copies for record in records]
    if not records:
        raise UserError("no iteration was measured: give more --iterations")
    rows = [_own_seconds(record) for record in records]
    return work_of_rows(
        rows,
        env_steps=round(records[0]["global_step"] / records[0]["iteration"]),
        gradient_steps=round(statistics.fmean(record["optim/steps"] for record in records)),
        step_spread_s=statistics.fmean(record["time/step_spread_s"] for record in records),
    )


def work_of_rows(
    rows: Sequence[dict[str, float]], *, env_steps: int, gradient_steps: int, step_spread_s: float
) -> Work:
    """Means and deviations of own seconds by part; a row is an iteration of a rank.

    Not medians: cores of shared hosts have two speeds, which take turns; the middle is one of them.
    """
    updates_s = [row["forward"] + row["backward"] + row["optimizer"] for row in rows]
    own_s = [sum(row.values()) for row in rows]
    return Work(
        env_steps=env_steps,
        gradient_steps=gradient_steps,
        **{f"{name}_s": statistics.fmean(row[name] for row in rows) for name in rows[0]},
        collect_spread_s=spread([row["collect"] for row in rows]),
        step_spread_s=step_spread_s,
        update_spread_s=math.sqrt(max(0.0, spread(updates_s) ** 2 - gradient_steps * step_spread_s**2)),
        relative_error=spread(own_s) / statistics.fmean(own_s) / math.sqrt(len(own_s)),
    )


def _own_seconds(record: dict[str, Any]) -> dict[str, float]:
    """An iteration of a one-rank run by part, without its collectives."""
    parts = {name: record[f"time/{name}_s"] for name in PARTS}
    elapsed_s = record["global_step"] / record["iteration"] / record["time/sps"]
    own_s = elapsed_s - record["time/sync_s"] - record["time/gradient_wait_s"]
    return parts | {"rest": max(0.0, own_s - sum(parts.values()))}


def spread(values: Sequence[float]) -> float:
    """Standard deviation; of a single value, 0."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def steps_per_episode(records: Sequence[dict[str, Any]]) -> float:
    """Environment steps per ended episode; nan if none ended.

    Not the mean length: the first episodes begin at a random age, so those that end soon are short.
    """
    ended = sum(record["episode/count"] for record in records)
    steps = sum(record["global_step"] / record["iteration"] for record in records)
    return steps / ended if ended else math.nan


def gradient_bytes_of_log(log: str) -> int:
    """The size of the gradient, as a rank logged it."""
    found = re.findall(GRADIENT_BYTES_LOGGED.replace("%d", r"(\d+)"), log)
    assert found, "rl_dist.strategy logs it"
    return int(found[-1])


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
    say: Callable[[str], None] = lambda text: None,
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

    Raises:
        UserError: flags that training refuses, a number of ranks that cannot be, or too many for this machine.
    """
    gpus, load = sorted({1, *gpus}), machine_load()
    if gpus[0] < 1:
        raise UserError(f"--gpus {gpus[0]} must be at least 1")
    per_machine = ranks_per_machine or default_ranks_per_machine(device_type, gpus[-1])
    if between is None:
        _check_one_machine(gpus[-1], per_machine)
    short = _Short(without(flags, OF_RANKS), iterations, device_type, per_machine, say)
    short.check_cores(gpus[-1])
    first = short.run(1, [])
    short.check_memory(gpus[-1], first.copy_bytes, divided="weak" not in scalings)
    one = work_of(first.records)
    num_steps, batch_size = first.config["train"]["num_steps"], first.config["train"]["batch_size"]
    num_envs = one.env_steps // num_steps
    gradient_bytes = gradient_bytes_of_log(first.log)
    talk = _Talk(gradient_bytes, short)
    link = link or talk.link(gpus[-1])
    points = []
    for scaling in scalings:
        for ranks in gpus:
            if ranks == 1:
                points.append(Point(ranks=1, scaling=scaling, work=one, threads=threads_per_rank(1)))
                continue
            share, problem = share_flags(num_envs, batch_size, ranks, scaling)
            if problem:
                points.append(Point(ranks=ranks, scaling=scaling, problem=problem))
                continue
            points.append(
                Point(
                    ranks=ranks,
                    scaling=scaling,
                    work=work_of(short.run(ranks, share).records),
                    alone=short.alone(ranks, share, one if scaling == "weak" else None) if uncontended else None,
                    communication=talk.of(ranks, link, between or link),
                    copies=short.copies(ranks),
                    threads=threads_per_rank(short.copies(ranks)),
                )
            )
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


def share_flags(num_envs: int, batch_size: int, ranks: int, scaling: str) -> tuple[list[str], str]:
    """The sizes of one rank among `ranks` as flags, or why they cannot be shared out."""
    if scaling == "weak":
        return [f"--num_envs={num_envs}"], ""
    if num_envs % ranks or batch_size % ranks:
        what = f"num_envs {num_envs} and batch_size {batch_size} do not divide over {ranks} ranks"
        return [], f"{what}: choose multiples of {ranks}, or --scaling weak"
    return [f"--num_envs={num_envs // ranks}", f"--batch_size={batch_size // ranks}"], ""


@dataclass(frozen=True)
class _Short:
    """Short runs of a rank's share on this machine."""

    job: list[str]
    iterations: int
    device_type: str
    per_machine: int
    say: Callable[[str], None]

    def copies(self, ranks: int) -> int:
        """Ranks of the fullest machine, as far as there are devices here."""
        here = min(ranks, self.per_machine)
        return here if self.device_type == "cpu" else max(1, min(here, torch.cuda.device_count()))

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

        from rl_dist.host_memory import host_memory

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
        self.say(f"{what}, {' '.join(share) or 'sizes as given'}")
        names = [flag[2:].partition("=")[0] for flag in share]
        flags = [*without(self.job, names), *share, f"--strategy={strategy}"]
        return run_trial(flags, copies, threads, self.iterations, device_type=self.device_type)


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
            from rl_dist.hardware import gib  # with psutil, which training goes without

            self.short.say(f"reductions of {', '.join(map(gib, sizes))} over {ranks} ranks")
            self.found[ranks] = measure_reductions(ranks, sizes, self.short.device_type, threads_per_rank(ranks))
        return self.found[ranks]

    def link(self, most: int) -> Link:
        """The link inside this machine, as far as it can be measured here."""
        devices = most if self.short.device_type == "cpu" else torch.cuda.device_count()
        if min(most, self.short.per_machine) == 1:
            return Link(name="none")
        if devices < 2:
            return link_of_gpu(torch.cuda.get_device_name(0))
        return fit_link(self.measured(2).gradients_s, 2)

    def of(self, ranks: int, link: Link, between: Link) -> Communication:
        """What an iteration of `ranks` ranks pays."""
        devices = ranks if self.short.device_type == "cpu" else torch.cuda.device_count()
        if link.name == "measured" and ranks <= min(self.short.per_machine, devices):
            found = self.measured(ranks)
            return Communication(gradient_s=found.gradients_s[self.gradient_bytes // 4 * 4], small_s=found.small_s)
        return modelled_communication(self.gradient_bytes, ranks, self.short.per_machine, link, between)


def modelled_communication(num_bytes: int, ranks: int, per_machine: int, inside: Link, between: Link) -> Communication:
    """Reductions by the links' latency and bandwidth."""

    def seconds(size: int) -> float:
        return cluster_all_reduce_s(size, ranks, per_machine, inside, between)

    return Communication(gradient_s=seconds(num_bytes), small_s=SMALL_COLLECTIVES * seconds(64))


SMALL_COLLECTIVES = 7  # of an iteration: SUMS, AGREEMENTS and two for each gather, see rl_dist.reduction_bench
