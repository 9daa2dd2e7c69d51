"""Three ranks and more: a process that has just started reduces gradients as every other one."""

import ordered_ranks
import pytest
import torch
from agents_ranks import world_of_one
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from train_runs import REPO, start

from rl_dist.launch.ranks import launch
from rl_dist.strategies.ordered_ddp import OrderedDDP
from rl_dist.strategies.strategy import EagerAdam

pytestmark = pytest.mark.timeout(300)
PRIVATE = (
    "DistributedDataParallel._build_params_for_reducer, Reducer._push_all_rebuilt_params or "
    "Reducer._rebuild_buckets"
)


@pytest.mark.slow  # what it hangs on is tested below
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_a_first_step_and_a_resumed_training_or_fit_are_bit_for_bit_those_of_one_that_went_on(
    num_ranks, tmp_path
):
    assert launch(ordered_ranks.exercise, (str(tmp_path),), num_ranks) == 0
    for path in sorted(tmp_path.glob("rank_*.pt")):
        found = torch.load(path, weights_only=True)
        assert len(found) > 15
        same = {name for name, rows in found.items() if (rows == rows[0]).all() and rows.any()}
        assert same == found.keys(), f"{path.stem}, torch {torch.__version__}"


def test_adam_without_the_compiler_steps_and_resumes_bit_for_bit_as_torchs():
    results = []
    for kind in (torch.optim.Adam, EagerAdam):
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        optimizer = kind(net.parameters(), lr=0.01, eps=1e-5)
        for step in range(6):
            if step == 3:  # resumed
                saved = optimizer.state_dict()
                optimizer = kind(net.parameters(), lr=0.5)
                optimizer.load_state_dict(saved)
            optimizer.zero_grad()
            net(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
        results.append([*net.parameters(), optimizer.state_dict()["state"][0]["exp_avg_sq"]])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("unused", [False, True])
def test_the_private_parts_of_torch_are_those_of_2_11_to_2_13(unused):
    """Buckets are ordered once, before the first step, the last parameters first."""
    net = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 50), nn.Linear(50, 7))
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    steps = []

    def note(state, bucket):
        steps[-1].append([names[id(parameter)] for parameter in bucket.parameters()])
        return allreduce_hook(None, bucket)

    changed = (
        f"torch {torch.__version__} has changed {PRIVATE}, which rl_dist/strategies/ordered_ddp.py "
        "uses and which was checked with torch 2.11, 2.12 and 2.13: adapt OrderedDDP"
    )
    with world_of_one():
        try:
            wrapped = OrderedDDP(net, bucket_cap_mb=0.01, find_unused_parameters=unused)
        except (AttributeError, TypeError) as error:
            pytest.fail(f"{changed}: {error}")
        wrapped.register_comm_hook(None, note)
        for _ in range(3):
            steps.append([])
            wrapped(torch.ones(2, 40)).sum().backward()
    assert steps[0] == steps[1] == steps[2], changed
    assert unused or (len(steps[0]) > 1 and steps[0][0][0] == "2.bias"), changed


LEAVE_AT_ONCE = """
import faulthandler, torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from train_runs import REPO, start
from agents_ranks import world_of_one
from rl_dist.strategies.ordered_ddp import OrderedDDP

def hook(state, bucket):
    return allreduce_hook(None, bucket)

faulthandler.dump_traceback_later(100, exit=True)  # takes no lock of Python's
for _ in range(2000):
    with world_of_one():
        wrapped = OrderedDDP(torch.nn.Linear(40, 60))
        wrapped.register_comm_hook(None, hook)
        wrapped(torch.ones(2, 40)).sum().backward()
    del wrapped
"""


@pytest.mark.slow
def test_ranks_that_leave_right_after_a_gradient_step_do_not_hang():
    """Freed at once, one in some thousand groups waited for a thread that waited for Python."""
    job = start("-c", LEAVE_AT_ONCE, cwd=REPO)
    _, stderr = job.communicate(timeout=150)
    assert job.returncode == 0, stderr
