"""Heads: several choices, masks and squashed actions, against known distributions."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policies import NUM_OBS, SEVERAL, make_inputs, make_policy
from torch.distributions import Categorical

from agents.network import heads
from agents.network.noise import action_noise
from agents.policy import Policy, PolicyConfig
from envs.vector.layout import Layout, Part
from rl_dist.errors import UserError

MASKED = Layout((Part("observation", "vector", (4,)), Part("action_mask", "mask", (9,))))
SMALL = PolicyConfig(hidden_size=8)


def masked_policy(space=SEVERAL, **options):
    torch.manual_seed(0)
    policy = Policy(PolicyConfig(hidden_size=8, **options), MASKED, space).double()
    torch.nn.init.normal_(policy.actor_head.weight)
    return policy


def masked_inputs(mask, num_envs):
    """One step of environments that all have this mask."""
    torch.manual_seed(1)
    rows = torch.cat([torch.randn(1, 4), torch.tensor([mask])], dim=1).double()
    return rows.expand(num_envs, -1), torch.zeros(num_envs, dtype=torch.bool)


def test_log_probability_and_entropy_of_several_choices_are_sums_over_them():
    policy = make_policy(SMALL, SEVERAL)
    logits = torch.randn(5, 9, dtype=torch.float64)
    actions = torch.stack([torch.randint(n, (5,)) for n in (3, 2, 4)], dim=1)
    found = policy.distribution(logits)
    each = [Categorical(logits=part) for part in logits.split([3, 2, 4], dim=-1)]
    expected = sum(one.log_prob(a) for one, a in zip(each, actions.T, strict=True))
    torch.testing.assert_close(found.log_prob(actions), expected)
    torch.testing.assert_close(found.entropy(), sum(one.entropy() for one in each))


def test_choices_are_drawn_as_often_as_their_softmax_says():
    policy = make_policy(SMALL, SEVERAL)
    obs = torch.randn(1, NUM_OBS, dtype=torch.float64).expand(20_000, -1)
    start, state = torch.ones(20_000, dtype=torch.bool), policy.initial_state(20_000)
    noise = action_noise(SEVERAL, 1, 0, 20_000, 0, 1)[0]
    actions = policy.act(obs, state, start, noise)[0]
    logits = policy.network(obs[None, :1], state[:1])[0][0][0, 0]
    for digit, part in enumerate(logits.split([3, 2, 4])):
        shares = torch.bincount(actions[:, digit], minlength=len(part)) / 20_000
        np.testing.assert_allclose(shares, part.softmax(0).detach(), atol=0.012)


MASK = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
FORBIDDEN = [(0, 1), (1, 0), (2, 0), (2, 1), (2, 3)]


def test_forbidden_actions_are_never_drawn_in_100_000():
    policy = masked_policy()
    drawn = []
    for step in range(10):
        obs, start = masked_inputs(MASK, 10_000)
        noise = action_noise(SEVERAL, 1, 0, 10_000, step, 1)[0]
        drawn.append(policy.act(obs, policy.initial_state(10_000), start, noise)[0])
    drawn = torch.cat(drawn)
    assert len(drawn) == 100_000 and set(drawn[:, 0].tolist()) == {0, 2}
    for digit, choice in FORBIDDEN:
        assert not (drawn[:, digit] == choice).any()
    greedy = policy.act(obs, policy.initial_state(10_000), start)[0]
    assert all((greedy[:, digit] != choice).all() for digit, choice in FORBIDDEN)


def test_probabilities_and_entropy_are_those_among_the_allowed_actions():
    policy = masked_policy()
    obs, start = masked_inputs(MASK, 1)
    (actor, _), _ = policy.network(obs[None], policy.initial_state(1))
    logits = actor[0, 0]
    first = Categorical(logits=logits[[0, 2]])  # the other two have one allowed choice each
    evaluation = policy(
        obs[None], torch.tensor([[[2, 1, 2]]]), policy.initial_state(1), start[None]
    )
    torch.testing.assert_close(evaluation.logprobs[0, 0], first.log_prob(torch.tensor(1)))
    torch.testing.assert_close(evaluation.entropy[0, 0], first.entropy())
    forbidden = policy(obs[None], torch.tensor([[[1, 1, 2]]]), policy.initial_state(1), start[None])
    assert forbidden.logprobs.exp() == 0.0


@pytest.mark.parametrize(
    ("space", "mask", "most"),
    [
        (spaces.Discrete(3), None, [3]),
        (SEVERAL, None, [3, 2, 4]),
        (SEVERAL, MASK, [2]),
        (spaces.Discrete(9), MASK, [4]),
        (SEVERAL, [1.0] * 9, [3, 2, 4]),
    ],
)
def test_no_entropy_exceeds_that_of_all_allowed_actions_alike(space, mask, most):
    policy = masked_policy(space, feature_window=2) if mask else make_policy(SMALL, space)
    obs = make_inputs(policy)[0][0] if mask is None else masked_inputs(mask, 5)[0].repeat(1, 2)
    largest = policy.largest_entropy(obs)
    assert largest.tolist() == pytest.approx([sum(map(math.log, most))] * 5)
    (actor, _), _ = policy.network(obs[None], policy.initial_state(5))
    entropy = policy.distribution(actor[0]).entropy()
    assert (entropy < largest).all()
    policy.actor_head.weight.data.zero_()
    (actor, _), _ = policy.network(obs[None], policy.initial_state(5))
    torch.testing.assert_close(policy.distribution(actor[0]).entropy(), largest)


def test_the_gradient_ignores_forbidden_actions_and_the_mask_is_no_input():
    policy = masked_policy(feature_window=2)
    obs, start = masked_inputs(MASK, 1)
    window = torch.cat([torch.zeros_like(obs), obs], dim=1)
    actions = torch.tensor([[[2, 1, 2]]])
    evaluation = policy(window[None], actions, policy.initial_state(1), start[None])
    (evaluation.logprobs + evaluation.entropy).sum().backward()
    gradient = policy.actor_head.weight.grad.abs().sum(1)
    assert gradient[[0, 2]].min() > 0 and gradient[[1, 3, 5, 6, 8]].max() == 0
    assert policy.feature_core.input_size == 4
    everything = masked_inputs([1.0] * 9, 1)[0]
    state = policy.initial_state(1)
    values = [
        policy.act(torch.cat([row, row], dim=1), state, start)[2] for row in (obs, everything)
    ]
    assert torch.equal(*values)


def squashed(means, log_std):
    return heads.SquashedNormal(torch.tensor(means).double(), torch.tensor(log_std).double())


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, -0.5), (1.5, 0.0), (-3.0, -1.0), (0.3, 0.4)])
def test_the_density_of_a_squashed_action_integrates_to_one_and_gives_the_entropy(mean, log_std):
    distribution = squashed([mean], [log_std])
    before = torch.linspace(-30, 30, 2_000_001, dtype=torch.float64)[:, None]
    inside = before.abs().squeeze(1) < 7.0
    actions = before.tanh()
    logprobs = distribution.log_prob(actions)[inside]
    slope = (1.0 - actions.square()).squeeze(1)[inside]
    weights = slope * (before[1, 0] - before[0, 0])
    total = (logprobs.exp() * weights).sum()
    assert float(total) == pytest.approx(1.0, abs=1e-4)
    entropy = -(logprobs * logprobs.exp() * weights).sum()
    assert float(distribution.entropy()) == pytest.approx(float(entropy), abs=2e-3)


def test_gradients_of_a_squashed_log_probability_are_the_numerical_ones():
    actions = torch.tensor([[0.3, -0.9], [0.999, 0.0]], dtype=torch.float64)

    def figures(means, log_std):
        distribution = heads.SquashedNormal(means, log_std)
        return distribution.log_prob(actions), distribution.entropy()

    means = torch.tensor([[0.2, -1.0], [2.0, 0.1]], dtype=torch.float64, requires_grad=True)
    log_std = torch.tensor([-0.5, 0.2], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(figures, (means, log_std))


def test_squashed_actions_keep_within_their_bounds_and_saturated_ones_stay_finite():
    policy = make_policy(PolicyConfig(hidden_size=8, squash_actions=True)).float()
    obs, state, starts, _ = (tensor[0] for tensor in make_inputs(policy))
    state = policy.initial_state(5)
    noise = torch.full((5, 2), 60.0)
    actions, logprobs, _, _ = policy.act(obs.float(), state, starts, noise)
    assert actions.max() == 1.0 and torch.isfinite(logprobs).all()
    again = policy(obs.float()[None], actions[None], state, starts[None])
    assert torch.equal(again.logprobs[0], logprobs)
    mean, _, _, _ = policy.act(obs.float(), state, starts)
    assert mean.abs().max() < 1.0


@pytest.mark.parametrize(
    "space", [spaces.Discrete(2), SEVERAL, spaces.Box(-1.0, np.inf, (2,))], ids=str
)
def test_squashing_wants_continuous_actions_with_bounds(space):
    with pytest.raises(UserError, match="squash_actions needs continuous actions with bounds"):
        Policy(PolicyConfig(squash_actions=True), 4, space)


def test_noise_of_several_choices_is_that_of_one_choice_after_the_other():
    together = action_noise(SEVERAL, 3, 2, 4, 8, 16)
    assert together.shape == (16, 4, 9)
    assert torch.equal(together, action_noise(spaces.Discrete(9), 3, 2, 4, 8, 16))
