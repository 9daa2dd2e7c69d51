"""How cost and memory of an iteration grow with the number of environments, and whether it leaks.

    python benchmarks/many_envs.py [--num_envs 8 64 512 4096] [--iterations 3] [--long 0]

Each number trains in a process of its own: an LSTM of 64 on CartPole-v1, 32 steps, one epoch, two
minibatches, one thread. Printed are medians of its iterations after the first: steps per second,
microseconds of an environment's step in collecting and updating, the most memory that the process
came to, and milliseconds of an iteration of 128 steps and 4 epochs for what is besides (see
host_work.py): noise, which a GPU makes itself, and order, plans and tables, always the host's.
--long N trains N iterations of 8 environments and prints how its memory grew in the last four
fifths of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from host_work import measure

NUM_STEPS = 32
MIB = 2**20
CODE = """
import json, psutil, resource, sys
from agents import train
num_envs, iterations, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
process, seen = psutil.Process(), []
def note(moment):
    metrics = moment.metrics
    times = [metrics["time/collect_s"], metrics["time/update_s"], metrics["time/sps"]]
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen.append([*times, process.memory_info().rss, peak])
train(env="CartPole-v1", policy="lstm", hidden_size=64, num_envs=num_envs, num_steps=32,
      bptt_steps=16, batch_size=num_envs, update_epochs=1, learning_rate=1e-9, device="cpu",
      num_gpus=1, threads=1, total_steps=num_envs * 32 * iterations, validate_every=0,
      checkpoint_every=10**9, eval_episodes=1, on_iteration=note, run_dir=folder)
print(json.dumps(seen), file=sys.stderr)
"""


def train_with(num_envs: int, iterations: int) -> list[list[float]]:
    """Seconds of collecting and updating, steps/s, bytes held and the most so far, by iteration."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", CODE, str(num_envs), str(iterations), f"{folder}/run"]
        root = Path(__file__).resolve().parents[1]
        done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    seen: list[list[float]] = json.loads(done.stderr.splitlines()[-1])
    return seen


def row_of(num_envs: int, iterations: int) -> dict[str, float]:
    """Medians of the iterations after the first."""
    seen = train_with(num_envs, iterations + 1)[1:]
    collect_s, update_s, rate, _, peak = (median(column) for column in zip(*seen, strict=True))
    steps = num_envs * NUM_STEPS
    host = measure(num_envs, "cpu", 3)
    return {
        "num_envs": num_envs,
        "steps_per_s": round(rate),
        "collect_us": round(1e6 * collect_s / steps, 1),
        "update_us": round(1e6 * update_s / steps, 1),
        "noise_ms": round(host.pop("noise"), 1),
        "host_ms": round(sum(host.values()), 1),
        "peak_mib": round(peak / MIB),
    }


def main() -> None:
    """Print a row for each number of environments, then the long run's growth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num_envs", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--long", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for num_envs in args.num_envs:
        print(json.dumps(row_of(num_envs, args.iterations)), flush=True)
    if args.long:
        held = [each[3] for each in train_with(8, args.long)]
        growth = (held[-1] - held[args.long // 5]) / MIB
        print(json.dumps({"iterations": args.long, "grown_mib": round(growth, 2)}))


if __name__ == "__main__":
    main()
