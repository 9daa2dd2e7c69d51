"""Compare how fast we and sb3-contrib solve CartPole without velocities.

    python benchmarks/time_to_solve.py --python /path/to/venv/bin/python [--seeds 1 2 3 4 5]

--python is a Python interpreter with sb3-contrib. sb3-contrib runs with the settings that its
authors tuned for this task; we use our defaults. The task is solved when the mean return of the
last 100 training episodes reaches 475 and then does not fall below 475 for 100 more episodes; 475
is Gymnasium's reward threshold for CartPole-v1. The time is measured from the start of the command,
so it includes the start-up. The two runs take turns of a few seconds, with one thread each. Between
its turns, a run and its clock are halted. If a run ends without solving the task, the table shows
how long the run trained. The ratio of the two times is then only a bound, and the median omits it.
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
from turns import parser_of

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.05


@dataclass(frozen=True)
class Goal:
    """A mean return that a run must reach and then not fall below for some more episodes."""

    mean: float
    episodes: int


@dataclass(frozen=True)
class Moment:
    """The end of an iteration, with the episodes that ended in it."""

    seconds: float  # total duration of the run's turns so far
    steps: int
    mean: float | None  # mean return of the episodes; None if count is 0
    count: int


class Run(Program):
    """A training process that is halted between its turns."""

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
        """The moment at which the run solved the task; if it did not, the latest moment."""
        return self.solved or self.moments[-1]

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
        lines = text[: text.rfind("\n") + 1].splitlines()[len(self.moments) :]
        for record in map(json.loads, lines):
            mean, count = record["episode/return"], record["episode/count"]
            self.moments.append(Moment(seconds, record["global_step"], mean, count))

    def cells(self) -> str:
        """Return the time and the steps of this run as cells of a table row."""
        seconds = f"{self.last.seconds:.1f}"
        return f"{seconds if self.solved else f'not in {seconds}'} | {self.last.steps:,}"


def mean_of_last(moments: Sequence[Moment], episodes: int) -> float | None:
    """Return the mean return of the last `episodes` episodes; None if fewer ended."""
    total, count = 0.0, 0
    for moment in reversed(moments):
        total += (moment.mean or 0.0) * moment.count
        count += moment.count
        if count >= episodes:
            return total / count
    return None


def solved_at(moments: Sequence[Moment], goal: Goal) -> Moment | None:
    """Return the moment at which a run reached the goal, or None.

    The run must also keep the goal for `goal.episodes` episodes after this moment.
    """
    reached: Moment | None = None
    after = 0  # number of episodes since `reached`
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
    """Train in turns until both runs solve the task or end; return both, ours first."""
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        ours = (
            f"{ROOT}/train_distributed.py --env CartPolePositions-v1 --threads 1 "
            f"--validate_every 0 --total_steps {args.total_steps} --seed {seed} "
            f"--device {args.device} --run_dir {folder}/ours"
        )
        peer = (
            f"{ROOT}/benchmarks/peers.py sb3_solve --metrics {folder}/peer.jsonl --seed {seed} "
            f"--total_steps {args.total_steps} --device {args.device}"
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
    """Print a row per seed, how many runs solved the task, and the median ratio."""
    parser = parser_of(__doc__)
    parser.add_argument("--python", required=True, help="Python interpreter with sb3-contrib")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--total_steps", type=int, default=200_000, help="step limit of each run")
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
        print(f"Median ratio of the {len(ratios)} seeds that both solved: {median(ratios):.2f}.")


if __name__ == "__main__":
    main()
