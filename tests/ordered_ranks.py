"""Check on several ranks that a resumed training equals an uninterrupted one.

Spawned processes import this file.
"""

from dataclasses import replace

import torch
from agents_ranks import make_job
from on_ranks import saves_results
from pipeline_ranks import FORMS
from sharding_ranks import HALF, run
from supervised_ranks import Fitted, make_net

from rl_dist.strategies.config import StrategyConfig

TRAININGS = FORMS | {"hybrid": StrategyConfig(mode="hybrid")}


@saves_results
def exercise(world, out):
    """Run each training and one fit, both without interruption and with a resume.

    Return the final parameters of all runs.
    """
    results = {}
    for name, strategy in TRAININGS.items():
        if name == "pipeline" and world.size % 2:
            continue
        sizes = {"num_envs": 12, "batch_size": 12, "iterations": 2, "checkpoint_every": 1}
        sizes |= {"grad_accumulation": 2} if name == "ddp" else {}
        job = make_job("recall, clstm", out / name, dtype=torch.float32, **sizes)
        job = replace(job, strategy=strategy)
        whole = run(job, world)
        again = replace(job, run_dir=out / f"{name}, again")
        resumed = run(again, world, out / name / "checkpoints" / HALF)
        results[f"training, {name}"] = torch.stack([whole["parameters"], resumed["parameters"]])
    Fitted(world, out / "fit", net=make_net(dropout=0.3), epochs=1)
    resumed = Fitted(world, out / "fit", net=make_net(dropout=0.3), resume=True)
    fits = (Fitted(world, net=make_net(dropout=0.3)), resumed)
    weights = [torch.cat([weight.flatten() for weight in fit.weights.values()]) for fit in fits]
    results["fit"] = torch.stack(weights)
    return results
