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

from agents.config import PRESETS, RunConfig

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("task_results.jsonl")
FLAGS = "--num_gpus 1 --device {device} --threads 1"  # they concern the machine only
SEEDS = (1, 2, 3, 4, 5)
CURVE_POINTS = 50
EPISODES = 100  # number of training episodes at the end of a run whose mean return is shown
# 0.975 quantiles of Student's t distribution for 1 (no interval) to 10 seeds
STUDENT_T = (0, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
Result = dict[str, Any]  # a line of task_results.jsonl
Results = dict[str, list[Result]]  # by name of the row
Sources = dict[str, dict[str, str]]  # text and compared figure of a source, by its letter


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table, as in tasks.toml."""

    group: str
    task: str
    env: str = ""  # Gymnasium id, if it is not the name of the task
    steps: int
    preset: str = ""  # preset that a run must choose
    flags: str = ""
    trainer: str = ""  # arguments of tuned_sb3.py, for rows of another trainer
    # Published figures: value, source (a key of `sources`), and, if they differ from ours, the
    # version of the task and the number of steps
    published: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""  # what is known of the reason for a return that is low or varies much

    @property
    def name(self) -> str:
        """Name of the row; --rows selects rows by parts of this name."""
        trainer = "by stable-baselines3" if self.trainer else ""
        return " ".join(filter(None, (self.task, self.flags, trainer)))

    def command(self, seed: int, device: str = "cpu") -> list[str]:
        """Return the training command without --run_dir."""
        if self.trainer:
            text = f"benchmarks/tuned_sb3.py {self.trainer} --device {device}"
        else:
            text = f"train_distributed.py --env {self.env or self.task} {self.flags} "
            text += FLAGS.format(device=device)
        return shlex.split(f"{text} --total_steps {self.steps} --seed {seed}")

    def is_current(self, result: Result) -> bool:
        """Return whether today's command and settings are those of the result."""
        values = settings_of(self.preset)
        return (
            result["preset"] == (self.preset or self.trainer)
            and result["command"] == self.command(result["seed"], result["device"])
            and all(values.get(name) == value for name, value in result["settings"].items())
        )


def settings_of(preset: str) -> dict[str, Any]:
    """Return the settings of a preset that affect learning; none for other trainers."""
    if not preset:
        return {}
    config = RunConfig().changed(PRESETS[preset])
    return PRESETS[preset] | vars(config.ppo) | vars(config.policy)


def read_rows() -> tuple[list[Row], Sources]:
    """Return the rows of tasks.toml and the sources of published figures, by letter."""
    tables = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text())
    return [Row(**row) for row in tables["row"]], tables["sources"]


def curve_of(metrics: Sequence[dict[str, Any]], steps: int) -> list[tuple[int, float]]:
    """Return a learning curve of at most CURVE_POINTS points, [step, mean return].

    A point is the mean of the training episodes that ended in a window of `steps` / CURVE_POINTS
    steps or slightly more; windows in which no episode ended are omitted.
    """
    points: list[tuple[int, float]] = []
    first_step, total, count = 0, 0.0, 0.0
    for record in metrics:
        step = record["global_step"]
        total += (record["episode/return"] or 0.0) * record["episode/count"]
        count += record["episode/count"]
        if step - first_step >= steps / CURVE_POINTS:
            if count:
                points.append((step, round(total / count, 4)))
            first_step, total, count = step, 0.0, 0.0
    return points


def end_of(metrics: Sequence[dict[str, Any]]) -> float | None:
    """Return the mean return of the last EPISODES training episodes; None if none ended."""
    total, count = 0.0, 0.0
    for record in reversed(metrics):
        if count < EPISODES and record["episode/count"]:
            total += record["episode/return"] * record["episode/count"]
            count += record["episode/count"]
    return total / count if count else None


def train(row: Row, seed: int, device: str, run_dir: Path) -> Result:
    """Run the command of a row and return its result."""
    shutil.rmtree(run_dir, ignore_errors=True)
    command = row.command(seed, device)
    print("python", shlex.join(command), flush=True)
    arguments = [sys.executable, *command, "--run_dir", str(run_dir.absolute())]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        code = os.waitstatus_to_exitcode(status)
        raise RuntimeError(f"{row.name}, seed {seed}: the training ended with exit code {code}")
    summary = json.loads((run_dir / "summary.json").read_text())
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    preset, best = row.trainer, None
    if not preset:
        preset = json.loads((run_dir / "config.json").read_text())["train"]["chosen_preset"]
        best = summary.get("best", summary["test"])["return"]  # omitted if it is the last
    return {
        "row": row.name,
        "seed": seed,
        "command": command,
        "device": device,
        "preset": preset,
        "settings": settings_of(row.preset),
        "date": time.strftime("%Y-%m-%d"),
        "return": summary["test"]["return"],
        "best": best,
        "end": end_of(metrics),
        "cpu_minutes": round((usage.ru_utime + usage.ru_stime) / 60, 2),
        "curve": curve_of(metrics, row.steps),
    }


