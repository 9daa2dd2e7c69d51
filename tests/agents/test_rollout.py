import pytest
import torch
from scripted_env import BOTH, TERMINATED, TRUNCATED, ScriptedEnv

from agents.network.inputs import Normalizer
from agents.network.minibatches import to_sequences
from agents.network.noise import sequence_orders
from agents.policy import Policy, PolicyConfig
from agents.rollout import collect, fresh_carry

SCRIPTS = [
    [(3, TERMINATED), (5, TRUNCATED)],
    [(8, TRUNCATED)],  # ends exactly with the rollout
    [(1, TRUNCATED), (1, TERMINATED), (1, BOTH)],  # every step is an end
    [(100, TERMINATED)],
]
NUM_STEPS, BPTT_STEPS, GAMMA = 8, 4, 0.9


def make_policy(**options):
    torch.manual_seed(0)
    return Policy(
        PolicyConfig(hidden_size=8, **options), 4, ScriptedEnv(SCRIPTS).single_action_space
    ).double()


def make_normalizer():
    normalizer = Normalizer(4)
    normalizer.moments.merge(normalizer.moments.sums(torch.linspace(-30, 40, 40).view(10, 4)))
    return normalizer


def collect_some(policy, normalizer, count=1, num_steps=NUM_STEPS, env=None):
    env = env or ScriptedEnv(SCRIPTS)
    carry = fresh_carry(policy, env.reset()[0])
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(16, len(SCRIPTS), 2, dtype=torch.float64, generator=generator)
    cuts = range(0, count * num_steps, num_steps)
    rollouts = [
        collect(policy, normalizer, env, carry, noise[t : t + num_steps], BPTT_STEPS, 0.9)
        for t in cuts
    ]
    return rollouts, carry, env


@pytest.fixture(scope="module")
def policy():
    return make_policy()


@pytest.fixture(scope="module")
def normalizer():
    return make_normalizer()


def test_episode_starts_are_about_inputs_and_ends_about_steps(policy, normalizer):
    (first, second), _, _ = collect_some(policy, normalizer, count=2)
    assert first.episode_start[:, 0].nonzero().flatten().tolist() == [0, 3]
    assert first.terminated[:, 0].nonzero().flatten().tolist() == [2]
    assert first.truncated[:, 0].nonzero().flatten().tolist() == [7]
    assert second.episode_start[:, 0].nonzero().flatten().tolist() == [0, 3]
    assert first.episode_start[:, 1].tolist() == [True] + [False] * 7
    # a rollout's start is no episode's
    assert second.episode_start[0].tolist() == [True, True, True, False]
    assert first.episode_start[:, 2].all()
    assert first.terminated[:, 2].tolist() == [False, True, True] * 2 + [False, True]
    assert first.truncated[:, 2].tolist() == [True, False, True] * 2 + [True, False]
    assert torch.equal(first.episode_end, first.terminated | first.truncated)


def test_observations_and_rewards_stand_beside_the_action_they_belong_to(policy, normalizer):
    (rollout, _), _, env = collect_some(policy, normalizer, count=2)
    ages = [0, 1, 2, 0, 1, 2, 3, 4]
    episodes = [0, 0, 0, 1, 1, 1, 1, 1]
    assert rollout.raw_obs[:, 0, 2].tolist() == ages
    assert rollout.raw_obs[:, 0, 1].tolist() == episodes
    rewards = [10.0 * episode + age for episode, age in zip(episodes, ages, strict=True)]
    assert rollout.rewards[:, 0].tolist() == rewards
    assert rollout.rewards[:, 3].tolist() == [300.0 + age for age in range(8)]
    assert torch.equal(rollout.actions, torch.stack(env.received[:8]))
    torch.testing.assert_close(rollout.obs, normalizer(rollout.raw_obs.double()))


def test_episode_statistics_are_of_plain_rewards_and_go_on_over_rollouts(policy, normalizer):
    (first, second), carry, _ = collect_some(policy, normalizer, count=2)
    assert first.episode_lengths[:, 0].tolist() == [1, 2, 3, 1, 2, 3, 4, 5]
    assert first.episode_returns[:, 0].tolist() == [0, 2, 6, 20, 42, 66, 92, 120]
    assert second.episode_lengths[:, 3].tolist() == list(range(9, 17))
    assert float(second.episode_returns[-1, 3]) == 2 * sum(300 + age for age in range(16))
    assert carry.episode_length.tolist() == [0, 0, 0, 16]
    assert float(carry.episode_return[3]) == float(second.episode_returns[-1, 3])
    (shaped,), _, _ = collect_some(policy, normalizer, env=ScriptedEnv(SCRIPTS, plain=False))
    assert shaped.episode_returns[:, 0].tolist() == [0, 1, 3, 10, 21, 33, 46, 60]


