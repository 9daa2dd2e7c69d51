import math

import pytest
import torch
from policies import (
    BOX,
    DISCRETE,
    FORMS,
    NUM_OBS,
    ROWS,
    SEVERAL,
    make_inputs,
    make_policy,
    plans_of,
    run_stepwise,
)
from scripted_env import TERMINATED, TRUNCATED, ScriptedEnv

from agents.network.inputs import Normalizer
from agents.policy import PolicyConfig
from agents.rollout import collect, fresh_carry


def act_stepwise(policy, obs, state, starts, noise):
    """Actions, log-probabilities and values of single steps."""
    steps = []
    for step_obs, step_starts, step_noise in zip(obs, starts, noise, strict=True):
        *step, state = policy.act(step_obs, state, step_starts, step_noise)
        steps.append(step)
    return tuple(torch.stack(column) for column in zip(*steps, strict=True))


OF_SPACES = {
    f"{name}, {space}": (config, space, NUM_OBS)
    for name, config in FORMS.items()
    for space in (BOX, DISCRETE, SEVERAL)
}


@pytest.mark.parametrize("form", OF_SPACES | ROWS)
def test_acting_step_by_step_equals_evaluating_the_sequence(form):
    policy = make_policy(*(OF_SPACES | ROWS)[form])
    obs, state, starts, noise = make_inputs(policy)
    actions, logprobs, values = act_stepwise(policy, obs, state, starts, noise)
    assert actions.shape == (11, 5, *(OF_SPACES | ROWS)[form][1].shape)
    for plan in plans_of(policy, starts):
        evaluation = policy(obs, actions, state, starts, plan)
        torch.testing.assert_close(evaluation.logprobs, logprobs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(evaluation.values, values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS | ROWS)
def test_gradients_of_the_sequence_equal_those_of_single_steps(form):
    policy = make_policy(*ROWS[form]) if form in ROWS else make_policy(FORMS[form])
    obs, state, starts, noise = make_inputs(policy)
    actions = act_stepwise(policy, obs, state, starts, noise)[0]
    actor, values = run_stepwise(policy.network, obs, state, starts)
    expected_loss = policy.distribution(actor).log_prob(actions).sum() + values.square().sum()
    expected = torch.autograd.grad(expected_loss, list(policy.parameters()))
    for plan in plans_of(policy, starts):
        evaluation = policy(obs, actions, state, starts, plan)
        loss = evaluation.logprobs.sum() + evaluation.values.square().sum()
        gradients = torch.autograd.grad(loss, list(policy.parameters()))
        for got, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    silent = [
        name
        for (name, _), one in zip(policy.named_parameters(), expected, strict=True)
        if not one.any()
    ]
    nothing_to_remember = {
        "window of 1": ["feature_core.weight_hh_l0"],
        "no memory": [f"{name}_core.weight_hh_l0" for name in ("feature", "actor", "critic")],
    }
    assert silent == nothing_to_remember.get(form, [])


def test_the_log_probability_is_that_of_the_unclipped_sample():
    policy = make_policy(FORMS["clstm"])
    obs, state, starts, _ = make_inputs(policy)
    noise = torch.full((5, 2), 6.0, dtype=torch.float64)
    actions, logprobs, _, _ = policy.act(obs[0], state, starts[0], noise)
    mean, _, _, _ = policy.act(obs[0], state, starts[0])
    assert (actions > 1.0).all()
    torch.testing.assert_close(actions, mean + 6.0 * math.exp(-0.5))  # log_std_init is -0.5
    by_hand = 2 * (-0.5 * 36.0 + 0.5 - 0.5 * math.log(2 * math.pi))
    torch.testing.assert_close(logprobs, torch.full((5,), by_hand, dtype=torch.float64))


def test_entropy_is_that_of_known_distributions():
    policy = make_policy(FORMS["clstm"])
    obs, state, starts, noise = make_inputs(policy)
    each = 0.5 + 0.5 * math.log(2 * math.pi) - 0.5
    entropy = policy(obs, noise, state, starts).entropy
    assert entropy.flatten().tolist() == pytest.approx([2 * each] * 55)
    discrete = make_policy(FORMS["clstm"], DISCRETE)
    torch.nn.init.zeros_(discrete.actor_head.weight)
    actions = torch.zeros(11, 5, dtype=torch.int64)
    entropy = discrete(obs, actions, state, starts).entropy
    assert entropy.flatten().tolist() == pytest.approx([math.log(3)] * 55)


def test_a_window_is_read_from_its_oldest_observation_to_its_newest_from_zero_state():
    policy = make_policy(FORMS["window of 4"])
    window = torch.randn(1, 1, 4 * NUM_OBS, dtype=torch.float64)
    state = torch.zeros(2, 1, 8, dtype=torch.float64)
    for row in window.view(4, 1, 1, NUM_OBS):
        output, state = policy.feature_core(row, state)
    torch.testing.assert_close(policy._windowed_features(window), output)


def scripted_rollouts(config, num_rollouts=3, num_steps=8):
    """Rollouts one after the other, with a normaliser that has something to do."""
    policy = make_policy(config)
    normalizer = Normalizer(NUM_OBS)
    normalizer.moments.merge(normalizer.moments.sums(torch.linspace(-9, 11, 40).view(10, NUM_OBS)))
    env = ScriptedEnv(
        [[(3, TERMINATED), (6, TRUNCATED)], [(20, TRUNCATED)], [(1, TRUNCATED), (2, TERMINATED)]]
    )
    carry = fresh_carry(policy, env.reset()[0])
    noise = torch.randn(num_steps, 3, 2, dtype=torch.float64)
    rollouts = [collect(policy, normalizer, env, carry, noise, 4, 0.9) for _ in range(num_rollouts)]
    return policy, normalizer, rollouts


@pytest.mark.parametrize("size", [2, 4, 7])
def test_row_t_of_a_window_holds_the_observation_of_that_very_day(size):
    """Zeros stand before the start, no row crosses an episode, and windows go on over rollouts."""
    _, normalizer, rollouts = scripted_rollouts(PolicyConfig(hidden_size=8, feature_window=size))
    # [T, B, n, F]
    seen = torch.cat([rollout.obs for rollout in rollouts]).unflatten(-1, (size, NUM_OBS))
    raw = torch.cat([rollout.raw_obs for rollout in rollouts])
    starts = torch.cat([rollout.episode_start for rollout in rollouts])
    for b in range(3):
        begin = 0
        for t in range(len(raw)):
            begin = t if starts[t, b] else begin
            for row in range(size):
                day = t - (size - 1 - row)
                if day < begin:
                    assert seen[t, b, row].abs().max() == 0
                else:
                    torch.testing.assert_close(seen[t, b, row], normalizer(raw[day, b].double()))


def test_without_memory_a_step_depends_on_nothing_before_it():
    policy = make_policy(FORMS["no memory"])
    obs, state, starts, noise = make_inputs(policy)
    other = obs.clone()
    other[:-1] += 1.0
    actions = noise
    values = [policy(seen, actions, state, starts).values[-1] for seen in (obs, other)]
    torch.testing.assert_close(*values, rtol=0, atol=0)
    remembering = make_policy(FORMS["clstm"])
    values = [remembering(seen, actions, state, starts & False).values[-1] for seen in (obs, other)]
    assert (values[0] - values[1]).abs().max() > 1e-6
