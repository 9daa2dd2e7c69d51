"""Compare action heads to known distributions, with and without action masks."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete
from policies import SEVERAL, VECTOR, act, make_policy, small
from torch.distributions import Categorical

from agents.learner.network.noise import action_noise
from agents.learner.policy import Heads
from envs.vector.layout import Layout, Part

MASKED = Layout((Part("observation", "vector", (4,)), Part("action_mask", "mask", (9,))))
WINDOWS = small(feature_window=2)
MASK = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0]
COUNTS = [3, 2, 4]  # number of options of each choice in the action space SEVERAL


def one_step(policy, mask, num_envs=1):
    """Return the inputs of a step: observations (with mask), states, episode starts.

    All environments have the same values.
    """
    torch.manual_seed(1)
    row = torch.cat([torch.randn(1, policy.num_obs - len(mask)), torch.tensor([mask])], dim=1)
    start = torch.zeros(num_envs, dtype=torch.bool)
    return row.double().expand(num_envs, -1), policy.initial_state(num_envs), start


class Choice(NamedTuple):
    """The scores of a choice's options, which ones are allowed, and their distribution."""

    scores: torch.Tensor
    allowed: torch.Tensor
    distribution: Categorical


@pytest.fixture(scope="module", params=[[], MASK], ids=len)
def several(request):
    """Return a policy, the inputs of 50,000 equal steps, and its three choices."""
    mask = request.param
    policy = make_policy(small(), SEVERAL, MASKED if mask else VECTOR)
    obs, state, start = one_step(policy, mask, 50_000)
    actor = policy.act(obs[:1], state[:1], start[:1]).actor_outputs
    scores = actor.detach().flatten().split(COUNTS)
    allowed = torch.tensor(mask or [1] * 9).bool().split(COUNTS)
    pairs = zip(scores, allowed, strict=True)
    return policy, (obs, state, start), [Choice(s, a, Categorical(logits=s[a])) for s, a in pairs]


def evaluation_of(policy, inputs, actions):
    """Evaluate one step with these actions."""
    obs, state, start = inputs
    return policy(obs[None, :1], actions[None, None], state[:1], start[None, :1])


def likeliest(choices):
    return torch.stack([choice.scores.argmax() for choice in choices])


def test_options_are_drawn_by_softmax_and_forbidden_ones_never(several):
    policy, inputs, choices = several
    noise = action_noise(SEVERAL, 1, 0, 50_000, 0, 1)[0]
    drawn, *_ = act(policy, *inputs, noise)
    for digits, (scores, allowed, distribution) in zip(drawn.T, choices, strict=True):
        shares = torch.bincount(digits, minlength=len(scores)) / 50_000
        assert (shares[~allowed] == 0).all()
        np.testing.assert_allclose(shares[allowed], distribution.probs, atol=0.01)


def test_without_noise_every_choice_takes_its_likeliest_option(several):
    policy, inputs, choices = several
    greedy, *_ = act(policy, *inputs)
    assert (greedy == likeliest(choices)).all()


def test_the_log_probability_is_the_sum_over_the_choices(several):
    policy, inputs, choices = several
    expected = sum(choice.distribution.probs.max().log() for choice in choices)
    logprobs = evaluation_of(policy, inputs, likeliest(choices)).logprobs
    torch.testing.assert_close(logprobs.squeeze(), expected)


def test_the_entropy_is_the_sum_over_the_choices(several):
    policy, inputs, choices = several
    expected = sum(choice.distribution.entropy() for choice in choices)
    entropy = evaluation_of(policy, inputs, likeliest(choices)).entropy
    torch.testing.assert_close(entropy.squeeze(), expected)


def test_a_forbidden_option_has_probability_0():
    policy = make_policy(small(), SEVERAL, MASKED)
    forbidden = torch.tensor([1, 1, 2])
    assert evaluation_of(policy, one_step(policy, MASK), forbidden).logprobs.exp() == 0.0


def test_a_single_choice_is_evaluated_like_a_categorical_distribution():
    policy = make_policy(small(), Discrete(5))
    logits = 3.0 * torch.randn(4, 2, 5, dtype=torch.float64)
    actions = torch.randint(5, (4, 2))
    evaluation = policy.evaluate(Heads(logits, logits), actions)
    expected = Categorical(logits=logits)
    torch.testing.assert_close(evaluation.logprobs, expected.log_prob(actions))
    torch.testing.assert_close(evaluation.entropy, expected.entropy())


def test_the_entropy_is_largest_if_all_allowed_actions_are_equally_likely():
    policy = make_policy(WINDOWS, SEVERAL, MASKED)
    obs, state, start = one_step(policy, MASK)
    obs = obs.repeat(1, 2)
    policy.actor_head.weight.data.zero_()
    actor = policy.act(obs, state, start).actor_outputs
    evaluation = policy.evaluate(Heads(actor, actor), torch.zeros(1, 3, dtype=torch.int64))
    for value in (policy.largest_entropy(obs), evaluation.entropy):
        assert value.tolist() == pytest.approx([2 * math.log(2)])


def test_forbidden_actions_get_no_gradient():
    policy = make_policy(WINDOWS, SEVERAL, MASKED)
    obs, state, start = one_step(policy, MASK)
    window = torch.cat([torch.zeros_like(obs), obs], dim=1)
    evaluation = policy(window[None], torch.tensor([[[2, 1, 2]]]), state, start[None])
    (evaluation.logprobs + evaluation.entropy).sum().backward()
    gradient = policy.actor_head.weight.grad.abs().sum(1)
    assert gradient[[0, 2]].min() > 0 and gradient[[1, 3, 5, 6]].max() == 0


def test_the_mask_is_no_input_of_the_network():
    assert make_policy(WINDOWS, SEVERAL, MASKED).feature_core.input_size == 4
