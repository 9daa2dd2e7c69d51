"""How cost and memory of an iteration grow with the number of environments, and whether it leaks.

    python benchmarks/many_envs.py [--num_envs 8 64 512 4096] [--iterations 3] [--long 0]
    python benchmarks/many_envs.py --device cuda --env StockTrading-v0 --policy clstm \\
        --hidden_size 128 --num_steps 128 --bptt_steps 32 --update_epochs 4 \\
        --num_envs 4096 8192 16384

Each number trains in a process of its own, with one thread, and by default an LSTM of 64 on
CartPole-v1, 32 steps, one epoch, two minibatches. Printed are medians of its iterations after the
first: steps per second, microseconds of an environment's step in collecting and updating, the most
memory that the process came to, and of the GPU, and milliseconds of an iteration of 128 steps and
4 epochs for what is besides (see host_work.py): noise, which a GPU makes itself, and order, plans
and tables, always the host's. The second command makes the rows of a GPU, where the environments
of the trading task live as well. --long N trains N iterations of 8 environments and prints how its
memory grew in the last four fifths of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from host_work import measure
from machine import describe

MIB = 2**20
CODE = """
import json, os, psutil, resource, sys, torch
from agents import train
iterations, process, seen = int(sys.argv[2]), psutil.Process(), []
def note(moment):
    metrics = moment.metrics
    times = [metrics["time/collect_s"], metrics["time/update_s"], metrics["time/sps"]]
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    on_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    seen.append([*times, process.memory_info().rss, peak, on_gpu])
    if len(seen) == iterations:
        print(json.dumps(seen), file=sys.stderr, flush=True)
        os._exit(0)  # nothing is to be saved or evaluated
train(learning_rate=1e-9, num_gpus=1, threads=1, validate_every=0, checkpoint_every=10**9,
      total_steps=10**12, on_iteration=note, **json.loads(sys.argv[1]))
"""


def train_with(num_envs: int, iterations: int, work: dict[str, Any]) -> list[list[float]]:
    """Seconds of collecting and updating, steps/s, and bytes by iteration.

    Bytes are those held, the most so far, and the most on the GPU.
    """
    num_steps, minibatches = work["num_steps"], work["minibatches"]
    settings = {name: value for name, value in work.items() if name != "minibatches"} | {
        "num_envs": num_envs,
        "batch_size": num_envs * (num_steps // work["bptt_steps"]) // minibatches,
    }
    with tempfile.TemporaryDirectory() as folder:
        flags = json.dumps(settings | {"run_dir": f"{folder}/run"})
        words = [sys.executable, "-c", CODE, flags, str(iterations)]
        root = Path(__file__).resolve().parents[1]
        done = subprocess.run(words, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stderr}error: {num_envs} environments: see above")
    seen: list[list[float]] = json.loads(done.stderr.splitlines()[-1])
    return seen


def row_of(num_envs: int, iterations: int, work: dict[str, Any]) -> dict[str, float]:
    """Medians of the iterations after the first."""
    seen = train_with(num_envs, iterations + 1, work)[1:]
    columns = [median(column) for column in zip(*seen, strict=True)]
    collect_s, update_s, rate, _, peak, on_gpu = columns
    steps = num_envs * work["num_steps"]
    host = measure(num_envs, work["device"], 3)
    row = {
        "num_envs": num_envs,
        "steps_per_s": round(rate),
        "collect_us": round(1e6 * collect_s / steps, 3),
        "update_us": round(1e6 * update_s / steps, 3),
        "noise_ms": round(host.pop("noise"), 1),
        "host_ms": round(sum(host.values()), 1),
        "peak_mib": round(peak / MIB),
    }
    return row | ({"gpu_mib": round(on_gpu / MIB)} if on_gpu else {})


def main() -> None:
    """Print a row for each number of environments, then the long run's growth."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num_envs", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--long", type=int, default=0)
    of_training = parser.add_argument_group("the work, by flags of train_distributed.py")
    work = {
        "device": "cpu",
        "env": "CartPole-v1",
        "policy": "lstm",
        "precision": "auto",
        "hidden_size": 64,
        "num_steps": 32,
        "bptt_steps": 16,
        "update_epochs": 1,
        "minibatches": 2,
    }
    for name, default in work.items():
        of_training.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    work = {name: getattr(args, name) for name in work}
    torch.set_num_threads(1)
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    print(json.dumps(describe(threads=1) | gpu | work), flush=True)
    for num_envs in args.num_envs:
        print(json.dumps(row_of(num_envs, args.iterations, work)), flush=True)
    if args.long:
        held = [each[3] for each in train_with(8, args.long, work)]
        growth = (held[-1] - held[args.long // 5]) / MIB
        print(json.dumps({"iterations": args.long, "grown_mib": round(growth, 2)}))


if __name__ == "__main__":
    main()
