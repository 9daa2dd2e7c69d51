"""Predict the duration of an iteration on N ranks, without measuring anything.

    iteration = rollouts + update + reductions of gradients + small collectives
                + expected wait for the slowest rank

Ranks meet after the rollout and in every gradient step, and wait there for the slowest. The times
of a rank are means at the sizes, threads and neighbours that it has among N. Their variation counts
as normal and independent between ranks. Reductions follow latency and bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, harmonic_mean, median, stdev
from typing import Any

MODEL_ERROR = 0.1  # assumed standard error of an iteration that was not measured, as a share
SMALL_COLLECTIVES = 3  # sums and gathers of an iteration, besides its gradients
# The parts of an iteration: the name of what is lost there, and how to lose less.
LOSSES = {
    "rollouts": (
        "rollouts",
        "raise --num_envs, step slow environments in processes (--env_workers auto), or give each "
        "rank its own cores",
    ),
    "update": ("update", "raise --batch_size and --num_envs, or give each rank more cores"),
    "communication": ("reducing gradients", "raise --batch_size, or use a faster link"),
    "waiting": ("waiting for the slowest", "raise --num_steps, or level out environments"),
}
WARM_UP, LATEST = 2, 200  # iterations that an audit skips at first, and compares at most


# ---- the work of one rank


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """Seconds of one rank's iteration, without waiting for others."""

    env_steps: int  # this rank's
    gradient_steps: int
    collect_s: float
    update_s: float  # everything after the rollout
    collect_spread_s: float = 0.0  # standard deviation over iterations and ranks
    update_spread_s: float = 0.0  # the same, of what ranks wait for in all gradient steps
    relative_error: float = 0.0  # standard error of an iteration's seconds, as a share

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole iteration, alone."""
        return self.collect_s + self.update_s

    def scaled(self, collect: float, update: float) -> RankCost:
        """Return the cost with the times of the rollout and of the update multiplied."""
        return replace(
            self,
            collect_s=self.collect_s * collect,
            collect_spread_s=self.collect_spread_s * collect,
            update_s=self.update_s * update,
            update_spread_s=self.update_spread_s * update,
        )


def rank_cost(records: Sequence[Mapping[str, Any]]) -> RankCost:
    """Return one rank's cost: means over iterations and ranks.

    Means, not medians: the cores of a shared host alternate between two speeds, and a median would
    show only one of them.

    Args:
        records: lines of metrics.jsonl, of one training or of several with the same sizes.
    """
    entries = [entry for record in records for entry in record["ranks"]]
    collect_s = [entry["time/collect_s"] for entry in entries]
    update_s = [entry["time/update_own_s"] for entry in entries]
    iteration_s = [sum(parts) for parts in zip(collect_s, update_s, strict=True)]
    error_s = _spread(iteration_s) / math.sqrt(len(entries))
    steps = round(fmean(record["optim/steps"] for record in records))
    step_spread_s = fmean(entry["time/step_spread_s"] for entry in entries)
    return RankCost(
        env_steps=round(steps_per_iteration(records) / len(records[0]["ranks"])),
        gradient_steps=steps,
        collect_s=fmean(collect_s),
        update_s=fmean(update_s),
        collect_spread_s=_spread(collect_s),
        # either single steps vary, or whole updates are slow or fast
        update_spread_s=max(steps * step_spread_s, _spread(update_s)),
        relative_error=error_s / fmean(iteration_s),
    )


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def steps_per_iteration(records: Sequence[Mapping[str, Any]]) -> float:
    """Return the environment steps of all ranks in an iteration."""
    return records[0]["global_step"] / records[0]["iteration"]


def steps_per_episode(records: Sequence[Mapping[str, Any]]) -> float:
    """Return the environment steps per ended episode; NaN if none ended.

    Not the mean length: the first episodes begin at a random age, so those that end soon are short.
    """
    episodes = sum(record["episode/count"] for record in records)
    return len(records) * steps_per_iteration(records) / episodes if episodes else math.nan


# ---- reductions


@dataclass(frozen=True)
class Link:
    """A connection between ranks: seconds to begin and per hop, bytes per second."""

    base_s: float = 0.0
    hop_s: float = 0.0
    bytes_per_s: float = math.inf

    def all_reduce_s(self, num_bytes: float, ranks: int) -> float:
        """Return the seconds of a sum over ranks by a ring or a tree, the faster one.

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


