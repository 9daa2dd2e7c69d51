"""PocMemory-v0 and MemoryLength-v0 keep the rules of the projects that they come from."""

import gymnasium
import numpy as np
import pytest

import envs  # noqa: F401  registers the ids

SEEDS = range(20)


def play(env, seed, policy):
    """The return and observations of one episode; policy(observations so far) -> action."""
    seen, total = [env.reset(seed=seed)[0]], 0.0
    while True:
        obs, reward, terminated, _, _ = env.step(policy(seen))
        total += reward
        seen.append(obs)
        if terminated:
            return total, np.array(seen)


def to_the_good_end(seen):
    return int(seen[0][2] > 0)


def test_the_signs_of_the_corridor_are_shown_while_the_agent_stands_still():
    _, seen = play(gymnasium.make("PocMemory-v0"), 3, to_the_good_end)
    np.testing.assert_array_equal(seen[:3], np.stack([seen[0]] * 3))
    assert sorted(seen[0][[0, 2]]) == [-1, 1] and not seen[3:, [0, 2]].any()


def test_the_straight_way_to_the_good_end_of_the_corridor_earns_1_2_in_the_mean():
    env = gymnasium.make("PocMemory-v0")
    for seed in SEEDS:
        total, seen = play(env, seed, to_the_good_end)
        way = round(abs(seen[-1][1] - seen[0][1]) / 0.2)
        assert abs(seen[-1][1]) == 1 and 3 <= way <= 7
        assert total == pytest.approx(1.6 - 0.1 * (way - 1))  # 5 steps in the mean: 1.2


def test_the_bad_end_of_the_corridor_costs_what_the_good_one_earns():
    env = gymnasium.make("PocMemory-v0")
    total, seen = play(env, 0, lambda seen: 1 - to_the_good_end(seen))
    way = round(abs(seen[-1][1] - seen[0][1]) / 0.2)
    assert total == pytest.approx(-1.6 - 0.1 * (way - 1))


@pytest.mark.parametrize("length", [1, 5])
def test_the_last_action_after_the_length_earns_1_if_it_is_the_bit(length):
    env = gymnasium.make("MemoryLength-v0", length=length)
    for seed in SEEDS:
        total, seen = play(env, seed, lambda seen: int(seen[0][2] > 0))
        wrong, _ = play(env, seed, lambda seen: int(seen[0][2] < 0))
        assert (total, wrong) == (1.0, -1.0)
        assert len(seen) == length + 2  # bsuite shows the first observation twice
        shown = np.maximum(np.arange(length + 2) - 1, 0)
        np.testing.assert_allclose(seen[:, 0], 1 - shown / length)
        np.testing.assert_array_equal(seen[:, 2] != 0, shown == 0)


def test_a_length_below_one_is_refused():
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        gymnasium.make("MemoryLength-v0", length=0)
