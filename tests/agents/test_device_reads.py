"""Count how often the host reads device values: each read waits for all GPU work."""

from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from agents_ranks import make_job
from torch.utils._python_dispatch import TorchDispatchMode

from agents.learner.rollout import STEPS_PER_READ
from agents.learner.trainer import Training
from rl_dist.strategies import strategy

READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select")


@contextmanager
def counted_reads():
    """Count the reads that would wait for a GPU, per operator or tensor method."""
    counts = Counter()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            name = str(operator.overloadpacket)
            indices = args[1] if name in ("aten.index", "aten.index_put", "aten.index_put_") else ()
            masks = [index for index in indices if index is not None and index.dtype == torch.bool]
            counts[name] += name in READS or bool(masks)
            return operator(*args, **(kwargs or {}))

    def counting(name):
        read = getattr(torch.Tensor, name)
        count = lambda *args: counts.update([name]) or read(*args)  # noqa: E731
        return mock.patch.object(torch.Tensor, name, count)

    with Mode(), counting("tolist"), counting("cpu"):
        yield counts


@pytest.mark.parametrize(
    "name, checks",  # a batch of tensors is checked once per rollout
    [
        ("trading, clstm", {}),
        ("trading, mlp", {}),
        ("walk, clstm, batch of tensors", {"tolist": 1}),
    ],
)
def test_the_host_reads_once_in_8_steps_once_after_a_rollout_and_once_after_an_update(
    name, checks, world
):
    """No other vector step and no gradient step reads a device value."""
    job = make_job(name)
    training = Training(job, job.make_env, world)
    training.warm_up_normalizers()
    # Choose the code paths for GPUs: the code paths for the CPU may read values in every step.
    training.env.reads_steps = False
    with mock.patch.object(strategy, "step_if", lambda finite, optimizer: optimizer.step()):
        gpu_reads = mock.patch.dict(STEPS_PER_READ, cpu=STEPS_PER_READ["cuda"])
        with gpu_reads, counted_reads() as collecting:
            collected = training.collect()
        with counted_reads() as updating:
            training.update(collected)
    num_reads = job.config.train.num_steps // STEPS_PER_READ["cuda"] + 1
    assert +collecting == {"cpu": num_reads, **checks} and +updating == {"tolist": 1}
