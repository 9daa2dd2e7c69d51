"""How long an iteration takes on N ranks: the model, which measures nothing.

    iteration = max over ranks of (rollout) + steps * (max over ranks of (own part of a step) +
    reduction)
                + rest + small collectives

Ranks meet after the rollout and in every gradient step, and wait there for the slowest. Own parts
are those of one rank at the sizes, threads and neighbours that it has among N: means, as time adds
up. What varies is taken for normal and independent between ranks; steps of one iteration may be
slow together. Reductions follow latency and bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

# standard error, as a share, of an iteration that was not measured: an assumption
MODEL_ERROR = 0.1
# of an iteration: SUMS, AGREEMENTS and two for each gather, see rl_dist.speedup.reduction_bench
SMALL_COLLECTIVES = 7


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """One rank's iteration without waiting for others."""

    env_steps: int  # of this rank
    gradient_steps: int
    collect_s: float
    forward_s: float = 0.0  # of all gradient steps, as the next two
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    rest_s: float = 0.0  # advantages, statistics, metrics
    collect_spread_s: float = 0.0  # standard deviation over iterations and ranks
    step_spread_s: float = 0.0  # of one gradient step within an iteration
    # of all gradient steps of an iteration, beyond what its single steps explain
    update_spread_s: float = 0.0
    relative_error: float = 0.0  # standard error of an iteration's seconds, as a share

    @property
    def step_s(self) -> float:
        """One gradient step."""
        return (self.forward_s + self.backward_s + self.optimizer_s) / max(1, self.gradient_steps)

    @property
    def seconds(self) -> float:
        """The whole iteration, alone."""
        return self.collect_s + self.forward_s + self.backward_s + self.optimizer_s + self.rest_s

    def scaled(self, update: float, collect: float = 1.0) -> RankCost:
        """The same on a device that takes these multiples of the time."""
        of_collect = ("collect_s", "collect_spread_s")
        seconds = {item.name for item in fields(self) if item.name.endswith("_s")}
        factors = {name: collect if name in of_collect else update for name in seconds}
        return replace(self, **{name: getattr(self, name) * by for name, by in factors.items()})

    def repeated(self, epochs: int) -> RankCost:
        """So many times as many gradient steps on the same rollout."""
        of_update = ("forward_s", "backward_s", "optimizer_s", "update_spread_s", "gradient_steps")
        return replace(self, **{name: getattr(self, name) * epochs for name in of_update})

    def lengthened(self, times: int) -> RankCost:
        """Rollouts so many times longer, with more gradient steps of the same size."""
        return replace(
            self.scaled(times, times),
            env_steps=self.env_steps * times,
            gradient_steps=self.gradient_steps * times,
            step_spread_s=self.step_spread_s,
        )


def interpolate(known: Mapping[float, RankCost], share: float) -> RankCost:
    """The work of a rank with this share of the job, from others by their shares.

    Between two shares, times are linear in the share, as in a fixed part and one for each
    environment or sequence; below the smallest they are proportional, which leaves out the fixed
    part.
    """
    low = max((size for size in known if size <= share), default=0.0)
    high = min((size for size in known if size >= share), default=max(known))
    if low == high:
        return known[low]
    weight = (share - low) / (high - low)
    ends = [(known[high], weight)] + ([(known[low], 1.0 - weight)] if low else [])

    def mean(name: str) -> float:
        return sum(getattr(work, name) * part for work, part in ends)

    seconds = {item.name: mean(item.name) for item in fields(RankCost) if item.name.endswith("_s")}
    return RankCost(
        env_steps=round(mean("env_steps")),
        gradient_steps=known[high].gradient_steps,
        relative_error=max(work.relative_error for work, _ in ends),
        **seconds,
    )


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection between ranks: seconds to begin and per hop, bytes per second."""

    name: str
    base_s: float = 0.0
    hop_s: float = 0.0
    bytes_per_s: float = math.inf

    def all_reduce_s(self, num_bytes: float, ranks: int, algorithm: str = "auto") -> float:
        """Sum over ranks by a ring, a tree, or whichever is sooner.

        Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
            MPICH" (2005);
        NCCL's own choice, https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc
        """
        if ranks <= 1:
            return 0.0
        wire_s = 2.0 * num_bytes / self.bytes_per_s
        ring_s = self.base_s + 2 * (ranks - 1) * self.hop_s + wire_s * (ranks - 1) / ranks
        tree_s = self.base_s + 2 * math.ceil(math.log2(ranks)) * self.hop_s + wire_s
        return {"ring": ring_s, "tree": tree_s, "auto": min(ring_s, tree_s)}[algorithm]


def fit_link(measured_s: Mapping[int, float], ranks: int, name: str = "measured") -> Link:
    """The link that explains all-reduces by size in bytes: relative least squares.

    Latency goes to `base_s`: with one number of ranks hops look the same.
    """
    sizes = np.array(sorted(measured_s), dtype=float)
    seconds = np.array([measured_s[int(size)] for size in sizes])
    columns = np.stack([np.ones_like(sizes), 2.0 * sizes * (ranks - 1) / ranks], axis=1)
    base_s, per_byte_s = np.linalg.lstsq(
        columns / seconds[:, None], np.ones_like(seconds), rcond=None
    )[0]
    if per_byte_s <= 0 or base_s < 0:  # noise: no slope, or none but the slope
        base_s, per_byte_s = max(0.0, float(base_s)), max(1e-15, float(per_byte_s))
    return Link(name=name, base_s=float(base_s), bytes_per_s=1.0 / float(per_byte_s))


def cluster_all_reduce_s(
    num_bytes: float, ranks: int, ranks_per_machine: int, inside: Link, between: Link
) -> float:
    """All-reduce over machines: within each, then of each share between them."""
    here = min(ranks, ranks_per_machine)
    machines = math.ceil(ranks / ranks_per_machine)
    return inside.all_reduce_s(num_bytes, here) + between.all_reduce_s(num_bytes / here, machines)


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The cost of communication once all ranks are there."""

    gradient_s: float = 0.0  # one gradient's reduction
    small_s: float = 0.0  # one iteration's sums, gathers and agreements


