"""Train the tasks of examples/many_spaces.py, whose spaces, masks and cores differ.

    python benchmarks/many_spaces.py --seeds 1 2 3

Prints the mean return of 100 evaluation episodes without noise for every task and seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# beside what --preset small, their preset, sets
FLAGS = "--num_gpus 1 --device cpu --gae_lambda 0.98 --validate_every 0"
TASKS = {  # flags, and the best mean return that is possible
    "MaskedCartPole-v0": (
        "--info_mask --refresh_states --min_adv_std 0.2 --total_steps 100000",
        500,
    ),
    "PatchRecall-v0": ("--policy gru --total_steps 100000", 1),
    "PatchRecall-v0, minGRU": ("--policy mingru --num_layers 2 --total_steps 100000", 1),
    "Orders-v0": ("--policy lstm --total_steps 200000", 1),
}


def train(task: str, seed: int, threads: int) -> float:
    """Return the mean return of the evaluation after a training."""
    flags = f"{FLAGS} {TASKS[task][0]} --seed {seed} --threads {threads}".split()
    env = f"examples.many_spaces:{task.partition(',')[0]}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train_distributed.py", "--env", env, *flags]
        subprocess.run(
            [*command, "--run_dir", folder], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        return float(json.loads(Path(folder, "summary.json").read_text())["test"]["return"])


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    for task in args.tasks:
        for seed in args.seeds:
            found = train(task, seed, args.threads)
            print(f"{task}, seed {seed}: {found:.3g} of {TASKS[task][1]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
