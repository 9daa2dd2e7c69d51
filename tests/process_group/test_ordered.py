"""Three ranks and more: a process that has just started reduces gradients as one that has gone on."""

import ordered_ranks
import pytest
import torch
from agents_ranks import world_of_one
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from rl_dist.launch.launcher import launch
from rl_dist.parallel.strategy import OrderedDDP

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("num_ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_first_step_and_a_resumed_training_or_fit_are_bit_for_bit_those_of_one_that_went_on(num_ranks, tmp_path):
    assert launch(ordered_ranks.exercise, (str(tmp_path),), num_ranks) == 0
    for path in sorted(tmp_path.glob("rank_*.pt")):
        found = torch.load(path, weights_only=True)
        assert len(found) > 20
        different = [name for name, rows in found.items() if not (rows == rows[0]).all() or not rows.any()]
        assert not different, f"{path.stem}, torch {torch.__version__}: {', '.join(different)}"


@pytest.mark.parametrize("unused", [False, True])
def test_torch_lets_its_buckets_be_ordered_once_the_last_parameters_first(unused):
    net = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 50), nn.Linear(50, 7))
    names, steps = {id(parameter): name for name, parameter in net.named_parameters()}, []

    def note(state, bucket):
        steps[-1].append([names[id(parameter)] for parameter in bucket.parameters()])
        return allreduce_hook(None, bucket)

    with world_of_one():
        wrapped = OrderedDDP(net, bucket_cap_mb=0.01, find_unused_parameters=unused)
        wrapped.register_comm_hook(None, note)
        for _ in range(3):
            steps.append([])
            wrapped(torch.ones(2, 40)).sum().backward()
    changed = (
        f"torch {torch.__version__} has changed DistributedDataParallel._build_params_for_reducer, "
        "Reducer._push_all_rebuilt_params or _rebuild_buckets"
    )
    assert steps[0] == steps[1] == steps[2], changed
    assert unused or (len(steps[0]) > 1 and steps[0][0][0] == "2.bias"), changed