def modelled_communication(
    num_bytes: int, ranks: int, per_machine: int, inside: Link, between: Link
) -> Communication:
    """Reductions by the links' latency and bandwidth."""

    def seconds(size: int) -> float:
        return cluster_all_reduce_s(size, ranks, per_machine, inside, between)

    return Communication(gradient_s=seconds(num_bytes), small_s=SMALL_COLLECTIVES * seconds(64))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One iteration on N ranks, in seconds; the parts add up."""

    ranks: int
    env_steps: int  # of all ranks
    collect_s: float
    update_s: float
    rest_s: float
    communication_s: float
    waiting_s: float  # for the slowest rank
    relative_error: float  # standard error, as a share

    @property
    def iteration_s(self) -> float:
        """All parts."""
        return self.collect_s + self.update_s + self.rest_s + self.communication_s + self.waiting_s

    @property
    def steps_per_s(self) -> float:
        """Environment steps of all ranks."""
        return self.env_steps / self.iteration_s

    @property
    def interval_s(self) -> tuple[float, float]:
        """95 % interval of an iteration's seconds, from the measured spread."""
        margin = min(0.9, 1.96 * self.relative_error)
        return self.iteration_s * (1 - margin), self.iteration_s * (1 + margin)

    @property
    def shares(self) -> dict[str, float]:
        """Parts of the time."""
        parts = {
            "rollouts": self.collect_s,
            "update": self.update_s + self.rest_s,
            "communication": self.communication_s,
            "waiting": self.waiting_s,
        }
        return {name: seconds / self.iteration_s for name, seconds in parts.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        names = ("iteration_s", "steps_per_s", "shares")
        derived = {name: getattr(self, name) for name in names}
        return asdict(self) | derived | {"interval_s": list(self.interval_s)}


def predict(work: RankCost, ranks: int, communication: Communication) -> Prediction:
    """An iteration of `ranks` ranks that each do `work`."""
    steps = work.gradient_steps
    talk_s = steps * communication.gradient_s + communication.small_s
    update_spread_s = math.hypot(steps * work.step_spread_s, work.update_spread_s)
    return Prediction(
        ranks=ranks,
        env_steps=work.env_steps * ranks,
        collect_s=work.collect_s,
        update_s=work.forward_s + work.backward_s + work.optimizer_s,
        rest_s=work.rest_s,
        communication_s=talk_s if ranks > 1 else 0.0,
        waiting_s=expected_maximum(ranks) * (work.collect_spread_s + update_spread_s),
        relative_error=work.relative_error,
    )


@cache
def expected_maximum(count: int) -> float:
    """Expected maximum of independent standard normal numbers (2: 0.564)."""
    if count <= 1:
        return 0.0
    edges = np.linspace(-9.0, 9.0, 20_001)
    below = np.array([NormalDist().cdf(edge) for edge in edges])
    chance = below**count
    middles = (edges[1:] + edges[:-1]) / 2
    return float((middles * np.diff(chance)).sum())


@dataclass(frozen=True)
class Scaled:
    """A prediction beside that of one rank."""

    one: Prediction
    many: Prediction

    @property
    def speedup(self) -> float:
        """Environment steps per second, relative to one rank."""
        return self.many.steps_per_s / self.one.steps_per_s

    @property
    def efficiency(self) -> float:
        """Speedup per rank."""
        return self.speedup / self.many.ranks


_CORES = "ranks slow each other{} down: give each rank cores{} of its own"
_LEVEL = "environments differ in speed: raise --num_steps, or level out what slows some down"
_FEWER = "raise --batch_size for fewer, larger gradient steps, or use a faster link"
_ENVS = "a rollout of fewer environments is hardly shorter: raise --num_envs, or try weak scaling"
_BATCH = "smaller minibatches do not pay: raise --batch_size and --num_envs"
# Part of the time: in words, and the fix by scaling.
LOSSES = {
    "rollouts": ("in rollouts", {"strong": _ENVS, "weak": _CORES.format("'s environments", "")}),
    "update": ("in the update", {"strong": _BATCH, "weak": _CORES.format("", " or a GPU")}),
    "communication": ("reducing gradients", {"strong": _FEWER, "weak": _FEWER}),
    "waiting": ("waiting for the slowest rank", {"strong": _LEVEL, "weak": _LEVEL}),
}


def bottleneck(scaled: Scaled, scaling: str, unit: str = "ranks") -> tuple[str, str]:
    """Return the reason why N ranks are not N times as fast, and the fix or ""."""
    many, one = scaled.many, scaled.one
    head = f"{many.ranks} {unit} give {scaled.speedup:.2f}x"
    if scaled.efficiency > 0.9:
        return f"{head}: they scale well", ""
    # a rank's part of what one rank does alone in an iteration
    ideal = many.env_steps / many.ranks / one.env_steps
    lost_s = {
        "rollouts": many.collect_s - one.collect_s * ideal,
        "update": many.update_s + many.rest_s - (one.update_s + one.rest_s) * ideal,
        "communication": many.communication_s,
        "waiting": many.waiting_s,
    }
    worst = max(lost_s, key=lambda part: lost_s[part])
    where, fixes = LOSSES[worst]
    share = f"{lost_s[worst] / many.iteration_s:.0%} of an iteration"
    return f"{head} instead of {many.ranks}x: most is lost {where} ({share})", fixes[scaling]
