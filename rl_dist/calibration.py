"""What the scaling model needs, measured without training on several ranks.

For every number of ranks N, short runs of a rank's share of the job: N copies side by side that do not communicate,
at the sizes and with the threads that a rank would have. Reductions are measured by ranks that only reduce.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rl_dist.launch import UserError
from rl_dist.machines import LINKS, link_of_gpu
from rl_dist.metrics import METRICS_FILE
from rl_dist.reduction_bench import Reductions, measure_reductions
from rl_dist.scaling_model import Communication, Link, Prediction, Scaled, Work, cluster_all_reduce_s, fit_link, predict
from rl_dist.strategy import GRADIENT_BYTES_LOGGED
from rl_dist.trial import Trial, run_trial, without
from rl_dist.world import threads_per_rank

SCALINGS = ("strong", "weak")
FIT_FACTORS = (1 / 64, 1, 4)  # of the gradient's size, to tell latency from bandwidth
OF_RANKS = ("num_gpus", "strategy", "scaling", "lr_scaling", "device")  # chosen here for the short runs
TRADING, OF_TRADING = "StockTrading-v0", ("data", "market", "trading")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One number of ranks and a way of scaling, measured or refused."""

    ranks: int
    scaling: str
    work: Work | None = None
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
    between: Link  # between machines
    gradient_bytes: int
    num_envs: int
    batch_size: int
    steps_per_episode: float  # nan: no episode ended
    one: Point
    points: list[Point]

    def scaled(self, point: Point) -> Scaled:
        """A point's prediction beside that of one rank."""
        return Scaled(self.one.prediction, point.prediction)


# ---- from records of metrics to the model's terms


def work_of(copies: Sequence[Sequence[dict[str, Any]]]) -> Work:
    """One rank's own work: medians over the metrics of independent one-rank runs."""
    records = [record for records in copies for record in records]
    if not records:
        raise UserError("no iteration was measured: give more --iterations")
    rows = [_own_seconds(record) for record in records]

    def middle(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    own_s = [sum(row.values()) for row in rows]
    return Work(
        env_steps=round(records[0]["global_step"] / records[0]["iteration"]),
        gradient_steps=round(statistics.median(record["optim/steps"] for record in records)),
        collect_s=middle("collect"),
        forward_s=middle("forward"),
        backward_s=middle("backward"),
        optimizer_s=middle("optimizer"),
        rest_s=middle("rest"),
        collect_spread_s=spread([row["collect"] for row in rows]),
        step_spread_s=statistics.median(record["time/step_spread_s"] for record in records),
        relative_error=spread(own_s) / statistics.median(own_s) / math.sqrt(len(own_s)),
    )


def _own_seconds(record: dict[str, Any]) -> dict[str, float]:
    """An iteration of a one-rank run by part, without its collectives."""
    parts = {name: record[f"time/{name}_s"] for name in ("collect", "forward", "backward", "optimizer")}
    elapsed_s = record["global_step"] / record["iteration"] / record["time/sps"]
    own_s = elapsed_s - record["time/sync_s"] - record["time/gradient_wait_s"]
    return parts | {"rest": max(0.0, own_s - sum(parts.values()))}


def spread(values: Sequence[float]) -> float:
    """Standard deviation by absolute deviations: a hiccup does not decide it."""
    if len(values) < 2:
        return 0.0
    middle = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - middle) for value in values)


def steps_per_episode(records: Sequence[dict[str, Any]]) -> float:
    """Environment steps per ended episode; nan if none ended."""
    ended = sum(record["episode/count"] for record in records)
    steps = sum(record["global_step"] / record["iteration"] for record in records)
    return steps / ended if ended else math.nan


# ---- a run directory


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics.

    Raises:
        UserError: there are none.
    """
    path = run_dir / METRICS_FILE
    if not (run_dir / "config.json").is_file() or not path.is_file():
        raise UserError(f"{run_dir} is no run directory: it holds no config.json and {METRICS_FILE}")
    lines = path.read_bytes().rpartition(b"\n")[0].splitlines()
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None


def flags_of_run(run_dir: Path) -> list[str]:
    """The training flags of a run, without those that cannot take effect."""
    read_records(run_dir)
    config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    trading = config["task"]["env"] == TRADING
    flags = []
    for section, values in config.items():
        if section in OF_TRADING and (not trading or (section == "market" and config["data"]["data"] != "simulated")):
            continue
        for name, value in values.items():
            if value == "" or (section == "task" and trading and name != "env"):
                continue
            flags.append(f"--{name}={'none' if value is None else value}")
    return flags


def gradient_bytes_of_log(log: str) -> int:
    """The size of the gradient, as a rank logged it."""
    found = re.findall(GRADIENT_BYTES_LOGGED.replace("%d", r"(\d+)"), log)
    assert found, "rl_dist.strategy logs it"
    return int(found[-1])


# ---- measuring


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

    Raises:
        UserError: flags that training refuses, or a number of ranks that cannot be.
    """
    gpus = sorted({1, *gpus})
    if gpus[0] < 1:
        raise UserError(f"--gpus {gpus[0]} must be at least 1")
    per_machine = ranks_per_machine or default_ranks_per_machine(device_type, gpus[-1])
    if between is None and gpus[-1] > per_machine:
        raise UserError(
            f"--between: {gpus[-1]} GPUs are {-(-gpus[-1] // per_machine)} machines of {per_machine}; "
            f"name the network between them: {', '.join(LINKS)}"
        )
    job = without(flags, OF_RANKS)
    short = _Short(job, iterations, device_type, per_machine, say)
    first = short.run(1, [])
    one = work_of(first.records)
    num_steps, batch_size = first.config["train"]["num_steps"], first.config["train"]["batch_size"]
    num_envs = one.env_steps // num_steps
    gradient_bytes = gradient_bytes_of_log(first.log)
    talk = _Talk(gradient_bytes, short)
    link = link or talk.link(gpus[-1])
    between = between or link
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
            work = work_of(short.run(ranks, share).records)
            points.append(
                Point(
                    ranks=ranks,
                    scaling=scaling,
                    work=work,
                    communication=talk.of(ranks, link, between),
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

    def run(self, ranks: int, share: list[str]) -> Trial:
        """As many copies as ranks would share this machine; those of several with DDP."""
        copies = self.copies(ranks)
        threads = threads_per_rank(min(ranks, self.per_machine))
        what = f"{copies} cop{'ies' if copies > 1 else 'y'} with {threads} thread(s)"
        self.say(f"{what}, {' '.join(share) or 'sizes as given'}")
        names = [flag[2:].partition("=")[0] for flag in share]
        flags = [*without(self.job, names), *share, f"--strategy={'ddp' if ranks > 1 else 'auto'}"]
        return run_trial(flags, copies, threads, self.iterations, device_type=self.device_type)


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
            self.short.say(f"reductions of {sizes} bytes over {ranks} ranks")
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