def read_results(
    rows: Sequence[Row], path: Path, seeds: Sequence[int] = SEEDS, device: str = "cpu"
) -> Results:
    """Return the current results of these seeds and this device, by name of the row."""
    lines = path.read_text().splitlines() if path.exists() else []
    found: dict[tuple[str, int], Result] = {}
    by_name = {row.name: row for row in rows}
    for result in map(json.loads, lines):
        row = by_name.get(result["row"])
        if row and result["device"] == device and row.is_current(result):
            found[row.name, result["seed"]] = result
    return {
        name: [found[name, seed] for seed in sorted(seeds) if (name, seed) in found]
        for name in by_name
    }


def mean_curve(results: Sequence[Result]) -> np.ndarray:
    """Return the mean over seeds of the learning curves, at CURVE_POINTS steps, and the extremes.

    Returns:
        Array [4, CURVE_POINTS]: share of the steps, mean, lowest and highest value.
    """
    share = np.linspace(0, 1, CURVE_POINTS + 1)[1:]
    curves = []
    for result in results:
        steps, returns = np.transpose(result["curve"])
        curves.append(np.interp(share, steps / steps[-1], returns))
    return np.stack([share, np.mean(curves, 0), np.min(curves, 0), np.max(curves, 0)])


def figures_of(results: Sequence[Result]) -> dict[str, tuple[float, float]]:
    """Return the means over seeds of a row's figures, with half of the 95 % interval (Student's t).

    "peak" is the highest point of the mean learning curve; it has no interval.
    """
    figures = {}
    for name in ("return", "best", "end", "cpu_minutes"):
        values = [result[name] for result in results if result[name] is not None]
        if values:
            spread = stdev(values) if len(values) > 1 else 0.0
            quantile = STUDENT_T[min(len(values), len(STUDENT_T)) - 1]
            figures[name] = mean(values), quantile * spread / len(values) ** 0.5
    if curves := [result for result in results if result["curve"]]:
        figures["peak"] = float(mean_curve(curves)[1].max()), 0.0
    return figures


def shown(figure: tuple[float, float] | None, with_interval: bool = False) -> str:
    """Return a figure as text, with its 95 % interval if it is asked for and not empty."""
    if figure is None:
        return "-"
    middle, half = figure
    digits = 0 if abs(middle) >= 100 else 1 if abs(middle) >= 10 else 2
    low, center, high = (f"{x:,.{digits}f}" for x in (middle - half, middle, middle + half))
    return f"{center} [{low}, {high}]" if with_interval and low != high else center


def table_of(rows: Sequence[Row], results: Results, sources: Sources) -> str:
    """Return the rows that have results as a table in Markdown."""
    heads = (
        "task", "steps", "seeds: returns", "mean return [95 %]", "best checkpoint", "peak", "end",
        "published", "minutes",
    )  # fmt: skip
    lines = [heads, ("---",) * len(heads)]
    for row in rows:
        published = []
        for figure in row.published:
            about = [figure["about"]] if "about" in figure else []
            about += [f"{figure['steps']:,} steps"] if "steps" in figure else []
            compare = figure.get("compare", sources[figure["source"]]["compare"])
            text = f"{compare} {figure['value']:,} {figure['source']}"
            published.append(f"{text} ({', '.join(about)})" if about else text)
        name = f"`{row.env}`" if row.env else ""
        flags = f"`{row.flags}`" if row.flags else ""
        task = " ".join(filter(None, (row.task, name, flags)))
        task += ", by stable-baselines3" if row.trainer else ""
        ours = figures_of(results[row.name])
        returns = sorted(result["return"] for result in results[row.name])
        seeds = f"{len(returns)}: {shown((returns[0], 0))} to {shown((returns[-1], 0))}"
        cells = (task, f"{row.steps:,}", seeds, shown(ours["return"], True))
        others = (shown(ours.get(name)) for name in ("best", "peak", "end"))
        minutes = f"{ours['cpu_minutes'][0]:.1f}"
        lines.append((*cells, *others, "; ".join(published) or "-", minutes))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def page(rows: Sequence[Row], results: Results, sources: Sources) -> str:
    """Return the tables of all groups, the notes, the rows without all results, and the sources."""
    parts = []
    pending = [row.name for row in rows if len(results[row.name]) < len(SEEDS)]
    rows = [row for row in rows if results[row.name]]
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        presets = sorted({row.preset for row in members if row.preset})
        parts += [
            f"### {group}",
            f"Preset {' and '.join(presets)}.",
            table_of(members, results, sources),
        ]
    parts += [f"- **{row.name}**: {row.note}." for row in rows if row.note]
    parts += ["Rows without five results yet: " + "; ".join(pending) + "."] if pending else []
    used = {figure["source"] for row in rows for figure in row.published}
    parts += [f"{key}: {sources[key]['text']}." for key in sources if key in used]
    return "\n\n".join(parts)


