"""The picture of predictions or measurements: speedup and efficiency over GPUs."""

from __future__ import annotations

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
