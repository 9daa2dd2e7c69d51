"""Compare action heads to known distributions, with and without action masks."""

import math

import numpy as np
import pytest
import torch
from policies import SEVERAL, VECTOR, act, make_policy, small
from torch.distributions import Categorical

from agents.learner.network.noise import action_noise
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


@pytest.mark.parametrize("mask", [[], MASK], ids=len)
def test_several_choices_are_independent_softmaxes_over_the_allowed_options(mask):
    policy = make_policy(small(), SEVERAL, MASKED if mask else VECTOR)
    obs, state, start = one_step(policy, mask, 50_000)
    outputs = policy.network(obs[None, :1], state[:1]).outputs
    logits = outputs.actor_outputs[0, 0].detach().split(COUNTS)
    masks = torch.tensor(mask or [1] * 9).bool().split(COUNTS)
    drawn = act(policy, obs, state, start, action_noise(SEVERAL, 1, 0, 50_000, 0, 1)[0])[0]
    greedy = act(policy, obs, state, start)[0]
    logprob = entropy = 0.0
    for digit, (scores, allowed) in enumerate(zip(logits, masks, strict=True)):
        distribution = Categorical(logits=scores[allowed])
        shares = torch.bincount(drawn[:, digit], minlength=len(scores)) / 50_000
        assert (shares[~allowed] == 0).all()
        np.testing.assert_allclose(shares[allowed], distribution.probs, atol=0.01)
        assert (greedy[:, digit] == scores.argmax()).all()
        logprob += distribution.probs.max().log()
        entropy += distribution.entropy()
    evaluation = policy(obs[None, :1], greedy[None, :1], state[:1], start[None, :1])
    torch.testing.assert_close(evaluation.logprobs[0, 0], logprob)
    torch.testing.assert_close(evaluation.entropy[0, 0], entropy)
    if mask:
        forbidden = torch.tensor([[[1, 1, 2]]])
        assert policy(obs[None, :1], forbidden, state[:1], start[None, :1]).logprobs.exp() == 0.0


def test_the_entropy_is_largest_if_all_allowed_actions_are_equally_likely():
    policy = make_policy(WINDOWS, SEVERAL, MASKED)
    obs, state, _ = one_step(policy, MASK)
    obs = obs.repeat(1, 2)
    policy.actor_head.weight.data.zero_()
    outputs = policy.network(obs[None], state).outputs
    entropy = policy.distribution(outputs.actor_outputs[0]).entropy()
    for value in (policy.largest_entropy(obs), entropy):
        assert value.tolist() == pytest.approx([2 * math.log(2)])


def test_the_gradient_ignores_forbidden_actions_and_the_mask_is_no_input():
    policy = make_policy(WINDOWS, SEVERAL, MASKED)
    obs, state, start = one_step(policy, MASK)
    window = torch.cat([torch.zeros_like(obs), obs], dim=1)
    evaluation = policy(window[None], torch.tensor([[[2, 1, 2]]]), state, start[None])
    (evaluation.logprobs + evaluation.entropy).sum().backward()
    gradient = policy.actor_head.weight.grad.abs().sum(1)
    assert gradient[[0, 2]].min() > 0 and gradient[[1, 3, 5, 6]].max() == 0
    assert policy.feature_core.input_size == 4
