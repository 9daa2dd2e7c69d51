"""Seconds until CartPole without velocities is solved: this project and sb3-contrib in turns.

    python benchmarks/time_to_solve.py --python /path/to/venv/bin/python [--seeds 1 2 3 4 5]

The environment of --python holds sb3-contrib, whose settings are those its authors tuned for this
task; ours are the defaults. Solved: the mean return of the last 100 training episodes is at least
475, the threshold that Gymnasium registers for CartPole-v1. The clock starts with the command, so
start-up counts. One thread each.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / "benchmarks" / "peers" / "sb3_solve.py"
GOAL, EPISODES = 475.0, 100
POLL_S = 0.05


def mean_of_last(lines: list[str]) -> float:
    """Return the mean return of the last episodes that metrics.jsonl has; 0: too few so far."""
    last: deque[tuple[float, int]] = deque()
    for line in reversed(lines):
        record = json.loads(line)
        if record["episode/count"]:
            last.append((record["episode/return"], record["episode/count"]))
        if (count := sum(n for _, n in last)) >= EPISODES:
            return sum(mean * n for mean, n in last) / count
    return 0.0


def ours(seed: int, total_steps: int) -> tuple[float, bool, int]:
    """Train with our defaults; return seconds, success and environment steps."""
    with tempfile.TemporaryDirectory() as folder:
        words = f"--env CartPolePositions-v1 --seed {seed} --total_steps {total_steps}"
        words += f" --device cpu --threads 1 --validate_every 0 --run_dir {folder}/run"
        command = [sys.executable, str(ROOT / "train_distributed.py"), *words.split()]
        metrics = Path(folder, "run", "metrics.jsonl")
        started_s, size = time.monotonic(), 0
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as training:
            while training.poll() is None:
                time.sleep(POLL_S)
                if not metrics.exists() or metrics.stat().st_size == size:
                    continue
                text = metrics.read_text()
                size = len(text)
                lines = text[: text.rfind("\n") + 1].splitlines()
                if mean_of_last(lines) >= GOAL:
                    seconds = time.monotonic() - started_s
                    training.terminate()
                    return seconds, True, json.loads(lines[-1])["global_step"]
        return time.monotonic() - started_s, False, total_steps


def theirs(python: str, seed: int, total_steps: int) -> tuple[float, bool, int]:
    """Train with sb3-contrib; return seconds, success and environment steps."""
    words = f"--seed {seed} --total_steps {total_steps} --goal {GOAL} --episodes {EPISODES}"
    started_s = time.monotonic()
    done = subprocess.run(
        [python, str(PEER), *words.split()], stdout=subprocess.PIPE, text=True, check=True
    )
    report = json.loads(done.stdout.splitlines()[-1])
    return time.monotonic() - started_s, report["solved"], report["steps"]


def main() -> None:
    """Take turns, print a row for each seed and the median ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", required=True, help="of an environment with sb3-contrib")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--total_steps", type=int, default=200_000, help="for either, at most")
    args = parser.parse_args()
    print(
        "| seed | ours, s | steps | sb3-contrib, s | steps | sb3-contrib / ours |\n|" + "---|" * 6
    )
    ratios = []
    for number, seed in enumerate(args.seeds):
        turns = [
            lambda seed=seed: ours(seed, args.total_steps),
            lambda seed=seed: theirs(args.python, seed, args.total_steps),
        ]
        order = (0, 1) if number % 2 == 0 else (1, 0)
        results = {side: turns[side]() for side in order}
        cells = [
            f"{seconds:.1f} | {steps:,}" if solved else f"not in {seconds:.0f} | {steps:,}"
            for seconds, solved, steps in (results[0], results[1])
        ]
        ratios.append(results[1][0] / results[0][0])
        print(f"| {seed} | {' | '.join(cells)} | {ratios[-1]:.2f} |", flush=True)
    print(f"\nMedian of the ratios: {median(ratios):.2f}")


if __name__ == "__main__":
    main()
