import pytest
import torch

from agents.gae import gae

REWARDS, VALUES, NEXT_VALUES = [1.0, 2.0, 3.0], [0.5, 1.0, 1.5], [1.0, 1.5, 2.0]


def run(rewards, values, next_values, episode_end, gamma=0.9, gae_lambda=0.8):
    columns = torch.tensor([rewards, values, next_values], dtype=torch.float64)[..., None]
    ends = torch.tensor(episode_end)[:, None]
    advantages, returns = gae(columns[0], columns[1], columns[2], ends, gamma, gae_lambda)
    assert torch.equal(returns, advantages + columns[1])
    return pytest.approx(advantages[:, 0].tolist(), abs=1e-12)


def test_advantages_of_an_episode_that_goes_on_are_those_computed_by_hand():
    # deltas: 1 + 0.9 - 0.5 = 1.4; 2 + 1.35 - 1 = 2.35; 3 + 1.8 - 1.5 = 3.3; decay 0.72
    assert run(REWARDS, VALUES, NEXT_VALUES, [False] * 3) == [4.80272, 4.726, 3.3]


def test_a_truncated_step_bootstraps_from_the_value_of_its_final_observation():
    # V(final_obs) = 5: delta 2 + 4.5 - 1 = 5.5; what follows belongs to another episode
    assert run(REWARDS, VALUES, [1.0, 5.0, 2.0], [False, True, False]) == [1.4 + 0.72 * 5.5, 5.5, 3.3]


def test_a_terminated_step_bootstraps_from_zero():
    assert run(REWARDS, VALUES, [1.0, 0.0, 2.0], [False, True, False]) == [1.4 + 0.72 * 1.0, 1.0, 3.3]


def test_with_lambda_1_returns_are_discounted_rewards_plus_the_bootstrap():
    got = run(REWARDS, VALUES, NEXT_VALUES, [False] * 3, gamma=0.5, gae_lambda=1.0)
    returns = [1 + 0.5 * 2 + 0.25 * 3 + 0.125 * 2, 2 + 0.5 * 3 + 0.25 * 2, 3 + 0.5 * 2]
    assert got == [total - value for total, value in zip(returns, VALUES, strict=True)]


def test_with_lambda_0_advantages_are_one_step_errors():
    assert run(REWARDS, VALUES, NEXT_VALUES, [False] * 3, gae_lambda=0.0) == [1.4, 2.35, 3.3]


def test_a_perfect_critic_leaves_no_advantage():
    """Reward 1 for ever is worth 1 / (1 - gamma)."""
    assert run([1.0] * 5, [10.0] * 5, [10.0] * 5, [False] * 5) == [0.0] * 5


def test_a_rollout_of_one_step_works():
    assert run([1.0], [0.5], [2.0], [True]) == [1 + 1.8 - 0.5]


def test_environments_do_not_mix():
    generator = torch.Generator().manual_seed(0)
    rewards, values, next_values = torch.randn(3, 9, 4, generator=generator).double()
    ends = torch.rand(9, 4, generator=generator) < 0.3
    together, _ = gae(rewards, values, next_values, ends, 0.97, 0.9)
    for b in range(4):
        pick = slice(b, b + 1)
        alone, _ = gae(rewards[:, pick], values[:, pick], next_values[:, pick], ends[:, pick], 0.97, 0.9)
        assert torch.equal(together[:, pick], alone)


def test_cutting_a_rollout_at_an_episode_end_changes_nothing():
    generator = torch.Generator().manual_seed(1)
    rewards, values, next_values = torch.randn(3, 8, 1, generator=generator).double()
    ends = torch.zeros(8, 1, dtype=torch.bool)
    ends[4] = True
    whole, _ = gae(rewards, values, next_values, ends, 0.97, 0.9)
    halves = [
        gae(rewards[part], values[part], next_values[part], ends[part], 0.97, 0.9)[0]
        for part in (slice(0, 5), slice(5, 8))
    ]
    torch.testing.assert_close(torch.cat(halves), whole)
