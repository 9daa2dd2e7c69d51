"""Train tasks with the presets; show what they reach, next to published figures.

    pip install -e '.[tasks]'
    python benchmarks/task_table.py [--rows Hopper LunarLander] [--seeds 1 2 3 4 5] [--jobs 2]
    python benchmarks/task_table.py --print_only --pictures docs/images

tasks.toml lists the rows: a task, its steps, and published figures. For each row and seed, one
command is printed and run. Its result is appended to task_results.jsonl and used until the command
or the values of its preset change, so a table can be made in several calls. The rows of a task take
turns, seed by seed; minutes and seconds are CPU time, so other programs change them little.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # can be started from any directory

import numpy as np

from agents.config import PRESETS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("task_results.jsonl")
FLAGS = "--num_gpus 1 --device {device} --threads 1"  # they concern the machine only
WINDOW = 16_384  # number of steps over which the column "training" averages
CURVE_POINTS = 50
# 0.975 quantiles of Student's t distribution for 2 to 10 seeds
STUDENT_T = dict(enumerate((12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), 2))
Result = dict[str, Any]  # a line of task_results.jsonl


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table, as in tasks.toml."""

    group: str
    task: str
    env: str = ""  # Gymnasium id, if it is not the name of the task
    steps: int
    flags: str = ""
    trainer: str = ""  # arguments of tuned_sb3.py, for rows of another trainer
    # Published figures: value, source (a key of `sources`), and, if they differ from ours, the
    # version of the task and the number of steps
    published: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""  # what is known of the reason for a low return

    @property
    def name(self) -> str:
        """Name of the row; --rows selects rows by parts of this name."""
        return " ".join(filter(None, (self.task, self.flags, self.trainer)))

    def command(self, seed: int, device: str = "cpu") -> list[str]:
        """Return the training command without --run_dir."""
        if self.trainer:
            text = f"benchmarks/tuned_sb3.py {self.trainer} --device {device}"
        else:
            text = f"train_distributed.py --env {self.env or self.task} {self.flags} "
            text += FLAGS.format(device=device)
        return shlex.split(f"{text} --total_steps {self.steps} --seed {seed}")

    def is_current(self, result: Result) -> bool:
        """Return whether today's command and preset would give this result."""
        settings = PRESETS.get(result["preset"])
        command = self.command(result["seed"], result["device"])
        return (result["command"], result["settings"]) == (command, settings)


def read_rows() -> tuple[list[Row], dict[str, dict[str, str]]]:
    """Return the rows of tasks.toml and the sources of published figures, by letter."""
    tables = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text())
    return [Row(**row) for row in tables["row"]], tables["sources"]


def windows(metrics: Sequence[dict[str, Any]], size: float) -> list[tuple[int, float]]:
    """Divide a run into windows of at least `size` steps.

    Return for each window its last step and the mean return of the training episodes that ended in
    it. Windows without episodes are omitted; an incomplete window at the end counts only if it is
    the only one.
    """
    points: list[tuple[int, float]] = []
    first_step, total, count = 0, 0.0, 0.0
    for record in metrics:
        step = record["global_step"]
        total += (record["episode/return"] or 0.0) * record["episode/count"]
        count += record["episode/count"]
        is_whole = step - first_step >= size
        if count and (is_whole or (not points and record is metrics[-1])):
            points.append((step, total / count))
        if is_whole:
            first_step, total, count = step, 0.0, 0.0
    return points


