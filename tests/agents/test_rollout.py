"""Test rollouts of scripted episodes, for which all numbers are known."""

import pytest
import torch
from policies import make_policy, small
from scripted_env import BOTH, TERMINATED, TRUNCATED, ScriptedEnv

from agents.learner.network.inputs import Normalizer
from agents.learner.rollout import STEPS_PER_READ, collect, fresh_carry

SCRIPTS = [
    [(3, TERMINATED), (5, TRUNCATED)],
    [(8, TRUNCATED)],  # each episode ends at the last step of a rollout
    [(1, TRUNCATED), (1, TERMINATED), (1, BOTH)],  # every step ends an episode
    [(100, TERMINATED)],
]
GAMMA = 0.5


@pytest.fixture(scope="module")
def normalizer():
    normalizer = Normalizer(4)
    normalizer.moments.merge(normalizer.moments.sums(torch.linspace(-30, 40, 40).view(10, 4)))
    return normalizer


def collected(policy, normalizer, num_steps=8):
    """Collect 16 steps in rollouts of `num_steps`.

    Return the rollouts, the carry after the last one, and the environment.
    """
    env = ScriptedEnv(SCRIPTS)
    carry = fresh_carry(policy, env.reset()[0])
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(16, len(SCRIPTS), 2, dtype=torch.float64, generator=generator)
    rollouts = []
    for part in noise.split(num_steps):
        rollout, carry = collect(policy, normalizer, env, carry, part, 4, GAMMA)
        rollouts.append(rollout)
    return rollouts, carry, env


@pytest.fixture(scope="module")
def rollouts(normalizer):
    return collected(make_policy(small()), normalizer)


@pytest.fixture
def first(rollouts):
    """Return the first rollout."""
    (first, _), _, _ = rollouts
    return first


def steps_of(flags):
    return flags.nonzero().flatten().tolist()


def test_the_first_observation_of_an_episode_is_an_episode_start(rollouts):
    (first, second), _, _ = rollouts
    assert steps_of(first.episode_start[:, 0]) == steps_of(second.episode_start[:, 0]) == [0, 3]
    assert first.episode_start[:, 2].all()


def test_a_rollout_may_begin_within_an_episode(rollouts):
    (_, second), _, _ = rollouts
    # In environment 3, an episode of the first rollout continues in the second one.
    assert second.episode_start[0].tolist() == [True, True, True, False]


def test_the_last_step_of_an_episode_is_terminated_or_truncated(first):
    assert (steps_of(first.terminated[:, 0]), steps_of(first.truncated[:, 0])) == ([2], [7])
    assert steps_of(first.terminated[:, 2]) == [1, 2, 4, 5, 7]
    assert steps_of(first.truncated[:, 2]) == [0, 2, 3, 5, 6]


def test_a_row_holds_an_observation_its_action_and_the_reward(first, rollouts):
    *_, env = rollouts
    ages, episodes = [0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 0, 1, 1, 1, 1, 1]
    assert first.raw_obs[:, 0, 1:3].T.tolist() == [episodes, ages]
    rewards = [10.0 * episode + age for episode, age in zip(episodes, ages, strict=True)]
    assert first.rewards[:, 0].tolist() == rewards
    assert torch.equal(first.actions, torch.stack(env.received[:8]))


def test_stored_observations_are_normalised(first, normalizer):
    torch.testing.assert_close(first.obs, normalizer(first.raw_obs.double()))


def test_within_an_episode_the_next_value_is_the_following_value(first):
    continuing = ~first.episode_end[:-1]
    assert torch.equal(first.next_values[:-1][continuing], first.values[1:][continuing])


def test_the_next_value_is_0_only_at_terminated_steps(first):
    assert torch.equal(first.next_values == 0, first.terminated)


def test_episode_sums_continue_over_rollouts_and_restart_with_each_episode(rollouts):
    (first, second), carry, _ = rollouts
    assert carry.episode_length.tolist() == [0, 0, 0, 16]
    assert float(carry.episode_return[3]) == 2 * sum(300 + age for age in range(16))
    discounted = torch.cat([first.discounted_returns, second.discounted_returns])
    assert discounted[:5, 0].tolist() == [0, 1, 2.5, 10, 16]
    total = 0.0
    # The episode of environment 3 never ends.
    for age, value in enumerate(discounted[:, 3].tolist()):
        total = GAMMA * total + 300.0 + age
        assert value == pytest.approx(total)


@pytest.mark.parametrize("steps", [3, 8])
def test_values_do_not_depend_on_how_often_the_host_reads_truncations(
    normalizer, rollouts, steps, monkeypatch
):
    monkeypatch.setitem(STEPS_PER_READ, "cpu", steps)
    (first, second), _, _ = collected(make_policy(small()), normalizer)
    expected = [rollout.next_values for rollout in rollouts[0]]
    torch.testing.assert_close([first.next_values, second.next_values], expected)


def states_after(policy, rollout, column):
    """Replay a column of a rollout from its start; return the state after each step."""
    state, states = policy.initial_state(1), []
    for obs, start in zip(rollout.obs[:, column], rollout.episode_start[:, column], strict=True):
        state = policy.act(obs[None], state, start[None]).state
        states.append(state[0])
    return states


@pytest.mark.parametrize(
    "window, column, step, rows",
    [
        # The bootstrap value uses the final observation and state of the ended episode, not those
        # of the next episode.
        (0, 1, 7, [[1.0, 0.0, 8.0, 1.0]]),
        (0, 2, 3, [[2.0, 3.0, 1.0, 1.0]]),
        (3, 1, 7, [[1.0, 0, 6, 1], [1.0, 0, 7, 1], [1.0, 0, 8, 1]]),
    ],
)
def test_a_truncated_step_uses_the_value_of_its_final_observation(
    normalizer, window, column, step, rows
):
    policy = make_policy(small(feature_window=window))
    (rollout, _), _, _ = collected(policy, normalizer)
    state = states_after(policy, rollout, column)[step]
    seen = normalizer(torch.tensor(rows).double()).flatten()[None]
    expected = policy.act(seen, state[None], torch.tensor([False])).values[0]
    torch.testing.assert_close(rollout.next_values[step, column], expected)


@pytest.mark.parametrize("window", [0, 3])
def test_bootstrap_values_change_neither_states_nor_windows(normalizer, window):
    """Two rollouts of 8 steps with a bootstrap between them equal a rollout of 16."""
    policy = make_policy(small(feature_window=window))
    halves, carry, _ = collected(policy, normalizer)
    (whole,), whole_carry, _ = collected(policy, normalizer, num_steps=16)
    for name in ("obs", "actions", "logprobs", "values", "rewards", "discounted_returns"):
        parts = [getattr(half, name) for half in halves]
        assert torch.equal(torch.cat(parts), getattr(whole, name))
    for name, tensor in vars(carry).items():
        assert torch.equal(tensor, getattr(whole_carry, name)), name
    if window:
        # A window holds the latest observations of the episode, and zeros before its start.
        days, age = normalizer(whole.raw_obs.double()), whole.raw_obs[..., 2:3]
        for back in range(3):
            expected = days.roll(back, 0) * (age >= back)
            torch.testing.assert_close(whole.obs.unflatten(-1, (3, 4))[:, :, 2 - back], expected)
