"""Speed of training beside other programs: the default against other threads and ways to wait.

    python benchmarks/busy_machine.py [--loads 0 2 10] [--rounds 3] [--seconds 5]

Every setting trains for some seconds in turn, beside as many busy processes as the load says. The
busy processes start after the first iteration, so that start-up does not count. A round compares
each setting with the fastest of the others in that round; the table shows medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import describe

from rl_dist.run_dir import RunDir

REPO = Path(__file__).resolve().parents[1]
ENDLESS = "--device cpu --total_steps 1000000000 --validate_every 0 --checkpoint_every 1000000"
JOBS = {
    "CartPole-v1": "--env CartPole-v1",
    "CartPolePositions-v1": "--env CartPolePositions-v1",
    "main job": "",
}
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
# name: (flags, environment)
SETTINGS: dict[str, tuple[str, dict[str, str]]] = {
    "default": ("", {}),
    "1 thread": ("--threads 1", {}),
    "2 threads, spinning": ("--threads 2", {"OMP_WAIT_POLICY": "ACTIVE"}),
    "2 threads, sleeping": ("--threads 2", {"OMP_WAIT_POLICY": "PASSIVE"}),
}


def steps_per_second(job: str, setting: str, load: int, seconds: float) -> float:
    """Train for some seconds beside `load` busy processes; return environment steps per second."""
    flags, variables = SETTINGS[setting]
    inherited = {name: value for name, value in os.environ.items() if name not in WAITING}
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder, "run")
        words = f"{ENDLESS} {JOBS[job]} {flags} --run_dir {run_dir}".split()
        training = subprocess.Popen(
            [sys.executable, str(REPO / "train_distributed.py"), *words],
            env=inherited | variables,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        busy: list[subprocess.Popen] = []
        try:
            before = len(_wait_for_records(training, run_dir, 1))
            busy += [
                subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)
            ]
            time.sleep(seconds)
            records = _wait_for_records(training, run_dir, before + 2)[before:]
        finally:
            for process in (*busy, training):
                process.kill()
                process.wait()
    # the first of these began before the load came
    steps = records[-1]["global_step"] - records[0]["global_step"]
    spent = sum(row["time/collect_s"] + row["time/update_s"] for row in records[1:])
    return steps / spent


def _wait_for_records(training: subprocess.Popen, run_dir: Path, least: int) -> list[dict]:
    while True:
        records = RunDir(run_dir).records()
        if len(records) >= least:
            return records
        if training.poll() is not None:
            sys.exit(f"the training ended with code {training.returncode}")
        time.sleep(0.05)


def main() -> None:
    """Print a row for each job, load and setting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loads", type=int, nargs="+", default=[0, 2, 10])
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    print(json.dumps(describe(threads=2)), flush=True)
    print("| job | load | setting | steps/s | of the fastest |\n|---|---|---|---|---|")
    for load in args.loads:
        for job in args.jobs:
            rounds = [
                {name: steps_per_second(job, name, load, args.seconds) for name in SETTINGS}
                for _ in range(args.rounds)
            ]
            for name in SETTINGS:
                rate = statistics.median(rates[name] for rates in rounds)
                shares = [
                    rates[name] / max(other for key, other in rates.items() if key != "default")
                    for rates in rounds
                ]
                share = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
                print(f"| {job} | {load} | {name} | {rate:,.0f} | {share} |", flush=True)


if __name__ == "__main__":
    main()