def fit_link(ranks: int, measured_s: Mapping[int, float]) -> Link:
    """Return the link that explains all-reduces of a small and a large size.

    Args:
        measured_s: seconds by bytes.
    """
    small, large = min(measured_s), max(measured_s)
    # Noise may leave no slope, or nothing but the slope.
    byte_s = max(1e-15, (measured_s[large] - measured_s[small]) / (large - small))
    latency_s = max(0.0, measured_s[small] - small * byte_s)  # a tree, as in `all_reduce_s`
    hop_s = latency_s / (2 * math.ceil(math.log2(ranks)))
    return Link(hop_s=hop_s, bytes_per_s=2.0 * (ranks - 1) / ranks / byte_s)


# Latencies: NCCL's own cost constants (base 8.4 us; per hop 4.0 us NVLink, 14 us network),
# https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc, which torch ships in
# torch/_inductor/comm_analysis.py. Bandwidth: four fifths of the nominal rate per direction, unless
# a source is named.
BASE_S, NVLINK_HOP_S = 8.4e-6, 4.0e-6
NETWORK = Link(BASE_S, 14e-6, 0.8 * 50e9)  # InfiniBand NDR: 400 Gbit/s for each GPU


@dataclass(frozen=True)
class Network:
    """The connections between all ranks."""

    inside: Link  # between the ranks of a machine
    ranks_per_machine: int = 8
    between: Link = NETWORK  # between machines, one for each rank

    def all_reduce_s(self, num_bytes: float, ranks: int) -> float:
        """Return the seconds of sums within machines, then of shares between them."""
        local_ranks = min(ranks, self.ranks_per_machine)
        machines = math.ceil(ranks / self.ranks_per_machine)
        inside_s = self.inside.all_reduce_s(num_bytes, local_ranks)
        return inside_s + self.between.all_reduce_s(num_bytes / local_ranks, machines)

    def iteration_s(self, gradient_steps: int, gradient_bytes: int, ranks: int) -> float:
        """Return the seconds that an iteration communicates once all ranks have arrived."""
        gradients_s = gradient_steps * self.all_reduce_s(gradient_bytes, ranks)
        return gradients_s + SMALL_COLLECTIVES * self.all_reduce_s(64, ranks)


# ---- cards that are not in this machine


@dataclass(frozen=True)
class Card:
    """One kind of GPU: data-sheet rates and a list price."""

    fp32_tflops: float  # peak, without sparsity
    network: Network
    usd_per_hour: float  # the lowest price that was found


# Rates: the makers' pages, checked in November 2026 on the pages named; the others are from memory.
# Prices: providers' pages from August to November 2026.
CARDS = {
    # NVLink 3, 600 GB/s both ways; https://hmc-tech.com/gpus/nvidia-a100-sxm-vs-nvidia-b200
    "A100": Card(19.5, Network(Link(BASE_S, NVLINK_HOP_S, 0.8 * 300e9)), 1.39),
    # NVLink 4, 900 GB/s; https://glennklockwood.com/garden/processors/h100
    "H100 SXM": Card(67, Network(Link(BASE_S, NVLINK_HOP_S, 0.8 * 450e9)), 2.40),
    # NVLink 5, 1800 GB/s
    "B200": Card(75, Network(Link(BASE_S, NVLINK_HOP_S, 0.8 * 900e9)), 5.00),
    # PCIe 4 through the host, without peer access: 10 GB/s in torch/_inductor/comm_analysis.py
    # https://www.grafikkarten.com/de/news/nvidia-rtx-6000-grafikkarte-der-ada-generation
    "RTX 4090": Card(82.6, Network(Link(15e-6, 10e-6, 10e9)), 0.29),
}


