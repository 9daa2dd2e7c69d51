"""Reads of device values by the host; each one empties a GPU's queue of work."""

from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from agents_ranks import make_job, world_of_one
from torch.utils._python_dispatch import TorchDispatchMode

from agents.trainer import Training
from rl_dist.strategies import strategy

READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select")


@contextmanager
def counted_reads():
    """Count, by operator or method, what would wait for a GPU."""
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


@pytest.mark.parametrize("name", ["trading, clstm", "trading, mlp"])
def test_the_host_reads_once_after_a_rollout_and_once_after_an_update(name, tmp_path):
    """Nothing is read in a vector step or a gradient step."""
    with world_of_one() as world:
        training = Training(make_job(name, tmp_path, iterations=1), world)
        training.warm_up_normalizers()
        # without the branches of a CPU, which may read
        training.env.reads_steps = False
        with mock.patch.object(strategy, "step_if", lambda finite, optimizer: optimizer.step()):
            with counted_reads() as collecting:
                collected = training.collect(lifetime_step=16)
            with counted_reads() as updating:
                training.update(collected)
    assert +collecting == {"cpu": 1} and +updating == {"tolist": 1}


def test_what_reads_is_counted():
    values = torch.ones(3)
    with counted_reads() as reads:
        values[0].item(), bool(values[0] > 0), values[values > 0], values.nonzero(), values.tolist()
    counts = {"aten._local_scalar_dense": 2, "aten.index": 1, "aten.nonzero": 1, "tolist": 1}
    assert +reads == counts
