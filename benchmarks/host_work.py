"""Host work of an iteration besides the environments: noise, order of sequences, piece plans.

    python -m benchmarks.host_work [--num_envs 64 4096] [--repeats 7]

With a GPU the noise is made there, and only its launches are the host's; `--device cuda` times
them. Medians of whole iterations in milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from agents.network.sequences import plan_pieces, plans_to_device
from agents.noise import action_noise, sequence_orders

NUM_STEPS, BPTT_STEPS, EPOCHS, MINIBATCHES, EPISODE = 128, 32, 4, 2, 250


def milliseconds(work: Callable[[], Any], repeats: int) -> float:
    """Median over repeats, after one to warm up."""
    found = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        found.append(1e3 * (time.perf_counter() - started))
    return median(found[1:])


def measure(num_envs: int, device: str, repeats: int) -> dict[str, float]:
    """Milliseconds of each part of the work of one iteration."""
    space = spaces.Box(-1.0, 1.0, (5,), np.float32)
    per_env = NUM_STEPS // BPTT_STEPS
    share = (0, num_envs, per_env, MINIBATCHES)
    starts = np.random.default_rng(0).random((BPTT_STEPS, per_env * num_envs)) < 1.0 / EPISODE
    orders = sequence_orders((1, 1), EPOCHS, *share)
    batches = list(orders.reshape(EPOCHS * MINIBATCHES, -1))
    place = torch.device(device)
    work: dict[str, Callable[[], Any]] = {
        "noise": lambda: action_noise(space, 1, 0, num_envs, 128, NUM_STEPS, device),
        "order of sequences": lambda: sequence_orders((1, 1), EPOCHS, *share),
        "plans": lambda: plan_pieces(starts, batches),
        "tables to the device": lambda: plans_to_device(plans, place, orders),
    }
    plans = plan_pieces(starts, batches)
    return {name: milliseconds(part, repeats) for name, part in work.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_envs", type=int, nargs="+", default=[64, 4096])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    print(f"torch {torch.__version__}, {threads} threads, {capability}, noise on {args.device}")
    for num_envs in args.num_envs:
        found = measure(num_envs, args.device, args.repeats)
        parts = ", ".join(f"{name} {ms:.1f}" for name, ms in found.items())
        print(f"{num_envs} environments: {parts} ms")


if __name__ == "__main__":
    main()
