"""Check on several ranks that the first gradient step equals all later ones.

Spawned processes import this file.
"""

from dataclasses import replace

import torch
from agents_ranks import make_job
from on_ranks import saves_results
from pipeline_ranks import FORMS
from sharding_ranks import HALF, run
from supervised_ranks import Fitted, make_net
from torch import nn

from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy

STRATEGIES = {
    "one bucket": {},
    "unused parameters": {"find_unused_parameters": True},
    "compressed": {"gradient_compression": "bf16"},
    "hybrid": {"mode": "hybrid"},
}
TRAININGS = {
    "ddp": FORMS["ddp"],
    "hybrid": StrategyConfig(mode="hybrid"),
    "pipeline": FORMS["pipeline"],
}


def first_steps(world, dtype, parts, **options):
    """Return this rank's gradients of three equal steps of a new strategy, [3, N]."""
    torch.manual_seed(0)
    layers = [nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 7)]
    generator = torch.Generator().manual_seed(world.rank)
    inputs = torch.randn(parts, 4, 40, dtype=dtype, generator=generator)
    strategy = Strategy(StrategyConfig(**({"mode": "ddp"} | options)), world)
    module = strategy.wrap(nn.Sequential(*layers).to(dtype))
    found = []
    optimizer = torch.optim.SGD(strategy.parameters, lr=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        for number, part in enumerate(inputs, 1):
            with strategy.accumulating(last=number == parts):
                strategy.backward(module(part).square().mean())
        gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in strategy.parameters]
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
        strategy.step(optimizer)
    return torch.stack(found)


@saves_results
def exercise(world, out):
    """Record gradients, and training runs and fits, each both whole and resumed."""
    forms = {"": (torch.float32, 1), ", fp64 in parts": (torch.float64, 2)}
    results = {
        f"{name}{form}": first_steps(world, *how, **options)
        for name, options in STRATEGIES.items()
        for form, how in forms.items()
    }
    for name, strategy in TRAININGS.items():
        if name == "pipeline" and world.size % 2:
            continue
        sizes = {"num_envs": 12, "batch_size": 12, "iterations": 2, "checkpoint_every": 1}
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
