"""Replicas: DDP's bucket order, devices that round differently, DataParallel."""

import sys

import ordered_ranks
import pytest
import torch
from agents_ranks import world_of_one
from policies import BOX, FORMS, make_inputs, make_policy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from train_runs import REPO, start

from agents.learner.policy import Evaluation
from rl_dist.launch.ranks import launch
from rl_dist.strategies import replicas
from rl_dist.strategies.adam import EagerAdam
from rl_dist.strategies.replicas import DataParallel, OrderedDDP

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow  # the faster tests below check the causes of differences
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_a_resumed_training_or_fit_equals_an_uninterrupted_one_bit_for_bit(num_ranks, tmp_path):
    assert launch(ordered_ranks.exercise, (str(tmp_path),), num_ranks) == 0
    for path in sorted(tmp_path.glob("rank_*.pt")):
        found = torch.load(path, weights_only=True)
        same = {name for name, (whole, resumed) in found.items() if torch.equal(whole, resumed)}
        assert same == found.keys() and {"fit", "training, hybrid"} <= same


def test_the_eager_adam_steps_and_resumes_bit_for_bit_like_that_of_torch():
    results = []
    for kind in (torch.optim.Adam, EagerAdam):
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        optimizer = kind(net.parameters(), lr=0.01, eps=1e-5)
        for _ in range(3):
            saved = optimizer.state_dict()
            optimizer = kind(net.parameters(), lr=0.5)
            optimizer.load_state_dict(saved)
            optimizer.zero_grad()
            net(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
        results.append(nn.utils.parameters_to_vector(net.parameters()))
    assert torch.equal(*results)


@pytest.mark.parametrize("unused", [False, True])
def test_buckets_begin_with_the_last_parameters_from_the_first_step_on(unused):
    """OrderedDDP uses private functions of torch; this test fails if they change."""
    net = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 50), nn.Linear(50, 7))
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    steps = []

    def note(state, bucket):
        steps[-1].append([names[id(parameter)] for parameter in bucket.parameters()])
        return allreduce_hook(None, bucket)

    with world_of_one():
        wrapped = OrderedDDP(net, bucket_cap_mb=0.01, find_unused_parameters=unused)
        wrapped.register_comm_hook(None, note)
        for _ in range(3):
            steps.append([])
            wrapped(torch.ones(2, 40)).sum().backward()
    assert steps[0] == steps[1] == steps[2]
    assert unused or (len(steps[0]) > 1 and steps[0][0][0] == "2.bias")


LEAVE_AT_ONCE = """
import faulthandler, torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from agents_ranks import world_of_one
from rl_dist.strategies.replicas import OrderedDDP

def hook(state, bucket):
    return allreduce_hook(None, bucket)

faulthandler.dump_traceback_later(100, exit=True)  # works without the GIL
for _ in range(2000):
    with world_of_one():
        wrapped = OrderedDDP(torch.nn.Linear(40, 60))
        wrapped.register_comm_hook(None, hook)
        wrapped(torch.ones(2, 40)).sum().backward()
    del wrapped
"""


@pytest.mark.slow
def test_ranks_that_exit_right_after_a_gradient_step_do_not_hang():
    """Freeing a process group right after a step could deadlock.

    The freeing thread would hold the GIL while it waits for a thread of gloo, which needs the GIL.
    """
    job = start("-c", LEAVE_AT_ONCE, cwd=REPO)
    _, stderr = job.communicate(timeout=150)
    assert job.returncode == 0, stderr


def test_ranks_whose_devices_round_differently_stay_equal(ranks):
    first, second = ranks
    assert first["True"] == second["True"]
    # if the ranks do not agree on one gradient norm, their weights drift apart
    assert first["False"] != second["False"]


def test_replicas_cast_their_weights_and_pass_gradients_to_the_parameters(monkeypatch):
    """Make the replicas of DataParallel on a CPU, without copies of the weights."""
    monkeypatch.setattr(
        sys.modules["torch.nn.parallel.replicate"],  # a function hides this module
        "_broadcast_coalesced_reshape",
        lambda tensors, devices, detach: [[x.view_as(x) for x in tensors] for _ in devices],
    )
    policy = make_policy(FORMS["clstm"], BOX).float()
    policy.low_precision = torch.bfloat16
    obs, state, starts, actions = make_inputs(policy)
    inputs = obs.float(), actions.float(), state.float(), starts
    gradients = []
    for module in (policy, nn.parallel.replicate(policy, [0, 1])[1]):
        loss = sum(part.sum() for part in module(*inputs))
        gradients.append(torch.autograd.grad(loss, list(policy.parameters())))
    assert all(map(torch.equal, *gradients))


def test_a_batch_split_over_devices_is_evaluated_like_the_whole_batch(monkeypatch):
    """Split and join the batch by hand, because torch needs GPUs to do this."""
    monkeypatch.setattr(replicas, "scatter", lambda x, devices, axis: x.chunk(len(devices), axis))
    policy = make_policy(FORMS["clstm"], BOX)
    obs, state, starts, actions = make_inputs(policy, num_envs=7)
    inputs = obs, actions, state, starts
    whole, parallel = policy(*inputs), DataParallel(policy, [0, 1])
    # Without GPUs, DataParallel does not split the batch.
    assert all(map(torch.equal, parallel(*inputs), whole))
    parts, options = parallel.scatter(inputs, {}, [0, 1, 2])
    outputs = [policy(*part) for part, _ in zip(parts, options, strict=True)]
    terms = zip(*outputs, strict=True)
    joined = Evaluation(*(torch.cat(parts, policy.BATCH_AXES[0]) for parts in terms))
    torch.testing.assert_close(joined, whole, rtol=1e-12, atol=1e-12)
