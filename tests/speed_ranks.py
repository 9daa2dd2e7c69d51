"""What two ranks do for the tests of precision, speed and accumulation; must be importable."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from agents_ranks import Recording, make_job

import agents.ppo
from agents.trainer import train
from rl_dist.process_group.collectives import check_in_sync
from rl_dist.process_group.world import StopFlag, close_world, open_world
from rl_dist.strategies.config import StrategyConfig
from rl_dist.telemetry.metrics import NullWriter

SINGLE = torch.float32
NAME = "brief, clstm"  # actions in a box, episodes shorter than slots


def job_of(
    name=NAME,
    *,
    precision="auto",
    compression="none",
    **options,
):
    """A small job of `agents_ranks`, two iterations long by default."""
    job = make_job(name, **{"iterations": 2} | options)
    return replace(
        job, strategy=StrategyConfig(precision=precision, gradient_compression=compression)
    )


def trained(world, *args, **options):
    """The training after its end."""
    training = Recording(job_of(*args, **options), world)
    train(training, NullWriter(), StopFlag())
    return training


CASES = {
    "one batch": {"batch_size": 16},
    "two parts": {"batch_size": 8, "grad_accumulation": 2},
    "four parts": {"batch_size": 4, "grad_accumulation": 4},
    "single": {"dtype": SINGLE},
    "compressed": {"dtype": SINGLE, "compression": "bf16"},
    "bf16": {"dtype": SINGLE, "precision": "bf16"},
    "fp16": {"dtype": SINGLE, "precision": "fp16"},
    "fp16, overflow on one rank": {"dtype": SINGLE, "precision": "fp16"},
}


def overflowing_once(rank):
    """On rank 1 the third loss of the run overflows."""
    calls = [0]

    def loss(*args):
        calls[0] += 1
        parts = original(*args)
        factor = torch.inf if rank == 1 and calls[0] == 3 else 1.0
        return parts._replace(total=parts.total * factor)

    original = agents.ppo.ppo_loss
    return mock.patch("agents.ppo.ppo_loss", loss)


def exercise(out_dir):
    """Train every case and write what this rank saw of it."""
    world = open_world("cpu", timeout_s=60)
    torch.set_num_threads(1)
    found = {}
    for name, options in CASES.items():
        sent = Counter()  # bytes and calls of gradient reductions: the only asynchronous ones
        original = dist.all_reduce

        def counted(tensor, *args, sent=sent, original=original, **kwargs):
            if kwargs.get("async_op"):
                sent.update({"calls": 1, "bytes": tensor.nbytes, str(tensor.dtype): 1})
            return original(tensor, *args, **kwargs)

        failing = overflowing_once(world.rank if "overflow" in name else 0)
        with mock.patch("torch.distributed.all_reduce", counted), failing:
            training = trained(world, **options)
        check_in_sync(training.replicated(), world)
        found[name] = {
            "record": {key: training.record()[key] for key in ("parameters", "hashes", "losses")},
            "sent": dict(sent),
            "gradient_bytes": training.ppo.strategy.gradient_bytes,
            "bad_in_a_row": training.ppo.bad_in_a_row,
        }
    torch.save(found, Path(out_dir, f"rank_{world.rank}.pt"))
    close_world(world)
    return 0
