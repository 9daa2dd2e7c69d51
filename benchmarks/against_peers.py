"""Speed beside other recurrent trainers: the same network and work, an iteration each in turn.

    python benchmarks/against_peers.py --python /path/to/venv/bin/python [--minutes 7]

The environment of --python holds the peers: rl_games, skrl, sb3-contrib (each with gymnasium, and
best with this project's version of torch); a peer that is not there is left out. All train 64
environments for 128 steps, then 4 epochs of 4 minibatches, on an LSTM, a tanh layer and two heads.
The learning rate is so low that policies stay random: what they learn would change the length of
episodes, on which speed depends. Every trainer is a process that waits for its turns; a turn is one
iteration. In a pair, ours and a peer take a turn each, in the next pair in the other order. A ratio
is the peer's time over ours in one pair; printed are medians and their 95 % intervals by bootstrap.
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
from pathlib import Path
from typing import Any

import numpy as np
from turns import STEPS, describe

SCRIPT = Path(__file__).resolve().parent / "peers.py"
PEERS = {  # by driver: the package that it needs
    "rl_games": "rl_games",
    "skrl": "skrl",
    "clean": "gymnasium",
    "sb3": "sb3_contrib",
}
RESAMPLES = 10_000
Pairs = list[tuple[dict[str, Any], dict[str, Any]]]  # reports of ours and of a peer


class Trainer:
    """A process of one driver, which iterates when it gets a turn."""

    def __init__(self, stack: ExitStack, python: str, *arguments: str | int) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        environment["TMPDIR"] = stack.enter_context(folder)  # a killed driver removes nothing
        self.errors = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, str(SCRIPT), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            bufsize=1,
            env=environment,
            start_new_session=True,
        )
        stack.callback(self.process.wait)
        stack.callback(os.killpg, self.process.pid, signal.SIGKILL)  # ranks, too
        self.about: dict[str, Any] = {}

    def turn(self) -> dict[str, Any]:
        """Let it iterate once, and return what it measured."""
        assert self.process.stdin
        with suppress(BrokenPipeError):  # it has ended: the report has its last line
            self.process.stdin.write("go\n")
        return self.report()

    def report(self) -> dict[str, Any]:
        """Wait for its next report; raise RuntimeError with its last line if there is none."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise RuntimeError(self.errors.read().strip().rpartition("\n")[2])
        report: dict[str, Any] = json.loads(line)
        self.about |= {name: report.pop(name) for name in ("trainer", "torch") if name in report}
        return report


def lacking(python: str) -> dict[str, str]:
    """Return why some drivers cannot run in an environment."""
    script = "import sys, importlib.util as u; print(*[n for n in sys.argv[1:] if u.find_spec(n)])"
    command = [python, "-c", script, "torch", *PEERS.values()]
    present = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return {
        driver: f"not installed: {package} or torch"
        for driver, package in PEERS.items()
        if not {package, "torch"} <= set(present)
    }


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and its 95 % interval by bootstrap."""
    values = np.asarray(samples)
    picks = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def take_pairs(
    ours: Trainer, peers: dict[str, Trainer], until: float, fewest: int
) -> dict[str, Pairs]:
    """Take pairs of turns until the time is over; at least `fewest` with each peer."""
    pairs: dict[str, Pairs] = {name: [] for name in peers}
    number = 0
    while peers and (number < fewest or time.monotonic() < until):
        for name, peer in peers.items():
            order = [ours, peer] if number % 2 == 0 else [peer, ours]
            measured = [trainer.turn() for trainer in order]
            pairs[name].append((measured[number % 2], measured[1 - number % 2]))
        number += 1
    return pairs


def medians(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return steps per second, seconds of the phases and length of episodes."""
    row: dict[str, Any] = {
        "steps_per_s": round(STEPS / float(np.median([report["seconds"] for report in reports]))),
        "turns": len(reports),
    }
    for name in ("collect_s", "update_s", "cpu_s", "episode_length"):
        values = [report[name] for report in reports if report.get(name) is not None]
        row[name] = round(float(np.median(values)), 3) if values else None
    return row


def compare(task: str, args: argparse.Namespace, missing: dict[str, str]) -> None:
    """Start all trainers on a task, warm them up, let them take turns, and print."""
    with ExitStack() as stack:
        flags = (task, "--threads", args.threads)
        ours = Trainer(stack, sys.executable, "ours", *flags, "--ranks", args.ranks)
        present = [name for name in args.peers if name not in missing]
        peers = {name: Trainer(stack, args.python, name, *flags) for name in present}
        for name, trainer in {"ours": ours, **peers}.items():
            try:
                trainer.report()
                for _ in range(args.warm_up):
                    trainer.turn()
            except RuntimeError as error:
                if trainer is ours:
                    raise
                print(json.dumps({"task": task, "left_out": name, "reason": str(error)}))
                del peers[name]
        until = time.monotonic() + 60.0 * args.minutes / len(args.tasks)
        pairs = take_pairs(ours, peers, until - 20.0, args.fewest)  # 20 s: start and warm-up
        our_reports = [mine for turns in pairs.values() for mine, _ in turns]
        print(json.dumps({"task": task, "trainer": "ours", **medians(our_reports)}), flush=True)
        for name, turns in pairs.items():
            row = {"task": task, **peers[name].about, **medians([theirs for _, theirs in turns])}
            for clock, label in (("seconds", "ours is faster"), ("cpu_s", "by CPU time")):
                ratios = [theirs[clock] / mine[clock] for mine, theirs in turns]
                row[label] = [round(ratio, 2) for ratio in median_interval(ratios)]
            print(json.dumps(row), flush=True)


def main() -> None:
    """Compare on each task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="of the peers' environment")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    tasks = ["cartpole", "stocks"]
    parser.add_argument("--tasks", nargs="+", default=tasks, choices=tasks)
    parser.add_argument("--minutes", type=float, default=7.0, help="for all tasks")
    parser.add_argument("--fewest", type=int, default=4, help="pairs of each peer, at least")
    parser.add_argument("--warm_up", type=int, default=2, help="turns before the first pair")
    parser.add_argument("--threads", type=int, default=2, help="of each trainer")
    parser.add_argument("--ranks", type=int, default=1, help="of ours; they share its threads")
    args = parser.parse_args()
    if args.threads % args.ranks:
        parser.error("--threads must be a multiple of --ranks, which share them")
    missing = lacking(args.python)
    print(json.dumps(describe(args.threads) | {"ranks": args.ranks}))
    for name, reason in missing.items():
        print(json.dumps({"left_out": name, "reason": reason}))
    for task in args.tasks:
        compare(task, args, missing)


if __name__ == "__main__":
    main()
