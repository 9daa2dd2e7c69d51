"""Seconds until CartPole without velocities is solved: this project and sb3-contrib in turns.

    python benchmarks/time_to_solve.py --python /path/to/venv/bin/python [--seeds 1 2 3 4 5]

The environment of --python holds sb3-contrib, whose settings are those its authors tuned for this
task; ours are the defaults. Solved: the mean return of the last 100 training episodes is at least
475, the threshold that Gymnasium registers for CartPole-v1, and stays so for 100 more episodes. A
run's time is when it came to the first of these means, on a clock that begins with the command, so
start-up counts. Both train in turns of some seconds, one thread each; whoever has no turn is halted
and so is its clock. A run that ends before it is solved has no time: its row says how long it
trained, and the ratios are bounds, which the medians leave out. CPU time says what the seconds
would say on a machine that does nothing else.
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
PEER = ROOT / "benchmarks" / "peers" / "sb3_solve.py"
POLL_S = 0.05


@dataclass(frozen=True)
class Goal:
    """The mean of so many episodes that has to be reached and kept."""

    mean: float
    episodes: int


@dataclass(frozen=True)
class Moment:
    """An iteration's end, and its episodes."""

    seconds: float  # of this run's turns
    cpu_s: float
    steps: int
    mean: float | None  # return of the episodes that ended
    count: int


class Run:
    """A training that is halted but in its turns, as its metrics.jsonl shows it."""

    def __init__(self, held: ExitStack, command: Sequence[str | Path], metrics: Path) -> None:
        self.metrics = metrics
        self.moments: list[Moment] = []
        self.seconds = 0.0
        self.errors = held.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115  # held
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=self.errors, start_new_session=True
        )
        self._signal(signal.SIGSTOP)
        held.callback(self.end)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """End it and its ranks."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    @property
    def ended(self) -> bool:
        """Whether it ended by itself."""
        return self.process.poll() is not None

    def turn(self, length_s: float) -> None:
        """Let it train so long, or to its end, and read what it wrote."""
        began_s = time.monotonic()
        self._signal(signal.SIGCONT)
        while not self.ended and time.monotonic() < began_s + length_s:
            time.sleep(POLL_S)
            self._read(self.seconds + time.monotonic() - began_s)
        self._signal(signal.SIGSTOP)
        self.seconds += time.monotonic() - began_s
        self._read(self.seconds)  # its last lines, if it has ended

    def _read(self, seconds: float) -> None:
        text = self.metrics.read_text() if self.metrics.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()[len(self.moments) :]
        cpu_s = self._cpu_s() if lines else 0.0
        for record in map(json.loads, lines):
            episodes = record["episode/return"], record["episode/count"]
            self.moments.append(Moment(seconds, cpu_s, record["global_step"], *episodes))

    def _cpu_s(self) -> float:
        """Seconds of CPU of all its processes; what was read last if they have ended."""
        used = self.moments[-1].cpu_s if self.moments else 0.0
        with suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            used = max(used, sum(map(cpu_of, [process, *process.children(recursive=True)])))
        return used

    def failure(self) -> str:
        """Return its last words if it failed."""
        if not self.ended or not self.process.returncode:
            return ""
        self.errors.seek(0)
        last = [line for line in self.errors.read().splitlines() if line.strip()][-1:]
        return " ".join(last) or f"exit code {self.process.returncode}"


def cpu_of(process: psutil.Process) -> float:
    """Seconds of CPU of a process and of those it waited for."""
    with suppress(psutil.NoSuchProcess):
        return sum(process.cpu_times()[:4])  # user, system, and both of ended children
    return 0.0


def mean_of_last(moments: Sequence[Moment], episodes: int) -> float | None:
    """Return the mean return of so many last episodes or a few more; None: too few so far."""
    total, count = 0.0, 0
    for moment in reversed(moments):
        if moment.mean is not None:
            total += moment.mean * moment.count
            count += moment.count
        if count >= episodes:
            return total / count
    return None


def solved_at(moments: Sequence[Moment], goal: Goal) -> Moment | None:
    """Return when the mean came to the goal to stay there for as many episodes again."""
    found: Moment | None = None
    after = 0  # episodes since
    for number, moment in enumerate(moments):
        mean = mean_of_last(moments[: number + 1], goal.episodes)
        if mean is None or mean < goal.mean:
            found = None
        elif found is None:
            found, after = moment, 0
        else:
            after += moment.count
            if after >= goal.episodes:
                return found
    return None


def commands(seed: int, args: argparse.Namespace, folder: str) -> list[tuple[list[str], Path]]:
    """Return what to run, and the file in which it writes its episodes: ours, then the peer's."""
    words = f"--seed {seed} --total_steps {args.total_steps}"
    ours = f"--env CartPolePositions-v1 --device cpu --threads 1 --validate_every 0 {words}"
    script = [sys.executable, str(ROOT / "train_distributed.py"), "--run_dir", f"{folder}/run"]
    peer = [args.python, str(PEER), "--metrics", f"{folder}/peer.jsonl", *words.split()]
    return [
        (script + ours.split(), Path(folder, "run", "metrics.jsonl")),
        (peer, Path(folder, "peer.jsonl")),
    ]