def train(row: Row, seed: int, device: str, run_dir: Path) -> Result:
    """Run the command of a row and return its result."""
    shutil.rmtree(run_dir, ignore_errors=True)
    command = row.command(seed, device)
    print("python", shlex.join(command), flush=True)
    arguments = [sys.executable, *command, "--run_dir", str(run_dir.absolute())]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"error: {row.name}, seed {seed}: the training failed (status {status})")
    summary = json.loads((run_dir / "summary.json").read_text())
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    preset = row.trainer
    if not preset:
        preset = json.loads((run_dir / "config.json").read_text())["train"]["chosen_preset"]
    points = windows(metrics, row.steps / CURVE_POINTS)
    curve = [(step, round(value, 4)) for step, value in points]
    return {
        "row": row.name,
        "seed": seed,
        "command": command,
        "device": device,
        "preset": preset,
        "settings": PRESETS.get(preset),
        "date": time.strftime("%Y-%m-%d"),
        "return": summary["test"]["return"],
        "best": summary.get("best", {}).get("return"),
        "training": max((value for _, value in windows(metrics, WINDOW)), default=None),
        "end": curve[-1][1] if curve else None,
        "cpu_minutes": round((usage.ru_utime + usage.ru_stime) / 60, 2),
        "curve": curve,
    }


def read_results(rows: Sequence[Row], path: Path) -> dict[str, list[Result]]:
    """Return the current results by name of the row, in the order of their seeds."""
    lines = path.read_text().splitlines() if path.exists() else []
    results: dict[str, dict[int, Result]] = {row.name: {} for row in rows}
    by_name = {row.name: row for row in rows}
    for result in map(json.loads, lines):
        row = by_name.get(result["row"])
        if row and row.is_current(result):
            results[row.name][result["seed"]] = result
    return {name: [by_seed[seed] for seed in sorted(by_seed)] for name, by_seed in results.items()}


def shown(results: Sequence[Result], name: str, with_interval: bool = False) -> str:
    """Return the mean over seeds of one value, and its 95 % interval (Student's t)."""
    values = [result[name] for result in results if result[name] is not None]
    if not values:
        return "-"
    middle, half = mean(values), 0.0
    if with_interval and len(values) in STUDENT_T:
        half = STUDENT_T[len(values)] * stdev(values) / len(values) ** 0.5
    digits = 0 if abs(middle) >= 100 else 1 if abs(middle) >= 10 else 2
    low, center, high = (f"{x:,.{digits}f}" for x in (middle - half, middle, middle + half))
    return center if low == high else f"{center} [{low}, {high}]"


def low_rows(
    rows: Sequence[Row], results: dict[str, list[Result]], sources: dict[str, dict[str, str]]
) -> list[Row]:
    """Return the rows that are more than 10 % below a published figure after as many steps."""
    low = []
    for row in rows:
        for figure in row.published:
            name = sources[figure["source"]]["compare"]
            values = [r[name] for r in results[row.name] if r[name] is not None]
            least = figure["value"] - 0.1 * abs(figure["value"])
            if values and figure.get("steps", 0) <= row.steps and mean(values) < least:
                low.append(row)
                break
    return low


def table_of(rows: Sequence[Row], results: dict[str, list[Result]]) -> str:
    """Return the rows that have results as a table in Markdown."""
    heads = (
        "task", "steps", "seeds", "return [95 %]", "best checkpoint", "best window",
        "end of training", "published", "minutes",
    )  # fmt: skip
    lines = [heads, ("---",) * len(heads)]
    for row in rows:
        found = results[row.name]
        if not found:
            continue
        figures = []
        for figure in row.published:
            about = [figure[name] for name in ("about",) if name in figure]
            about += [f"{figure['steps']:,} steps"] if "steps" in figure else []
            text = f"{figure['value']:,} {figure['source']}"
            figures.append(f"{text} ({', '.join(about)})" if about else text)
        task = row.task + (f" `{row.flags}`" if row.flags else "")
        task += ", by stable-baselines3" if row.trainer else ""
        minutes = f"{mean(result['cpu_minutes'] for result in found):.1f}"
        cells = (task, f"{row.steps:,}", str(len(found)), shown(found, "return", True))
        others = (shown(found, name) for name in ("best", "training", "end"))
        lines.append((*cells, *others, "; ".join(figures) or "-", minutes))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page(rows: Sequence[Row], results: dict[str, list[Result]], sources: dict[str, Any]) -> str:
    """Return the tables of all groups, the notes on low rows, and the sources."""
    parts = []
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        if any(results[row.name] for row in members):
            presets = {r["preset"] for row in members for r in results[row.name] if r["settings"]}
            parts += [f"### {group}", f"Preset {' and '.join(sorted(presets))}."]
            parts.append(table_of(members, results))
    parts += [f"- **{row.name}**: {row.note}" for row in low_rows(rows, results, sources)]
    used = {p["source"] for row in rows if results[row.name] for p in row.published}
    return "\n\n".join(
        parts + [f"{key}: {sources[key]['text']}." for key in sources if key in used]
    )