def draw(path: Path, rows: Sequence[Row], results: Results, by_seconds: bool) -> None:
    """Draw learning curves, by steps or seconds: the mean over seeds, in a band of all seeds.

    Each task has a plot of its own, in which trainers are compared. The dotted line is the best
    published figure after the same number of steps.
    """
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row.task for row in rows))
    columns = min(5, len(tasks))
    height = -(-len(tasks) // columns)
    figure = Figure(figsize=(10, 3.6) if by_seconds else (2.5 * columns, 1.9 * height))
    axes = dict(zip(tasks, figure.subplots(height, columns, squeeze=False).flat, strict=False))
    for axis in figure.axes[len(tasks) :]:
        axis.axis("off")
    for row in rows:
        axis = axes[row.task]
        share, middle, low, high = mean_curve(results[row.name])
        seconds = figures_of(results[row.name])["cpu_minutes"][0] * 60
        places = share * (seconds if by_seconds else row.steps / 1e6)
        axis.fill_between(places, low, high, alpha=0.3, linewidth=0)
        axis.plot(places, middle, label="stable-baselines3" if row.trainer else "this project")
        published = [figure["value"] for figure in row.published if "steps" not in figure]
        if published:
            axis.axhline(max(published), color="grey", linestyle=":", linewidth=1)
        axis.set_title(row.task, fontsize=8)
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
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
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: must be at least 1")
    every, sources = read_rows()
    rows = [row for row in every if any(part in row.name for part in args.rows)]
    if not rows:
        parser.error(f"no row has {' or '.join(args.rows)} in its name")
    choice = (rows, args.results, args.seeds, args.device)
    stored = {(name, r["seed"]) for name, found in read_results(*choice).items() for r in found}
    failures: list[BaseException] = []

    def run(row: Row, seed: int) -> None:
        folder = args.out / f"{re.sub('[^a-zA-Z0-9]+', '_', row.name)}.{seed}"
        result = train(row, seed, args.device, folder)
        with args.results.open("a") as file:
            file.write(json.dumps(result) + "\n")

    for folder in filter(None, (args.results.parent, args.pictures)):
        folder.mkdir(parents=True, exist_ok=True)
    if not args.print_only:
        tasks = dict.fromkeys(row.task for row in rows)
        turns = [(r, s) for task in tasks for s in args.seeds for r in rows if r.task == task]
        with ThreadPoolExecutor(args.jobs) as pool:
            missing = [turn for turn in turns if (turn[0].name, turn[1]) not in stored]
            runs = [pool.submit(run, *turn) for turn in missing]
        failures = [error for future in runs if (error := future.exception())]
    results = read_results(*choice)
    print(page(rows, results, sources))
    drawn = [
        row for row in rows if results[row.name] and all(r["curve"] for r in results[row.name])
    ]
    compared = {row.task for row in drawn if row.trainer}
    pictures = {
        "tasks.png": [row for row in drawn if not (row.trainer or row.flags)],
        "seconds.png": [row for row in drawn if row.task in compared and not row.flags],
    }
    for name, members in pictures.items() if args.pictures else ():
        if members:
            draw(args.pictures / name, members, results, by_seconds=name == "seconds.png")
    if failures:
        raise SystemExit("error: " + "; ".join(map(str, failures)))


if __name__ == "__main__":
    main()
