"""Strategy dp: what each GPU gets, cut and joined by hand, is the module on the whole batch.

What needs several GPUs (replicas, threads, copies) is torch's own and is not run here.
"""

import gymnasium
import pytest
import torch
from torch import nn

from agents.policy import Evaluation, Policy, PolicyConfig
from rl_dist.errors import UserError
from rl_dist.strategies.data_parallel import BatchFirst, DataParallel, batch_first

LENGTH = 6
SLOTS = 7
NUM_OBS = 3
BOX = gymnasium.spaces.Box(-1.0, 1.0, (2,))
DISCRETE = gymnasium.spaces.Discrete(4)


def policy_and_inputs(config, space):
    torch.manual_seed(0)
    policy = Policy(config, NUM_OBS, space).double()
    obs = torch.randn(LENGTH, SLOTS, max(config.feature_window, 1) * NUM_OBS, dtype=torch.float64)
    actions = torch.randint(4, (LENGTH, SLOTS))
    if space is BOX:
        actions = torch.randn(LENGTH, SLOTS, 2).double()
    state = torch.randn_like(policy.initial_state(SLOTS))
    return policy, (obs, actions, state, torch.rand(LENGTH, SLOTS) < 0.2)


def gradients(policy, evaluation):
    loss = sum(part.square().sum() for part in evaluation)
    return torch.autograd.grad(loss, list(policy.parameters()))


@pytest.mark.parametrize("space", [BOX, DISCRETE], ids=["box", "discrete"])
@pytest.mark.parametrize(
    "config", [{}, {"feature_window": 2}, {"policy": "mlp"}, {"memory": False}], ids=str
)
def test_slots_cut_into_parts_are_evaluated_as_all_together(config, space):
    policy, inputs = policy_and_inputs(PolicyConfig(hidden_size=5, **config), space)
    chunks = [value.chunk(3) for value in batch_first(inputs, Policy.BATCH_AXES)]
    part_of = BatchFirst(policy, Policy.BATCH_AXES)
    outputs = [part_of(*part) for part in zip(*chunks, strict=True)]
    gathered = Evaluation(*(torch.cat(terms) for terms in zip(*outputs, strict=True)))
    together = Evaluation(*(term.movedim(0, Policy.BATCH_AXES[0]) for term in gathered))
    whole = policy(*inputs)
    torch.testing.assert_close(together, whole, rtol=1e-12, atol=1e-12)
    both = [gradients(policy, each) for each in (together, whole)]
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-10)


def test_the_wrapper_takes_and_gives_what_the_module_does():
    policy, inputs = policy_and_inputs(PolicyConfig(hidden_size=5), BOX)
    wrapped = DataParallel(policy, [0, 1], Policy.BATCH_AXES)  # without a GPU, torch cuts nothing
    found, whole = wrapped(*inputs), policy(*inputs)
    assert isinstance(found, Evaluation)
    assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))


def test_a_state_whose_batch_is_elsewhere_is_refused_by_name_and_shape():
    policy, inputs = policy_and_inputs(PolicyConfig(hidden_size=5), BOX)
    # the states' axis 1 counts vectors, not slots
    everywhere_1 = DataParallel(policy, [0, 1], (1,))
    with pytest.raises(UserError, match=r"axis 1 of input 2, \[7, 6, 5\].*must be as long"):
        everywhere_1(*inputs)
    with pytest.raises(UserError, match=r"axis 1 of input 0, \[5\]"):
        DataParallel(nn.Identity(), [0, 1], (1,))(torch.zeros(5))
