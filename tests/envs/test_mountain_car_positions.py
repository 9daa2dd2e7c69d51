"""MountainCarPositions-v0 moves as Gymnasium's car does, and shows its position only."""

import gymnasium
import numpy as np
import pytest

import envs  # noqa: F401  registers the ids


@pytest.mark.parametrize("seed", [0, 7])
def test_it_moves_and_pays_as_gymnasiums_car_does(seed):
    theirs, ours = map(gymnasium.make, ("MountainCarContinuous-v0", "MountainCarPositions-v0"))
    state, _ = theirs.reset(seed=seed)
    position, _ = ours.reset(seed=seed)
    for _ in range(999):
        np.testing.assert_allclose(position, state[:1], atol=1e-6)
        push = np.array([1.0 if state[1] >= 0 else -1.0], np.float32)  # always along: it arrives
        state, reward, *ends, _ = theirs.step(push)
        position, own_reward, *own_ends, _ = ours.step(push)
        assert own_reward == pytest.approx(reward) and own_ends == ends
        if ends[0]:
            return
    pytest.fail("the car never arrived")


def test_a_car_at_rest_is_truncated_at_the_limit_without_reward():
    env = gymnasium.make("MountainCarPositions-v0", max_episode_steps=20)
    env.reset(seed=0)
    results = [env.step(np.zeros(1, np.float32)) for _ in range(20)]
    assert sum(reward for _, reward, *_ in results) == 0.0
    assert [truncated for *_, truncated, _ in results].index(True) == 19
