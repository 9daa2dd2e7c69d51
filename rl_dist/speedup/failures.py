"""What failures take from a long run on many machines: the model, a table of it.

A job fails when any of its machines does, goes back to its last checkpoint, and starts again. Rare
checkpoints lose work, frequent ones cost time; Daly's interval is the best.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rl_dist.checkpoint.file import pack, write_atomically
from rl_dist.hardware.report import duration

DAY_S = 86_400.0
# 6.50 failures per 1,000 days of a machine of eight A100, on 2,000 of them: Kokolis et al. 2024,
# "Revisiting Reliability in Large-Scale Machine Learning Research Clusters",
# https://arxiv.org/abs/2410.21680. Llama 3 on machines of eight H100 had 3.8, see the tests.
NODE_MTBF_DAYS = 154.0
# from a machine's loss to the next new checkpoint: the longest of ten, docs/many_machines.md
RESTART_S = 60.0
COPIES_OF_WEIGHTS = 3  # in a checkpoint: the weights and both moments of Adam
COLUMNS = ("machines", "GPUs", "scaling", "steps/s", "efficiency", "waiting", "reducing",
           "fails every", "--checkpoint_every", "useful time", "speedup")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often machines fail, and what a failure and a checkpoint cost."""

    node_mtbf_days: float = NODE_MTBF_DAYS  # mean time between failures of one machine
    restart_s: float = RESTART_S
    checkpoint_s: float = 0.0  # 0: to be measured

    def measured(self, gradient_bytes: int) -> Failures:
        """The same with the time of a checkpoint here, if none is given."""
        return replace(self, checkpoint_s=self.checkpoint_s or checkpoint_seconds(gradient_bytes))

    def mtbf_s(self, nodes: int) -> float:
        """Mean time between failures of a job on so many machines."""
        return self.node_mtbf_days * DAY_S / nodes

    def plan(self, nodes: int, iteration_s: float) -> dict[str, float]:
        """Return the best checkpoint interval, in whole iterations, and the useful share."""
        mtbf_s = self.mtbf_s(nodes)
        every = max(1, round(best_interval_s(self.checkpoint_s, mtbf_s) / iteration_s))
        useful = useful_share(every * iteration_s, self.checkpoint_s, self.restart_s, mtbf_s)
        return {"mtbf_s": mtbf_s, "checkpoint_every": every, "useful": useful}


def best_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Seconds of work between two checkpoints that waste the least.

    Source: Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22 (2006); its first term is Young's of 1974.
    """
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    part = checkpoint_s / (2 * mtbf_s)
    young_s = math.sqrt(2 * checkpoint_s * mtbf_s)
    return max(0.0, young_s * (1 + math.sqrt(part) / 3 + part / 9) - checkpoint_s)


def useful_share(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time that is work which lasts; failures come at random.

    Also during restarts.

    Source: Daly 2006, as above.
    """
    exponent = (interval_s + checkpoint_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 700:  # no interval is ever finished
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))


def checkpoint_seconds(gradient_bytes: int, folder: Path | None = None) -> float:
    """Seconds to write a checkpoint of weights of so many bytes, the median of three."""
    seconds = []
    state = {"state": torch.zeros(COPIES_OF_WEIGHTS * gradient_bytes, dtype=torch.uint8)}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for _ in range(3):
            started_s = time.perf_counter()
            write_atomically(Path(name, "checkpoint.pt"), pack(state))
            seconds.append(time.perf_counter() - started_s)
    return median(seconds)


def add_failures(rows: Sequence[dict[str, Any]], per_node: int, failures: Failures) -> None:
    """Put machines, failures and what they leave of the speedup into a report's rows."""
    for row in rows:
        if not row["problem"]:
            row["nodes"] = math.ceil(row["gpus"] / per_node)
            row |= failures.plan(row["nodes"], row["iteration_s"])
            row["lasting_speedup"] = row["speedup"] * row["useful"]


def node_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row's cells in the order of COLUMNS."""
    shares = row["shares"]
    return (
        str(row["nodes"]),
        str(row["gpus"]),
        row["scaling"],
        f"{row['steps_per_s'] * row['useful']:,.0f}",
        f"{row['efficiency']:.0%}",
        f"{shares['waiting']:.1%}",
        f"{shares['communication']:.1%}",
        duration(row["mtbf_s"]),
        f"{row['checkpoint_every']:,}",
        f"{row['useful']:.2%}",
        f"{row['lasting_speedup']:,.1f}x",
    )
