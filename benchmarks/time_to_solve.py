"""Measure the seconds until CartPole without velocities is solved, beside sb3-contrib.

    python benchmarks/time_to_solve.py --python /path/to/venv/bin/python [--seeds 1 2 3 4 5]

The environment of --python holds sb3-contrib, whose settings are those its authors tuned for this
task; ours are the defaults. Solved: the mean return of the last 100 training episodes is at least
475, the threshold that Gymnasium registers for CartPole-v1, and stays so for 100 more episodes. A
run's time ends at the first of these means, on a clock that begins with the command, so start-up
counts. Both train in turns of some seconds, one thread each; outside its turns a run is halted and
so is its clock. A run that ends before it is solved has no time: its row says how long it trained,
and the ratio is a bound, which the median ignores.
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
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from against_peers import Program

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.05


@dataclass(frozen=True)
class Goal:
    """The mean over a number of episodes that a run has to reach and keep."""

    mean: float
    episodes: int


@dataclass(frozen=True)
class Moment:
    """An iteration's end, and its episodes."""

    seconds: float  # seconds of this run's turns
    steps: int
    mean: float | None  # returns of the episodes that ended
    count: int


class Run(Program):
    """A training that is halted outside its turns, as its metrics.jsonl shows it."""

    def __init__(self, held: ExitStack, command: list[str], metrics: Path, goal: Goal) -> None:
        super().__init__(held, command, stdout=subprocess.DEVNULL)
        self.signal(signal.SIGSTOP)
        self.metrics = metrics
        self.goal = goal
        self.moments: list[Moment] = []
        self.seconds = 0.0

    @property
    def solved(self) -> Moment | None:
        """The moment at which the run solved the task, or None."""
        return solved_at(self.moments, self.goal)

    @property
    def last(self) -> Moment:
        """The moment that solved the task, otherwise the end of the run."""
        return self.solved or self.moments[-1]

    def turn(self, length_s: float) -> None:
        """Let the run train for some seconds or to its end, and read its new metrics."""
        began_s = time.monotonic()
        self.signal(signal.SIGCONT)
        while self.process.poll() is None and time.monotonic() < began_s + length_s:
            time.sleep(POLL_S)
            self._read(self.seconds + time.monotonic() - began_s)
        self.signal(signal.SIGSTOP)
        self.seconds += time.monotonic() - began_s
        self._read(self.seconds)  # the last lines, if the run has ended
        if self.process.poll():
            raise SystemExit(f"error: {self.metrics.name}: the run failed: {self.last_line()}")

    def _read(self, seconds: float) -> None:
        text = self.metrics.read_text() if self.metrics.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()[len(self.moments) :]
        for record in map(json.loads, lines):
            mean, count = record["episode/return"], record["episode/count"]
            self.moments.append(Moment(seconds, record["global_step"], mean, count))

    def cells(self) -> str:
        """Return the run's part of a table row."""
        seconds = f"{self.last.seconds:.1f}"
        return f"{seconds if self.solved else f'not in {seconds}'} | {self.last.steps:,}"


def mean_of_last(moments: Sequence[Moment], episodes: int) -> float | None:
    """Return the mean return of the last episodes, or None if there are too few."""
    total, count = 0.0, 0
    for moment in reversed(moments):
        total += (moment.mean or 0.0) * moment.count
        count += moment.count
        if count >= episodes:
            return total / count
    return None


def solved_at(moments: Sequence[Moment], goal: Goal) -> Moment | None:
    """Return when the mean reached the goal and then kept it for `goal.episodes`."""
    reached: Moment | None = None
    after = 0  # episodes since then
    for number, moment in enumerate(moments):
        mean = mean_of_last(moments[: number + 1], goal.episodes)
        if mean is None or mean < goal.mean:
            reached = None
        elif reached is None:
            reached, after = moment, 0
        else:
            after += moment.count
            if after >= goal.episodes:
                return reached
    return None


def race(seed: int, args: argparse.Namespace) -> list[Run]:
    """Train with both in turns until both are solved or have ended; ours comes first."""
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        ours = (
            f"{ROOT}/train_distributed.py --env CartPolePositions-v1 --device cpu --threads 1 "
            f"--validate_every 0 --total_steps {args.total_steps} --seed {seed} "
            f"--run_dir {folder}/ours"
        )
        peer = (
            f"{ROOT}/benchmarks/peers.py sb3_solve --metrics {folder}/peer.jsonl --seed {seed} "
            f"--total_steps {args.total_steps}"
        )
        goal = Goal(args.mean, args.episodes)
        runs = [
            Run(held, [sys.executable, *ours.split()], folder / "ours/metrics.jsonl", goal),
            Run(held, [args.python, *peer.split()], folder / "peer.jsonl", goal),
        ]
        waiting = runs if seed % 2 else runs[::-1]
        while waiting:
            for run in waiting:
                run.turn(args.turn_s)
            waiting = [r for r in waiting if r.process.poll() is None and not r.solved]
        return runs


def main() -> None:
    """Print a row for each seed, how many were solved, and the median ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="Python of an environment with sb3-contrib")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--total_steps", type=int, default=200_000, help="limit for either trainer")
    parser.add_argument("--turn_s", type=float, default=2.0)
    parser.add_argument("--mean", type=float, default=475.0)
    parser.add_argument("--episodes", type=int, default=100)
    args = parser.parse_args()
    print("| seed | ours, s | steps | sb3-contrib, s | steps | ratio |")
    print("|" + "---|" * 6)
    solved, ratios = [0, 0], list[float]()
    for seed in args.seeds:
        ours, peer = race(seed, args)
        ratio = peer.last.seconds / ours.last.seconds
        bounds = {(True, True): "", (True, False): "more than ", (False, True): "less than "}
        both = (bool(ours.solved), bool(peer.solved))
        shown = f"{bounds[both]}{ratio:.2f}" if any(both) else "-"
        print(f"| {seed} | {ours.cells()} | {peer.cells()} | {shown} |", flush=True)
        solved = [solved[0] + both[0], solved[1] + both[1]]
        ratios += [ratio] if all(both) else []
    print(f"\nSolved: ours {solved[0]}, sb3-contrib {solved[1]} of {len(args.seeds)} seeds.")
    if ratios:
        print(f"Median of the {len(ratios)} that both solved: {median(ratios):.2f}.")


if __name__ == "__main__":
    main()
