"""This project's trainer, by its Python function; every iteration is one of a plain training.

With --ranks N that many processes share work and threads; needs /proc. VECTORIZATION=sync in the
environment steps Gymnasium's CartPole-v1 one by one, as most peers do.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout

import psutil
import torch
from turns import (
    BPTT_STEPS,
    CLIP,
    ENT_COEF,
    EPOCHS,
    GAE_LAMBDA,
    GAMMA,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MINIBATCH_STEPS,
    NUM_ENVS,
    NUM_STEPS,
    VF_COEF,
    Task,
    Turns,
    arguments,
    silence,
)

from agents import train

DRIVER = "BENCHMARK_DRIVER"  # for ranks: the process that takes the turns, where it reports


def settings(task: Task, threads: int, ranks: int = 1) -> dict[str, Any]:
    """Return the flags of the comparison, or those of the main job."""
    plain = {
        "threads": threads // ranks,
        "device": "cpu",
        "num_gpus": ranks,
        "total_steps": 10**9,
        "validate_every": 0,
        "checkpoint_every": 10**9,
        "collective_timeout": 80_000,  # ranks wait for their turns
    }
    if task.cascade:
        return plain | {"num_stocks": 30}
    return plain | {
        "env": "CartPole-v1" if task.discrete else "tasks:StockLike-v0",
        "vectorization": os.environ.get("VECTORIZATION", "auto"),
        "policy": "lstm",
        "hidden_size": task.hidden_size,
        "num_envs": NUM_ENVS,
        "num_steps": NUM_STEPS,
        "bptt_steps": BPTT_STEPS,
        "batch_size": MINIBATCH_STEPS // BPTT_STEPS,
        "update_epochs": EPOCHS,
        "learning_rate": LEARNING_RATE,
        "anneal_lr": False,
        "gamma": GAMMA,
        "gae_lambda": GAE_LAMBDA,
        "clip_coef": CLIP,
        "ent_coef": ENT_COEF,
        "vf_coef": VF_COEF,
        "max_grad_norm": MAX_GRAD_NORM,
    }


@functools.cache
def turns() -> Turns:
    """Take the turns of the process that was started, also in a rank that it has started."""
    number, reports = map(int, os.environ[DRIVER].split())
    about: dict[str, Any] = {"trainer": "ours", "torch": torch.__version__}
    if number == os.getpid():
        return Turns(reports=os.fdopen(reports, "w", buffering=1), **about)
    driver = psutil.Process(number)

    def cpu_s() -> float:
        each = [process.cpu_times() for process in driver.children(recursive=True)]
        return sum(times.user + times.system for times in each)

    own = Path(f"/proc/{number}/fd")
    orders, answers = (own / "0").open(), (own / str(reports)).open("w", buffering=1)
    return Turns(orders, answers, cpu_s, **about)


def end_of_iteration(moment: Any) -> None:
    """Report, and wait for the next turn; other ranks wait for the first one to go on."""
    metrics = moment.metrics
    if moment.is_main_process:
        turns().next(
            collect_s=metrics["time/collect_s"],
            update_s=metrics["time/update_s"],
            episode_length=metrics["episode/length"],
        )


def main() -> None:
    """Train until the turns end."""
    task, threads = arguments()
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    ranks = parser.parse_known_args()[0].ranks
    os.environ[DRIVER] = f"{os.getpid()} {silence()}"
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(on_iteration=end_of_iteration, run_dir=run, **settings(task, threads, ranks))


if __name__ == "__main__":
    main()
