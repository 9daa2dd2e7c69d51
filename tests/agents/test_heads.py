"""Heads: several choices, masks and squashed actions, against known distributions."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policies import SEVERAL, make_inputs, make_policy
from torch.distributions import Categorical

from agents.network import heads
from agents.network.noise import action_noise
from agents.policy import Policy, PolicyConfig
from envs.vector.layout import Layout, Part
from rl_dist.errors import UserError

MASKED = Layout((Part("observation", "vector", (4,)), Part("action_mask", "mask", (9,))))
SMALL = PolicyConfig(hidden_size=8)
WINDOWS = PolicyConfig(hidden_size=8, feature_window=2)
MASK = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
COUNTS = [3, 2, 4]  # of SEVERAL


def one_step(policy, mask, num_envs=1):
    """The same step of several environments: observations with this mask, starts, states."""
    torch.manual_seed(1)
    row = torch.cat([torch.randn(1, policy.num_obs - len(mask)), torch.tensor([mask])], dim=1)
    start = torch.zeros(num_envs, dtype=torch.bool)
    return row.double().expand(num_envs, -1), start, policy.initial_state(num_envs)


def test_log_probability_and_entropy_of_several_choices_are_sums_over_them():
    logits = torch.randn(5, 9, dtype=torch.float64)
    actions = torch.stack([torch.randint(n, (5,)) for n in COUNTS], dim=1)
    found = make_policy(SMALL, SEVERAL).distribution(logits)
    parts = [Categorical(logits=part) for part in logits.split(COUNTS, dim=-1)]
    expected = sum(part.log_prob(a) for part, a in zip(parts, actions.T, strict=True))
    torch.testing.assert_close(found.log_prob(actions), expected)
    torch.testing.assert_close(found.entropy(), sum(part.entropy() for part in parts))


@pytest.mark.parametrize("mask", [[], MASK], ids=["no mask", "mask"])
def test_choices_are_drawn_as_often_as_the_softmax_of_the_allowed_ones_says(mask):
    policy = make_policy(SMALL, SEVERAL, MASKED if mask else 4)
    obs, start, state = one_step(policy, mask, 50_000)
    noise = action_noise(SEVERAL, 1, 0, 50_000, 0, 1)[0]
    logits = policy.network(obs[None, :1], state[:1])[0][0][0, 0]
    allowed = torch.tensor(mask or [1.0] * 9).split(COUNTS)
    drawn = policy.act(obs, state, start, noise)[0]
    greedy = policy.act(obs, state, start)[0]
    for digit, part in enumerate(logits.split(COUNTS)):
        shares = torch.bincount(drawn[:, digit], minlength=len(part)) / 50_000
        assert (shares[allowed[digit] == 0] == 0).all()
        np.testing.assert_allclose(shares, part.softmax(0).detach(), atol=0.01)
        assert (greedy[:, digit] == part.argmax()).all()


def test_probabilities_and_entropy_are_those_among_the_allowed_actions():
    policy = make_policy(SMALL, SEVERAL, MASKED)
    obs, start, state = one_step(policy, MASK)
    logits = policy.network(obs[None], state)[0][0][0, 0]
    first = Categorical(logits=logits[[0, 2]])  # the other two have one allowed choice each

    def evaluate(*actions):
        return policy(obs[None], torch.tensor([[actions]]), state, start[None])

    torch.testing.assert_close(evaluate(2, 1, 2).logprobs[0, 0], first.log_prob(torch.tensor(1)))
    torch.testing.assert_close(evaluate(2, 1, 2).entropy[0, 0], first.entropy())
    assert evaluate(1, 1, 2).logprobs.exp() == 0.0


@pytest.mark.parametrize(
    ("space", "mask", "most"),
    [
        (spaces.Discrete(3), [], [3]),
        (SEVERAL, [], COUNTS),
        (SEVERAL, MASK, [2]),
        (spaces.Discrete(9), MASK, [4]),
        (SEVERAL, [1.0] * 9, COUNTS),
    ],
)
def test_no_entropy_exceeds_that_of_equally_likely_allowed_actions(space, mask, most):
    policy = make_policy(WINDOWS, space, MASKED) if mask else make_policy(SMALL, space)
    obs, _, state = one_step(policy, mask)
    obs = obs.repeat(1, 2) if mask else obs
    largest = policy.largest_entropy(obs)
    assert largest.tolist() == pytest.approx([sum(map(math.log, most))])

    def entropy():
        return policy.distribution(policy.network(obs[None], state)[0][0][0]).entropy()

    assert (entropy() < largest).all()
    policy.actor_head.weight.data.zero_()
    torch.testing.assert_close(entropy(), largest)


def test_the_gradient_ignores_forbidden_actions_and_the_mask_is_no_input():
    policy = make_policy(WINDOWS, SEVERAL, MASKED)
    obs, start, state = one_step(policy, MASK)
    window = torch.cat([torch.zeros_like(obs), obs], dim=1)
    evaluation = policy(window[None], torch.tensor([[[2, 1, 2]]]), state, start[None])
    (evaluation.logprobs + evaluation.entropy).sum().backward()
    gradient = policy.actor_head.weight.grad.abs().sum(1)
    assert gradient[[0, 2]].min() > 0 and gradient[[1, 3, 5, 6, 8]].max() == 0
    assert policy.feature_core.input_size == 4
    rows = obs, one_step(policy, [1.0] * 9)[0]
    values = [policy.act(torch.cat([row, row], dim=1), state, start)[2] for row in rows]
    assert torch.equal(*values)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, -0.5), (1.5, 0.0), (-3.0, -1.0), (0.3, 0.4)])
def test_the_density_of_a_squashed_action_integrates_to_one_and_gives_the_entropy(mean, log_std):
    parameters = torch.tensor([[mean], [log_std]], dtype=torch.float64)
    distribution = heads.SquashedNormal(*parameters)
    before = torch.linspace(-7, 7, 500_001, dtype=torch.float64)[:, None]
    logprobs = distribution.log_prob(before.tanh())
    weights = (1.0 - before.tanh().square()).squeeze(1) * (before[1, 0] - before[0, 0])
    assert float((logprobs.exp() * weights).sum()) == pytest.approx(1.0, abs=1e-4)
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
    obs, _, starts, _ = (tensor[0] for tensor in make_inputs(policy))
    given = obs.float(), policy.initial_state(5), starts
    actions, logprobs, _, _ = policy.act(*given, torch.full((5, 2), 60.0))
    assert actions.max() == 1.0 and torch.isfinite(logprobs).all()
    again = policy(given[0][None], actions[None], given[1], starts[None])
    assert torch.equal(again.logprobs[0], logprobs)
    assert policy.act(*given)[0].abs().max() < 1.0


@pytest.mark.parametrize(
    "space", [spaces.Discrete(2), SEVERAL, spaces.Box(-1.0, np.inf, (2,))], ids=str
)
def test_squashing_needs_continuous_actions_with_bounds(space):
    with pytest.raises(UserError, match="squash_actions"):
        Policy(PolicyConfig(squash_actions=True), 4, space)
