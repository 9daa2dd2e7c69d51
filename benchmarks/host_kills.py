"""Kill one of two hosts again and again: does the run go on, and after how long?

    python benchmarks/host_kills.py --kills 10

The hosts are network namespaces of this machine (root and Linux). The second host, with its agent
of torchrun and its rank, is killed while training runs, and a new host of the same name starts
another agent. A continuation counts when the run has saved an iteration beyond the last one before
the kill. At the end metrics.jsonl must hold every iteration once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

from simulated_hosts import Job, connected, torchrun  # noqa: E402
from train_runs import RECALL, records  # noqa: E402

from rl_dist.checkpoint.folder import iteration_in_name, latest_checkpoint  # noqa: E402

LIMIT_S = 180.0


def wait_beyond(iteration: int, run_dir: Path, job: Job) -> int:
    """Return the newest saved iteration as soon as it is a later one."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        newest = latest_checkpoint(run_dir)
        if newest and iteration_in_name(newest) > iteration:
            return iteration_in_name(newest)
        if job.process.poll() is not None or time.monotonic() > end_s:
            sys.exit(f"the run did not go on from iteration {iteration}:\n{job.text}")
        time.sleep(0.1)


def main() -> None:
    """Print a line for every kill, and the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    kills = parser.parse_args().kills
    with tempfile.TemporaryDirectory() as name, connected(Path(name), "first", "second") as network:
        run_dir = Path(name, "run")
        flags = [*RECALL, "--total_steps", 10**9, "--checkpoint_every", "5", "--run_dir", run_dir]
        first, _ = (torchrun(network.hosts[host], *flags) for host in network.names)
        saved = wait_beyond(10, run_dir, first)
        seconds = []
        for kill in range(1, kills + 1):
            network.hosts["second"].kill()
            killed_s = time.monotonic()
            torchrun(network.start("second"), *flags)
            time.sleep(0.5)  # a save that had begun may end
            before = max(saved, wait_beyond(0, run_dir, first))
            saved = wait_beyond(before, run_dir, first)
            seconds.append(time.monotonic() - killed_s)
            print(f"kill {kill}: after iteration {before}, {seconds[-1]:.1f} s", flush=True)
        iterations = [line["iteration"] for line in records(run_dir)]
        assert iterations == list(range(1, len(iterations) + 1)), "gaps or repetitions"
    print(
        f"{len(seconds)} of {kills} kills continued, {median(seconds):.1f} s "
        f"({min(seconds):.1f} to {max(seconds):.1f}) from the kill to the next new checkpoint"
    )


if __name__ == "__main__":
    main()
