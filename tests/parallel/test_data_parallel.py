"""Strategy dp: what goes to each GPU, cut and put together by hand, is the module on the whole batch.

What needs several GPUs (replicas, threads, copies between devices) is torch's own and is not run here.
"""

import gymnasium
import pytest
import torch
from torch import nn

from agents.policy import Evaluation, Policy, PolicyConfig
from rl_dist.errors import UserError
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.data_parallel import BatchFirst, DataParallel, back_from_first, batch_first
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.world import World

LENGTH, SLOTS, NUM_OBS = 6, 7, 3
BOX, DISCRETE = gymnasium.spaces.Box(-1.0, 1.0, (2,)), gymnasium.spaces.Discrete(4)


def policy_and_inputs(config, space):
    torch.manual_seed(0)
    policy = Policy(config, NUM_OBS, space).double()
    obs = torch.randn(LENGTH, SLOTS, max(config.feature_window, 1) * NUM_OBS, dtype=torch.float64)
    actions = torch.randn(LENGTH, SLOTS, 2).double() if space is BOX else torch.randint(4, (LENGTH, SLOTS))
    state = torch.randn_like(policy.initial_state(SLOTS))
    return policy, (obs, actions, state, torch.rand(LENGTH, SLOTS) < 0.2)


def loss_and_gradients(policy, evaluation):
    loss = sum(part.square().sum() for part in evaluation)
    return loss, torch.autograd.grad(loss, list(policy.parameters()))


@pytest.mark.parametrize("num_parts", [2, 3])
@pytest.mark.parametrize("space", [BOX, DISCRETE], ids=["box", "discrete"])
@pytest.mark.parametrize(
    "config",
    [
        PolicyConfig(hidden_size=5),
        PolicyConfig(hidden_size=5, feature_window=2),
        PolicyConfig(hidden_size=5, policy="mlp"),
        PolicyConfig(hidden_size=5, memory=False),
    ],
    ids=["clstm", "window", "mlp", "no_memory"],
)
def test_slots_cut_into_parts_are_evaluated_as_all_together(config, space, num_parts):
    policy, inputs = policy_and_inputs(config, space)
    parts = zip(*(value.chunk(num_parts) for value in batch_first(inputs, Policy.BATCH_AXES)), strict=True)
    outputs = [BatchFirst(policy, Policy.BATCH_AXES)(*part) for part in parts]
    assert [len(output.values) for output in outputs] == [len(part) for part in torch.zeros(SLOTS).chunk(num_parts)]
    gathered = Evaluation(*(torch.cat(terms) for terms in zip(*outputs, strict=True)))
    together = back_from_first(gathered, Policy.BATCH_AXES[0])
    whole = policy(*inputs)
    for one, other in zip(together, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        loss_and_gradients(policy, together)[1], loss_and_gradients(policy, whole)[1], strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_the_wrapper_takes_and_gives_what_the_module_does():
    policy, inputs = policy_and_inputs(PolicyConfig(hidden_size=5), BOX)
    wrapped = DataParallel(policy, [0, 1], Policy.BATCH_AXES)  # without a GPU, torch cuts nothing
    found, whole = wrapped(*inputs), policy(*inputs)
    assert isinstance(found, Evaluation)
    assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))


def test_a_module_with_the_batch_first_needs_no_axes():
    module, batch = nn.Linear(3, 2), torch.randn(5, 3)
    assert torch.equal(DataParallel(module, [0, 1])(batch), module(batch))


def test_a_state_whose_batch_is_elsewhere_is_refused_by_name_and_shape():
    policy, inputs = policy_and_inputs(PolicyConfig(hidden_size=5), BOX)
    everywhere_1 = DataParallel(policy, [0, 1], (1,))  # the states' axis 1 counts vectors, not slots
    with pytest.raises(UserError, match=r"axis 1 of input 2, whose shape is \[7, 6, 5\].*must be equal") as caught:
        everywhere_1(*inputs)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"axis 1 of input 0, whose shape is \[5\]"):
        DataParallel(nn.Identity(), [0, 1], (1,))(torch.zeros(5))


@pytest.mark.parametrize(
    ("size", "device", "ids", "told"),
    [
        (2, "cuda:0", (0, 1), "works in one process, got 2 ranks"),
        (1, "cpu", (0, 1), "there is none here: use --strategy none"),
        (1, "cuda:0", (0,), "needs at least 2 GPUs, got 1"),
    ],
)
def test_dp_is_refused_where_it_would_do_nothing(size, device, ids, told):
    world = World(rank=0, local_rank=0, size=size, device=torch.device(device), backend="gloo")
    with pytest.raises(UserError, match=told):
        Strategy(StrategyConfig(mode="dp", device_ids=ids), world)


def test_auto_is_no_mode_to_train_with():
    world = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend="gloo")
    with pytest.raises(UserError, match="has to be measured first"):
        Strategy(StrategyConfig(mode="auto"), world)
