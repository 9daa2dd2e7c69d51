"""Predict the duration of an iteration on N ranks; this module measures nothing.

    iteration = rollouts + update + reductions of gradients + small collectives
                + expected wait for the slowest rank

Ranks synchronise after the rollout and in every gradient step. Each time, they wait for the slowest
rank. The times of a rank are means. If this machine can run N ranks, they are measured with the
sizes, the threads and the number of processes of such a run. Otherwise, fewer processes are timed,
or the times are computed for another GPU. The model assumes that the times are normally distributed
and independent between ranks. It computes the time of a reduction from latency
and bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, harmonic_mean, median, stdev

from rl_dist.files import Record

SMALL_COLLECTIVES = 3  # number of collectives per iteration that do not reduce gradients
WARM_UP = 2  # number of iterations that `audit` skips at the start of a run


# ---- the work of one rank


@dataclass(frozen=True, kw_only=True)
class RankCost:
    """The cost of one iteration on one rank, without waits for other ranks."""

    env_steps: int  # environment steps of this rank
    gradient_steps: int
    # mean and standard deviation over iterations and ranks, in seconds
    collect: NormalDist
    update: NormalDist  # all work after the rollout

    @property
    def seconds(self) -> float:
        """The mean time of an iteration, without waits for other ranks."""
        return self.collect.mean + self.update.mean

    def scaled(self, collect: float, update: float) -> RankCost:
        """Return a copy with the rollout and update times multiplied by these factors."""
        return replace(self, collect=self.collect * collect, update=self.update * update)


def rank_cost(records: Sequence[Record]) -> RankCost:
    """Compute the cost of one rank; the times are means over iterations and ranks.

    Medians would be wrong: the cores of a shared host alternate between two speeds, and a median
    shows only one of these speeds.

    Args:
        records: lines of metrics.jsonl from one or more training runs with the same sizes.
    """
    entries = [entry for record in records for entry in record["ranks"]]
    collect_s = [entry["time/collect_s"] for entry in entries]
    update_s = [entry["time/update_own_s"] for entry in entries]
    steps = round(fmean(record["optim/steps"] for record in records))
    step_spread_s = fmean(entry["time/step_spread_s"] for entry in entries)
    return RankCost(
        env_steps=round(steps_per_iteration(records) / len(records[0]["ranks"])),
        gradient_steps=steps,
        collect=NormalDist(fmean(collect_s), _spread(collect_s)),
        # Times may vary from step to step or from update to update. Use the larger variation.
        update=NormalDist(fmean(update_s), max(steps * step_spread_s, _spread(update_s))),
    )


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation, or 0 if there is only one value."""
    return stdev(values) if len(values) > 1 else 0.0


def steps_per_iteration(records: Sequence[Record]) -> float:
    """Return the environment steps per iteration, summed over all ranks."""
    return records[0]["global_step"] / records[0]["iteration"]


def steps_per_episode(records: Sequence[Record]) -> float:
    """Return the environment steps divided by the number of episodes that ended.

    The result is NaN if no episode ended. This function does not use the lengths of the episodes
    that ended: their mean would be too small, because long episodes are still running.
    """
    episodes = sum(record["episode/count"] for record in records)
    return len(records) * steps_per_iteration(records) / episodes if episodes else math.nan


# ---- reductions


@dataclass(frozen=True)
class Link:
    """A connection between ranks: latency per hop, and bandwidth."""

    hop_s: float = 0.0
    bytes_per_s: float = math.inf

    def all_reduce_s(self, num_bytes: float, ranks: int) -> float:
        """Return the time of an all-reduce with the faster algorithm, ring or tree.

        Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
            MPICH" (2005); NCCL chooses in the same way:
            https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc
        """
        if ranks <= 1:
            return 0.0
        wire_s = 2.0 * num_bytes / self.bytes_per_s
        ring_s = 2 * (ranks - 1) * self.hop_s + wire_s * (ranks - 1) / ranks
        tree_s = 2 * math.ceil(math.log2(ranks)) * self.hop_s + wire_s
        return min(ring_s, tree_s)


