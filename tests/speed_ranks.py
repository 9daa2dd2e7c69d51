"""Functions that two ranks run for tests of precision, speed and accumulation."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from agents_ranks import CLIPPED, Recording, bad_losses, finish, make_job, run_loop
from on_ranks import saves_results

from agents.learner.trainer import Training
from rl_dist.strategies.config import StrategyConfig

SINGLE = torch.float32
NAME = "trading, clstm"  # continuous actions, and episodes shorter than a rollout
CASES = {
    "two parts": {"batch_size": 8, "grad_accumulation": 2},
    "single": {"dtype": SINGLE},
    "compressed": {"dtype": SINGLE, "compression": "bf16"},
    "fp16, overflow on one rank": {"dtype": SINGLE, "precision": "fp16"},
}
# one gradient step in bf16, in all forms that two ranks on CPUs can take
ONE_STEP = {
    "dtype": SINGLE,
    "precision": "bf16",
    "iterations": 1,
    "batch_size": 32,
    "ppo": replace(CLIPPED, update_epochs=1),
}
FORMS = {
    "ddp": {"mode": "ddp"},
    "hybrid": {"mode": "hybrid"},
    "pipeline": {"mode": "hybrid", "hybrid_form": "pipeline"},
}


def job_of(name=NAME, *, precision="auto", compression="none", form=None, **options):
    """Return a small job of `agents_ranks`; it trains 2 iterations by default."""
    job = make_job(name, **{"iterations": 2} | options)
    form = {"precision": precision, "gradient_compression": compression, **(form or {})}
    return replace(job, strategy=StrategyConfig(**form))


def trained(world, *args, **options):
    """Train to the end and return the Recording."""
    return finish(Recording(job_of(*args, **options), world))


def first_gradient(world, **options):
    """Take one gradient step; return the clipped gradient of each parameter."""
    job = job_of(**ONE_STEP, **options)
    training = Training(job, job.make_env, world)
    run_loop(training)
    state = training.checked_state()["optimizer"]["state"]
    return [state[number]["exp_avg"] / 0.1 for number in sorted(state)]  # Adam's first moment


@contextmanager
def counted_reductions():
    """Count the gradient reductions (the async all-reduces) and their bytes."""
    sent, all_reduce = Counter(), torch.distributed.all_reduce

    def counted(tensor, *args, **kwargs):
        if kwargs.get("async_op"):
            sent.update({"calls": 1, "bytes": tensor.nbytes})
        return all_reduce(tensor, *args, **kwargs)

    with mock.patch("torch.distributed.all_reduce", counted):
        yield sent


@saves_results
def exercise(world, _):
    """Train every case; return records and communication counts of this rank."""
    found = {}
    for name, options in CASES.items():
        overflowing = [3] if world.rank == 1 and "overflow" in name else []
        with counted_reductions() as sent, bad_losses(overflowing, torch.inf):
            training = trained(world, **options)
        training.checked_state()
        found[name] = {
            "record": {key: training.record()[key] for key in ("parameters", "hashes", "losses")},
            "sent": dict(sent),
            "gradient_bytes": training.ppo.strategy.gradient_bytes,
            "bad_in_a_row": training.ppo.bad_in_a_row,
        }
    found["bf16"] = {name: first_gradient(world, form=form) for name, form in FORMS.items()}
    return found
