"""Functions that ranks run for the sharding tests; spawned processes import them."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from agents_ranks import make_job, run_loop
from faults_ranks import RecordKeeper
from on_ranks import saves_results
from rl_dist_ranks import make_module

from agents.learner.trainer import Training
from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.errors import UserError
from rl_dist.process_group.collectives import all_reduce_max, parameter_hash
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy

HALF = "iteration_00000001.pt"
IN_PARTS = {"batch_size": 8, "grad_accumulation": 2}


def job(run_dir, mode="hybrid", shard_size=0, **options):
    """Return a small job with the strategy `mode` and a checkpoint every iteration."""
    options = {"iterations": 2, "checkpoint_every": 1} | options
    strategy = StrategyConfig(mode=mode, shard_size=shard_size)
    return replace(make_job("recall, clstm", run_dir, **options), strategy=strategy)


def run(job, world, resume_from=""):
    """Train, optionally from a checkpoint.

    Return the final parameters and their hash, some metrics of each iteration, the number of
    gradient reductions and, if the parameters are sharded, facts about the shards.
    """
    training, writer = Training(job, job.make_env, world), RecordKeeper()
    if resume_from:
        training.restore(load_checkpoint(resume_from))
    with mock.patch.object(world, "gradients_ready", wraps=world.gradients_ready) as reductions:
        run_loop(training, writer)
    kept = ("loss/policy", "loss/value", "optim/grad_norm", "episode/return")
    parameters = [parameter.detach().flatten() for parameter in training.policy.parameters()]
    result = {
        "parameters": torch.cat(parameters),
        "records": [{key: record[key] for key in kept} for record in writer.records],
        "hash": parameter_hash(training.policy),
        "reductions": reductions.call_count,
    }
    if training.ppo.strategy.shards:
        mesh = training.ppo.strategy.mesh
        backends = [group._get_backend(torch.device("cpu")) for group in mesh.get_all_groups()]
        result["mesh"] = list(mesh.shape)
        result["timeouts_s"] = [each.options._timeout.total_seconds() for each in backends]
        shards = [parameter.to_local() for parameter in training.ppo.strategy.parameters]
        result["shard_numbers"] = sum(shard.numel() for shard in shards)
    return result


@saves_results
def probe(world, out, shard_size=0):
    """Train and resume in modes hybrid and ddp; return the results of every run."""
    hybrid, ddp = {"shard_size": shard_size}, {"mode": "ddp"}
    half = f"checkpoints/{HALF}"
    results = {
        name: run(job(out / name, **options), world, resume_from)
        for name, options, resume_from in (
            ("hybrid", hybrid, ""),
            ("ddp", ddp, ""),
            ("hybrid in parts", hybrid | IN_PARTS, ""),
            ("hybrid, resumed", hybrid, out / "hybrid" / half),
            ("hybrid, resumed as ddp", ddp, out / "hybrid" / half),
            ("ddp, resumed as hybrid", hybrid, out / "ddp" / half),
        )
    }
    # This must be the last step, because it leaves a reduction unfinished.
    results["refusals"] = refusals(world)
    return results


def refusals(world):
    """Return how a strategy reacts to three faults.

    The faults are a NaN loss on one rank, an optimizer made before `wrap`, and ranks that call
    different collectives.
    """
    module = make_module(seed=world.rank)
    early = torch.optim.SGD(module.parameters(), lr=1.0)
    strategy = Strategy(StrategyConfig(mode="hybrid"), world)
    wrapped = strategy.wrap(module)
    optimizer = torch.optim.SGD(strategy.parameters, lr=1.0)
    results = {"hashes": [parameter_hash(module)]}

    def loss():
        return wrapped(torch.ones(4, 3).double()).square().mean()

    with strategy.accumulating():
        strategy.backward(loss() * (torch.nan if world.rank == 1 else 1.0))
    results["stepped"] = bool(strategy.step(optimizer)[1])
    results["hashes"].append(parameter_hash(module))
    with pytest.raises(UserError, match="optimizer"):
        strategy.step(early)
    with pytest.raises(UserError) as raised:
        all_reduce_max(0, world) if world.rank else strategy.backward(loss())
    return results | {"other calls": str(raised.value)}