def draw(
    path: Path, rows: Sequence[Row], results: dict[str, list[Result]], by_seconds: bool
) -> None:
    """Draw learning curves, by steps or seconds: the mean over seeds, in a band of all seeds.

    Each task has a plot of its own, in which trainers are compared. The dotted line is the best
    published figure after the same number of steps.
    """
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(f"{row.task} {row.flags}".strip() for row in rows))
    columns = min(5, len(tasks))
    height = -(-len(tasks) // columns)
    figure = Figure(figsize=(2.5 * columns, 1.9 * height) if columns > 2 else (10, 3.6))
    axes = dict(zip(tasks, figure.subplots(height, columns, squeeze=False).flat, strict=False))
    for axis in figure.axes[len(tasks) :]:
        axis.axis("off")
    for row in rows:
        axis = axes[f"{row.task} {row.flags}".strip()]
        share = np.linspace(0, 1, CURVE_POINTS + 1)[1:]
        curves = [
            np.interp(share * row.steps, *np.transpose(r["curve"])) for r in results[row.name]
        ]
        seconds = mean(result["cpu_minutes"] for result in results[row.name]) * 60
        places = share * (seconds if by_seconds else row.steps / 1e6)
        axis.fill_between(places, np.min(curves, 0), np.max(curves, 0), alpha=0.3, linewidth=0)
        axis.plot(
            places, np.mean(curves, 0), label="stable-baselines3" if row.trainer else "this project"
        )
        figures = [figure["value"] for figure in row.published if "steps" not in figure]
        if figures:
            axis.axhline(max(figures), color="grey", linestyle=":", linewidth=1)
        axis.set_title(row.name if not row.trainer else axis.get_title(), fontsize=8)
        axis.tick_params(labelsize=7)
        if by_seconds:
            axis.set(xscale="log", xlabel="CPU seconds", ylabel="mean return of training episodes")
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    """Train each row with each seed unless a result is stored; print the tables."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument(
        "--rows", nargs="+", default=[""], help="rows with any of these in their name; default: all"
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of trainings at a time")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs/task_table", help="for run directories"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="file with the results")
    parser.add_argument("--print_only", action="store_true", help="only print the stored results")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the learning curves")
    args = parser.parse_args(argv)
    every, sources = read_rows()
    rows = [row for row in every if any(part in row.name for part in args.rows)]
    stored = {
        (name, r["seed"]) for name, found in read_results(rows, args.results).items() for r in found
    }

    def run(row: Row, seed: int) -> None:
        folder = args.out / f"{re.sub('[^a-zA-Z0-9]+', '_', row.name)}.{seed}"
        result = train(row, seed, args.device, folder)
        with args.results.open("a") as file:
            file.write(json.dumps(result) + "\n")

    if not args.print_only:
        tasks = dict.fromkeys(row.task for row in rows)
        turns = [(r, s) for task in tasks for s in args.seeds for r in rows if r.task == task]
        missing = [(row, seed) for row, seed in turns if (row.name, seed) not in stored]
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda job: run(*job), missing))
    results = read_results(rows, args.results)
    print(page(rows, results, sources))
    compared = {row.task for row in rows if row.trainer}
    drawn = [row for row in rows if results[row.name] and results[row.name][0]["curve"]]
    pictures = {
        "tasks.png": [row for row in drawn if not row.trainer],
        "seconds.png": [row for row in drawn if row.task in compared],
    }
    for name, members in pictures.items() if args.pictures else ():
        if members:
            draw(args.pictures / name, members, results, by_seconds=name == "seconds.png")


if __name__ == "__main__":
    main()
