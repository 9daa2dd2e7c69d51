"""Speed beside other recurrent trainers: the same network and work, an iteration each in turn.

    python benchmarks/against_peers.py --python /path/to/venv/bin/python [--minutes 7]

The environment of --python holds what is to be compared: rl_games, skrl, sb3-contrib (each with
gymnasium, and best with this project's version of torch); what it lacks is left out, and said. All
train 64 environments for 128 steps, then 4 epochs of 4 minibatches, on an LSTM, a tanh layer and
two heads. The learning rate is so low that policies stay random: what they learn would change the
length of episodes, on which speed depends. Every trainer is a process that waits for its turns; a
turn is one iteration. In a pair, ours and a peer take a turn each, in the next pair in the other
order. A ratio is the peer's time over ours in one pair; printed are medians and their 95 %
intervals by bootstrap.
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe

DRIVERS = Path(__file__).resolve().parent / "peers"
PEERS = {  # by driver: the package that it needs
    "rl_games_lstm": "rl_games",
    "skrl_lstm": "skrl",
    "clean_lstm": "gymnasium",
    "sb3_lstm": "sb3_contrib",
}
STEPS = 64 * 128  # of an iteration
RESAMPLES = 10_000


class Trainer:
    """A process of one driver, which iterates when it is told to."""

    def __init__(
        self, held: ExitStack, python: str, driver: str, task: str, *flags: str | int
    ) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        environment["TMPDIR"] = held.enter_context(folder)  # removed behind a driver that is killed
        self.errors = held.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115  # held
        self.process = subprocess.Popen(
            [python, str(DRIVERS / f"{driver}.py"), task, *map(str, flags)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            bufsize=1,
            env=environment,
            start_new_session=True,
        )
        held.callback(self.end)
        self.about: dict[str, Any] = {}

    def turn(self) -> dict[str, Any]:
        """Let it iterate once, and return what it measured."""
        assert self.process.stdin and self.process.stdout
        with suppress(BrokenPipeError):  # it has ended: the report has its last words
            self.process.stdin.write("go\n")
        return self.report()

    def report(self) -> dict[str, Any]:
        """Wait for its next report; its last words are in the error if there is none."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            last = [one for one in self.errors.read().splitlines() if one.strip()][-1:]
            raise RuntimeError(" ".join(last) or "it ended without a word")
        report: dict[str, Any] = json.loads(line)
        self.about |= {name: report.pop(name) for name in ("trainer", "torch") if name in report}
        return report

    def end(self) -> None:
        """End the process, and its ranks."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def lacking(python: str) -> dict[str, str]:
    """Return why some drivers cannot run in an environment."""
    script = "import sys, importlib.util as u; print(*[n for n in sys.argv[1:] if u.find_spec(n)])"
    command = [python, "-c", script, "torch", *PEERS.values()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"error: --python {python} does not run: {error}") from error
    reasons = {}
    for driver, package in PEERS.items():
        absent = [name for name in (package, "torch") if name not in done.stdout.split()]
        if absent:
            reasons[driver] = f"not installed: {', '.join(absent)}"
    return reasons


def median_interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and its 95 % interval by bootstrap."""
    values = np.asarray(samples)
    picks = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def take_pairs(
    ours: Trainer, peers: dict[str, Trainer], until: float, fewest: int
) -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Pairs (ours, the peer's) until the time is over; at least `fewest` of each."""
    pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {name: [] for name in peers}
    number = 0
    while peers and (number < fewest or time.monotonic() < until):
        for name, peer in peers.items():
            both = [ours, peer] if number % 2 == 0 else [peer, ours]
            measured = [one.turn() for one in both]
            pairs[name].append((measured[number % 2], measured[1 - number % 2]))
        number += 1
    return pairs


def rows_of(
    task: str, peers: dict[str, Trainer], pairs: dict[str, list[Any]]
) -> Iterator[dict[str, Any]]:
    """One row per peer, and before them one of ours."""
    own = [mine for each in pairs.values() for mine, _ in each]
    yield {"task": task, "trainer": "ours", **medians(own), "turns": len(own)}
    for name, each in pairs.items():
        row = {"task": task, **peers[name].about, **medians([theirs for _, theirs in each])}
        for clock, label in (("seconds", "ours is faster"), ("cpu_s", "by CPU time")):
            ratios = [theirs[clock] / mine[clock] for mine, theirs in each]
            row[label] = [round(one, 2) for one in median_interval(ratios)]
        yield row | {"turns": len(each)}


def medians(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps per second, seconds of the phases and length of episodes."""
    found: dict[str, Any] = {}
    seconds = float(np.median([report["seconds"] for report in reports]))
    found["steps_per_s"] = round(STEPS / seconds)
    for name in ("collect_s", "update_s", "cpu_s", "episode_length"):
        values = [report[name] for report in reports if report.get(name) is not None]
        found[name] = round(float(np.median(values)), 3) if values else None
    return found


def compare(task: str, args: argparse.Namespace, missing: dict[str, str]) -> None:
    """Start all trainers on a task, warm them up, let them take turns, and print."""
    with ExitStack() as held:
        threads = ("--threads", args.threads)
        ours = Trainer(held, sys.executable, "ours", task, *threads, "--ranks", args.ranks)
        wanted = [name for name in args.peers if name not in missing]
        peers = {name: Trainer(held, args.python, name, task, *threads) for name in wanted}
        for name, trainer in {"ours": ours, **peers}.items():
            try:
                trainer.report()
                for _ in range(args.warm_up):
                    trainer.turn()
            except RuntimeError as error:
                if trainer is ours:
                    raise SystemExit(f"error: our own driver failed: {error}") from error
                print(json.dumps({"task": task, "left_out": name, "reason": str(error)}))
                del peers[name]
        until = time.monotonic() + 60.0 * args.minutes / len(args.tasks)
        pairs = take_pairs(ours, peers, until - 20.0, args.fewest)  # 20 s: start and warm-up
        for row in rows_of(task, peers, pairs):
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
    if args.ranks < 1 or args.threads % args.ranks:
        parser.error("--threads must be a multiple of --ranks, which share them")
    missing = lacking(args.python)
    print(json.dumps(describe(args.threads) | {"ranks": args.ranks}))
    for name, reason in missing.items():
        print(json.dumps({"left_out": name, "reason": reason}))
    for task in args.tasks:
        compare(task, args, missing)


if __name__ == "__main__":
    main()
