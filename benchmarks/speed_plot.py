"""Draw docs/images/speed.png out of what two other scripts measured.

    python benchmarks/against_peers.py ... > peers.jsonl
    python benchmarks/throughput.py --folder runs/bench
    python benchmarks/speed_plot.py peers.jsonl runs/bench/DATE.json docs/images/speed.png

Left: seconds of an iteration of CartPole-v1, by trainer. Right: whole iterations and their parts
below the roofs of memory and arithmetic, which were measured on the same threads (roofline.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import LogLocator, NullLocator

DARK, LIGHT, GREY = "#3f51b5", "#9fa8da", "#9e9e9e"
WORKS = {  # by letter: a colour, and what it is
    "A": (DARK, "A: CartPole-v1, LSTM of 128"),
    "B": ("#e65100", "B: market-like, LSTM of 256"),
    "C": ("#2e7d32", "C: main job, cascade of 128"),
}
MARKERS = {
    "LSTM forward": ">",
    "LSTM backward": "<",
    "layers": "s",
    "cell while collecting": "d",
    "iteration": "*",
}


def draw_trainers(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Bars of collecting and updating."""
    names = ["this project" if row["trainer"] == "ours" else row["trainer"] for row in rows]
    collect = [row["collect_s"] for row in rows]
    axes.barh(names, collect, color=DARK, label="collect")
    axes.barh(names, [row["update_s"] for row in rows], left=collect, color=LIGHT, label="update")
    axes.invert_yaxis()
    axes.set_xlabel("seconds per iteration of CartPole-v1, one thread")
    axes.legend(frameon=False)


def draw_roofline(axes: Any, found: dict[str, Any]) -> None:
    """Points below the roofs; both axes are logarithmic."""
    peak, bandwidth, points = found["gflops"], found["gb_per_s"], found["points"]
    ridge = peak / bandwidth  # FLOP/byte from which arithmetic is the limit
    right = 1.6 * max(ridge, *(point["flop_per_byte"] for point in points))
    axes.loglog([0.01, ridge, right], [0.01 * bandwidth, peak, peak], color=GREY, linewidth=2)
    lowest = 0.5 * min(point["gflops"] for point in points)
    axes.text(1.5 * lowest / bandwidth, 1.1 * lowest, f"a copy, {bandwidth:.0f} GB/s", color=GREY)
    axes.text(right, 1.06 * peak, f"a large product, {peak:.0f} GFLOP/s", ha="right", color=GREY)
    for point in points:
        colour, size = WORKS[point["work"]][0], 130 if point["part"] == "iteration" else 36
        place = point["flop_per_byte"], point["gflops"]
        axes.scatter(*place, marker=MARKERS[point["part"]], color=colour, s=size, zorder=3)
    for colour, words in WORKS.values():
        axes.plot([], [], color=colour, linewidth=4, label=words)
    for part, marker in MARKERS.items():
        axes.scatter([], [], color=GREY, marker=marker, label=part)
    axes.set_xlim(lowest / bandwidth, right)
    axes.set_ylim(lowest, 1.5 * peak)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("FLOP per byte that travels if nothing stays in a cache")
    axes.set_ylabel("GFLOP/s")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def main() -> None:
    """Read both files, and write the picture."""
    if len(sys.argv) != 4:
        raise SystemExit((__doc__ or "").partition("\n\n")[2])
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    measured = [json.loads(line) for line in lines]
    trainers = [row for row in measured if row.get("task") == "cartpole" and "update_s" in row]
    bench = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4), width_ratios=(4, 5))
    draw_trainers(left, trainers)
    draw_roofline(right, bench["roofline"])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(sys.argv[3], dpi=80)


if __name__ == "__main__":
    main()
