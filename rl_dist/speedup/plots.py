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
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["gpus"]):
        lines.setdefault((row["machine"], row["scaling"]), []).append(row)
    machines = list(dict.fromkeys(machine for machine, _ in lines))
    gpus = sorted({row["gpus"] for row in rows})
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9.0, 6.2), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    above.plot([1, gpus[-1]], [1, gpus[-1]], ":", color="#999999", label="ideal")
    below.axhline(1.0, color="#999999", linestyle=":")
    # each line: a colour for every machine, weak scaling dashed
    for (machine, scaling), line in lines.items():
        color = COLORS[machines.index(machine) % len(COLORS)]
        style: dict[str, Any] = {"color": color, "marker": "o", "markersize": 4}
        style["linestyle"] = "--" if scaling == "weak" else "-"
        here = [row["gpus"] for row in line]
        estimate = " (estimate)" if line[0]["estimate"] else ""
        label = f"{machine}{estimate}, {scaling}"
        above.plot(here, [row["speedup"] for row in line], label=label, **style)
        below.plot(here, [row["efficiency"] for row in line], **style)
        if all(row.get("speedup_interval") for row in line):
            low, high = zip(*(row["speedup_interval"] for row in line), strict=True)
            above.fill_between(here, low, high, color=color, alpha=0.12, linewidth=0)
    # both axes of speedup double, so that the ideal is straight
    above.set_xscale("log", base=2)
    above.set_yscale("log", base=2)
    above.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    above.set(ylabel="speedup, shaded: 95 %")
    above.set_title(title, fontsize=9)
    above.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    below.set(ylabel="efficiency", xlabel="GPUs (ranks)")
    below.set_ylim(0, max(1.1, 1.05 * max(row["efficiency"] for row in rows)))
    below.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    below.set_xticks(gpus, [str(number) for number in gpus])
    for axis in (above, below):
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
