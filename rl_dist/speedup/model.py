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
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

import numpy as np

# standard error, as a share, of an iteration that was not measured: an assumption
MODEL_ERROR = 0.1
# of an iteration: SUMS and GATHERS of rl_dist.launch.bench
SMALL_COLLECTIVES = 3
OF_UPDATE = ("update_s", "rest_s", "step_spread_s", "update_spread_s")
OF_ITERATION = (*OF_UPDATE, "collect_s", "collect_spread_s")


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """One rank's iteration without waiting for others."""

    env_steps: int  # of this rank
    gradient_steps: int
    collect_s: float
    update_s: float = 0.0  # all gradient steps: forward, backward, optimizer
    rest_s: float = 0.0  # advantages, statistics, metrics
    collect_spread_s: float = 0.0  # standard deviation over iterations and ranks
    step_spread_s: float = 0.0  # of one gradient step within an iteration
    # of all gradient steps of an iteration, beyond what its single steps explain
    update_spread_s: float = 0.0
    relative_error: float = 0.0  # standard error of an iteration's seconds, as a share

    @property
    def seconds(self) -> float:
        """The whole iteration, alone."""
        return self.collect_s + self.update_s + self.rest_s

    def times(self, factor: float, names: tuple[str, ...] = OF_ITERATION) -> RankCost:
        """The same with these figures multiplied."""
        return replace(self, **{name: getattr(self, name) * factor for name in names})

    def modelled(self) -> RankCost:
        """The same, known no better than the model knows it."""
        return replace(self, relative_error=max(self.relative_error, MODEL_ERROR))


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
    names = ("env_steps", *OF_ITERATION)
    means = {name: sum(getattr(work, name) * part for work, part in ends) for name in names}
    means["env_steps"] = round(means["env_steps"])
    error = max(work.relative_error for work, _ in ends)
    return replace(known[high], relative_error=error, **means)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection between ranks: seconds to begin and per hop, bytes per second."""

    name: str
    base_s: float = 0.0
    hop_s: float = 0.0
    bytes_per_s: float = math.inf
    shared: bool = False  # between machines: one port for all GPUs of a machine, not one for each

    def all_reduce_s(self, num_bytes: float, ranks: int) -> float:
        """Sum over ranks by a ring or a tree, whichever is sooner.

        Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
            MPICH" (2005);
        NCCL's own choice, https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc
        """
        if ranks <= 1:
            return 0.0
        wire_s = 2.0 * num_bytes / self.bytes_per_s
        ring_s = 2 * (ranks - 1) * self.hop_s + wire_s * (ranks - 1) / ranks
        tree_s = 2 * math.ceil(math.log2(ranks)) * self.hop_s + wire_s
        return self.base_s + min(ring_s, tree_s)


def fit_link(measured_s: Mapping[int, float]) -> Link:
    """The link that explains all-reduces of two ranks: relative least squares."""
    sizes = np.array(sorted(measured_s), dtype=float)
    seconds = np.array([measured_s[int(size)] for size in sizes])
    # a ring of two has two hops and sends each byte once
    columns = np.stack([np.full_like(sizes, 2.0), sizes], axis=1) / seconds[:, None]
    hop_s, per_byte_s = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)[0]
    # noise may leave no slope, or nothing but the slope
    hop_s, per_byte_s = max(0.0, float(hop_s)), max(1e-15, float(per_byte_s))
    return Link(name="measured", hop_s=hop_s, bytes_per_s=1.0 / per_byte_s)


@dataclass(frozen=True, kw_only=True)
class Communication:
    """The cost of communication once all ranks are there."""

    gradient_s: float = 0.0  # one gradient's reduction
    small_s: float = 0.0  # one iteration's sums and gathers


def modelled_communication(
    num_bytes: float, ranks: int, per_machine: int, inside: Link, between: Link
) -> Communication:
    """Reductions within each machine, then of each share between machines."""
    here, machines = min(ranks, per_machine), math.ceil(ranks / per_machine)

    def seconds(size: float) -> float:
        through_port = size if between.shared else size / here
        return inside.all_reduce_s(size, here) + between.all_reduce_s(through_port, machines)

    return Communication(gradient_s=seconds(num_bytes), small_s=SMALL_COLLECTIVES * seconds(64))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One iteration on N ranks, in seconds."""

    ranks: int
    env_steps: int  # of all ranks
    parts_s: dict[str, float]  # rollouts, update (with the rest), communication, waiting
    iteration_s: float  # all parts
    interval_s: tuple[float, float]  # of 95 %
    steps_per_s: float  # of all ranks
    shares: dict[str, float]  # parts of the time
    relative_error: float  # standard error, as a share


def predict(work: RankCost, ranks: int, communication: Communication) -> Prediction:
    """An iteration of `ranks` ranks that each do `work`."""
    steps = work.gradient_steps
    talk_s = steps * communication.gradient_s + communication.small_s
    update_spread_s = math.hypot(steps * work.step_spread_s, work.update_spread_s)
    parts_s = {
        "rollouts": work.collect_s,
        "update": work.update_s + work.rest_s,
        "communication": talk_s if ranks > 1 else 0.0,
        "waiting": expected_maximum(ranks) * (work.collect_spread_s + update_spread_s),
    }
    iteration_s = sum(parts_s.values())
    margin = min(0.9, 1.96 * work.relative_error)
    return Prediction(
        ranks=ranks,
        env_steps=work.env_steps * ranks,
        parts_s=parts_s,
        iteration_s=iteration_s,
        interval_s=(iteration_s * (1 - margin), iteration_s * (1 + margin)),
        steps_per_s=work.env_steps * ranks / iteration_s,
        shares={name: seconds / iteration_s for name, seconds in parts_s.items()},
        relative_error=work.relative_error,
    )


@cache
def expected_maximum(count: int) -> float:
    """Expected maximum of independent standard normal numbers (2: 0.564)."""
    if count <= 1:
        return 0.0
    edges = np.linspace(-9.0, 9.0, 20_001)
    chance = np.array([NormalDist().cdf(edge) for edge in edges]) ** count
    middles = (edges[1:] + edges[:-1]) / 2
    return float((middles * np.diff(chance)).sum())


# Part of the time: in words, and how to fix it.
LOSSES = {
    "rollouts": (
        "rollouts",
        "raise --num_envs, step slow environments in processes (--env_workers auto), or give each "
        "rank cores of its own",
    ),
    "update": ("update", "raise --batch_size and --num_envs, or give each rank more cores"),
    "communication": ("reducing gradients", "raise --batch_size, or use a faster link"),
    "waiting": ("waiting for the slowest", "raise --num_steps, or level out environments"),
}


def bottleneck(one: Prediction, many: Prediction) -> tuple[str, str]:
    """Return where N ranks lose most of their time and the fix, or "" twice."""
    if many.steps_per_s > 0.9 * many.ranks * one.steps_per_s:
        return "", ""
    # a rank's part of what one rank does alone in an iteration
    ideal = many.env_steps / many.ranks / one.env_steps
    lost_s = {name: many.parts_s[name] - one.parts_s[name] * ideal for name in LOSSES}
    worst = max(LOSSES, key=lambda part: lost_s[part])
    where, fix = LOSSES[worst]
    return f"{where} {lost_s[worst] / many.iteration_s:.0%}", fix