# ---- predictions


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One iteration on several ranks."""

    ranks: int
    env_steps: int  # all ranks together
    parts_s: dict[str, float]  # seconds, by the names of LOSSES
    relative_error: float  # standard error, as a share

    @property
    def iteration_s(self) -> float:
        """Return the seconds of all parts."""
        return sum(self.parts_s.values())

    @property
    def steps_per_s(self) -> float:
        """Return the environment steps of all ranks per second."""
        return self.env_steps / self.iteration_s


def predict(work: RankCost, ranks: int, communication_s: float) -> Prediction:
    """Predict an iteration of `ranks` ranks that each do `work`."""
    spread_s = work.collect_spread_s + work.update_spread_s
    return Prediction(
        ranks=ranks,
        env_steps=work.env_steps * ranks,
        parts_s={
            "rollouts": work.collect_s,
            "update": work.update_s,
            "communication": communication_s,
            "waiting": expected_maximum(ranks) * spread_s,
        },
        relative_error=work.relative_error,
    )


def expected_maximum(count: int) -> float:
    """Return the expected maximum of independent standard normal numbers (2: 0.566).

    Tukey's plotting position of the largest: at most 1.4 % from the exact integral for 2 to 256.
    """
    return NormalDist().inv_cdf((count - 1 / 3) / (count + 1 / 3))


def bottleneck(one: Prediction, many: Prediction) -> tuple[str, str]:
    """Return where N ranks lose most of their time and the fix, or "" twice."""
    if many.steps_per_s > 0.9 * many.ranks * one.steps_per_s:
        return "", ""
    # a perfect split of one rank's iteration has this share of its work on each rank
    share = many.env_steps / many.ranks / one.env_steps
    lost_s = {name: many.parts_s[name] - one.parts_s[name] * share for name in LOSSES}
    worst = max(LOSSES, key=lambda name: lost_s[name])
    label, fix = LOSSES[worst]
    return f"{label} {lost_s[worst] / many.iteration_s:.0%}", fix


# ---- the audit at the end of a run on several ranks


def audit(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Compare predicted and measured steps/s; None: one rank, or few iterations.

    The model predicts from the run's own figures: the times of the ranks, how much they varied, and
    the duration of a reduction once all ranks have arrived. The difference is its error.
    """
    with suppress(LookupError, TypeError, ValueError, ArithmeticError):  # of foreign metrics
        ranks = len(records[-1]["ranks"])
        same = [record for record in records if len(record["ranks"]) == ranks][WARM_UP:][-LATEST:]
        if ranks > 1:
            return _compare(same, ranks)
    return None


def _compare(records: Sequence[Mapping[str, Any]], ranks: int) -> dict[str, Any]:
    work = rank_cost(records)
    # The rank that comes last to a reduction waits for the transfer only.
    reductions = [min(entry["time/reduction_s"] for entry in record["ranks"]) for record in records]
    gradients_s = work.gradient_steps * median(reductions)
    small_s = min(record["time/sync_s"] for record in records)
    prediction = predict(work, ranks, gradients_s + small_s)
    measured = harmonic_mean([record["time/sps"] for record in records])
    return {
        "ranks": ranks,
        "iterations": len(records),
        "measured_steps_per_s": measured,
        "predicted_steps_per_s": prediction.steps_per_s,
        "error": prediction.steps_per_s / measured - 1.0,
        "busy": min(1.0, work.seconds * measured / prediction.env_steps),
    }


def describe(scaling: Mapping[str, Any]) -> str:
    """Return an audit in one line."""
    return (
        "scaling: {ranks} ranks trained {measured_steps_per_s:,.0f} steps/s; the model of "
        "rl_dist.speedup, given their own times, says {predicted_steps_per_s:,.0f} ({error:+.1%}); "
        "each worked {busy:.0%} of the time"
    ).format(**scaling)
