"""Test that sequences equal single steps; test log-probabilities and windows."""

import math

import pytest
import torch
from policies import (
    BOX,
    FORMS,
    ROWS,
    SEVERAL,
    VECTOR,
    act,
    act_stepwise,
    make_inputs,
    make_policy,
    network_of,
    plans_of,
    run_stepwise,
)

from agents.learner.policy import Heads

CASES = ROWS | {
    f"{name}, {space}": (config, space, VECTOR)
    for name, config in FORMS.items()
    for space in (BOX, SEVERAL)
}
# In these policies some parameters get no gradient.
NOT_RECURRENT = (FORMS["window of 1"], FORMS["no memory"])


@pytest.mark.parametrize("case", CASES)
def test_a_sequence_equals_its_single_steps_and_so_do_gradients(case):
    config, space, layout = CASES[case]
    policy = make_policy(config, space, layout)
    obs, state, starts, noise = make_inputs(policy)
    actions, logprobs, values, _ = act_stepwise(policy, obs, state, starts, noise)
    assert actions.shape == (11, 5, *space.shape)

    def gradients(logprobs, values):
        loss = logprobs.sum() + values.square().sum()
        return torch.autograd.grad(loss, list(policy.parameters()))

    resets = starts | (not config.memory)
    actor, stepwise = run_stepwise(network_of(policy), obs, state, resets)
    expected = gradients(policy.evaluate(Heads(actor, stepwise), actions).logprobs, stepwise)
    for plan in plans_of(policy, starts):
        evaluation = policy(obs, actions, state, starts, plan)
        torch.testing.assert_close(evaluation.logprobs, logprobs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(evaluation.values, values, rtol=1e-12, atol=1e-12)
        gradient = gradients(evaluation.logprobs, evaluation.values)
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-11)
    assert config in NOT_RECURRENT or all(gradient.any() for gradient in expected)


def test_log_probability_and_entropy_are_those_of_the_unclipped_normal():
    policy = make_policy(FORMS["clstm"])
    obs, state, starts, _ = make_inputs(policy)
    noise = torch.full((5, 2), 6.0, dtype=torch.float64)
    actions, logprobs, _, _ = act(policy, obs[0], state, starts[0], noise)
    assert (actions > 1.0).all()
    mean = act(policy, obs[0], state, starts[0])[0]
    torch.testing.assert_close(actions, mean + 6.0 * math.exp(-0.5))  # log_std_init is -0.5
    by_hand = 2 * (-0.5 * 36.0 + 0.5 - 0.5 * math.log(2 * math.pi))
    assert logprobs.tolist() == pytest.approx([by_hand] * 5)
    entropy = policy(obs[:1], actions[None], state, starts[:1]).entropy
    assert entropy[0].tolist() == pytest.approx([math.log(2 * math.pi)] * 5)


def test_a_window_is_read_from_oldest_to_newest_observation_starting_with_zero_state():
    policy = make_policy(FORMS["window of 4"])
    window = torch.randn(1, 1, 4 * VECTOR.size, dtype=torch.float64)
    state = torch.zeros(2, 1, 8, dtype=torch.float64)
    features, _ = policy.features(window, state)
    for row in window.view(4, 1, 1, VECTOR.size):
        output, (hidden, cells) = policy.feature_core(row, state)
        state = torch.stack([hidden, cells])
    torch.testing.assert_close(features, policy.feature_mlp(output, state)[0])


@pytest.mark.parametrize("form", ["no memory", "mlp", "clstm"])
def test_without_memory_a_step_depends_on_nothing_before_it(form):
    policy = make_policy(FORMS[form])
    obs, state, starts, noise = make_inputs(policy)
    other = torch.cat([obs[:-1] + 1.0, obs[-1:]])
    last = [policy(seen, noise, state, starts & False).values[-1] for seen in (obs, other)]
    assert torch.equal(*last) != (form == "clstm")