def fit_link(ranks: int, measured_s: Mapping[int, float]) -> Link:
    """Fit a link to the measured times of the smallest and the largest all-reduce.

    Args:
        ranks: number of ranks that took part in the measured all-reduces.
        measured_s: seconds of an all-reduce for each number of bytes.
    """
    small = min(measured_s)
    large = max(measured_s)
    # Measurement noise can cause a negative slope or latency. Set a lower bound.
    byte_s = max(1e-15, (measured_s[large] - measured_s[small]) / (large - small))
    # assume that the small all-reduce used the tree algorithm (see `all_reduce_s`)
    latency_s = max(0.0, measured_s[small] - small * byte_s)
    hop_s = latency_s / (2 * math.ceil(math.log2(ranks)))
    return Link(hop_s=hop_s, bytes_per_s=2.0 * (ranks - 1) / ranks / byte_s)


# Latencies are NCCL's constants: 4.0 us per NVLink hop, 14 us per network hop
# (https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc, copied in
# torch/_inductor/comm_analysis.py). Bandwidths are 80 % of the nominal rate per direction, unless a
# comment gives another source.
NVLINK_HOP_S = 4.0e-6
NETWORK = Link(14e-6, 0.8 * 50e9)  # InfiniBand NDR with 400 Gbit/s per GPU


@dataclass(frozen=True)
class Network:
    """The connections between all ranks."""

    inside: Link  # between ranks in the same machine
    ranks_per_machine: int = 8
    between: Link = NETWORK  # between machines; one for each rank

    def all_reduce_s(self, num_bytes: float, ranks: int) -> float:
        """Return the time of an all-reduce first inside each machine, then between machines."""
        local_ranks = min(ranks, self.ranks_per_machine)
        machines = math.ceil(ranks / self.ranks_per_machine)
        inside_s = self.inside.all_reduce_s(num_bytes, local_ranks)
        return inside_s + self.between.all_reduce_s(num_bytes / local_ranks, machines)

    def iteration_s(self, gradient_steps: int, gradient_bytes: int, ranks: int) -> float:
        """Return the communication time of an iteration, without waits for slow ranks."""
        gradients_s = gradient_steps * self.all_reduce_s(gradient_bytes, ranks)
        return gradients_s + SMALL_COLLECTIVES * self.all_reduce_s(64, ranks)


# ---- GPU models that this machine may not have


@dataclass(frozen=True)
class Card:
    """The data-sheet rates and a list price of a GPU model."""

    fp32_tflops: float  # peak rate without sparsity
    network: Network
    usd_per_hour: float  # lowest list price of several cloud providers


# If a rate has a source, it was checked against the source in November 2026. Rates without a source
# were written from memory. Prices are from the web pages of cloud providers, August to November
# 2026.
CARDS = {
    # NVLink 3, 600 GB/s in both directions together;
    # https://hmc-tech.com/gpus/nvidia-a100-sxm-vs-nvidia-b200
    "A100": Card(19.5, Network(Link(NVLINK_HOP_S, 0.8 * 300e9)), 1.39),
    # NVLink 4, 900 GB/s; https://glennklockwood.com/garden/processors/h100
    "H100 SXM": Card(67, Network(Link(NVLINK_HOP_S, 0.8 * 450e9)), 2.40),
    # NVLink 5, 1800 GB/s
    "B200": Card(75, Network(Link(NVLINK_HOP_S, 0.8 * 900e9)), 5.00),
    # PCIe 4 through the host without peer access: 10 GB/s, from torch/_inductor/comm_analysis.py
    # https://www.grafikkarten.com/de/news/nvidia-rtx-6000-grafikkarte-der-ada-generation
    "RTX 4090": Card(82.6, Network(Link(10e-6, 10e9)), 0.29),
}


