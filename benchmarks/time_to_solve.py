"""Seconds until CartPole without velocities is solved: this project and sb3-contrib in turns.

    python benchmarks/time_to_solve.py --python /path/to/venv/bin/python [--seeds 1 2 3 4 5]

The environment of --python holds sb3-contrib, whose settings are those its authors tuned for this
task; ours are the defaults. Solved: the mean return of the last 100 training episodes is at least
475, the threshold that Gymnasium registers for CartPole-v1, and stays so for 100 more episodes. A
run's time is when it reached the first of these means, on a clock that begins with the command, so
start-up counts. Both train in turns of some seconds, one thread each; a run without a turn is
halted and so is its clock. A run that ends before it is solved has no time: its row says how long
it trained, and the medians leave it out. CPU time is what the seconds would be on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.05


@dataclass(frozen=True)
class Goal:
    """A mean return over some episodes that has to be reached and kept."""

    mean: float
    episodes: int


@dataclass(frozen=True)
class Moment:
    """The end of an iteration, and its episodes."""

    seconds: float  # of this run's turns
    cpu_s: float
    steps: int
    mean: float | None  # return of the episodes that ended
    count: int


class Run:
    """A training that is halted between its turns, as its metrics.jsonl shows it."""

    def __init__(self, stack: ExitStack, command: Sequence[str | Path], metrics: Path) -> None:
        self.metrics = metrics
        self.moments: list[Moment] = []
        self.seconds = 0.0
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        self._signal(signal.SIGSTOP)
        stack.callback(self.process.wait)
        stack.callback(self._signal, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, number)

    def turn(self, length_s: float) -> bool:
        """Let it train for some seconds, or to its end; return whether it has ended."""
        began_s = time.monotonic()
        self._signal(signal.SIGCONT)
        while (code := self.process.poll()) is None and time.monotonic() < began_s + length_s:
            time.sleep(POLL_S)
            self._read(self.seconds + time.monotonic() - began_s)
        self._signal(signal.SIGSTOP)
        self.seconds += time.monotonic() - began_s
        self._read(self.seconds)  # its last lines, if it has ended
        if code:
            raise SystemExit(f"error: {self.process.args!r} ended with code {code}")
        return code is not None

    def _read(self, seconds: float) -> None:
        text = self.metrics.read_text() if self.metrics.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()[len(self.moments) :]
        cpu_s = self._cpu_s() if lines else 0.0
        for record in map(json.loads, lines):
            episodes = {"mean": record["episode/return"], "count": record["episode/count"]}
            self.moments.append(Moment(seconds, cpu_s, record["global_step"], **episodes))

    def _cpu_s(self) -> float:
        """Return the seconds of CPU of its processes; the last known ones if they have ended."""
        with suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            processes = [process, *process.children(recursive=True)]
            return sum(sum(each.cpu_times()[:4]) for each in processes)  # with ended children
        return self.moments[-1].cpu_s if self.moments else 0.0


def mean_of_last(moments: Sequence[Moment], episodes: int) -> float | None:
    """Return the mean return of at least so many last episodes; None: too few so far."""
    total, count = 0.0, 0
    for moment in reversed(moments):
        if moment.mean is not None:
            total += moment.mean * moment.count
            count += moment.count
        if count >= episodes:
            return total / count
    return None


def solved_at(moments: Sequence[Moment], goal: Goal) -> Moment | None:
    """Return when the mean reached the goal, if it stays there for that many more episodes."""
    first: Moment | None = None
    episodes_since = 0
    for number, moment in enumerate(moments):
        mean = mean_of_last(moments[: number + 1], goal.episodes)
        if mean is None or mean < goal.mean:
            first = None
        elif first is None:
            first, episodes_since = moment, 0
        else:
            episodes_since += moment.count
            if episodes_since >= goal.episodes:
                return first
    return None


def race(seed: int, goal: Goal, args: argparse.Namespace) -> list[tuple[Moment, bool]]:
    """Train with both in turns until both are solved or have ended; ours is the first result."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = ["--seed", str(seed), "--total_steps", str(args.total_steps), "--threads", "1"]
        script, place = ROOT / "train_distributed.py", folder / "run"
        ours: list[str | Path] = [sys.executable, script, *flags, "--run_dir", place]
        ours += ["--env", "CartPolePositions-v1", "--device", "cpu", "--validate_every", "0"]
        peer = [args.python, ROOT / "benchmarks" / "peers.py", "sb3_solve", *flags]
        peer += ["--metrics", folder / "peer.jsonl"]
        runs = [Run(stack, ours, folder / "run" / "metrics.jsonl")]
        runs += [Run(stack, peer, folder / "peer.jsonl")]
        waiting = runs if seed % 2 else runs[::-1]
        while waiting:
            ended = [run.turn(args.turn_s) for run in waiting]
            waiting = [
                run
                for run, over in zip(waiting, ended, strict=True)
                if not over and solved_at(run.moments, goal) is None
            ]
        solved = [solved_at(run.moments, goal) for run in runs]
        return [
            (moment or run.moments[-1], moment is not None)
            for run, moment in zip(runs, solved, strict=True)
        ]


def main() -> None:
    """Print a row for each seed, how many were solved, and the median ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="of an environment with sb3-contrib")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--total_steps", type=int, default=200_000, help="for either, at most")
    parser.add_argument("--turn_s", type=float, default=2.0)
    parser.add_argument("--mean", type=float, default=475.0)
    parser.add_argument("--episodes", type=int, default=100)
    args = parser.parse_args()
    print("| seed | ours, s | CPU, s | steps | sb3-contrib, s | CPU, s | steps | ratio | by CPU |")
    print("|" + "---|" * 9)
    counts = [0, 0]
    ratios: list[tuple[float, float]] = []
    for seed in args.seeds:
        results = race(seed, Goal(args.mean, args.episodes), args)
        cells = [str(seed)]
        for index, (moment, is_solved) in enumerate(results):
            counts[index] += is_solved
            seconds = f"{moment.seconds:.1f}" if is_solved else f"not in {moment.seconds:.0f}"
            cells += [seconds, f"{moment.cpu_s:.1f}", f"{moment.steps:,}"]
        (ours, we_solved), (peer, they_solved) = results
        if we_solved and they_solved:
            ratios.append((peer.seconds / ours.seconds, peer.cpu_s / ours.cpu_s))
            cells += [f"{ratio:.2f}" for ratio in ratios[-1]]
        else:
            cells += ["-", "-"]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\nSolved: ours {counts[0]}, sb3-contrib {counts[1]} of {len(args.seeds)} seeds.")
    if ratios:
        seconds_ratio, cpu_ratio = (median(column) for column in zip(*ratios, strict=True))
        print(f"Medians of {len(ratios)} seeds: {seconds_ratio:.2f}, by CPU time {cpu_ratio:.2f}.")


if __name__ == "__main__":
    main()