def value_of(policy, normalizer, obs, state):
    seen = normalizer(torch.tensor([obs]).double())
    return policy.act(seen, state[None], torch.tensor([False]))[2][0]


def states_after(policy, rollout, column):
    """The recurrent state after every step of a column, by acting again from the start."""
    state, states = policy.initial_state(1), []
    for obs, start in zip(rollout.obs[:, column], rollout.episode_start[:, column], strict=True):
        state = policy.act(obs[None], state, start[None])[3]
        states.append(state[0])
    return states


def test_the_next_value_is_that_of_the_true_successor(policy, normalizer):
    (rollout,), _, _ = collect_some(policy, normalizer)
    going_on = ~rollout.episode_end[:-1]
    assert torch.equal(rollout.next_values[:-1][going_on], rollout.values[1:][going_on])
    assert rollout.next_values[rollout.terminated].abs().max() == 0
    assert rollout.next_values[~rollout.terminated].abs().min() > 0


def test_a_truncated_step_looks_at_its_final_observation_with_the_state_of_its_episode(
    policy, normalizer
):
    (rollout,), _, _ = collect_some(policy, normalizer)
    after = states_after(policy, rollout, 1)
    # not the next episode's first
    expected = value_of(policy, normalizer, [1.0, 0.0, 8.0, 1.0], after[7])
    torch.testing.assert_close(rollout.next_values[7, 1], expected)
    after = states_after(policy, rollout, 2)
    for t, episode in ((0, 0.0), (3, 3.0), (6, 6.0)):  # t = 2 and 5 terminate as well: zero
        expected = value_of(policy, normalizer, [2.0, episode, 1.0, 1.0], after[t])
        torch.testing.assert_close(rollout.next_values[t, 2], expected)
    assert rollout.next_values[[2, 5], 2].tolist() == [0.0, 0.0]


def test_bootstrap_values_leave_no_trace_in_the_recurrent_state(policy, normalizer):
    """Two rollouts of 8 (a bootstrap value of every environment between) equal one of 16."""
    halves, carry, _ = collect_some(policy, normalizer, count=2)
    (whole,), whole_carry, _ = collect_some(policy, normalizer, num_steps=16)
    for name in ("obs", "actions", "logprobs", "values", "rewards", "episode_returns"):
        both = torch.cat([getattr(half, name) for half in halves])
        assert torch.equal(both, getattr(whole, name)), name
    for name, value in carry.tensors().items():
        assert torch.equal(value, whole_carry.tensors()[name]), name
    for column in range(len(SCRIPTS)):
        state = states_after(policy, whole, column)[-1]
        torch.testing.assert_close(carry.lstm_state[column], state)


def test_a_window_looks_at_the_final_observation_through_its_own_episode():
    policy = make_policy(feature_window=3)
    normalizer = make_normalizer()
    (rollout,), carry, _ = collect_some(policy, normalizer)
    rows = normalizer(torch.tensor([[1.0, 0, 6, 1], [1.0, 0, 7, 1], [1.0, 0, 8, 1]]).double())
    state = states_after(policy, rollout, 1)[7]
    expected = policy.act(rows.flatten()[None], state[None], torch.tensor([False]))[2][0]
    torch.testing.assert_close(rollout.next_values[7, 1], expected)
    assert carry.history[1].abs().max() == 0 and carry.history[3].abs().min() > 0
    (halves, whole) = (
        collect_some(policy, normalizer, count, steps)[0] for count, steps in ((2, 8), (1, 16))
    )
    assert torch.equal(torch.cat([half.obs for half in halves]), whole[0].obs)


def test_sequences_are_shuffled_differently_by_seed_iteration_epoch_and_stratum():
    orders = [
        epoch.tobytes()
        for key in ((1, 1), (2, 1), (1, 2))
        for first in (0, 4)
        for epoch in sequence_orders(key, 3, first, 4, 8, 2)
    ]
    assert len(set(orders)) == len(orders)


def test_sequences_are_steps_of_one_environment_in_order():
    values = torch.arange(6 * 2 * 1).view(6, 2, 1)  # [T, B, 1]; t * 2 + b
    sequences = to_sequences(values, 3)  # [L, K * B, 1]
    assert sequences.shape == (3, 4, 1)
    columns = sequences[:, :, 0].T.tolist()
    assert columns == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]  # (k, b) is column k * B + b
