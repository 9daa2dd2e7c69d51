"""This project's trainer, by its Python function; every iteration is one of a plain training.

VECTORIZATION=sync in the environment steps Gymnasium's CartPole-v1 one by one, as most peers do.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout

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
)

from agents import train


def settings(task: Task, threads: int) -> dict[str, Any]:
    """Return the flags of the comparison, or those of the main job."""
    plain = {
        "threads": threads,
        "device": "cpu",
        "num_gpus": 1,
        "total_steps": 10**9,
        "validate_every": 0,
        "checkpoint_every": 10**9,
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


def main() -> None:
    """Train until the turns end."""
    task, threads = arguments()
    turns = Turns(trainer="ours", torch=torch.__version__)

    def end_of_iteration(moment: Any) -> None:
        metrics = moment.metrics
        turns.next(
            collect_s=metrics["time/collect_s"],
            update_s=metrics["time/update_s"],
            episode_length=metrics["episode/length"],
        )

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(on_iteration=end_of_iteration, run_dir=run, **settings(task, threads))


if __name__ == "__main__":
    main()
