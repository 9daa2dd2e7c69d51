"""Draw docs/images/speed.png out of what two other scripts measured.

    python benchmarks/against_peers.py ... > peers.jsonl
    python benchmarks/throughput.py --folder runs/bench
    python benchmarks/speed_plot.py peers.jsonl runs/bench/DATE.json docs/images/speed.png

Left: seconds of an iteration of CartPole-v1, by trainer. Right: GFLOP/s of whole iterations below
the roof, which is a fixed product of matrices on the same threads in the same minutes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

DARK, LIGHT = "#3f51b5", "#9fa8da"
WORKS = {
    "A": "CartPole-v1,\nLSTM of 128",
    "B": "market-like,\nLSTM of 256",
    "C": "main job,\ncascade of 128",
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


def draw_roof(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Bars of whole iterations below the rate of the product."""
    roof = max(row["gflops"] / row["part_of_product"][0] for row in rows)
    names = [WORKS[row["work"]] for row in rows]
    bars = axes.bar(names, [row["gflops"] for row in rows], color=DARK, width=0.5)
    axes.bar_label(bars, [f"{100 * row['part_of_product'][0]:.0f} %" for row in rows])
    axes.axhline(roof, color=LIGHT, linewidth=2)
    axes.text(-0.25, 1.03 * roof, "one product of 1024 x 1024 matrices")
    axes.set_ylim(0, 1.2 * roof)
    axes.set_ylabel("GFLOP/s of an iteration")


def main() -> None:
    """Read both files, and write the picture."""
    if len(sys.argv) != 4:
        raise SystemExit((__doc__ or "").partition("\n\n")[2])
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    measured = [json.loads(line) for line in lines]
    trainers = [row for row in measured if row.get("task") == "cartpole" and "update_s" in row]
    bench = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3), width_ratios=(3, 2))
    draw_trainers(left, trainers)
    draw_roof(right, bench["rows"])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(sys.argv[3], dpi=84)


if __name__ == "__main__":
    main()
