"""Pictures of predictions or measurements over GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = ("#1f5fbf", "#d2691e", "#2e8b57", "#8b3fa0", "#c0392b", "#b8860b", "#555555")


def plot_speedup(rows: Sequence[dict[str, Any]], path: Path, title: str = "") -> Path:
    """Draw speedup with its interval above efficiency.

    There is a line for each machine and scaling.

    Args:
        rows: as in `rl_dist.speedup.report.SpeedupReport`, without those that have a problem.
    """
    gpus = sorted({row["gpus"] for row in rows})
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9.0, 6.2), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    above.plot([1, gpus[-1]], [1, gpus[-1]], ":", color="#999999", label="ideal")
    below.axhline(1.0, color="#999999", linestyle=":")
    # a colour for every machine, weak scaling dashed
    machines = dict.fromkeys(row["machine"] for row in rows)
    for number, machine in enumerate(machines):
        for scaling, style in (("strong", "o-"), ("weak", "o--")):
            line = [r for r in rows if (r["machine"], r["scaling"]) == (machine, scaling)]
            line.sort(key=lambda row: row["gpus"])
            here, color = [row["gpus"] for row in line], COLORS[number % len(COLORS)]
            label = f"{machine}, {scaling}" if line else None
            above.plot(here, [row["speedup"] for row in line], style, color=color, label=label)
            below.plot(here, [row["efficiency"] for row in line], style, color=color)
            if line and "speedup_interval" in line[0]:
                low, high = zip(*(row["speedup_interval"] for row in line), strict=True)
                above.fill_between(here, low, high, color=color, alpha=0.12, linewidth=0)
    # both axes of speedup double, so that the ideal is straight
    above.set_xscale("log", base=2)
    above.set_yscale("log", base=2)
    above.yaxis.set_major_formatter("{x:g}")
    above.set(ylabel="speedup, shaded: 95 %")
    above.set_title(title, fontsize=9)
    above.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    below.set(ylabel="efficiency", xlabel="GPUs (ranks)")
    below.set_ylim(0, max(1.1, 1.05 * max(row["efficiency"] for row in rows)))
    below.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    below.set_xticks(gpus, [str(number) for number in gpus])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


PARTS = {  # of the time: the shares that add up to it, and a colour
    "rollouts": ("rollouts", "#9ecae1"),
    "update": ("update", "#3182bd"),
    "reducing gradients": ("communication", "#fdae6b"),
    "waiting for the slowest": ("waiting", "#e6550d"),
    "failures and checkpoints": ("failures", "#636363"),
}


def plot_nodes(rows: Sequence[dict[str, Any]], path: Path, title: str = "") -> Path:
    """Draw where the time goes over GPUs; a field for each machine and scaling.

    Args:
        rows: as for `plot_speedup`, with `nodes` and what `rl_dist.speedup.failures` adds.
    """
    lines = dict.fromkeys((row["machine"], row["scaling"]) for row in rows)
    columns = min(2, len(lines))
    shape = math.ceil(len(lines) / columns), columns
    size = (5.2 * columns, 0.9 + 3.1 * shape[0])
    figure, fields = plt.subplots(*shape, figsize=size, squeeze=False, layout="constrained")
    for field, (machine, scaling) in zip(fields.flat, lines, strict=False):
        line = [r for r in rows if (r["machine"], r["scaling"]) == (machine, scaling)]
        line.sort(key=lambda row: row["gpus"])
        gpus = [row["gpus"] for row in line]
        heights = [
            [row["useful"] * row["shares"][key] if key in row["shares"] else 1 - row["useful"]
             for row in line]
            for key, _ in PARTS.values()
        ]  # fmt: skip
        colors = [color for _, color in PARTS.values()]
        field.stackplot(gpus, heights, colors=colors, labels=list(PARTS))
        efficiency = [row["efficiency"] * row["useful"] for row in line]
        field.plot(gpus, efficiency, "ko-", markersize=4, label="efficiency, failures included")
        field.set_xscale("log", base=2)
        field.set_xticks(gpus, [str(number) for number in gpus], rotation=45, fontsize=8)
        field.set_ylim(0, max(1.0, *efficiency))
        field.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
        last = line[-1]
        words = f"{last['gpus']:,} GPUs: {last['lasting_speedup']:,.0f}x"
        field.set_title(f"{machine}, {scaling}; {words}", fontsize=9)
        field.set_xlabel("GPUs (ranks)", fontsize=8)
    for field in fields.flat[len(lines) :]:
        field.set_visible(False)
    figure.suptitle(title, fontsize=9)
    figure.legend(*fields.flat[0].get_legend_handles_labels(), loc="outside lower center",
                  ncols=3, frameon=False, fontsize=8)  # fmt: skip
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
