"""Compare how the return grows with the seconds of training, here and in stable-baselines3.

    python benchmarks/return_by_seconds.py --python VENV/bin/python [--seeds 1 2 3 4 5]
    python benchmarks/return_by_seconds.py --print_only --picture seconds.png

--python is a Python interpreter with sb3-contrib and the environments. Both trainers run with one
thread and the same number of steps: ours with the preset that it chooses, stable-baselines3 with
the settings that its authors tuned for the task. The two runs take turns of a few seconds; between
its turns, a run and its clock are halted. The return is the mean over the last 100 training
episodes. Curves are appended to race_results.jsonl, so a comparison can be made in several calls.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from against_peers import Program
from turns import parser_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("race_results.jsonl")
POLL_S = 0.05
EPISODES = 100  # number of training episodes whose mean return is shown
CURVE_POINTS = 60
TASKS = {  # our id of a task: (environment steps, return that solves it, the peer's driver)
    "CartPolePositions-v1": (100_000, 475, "sb3_cartpole"),
    "LunarLander-v3": (1_000_000, 200, "sb3_lander"),
}
Point = tuple[float, int, float | None, int]  # seconds, steps, mean return, number of episodes


class Run(Program):
    """A training process that is halted between its turns."""

    def __init__(self, held: ExitStack, command: list[str], metrics: Path) -> None:
        super().__init__(held, command, stdout=subprocess.DEVNULL)
        self.signal(signal.SIGSTOP)
        self.metrics = metrics
        self.points: list[Point] = []
        self.seconds = 0.0  # total duration of the turns so far

    def turn(self, length_s: float) -> None:
        """Let the run train for `length_s` seconds or to its end; read its new metrics."""
        began_s = time.monotonic()
        self.signal(signal.SIGCONT)
        while self.process.poll() is None and time.monotonic() < began_s + length_s:
            time.sleep(POLL_S)
            self._read(self.seconds + time.monotonic() - began_s)
        self.signal(signal.SIGSTOP)
        self.seconds += time.monotonic() - began_s
        self._read(self.seconds)  # a run that has ended may have written more lines
        if self.process.poll():
            raise SystemExit(f"error: {self.metrics.name}: the run failed: {self.last_line()}")

    def _read(self, seconds: float) -> None:
        text = self.metrics.read_text() if self.metrics.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()[len(self.points) :]
        for record in map(json.loads, lines):
            mean, count = record["episode/return"], record["episode/count"]
            self.points.append((seconds, record["global_step"], mean, count))


def curve_of(points: Sequence[Point]) -> list[list[float]]:
    """Return seconds and the mean return of the last EPISODES episodes, as [seconds, return]."""
    curve, recent = [], list[float]()
    for seconds, _, mean, count in points:
        recent = [*recent, *[mean or 0.0] * count][-EPISODES:]
        if len(recent) == EPISODES:
            curve.append([round(seconds, 2), round(sum(recent) / EPISODES, 2)])
    places = np.linspace(0, len(curve) - 1, min(CURVE_POINTS, len(curve)))
    return [curve[int(place)] for place in places]


def race(task: str, seed: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train with both trainers in turns; return the results of both."""
    steps, _, driver = TASKS[task]
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        common = f"--seed {seed} --total_steps {steps} --threads 1 --device {args.device}"
        ours = f"{ROOT}/train_distributed.py --env {task} --validate_every 0 --eval_episodes 0"
        peer = f"{ROOT}/benchmarks/peers.py {driver} --metrics {folder}/peer.jsonl {common}"
        ours = f"{ours} --num_gpus 1 {common} --run_dir {folder}/ours"
        runs = {
            "ours": Run(held, [sys.executable, *ours.split()], folder / "ours/metrics.jsonl"),
            "peer": Run(held, [args.python, *peer.split()], folder / "peer.jsonl"),
        }
        waiting = list(runs.values())[:: 1 if seed % 2 else -1]
        while waiting:
            for run in waiting:
                run.turn(args.turn_s)
            waiting = [run for run in waiting if run.process.poll() is None]
        about = {"task": task, "seed": seed, "date": time.strftime("%Y-%m-%d")}
        return [
            about
            | {"trainer": name, "steps": run.points[-1][1], "seconds": round(run.points[-1][0], 1)}
            | {"curve": curve_of(run.points)}
            for name, run in runs.items()
        ]


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a row per task and trainer: medians over the seeds."""
    heads = ("task", "trainer", "seeds", "seconds", "return at the end", "solved", "after seconds")
    lines = [heads, ("---",) * len(heads)]
    for task, (_, goal, _) in TASKS.items():
        for trainer in ("ours", "peer"):
            found = [r for r in results if (r["task"], r["trainer"]) == (task, trainer)]
            if found:
                ends = [result["curve"][-1][1] for result in found]
                firsts = [next((s for s, v in r["curve"] if v >= goal), None) for r in found]
                solved = [seconds for seconds in firsts if seconds is not None]
                cells = (
                    task,
                    trainer,
                    str(len(found)),
                    f"{median(r['seconds'] for r in found):.0f}",
                )
                after = f"{median(solved):.0f}" if solved else "-"
                range_of_ends = f"{median(ends):.0f} ({min(ends):.0f} to {max(ends):.0f})"
                lines.append((*cells, range_of_ends, f"{len(solved)} of {len(found)}", after))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw return by seconds: the median over the seeds, and a thin line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(TASKS), figsize=(10, 3.6), squeeze=False)
    names = {"ours": "this project, preset", "peer": "stable-baselines3, tuned for the task"}
    for task, axis in zip(TASKS, axes[0], strict=True):
        for color, (trainer, label) in zip(("C0", "C1"), names.items(), strict=True):
            curves = [r["curve"] for r in results if (r["task"], r["trainer"]) == (task, trainer)]
            for curve in curves:
                axis.plot(*np.transpose(curve), color=color, alpha=0.3, linewidth=0.8)
            if curves:
                grid = np.linspace(0, median(curve[-1][0] for curve in curves), 200)
                values = [
                    np.interp(grid, seconds, returns, left=np.nan)
                    for seconds, returns in map(np.transpose, curves)
                ]
                axis.plot(grid, np.median(values, axis=0), color=color, linewidth=2, label=label)
        axis.set(title=task, xlabel="seconds on one core", ylabel="mean return of 100 episodes")
        axis.set_xscale("log")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparisons that are not stored yet; print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--python", default=sys.executable, help="interpreter with sb3-contrib")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--turn_s", type=float, default=2.0)
    parser.add_argument("--print_only", action="store_true", help="only print the stored results")
    parser.add_argument("--picture", type=Path, help="file to draw the curves to")
    args = parser.parse_args(argv)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    results = [json.loads(line) for line in lines]
    stored = {(result["task"], result["seed"]) for result in results}
    for seed in () if args.print_only else args.seeds:
        for task in args.tasks:
            if (task, seed) not in stored:
                pair = race(task, seed, args)
                results += pair
                with RESULTS.open("a") as file:
                    file.writelines(json.dumps(result) + "\n" for result in pair)
    print(table(results))
    if args.picture:
        draw(results, args.picture)


if __name__ == "__main__":
    main()
