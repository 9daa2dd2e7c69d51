"""Train once on one process and once on many: the learning curve is the same, sooner with GPUs.

    python examples/many_gpus.py --num_ranks 4

`num_envs` and `batch_size` are totals that the ranks divide among them. Without GPUs the ranks are
processes of the CPU, which shows the curve and no gain. The same as commands:

    python train_distributed.py --env CartPolePositions-v1 --total_steps 20000 --num_gpus 1
    python train_distributed.py --env CartPolePositions-v1 --total_steps 20000 --num_gpus 4

Rounding lets the curves part after some iterations; `precision="fp64"` puts that off.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

from agents import train


def main(num_ranks: int, total_steps: int = 20_000) -> list[list[float]]:
    """Train twice; return the return of every iteration of one rank, and of many."""
    curves = []
    for ranks in (1, num_ranks):
        run = train(
            env="CartPolePositions-v1", total_steps=total_steps, num_ranks=ranks, validate_every=0
        )
        curves.append([each["episode/return"] for each in run.metrics])
    return curves


if __name__ == "__main__":  # several ranks are new processes, which import this module again
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num_ranks", type=int, default=2, help="GPUs, or processes of the CPU")
    args = parser.parse_args()
    for number, (one, many) in enumerate(zip(*main(args.num_ranks), strict=True), 1):
        print(f"iteration {number}: return {one:.4f}, of {args.num_ranks} ranks {many:.4f}")
