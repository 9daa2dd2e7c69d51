"""Reads of device values by the host; each one empties a GPU's queue of work."""

from collections import Counter
from unittest import mock

import pytest
import torch
from agents_ranks import make_job, world_of_one
from torch.utils._python_dispatch import TorchDispatchMode

from agents.trainer import Training
from rl_dist.strategies import strategy

READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select")


class Reads(TorchDispatchMode):
    """Counts, while it is entered, what would wait for a GPU: by operator or method."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = str(operator.overloadpacket)
        indices = args[1] if name in ("aten.index", "aten.index_put", "aten.index_put_") else ()
        masks = [index for index in indices if index is not None and index.dtype == torch.bool]
        self.counts[name] += name in READS or bool(masks)
        return operator(*args, **(kwargs or {}))

    def __enter__(self):
        self.patches = [
            mock.patch.object(owner, name, self.counting(owner, name))
            for owner, name in ((torch.Tensor, "tolist"), (torch.Tensor, "cpu"))
        ]
        for patch in self.patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        for patch in self.patches:
            patch.stop()

    def counting(self, owner, name):
        read = getattr(owner, name)

        def count(*args):
            self.counts[name] += 1
            return read(*args)

        return count


@pytest.mark.parametrize("name", ["trading, clstm", "trading, mlp"])
def test_the_host_reads_once_after_a_rollout_and_once_after_an_update(name, tmp_path):
    """Nothing is read in a vector step or a gradient step."""
    with world_of_one() as world:
        training = Training(make_job(name, tmp_path, iterations=1), world)
        training.warm_up_normalizers()
        # without the branches of a CPU, which may read
        training.env.reads_steps = False
        with mock.patch.object(strategy, "step_if", lambda finite, optimizer: optimizer.step()):
            with Reads() as collecting:
                collected = training.collect(lifetime_step=16)
            with Reads() as updating:
                training.update(collected)
    assert +collecting.counts == {"cpu": 1} and +updating.counts == {"tolist": 1}


def test_what_reads_is_counted():
    values = torch.ones(3)
    with Reads() as reads:
        values[0].item(), bool(values[0] > 0), values[values > 0], values.nonzero(), values.tolist()
    counts = {"aten._local_scalar_dense": 2, "aten.index": 1, "aten.nonzero": 1, "tolist": 1}
    assert +reads.counts == counts