def race(seed: int, goal: Goal, args: argparse.Namespace) -> list[tuple[Run, Moment | None]]:
    """Train with both in turns until both are solved or have ended; ours comes first."""
    with ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory())
        runs = [Run(held, *each) for each in commands(seed, args, folder)]
        waiting = runs if seed % 2 else runs[::-1]
        while waiting:
            for run in waiting:
                run.turn(args.turn_s)
            waiting = [run for run in waiting if not (run.ended or solved_at(run.moments, goal))]
        for run in runs:
            if words := run.failure():
                raise SystemExit(f"error: {Path(run.process.args[1]).name} failed: {words}")  # type: ignore[index,arg-type]
        return [(run, solved_at(run.moments, goal)) for run in runs]


def cells(run: Run, solved: Moment | None) -> str:
    """A run's part of a row."""
    if solved:
        return f"{solved.seconds:.1f} | {solved.cpu_s:.1f} | {solved.steps:,}"
    last = run.moments[-1]
    return f"not in {last.seconds:.0f} | {last.cpu_s:.0f} | {last.steps:,}"


def ratios_of(results: list[tuple[Run, Moment | None]]) -> tuple[str, list[float]]:
    """The peer's seconds over ours, and its CPU time over ours: in words, and if both solved it."""
    ours, peer = (solved or run.moments[-1] for run, solved in results)
    ratios = [peer.seconds / ours.seconds, peer.cpu_s / ours.cpu_s]
    words = {(True, True): "", (True, False): "more than ", (False, True): "less than "}
    solved = (bool(results[0][1]), bool(results[1][1]))
    if not any(solved):
        return "- | -", []
    shown = " | ".join(f"{words[solved]}{ratio:.2f}" for ratio in ratios)
    return shown, ratios if all(solved) else []


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
    solved, ratios = [0, 0], list[list[float]]()
    for seed in args.seeds:
        results = race(seed, Goal(args.mean, args.episodes), args)
        words, found = ratios_of(results)
        print(f"| {seed} | {' | '.join(cells(*each) for each in results)} | {words} |", flush=True)
        solved = [before + bool(now) for before, (_, now) in zip(solved, results, strict=True)]
        ratios += [found] if found else []
    print(f"\nSolved: ours {solved[0]}, sb3-contrib {solved[1]} of {len(args.seeds)} seeds.")
    if ratios:
        middle, by_cpu = (median(column) for column in zip(*ratios, strict=True))
        print(f"Medians of the {len(ratios)} that both solved: {middle:.2f}, by CPU {by_cpu:.2f}.")


if __name__ == "__main__":
    main()
