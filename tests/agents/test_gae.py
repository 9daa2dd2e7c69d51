import pytest
import torch

from agents.advantages import gae

REWARDS = [1.0, 2.0, 3.0]
VALUES = [0.5, 1.0, 1.5]
NEXT_VALUES = [1.0, 1.5, 2.0]


def run(rewards, values, next_values, episode_end, gamma=0.9, gae_lambda=0.8):
    columns = torch.tensor([rewards, values, next_values], dtype=torch.float64)[..., None]
    ends = torch.tensor(episode_end)[:, None]
    advantages, returns = gae(columns[0], columns[1], columns[2], ends, gamma, gae_lambda)
    assert torch.equal(returns, advantages + columns[1])
    return pytest.approx(advantages[:, 0].tolist(), abs=1e-12)


def test_advantages_of_an_episode_that_goes_on_are_those_computed_by_hand():
    # deltas: 1 + 0.9 - 0.5 = 1.4; 2 + 1.35 - 1 = 2.35; 3 + 1.8 - 1.5 = 3.3; decay 0.72
    assert run(REWARDS, VALUES, NEXT_VALUES, [False] * 3) == [4.80272, 4.726, 3.3]


@pytest.mark.parametrize("next_value", [5.0, 0.0], ids=["truncated", "terminated"])
def test_the_last_step_of_an_episode_bootstraps_from_its_final_value_alone(next_value):
    # what follows belongs to another episode
    last = 2.0 + 0.9 * next_value - 1.0
    found = run(REWARDS, VALUES, [1.0, next_value, 2.0], [False, True, False])
    assert found == [1.4 + 0.72 * last, last, 3.3]


def test_with_lambda_1_returns_are_discounted_rewards_plus_the_bootstrap():
    got = run(REWARDS, VALUES, NEXT_VALUES, [False] * 3, gamma=0.5, gae_lambda=1.0)
    returns = [1 + 0.5 * 2 + 0.25 * 3 + 0.125 * 2, 2 + 0.5 * 3 + 0.25 * 2, 3 + 0.5 * 2]
    assert got == [total - value for total, value in zip(returns, VALUES, strict=True)]


def test_environments_do_not_mix():
    generator = torch.Generator().manual_seed(0)
    rewards, values, next_values = torch.randn(3, 9, 4, generator=generator).double()
    ends = torch.rand(9, 4, generator=generator) < 0.3
    together, _ = gae(rewards, values, next_values, ends, 0.97, 0.9)
    for b in range(4):
        column = (each[:, b : b + 1] for each in (rewards, values, next_values, ends))
        assert torch.equal(together[:, b : b + 1], gae(*column, 0.97, 0.9)[0])