# ---- predictions


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted times of one iteration on several ranks."""

    ranks: int
    env_steps: int  # environment steps of all ranks together
    parts_s: dict[str, float]  # name of each part of the iteration -> seconds

    @property
    def iteration_s(self) -> float:
        """The duration of the whole iteration."""
        return sum(self.parts_s.values())

    @property
    def steps_per_s(self) -> float:
        """The environment steps per second of all ranks together."""
        return self.env_steps / self.iteration_s


def predict(work: RankCost, ranks: int, communication_s: float) -> Prediction:
    """Predict the times of an iteration in which `ranks` ranks each do this work."""
    spread_s = work.collect.stdev + work.update.stdev
    return Prediction(
        ranks=ranks,
        env_steps=work.env_steps * ranks,
        parts_s={
            "rollouts": work.collect.mean,
            "update": work.update.mean,
            "reducing gradients": communication_s,
            "waiting for the slowest": expected_maximum(ranks) * spread_s,
        },
    )


def expected_maximum(count: int) -> float:
    """Return the expected maximum of `count` independent standard normal numbers.

    This is Tukey's plotting-position formula, which is within 1.4 % of the exact integral for 2 to
    256 numbers.
    """
    return NormalDist().inv_cdf((count - 1 / 3) / (count + 1 / 3))


def bottleneck(baseline: Prediction, many: Prediction) -> str:
    """Name the part of an iteration with the most extra time, and this time in percent.

    The extra time is the time in `many` minus the time in `baseline`, after scaling `baseline` to
    the same number of steps per rank. The percentage is relative to an iteration of `many`.
    """
    # environment steps of one rank, as a fraction of the steps of the baseline
    share = many.env_steps / many.ranks / baseline.env_steps
    lost_s = {name: many.parts_s[name] - baseline.parts_s[name] * share for name in many.parts_s}
    worst = max(lost_s, key=lambda name: lost_s[name])
    return f"{worst} {lost_s[worst] / many.iteration_s:.0%}"


# ---- the audit at the end of a run on several ranks


def audit(records: Sequence[Record]) -> Record | None:
    """Compare the measured steps/s of a run with the steps/s that the model predicts.

    The prediction uses measurements of the same run: the times of its ranks, the variation of these
    times, and the duration of a reduction after all ranks have arrived. Therefore, the difference
    between predicted and measured steps/s is the error of the model. Return None if the run has
    only 1 rank or too few iterations.
    """
    # Records that another program wrote may lack some values.
    with suppress(LookupError, TypeError, ValueError, ArithmeticError):
        ranks = len(records[-1]["ranks"])
        used_records = [record for record in records if len(record["ranks"]) == ranks][WARM_UP:]
        work = rank_cost(used_records)
        # The rank that arrives last at a reduction waits only for the transfer, so the shortest
        # wait of all ranks is the duration of the transfer.
        reductions_s = [min(rank["time/reduction_s"] for rank in r["ranks"]) for r in used_records]
        gradients_s = work.gradient_steps * median(reductions_s)
        small_s = min(record["time/sync_s"] for record in used_records)
        predicted = predict(work, ranks, gradients_s + small_s).steps_per_s
        measured = harmonic_mean([record["time/sps"] for record in used_records])
        if ranks > 1:
            return {
                "ranks": ranks,
                "iterations": len(used_records),
                "measured_steps_per_s": measured,
                "predicted_steps_per_s": predicted,
                "error": predicted / measured - 1.0,
            }
    return None


def describe(scaling: Record) -> str:
    """Format the result of `audit` as one line."""
    return (
        "check of the speedup model: {predicted_steps_per_s:,.0f} steps/s on {ranks} ranks, from "
        "the times of this run ({error:+.1%}); {measured_steps_per_s:,.0f} steps/s were measured"
    ).format(**scaling)
