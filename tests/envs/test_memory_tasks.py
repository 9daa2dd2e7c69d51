"""The memory tasks: their rules, and Gymnasium's environment checker."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from envs.memory_tasks import CartPolePositionsVectorEnv, RecallVectorEnv


@pytest.mark.parametrize("env_id", ["Recall-v0", "CartPolePositions-v1", "MountainCarPositions-v0"])
@pytest.mark.filterwarnings("error::UserWarning")
def test_gymnasium_makes_and_checks_single_and_vector_environments(env_id):
    check_env(gymnasium.make(env_id).unwrapped, skip_render_check=True)
    batch, listed = (gymnasium.make_vec(env_id, 3) for _ in range(2))
    np.testing.assert_array_equal(batch.reset(seed=5)[0], listed.reset(seed=[5, 6, 7])[0])
    assert batch.reset()[0] in batch.observation_space


def test_cart_pole_positions_shows_position_and_angle_and_truncates_at_its_own_limit():
    env = CartPolePositionsVectorEnv(2, max_episode_steps=3)
    env.reset(seed=1)
    for step in range(3):
        obs, _, terminated, truncated, info = env.step(np.ones(2))
        assert truncated.all() == (step == 2) and not terminated.any()
        if step < 2:
            np.testing.assert_array_equal(obs, env.state[:, [0, 2]].astype(np.float32))
    assert (info["final_obs"] != obs).all()


def test_recall_adds_noise_between_minus_1_and_1():
    noise = RecallVectorEnv(512).reset(seed=1)[0][:, 4:-1]
    assert -1.0 <= noise.min() < -0.95 and 0.95 < noise.max() <= 1.0


@pytest.mark.parametrize("remembers", [True, False])
def test_recall_rewards_memory_and_gives_a_quarter_to_a_constant_answer(remembers):
    env = RecallVectorEnv(64)
    obs, _ = env.reset(seed=1)
    total, cues = np.zeros(64), np.zeros(64, np.int64)
    for step in range(50 * 10):  # episodes have 10 steps
        shown = obs[:, :4]
        assert (shown.any(axis=1) == (step % 10 == 0)).all()
        if remembers:
            cues = np.where(shown.any(axis=1), shown.argmax(axis=1), cues)
        obs, rewards, terminated, truncated, _ = env.step(cues)
        assert (terminated == (step % 10 == 9)).all() and not truncated.any()
        total += rewards
    assert (total / 50).mean() == pytest.approx(1.0 if remembers else 0.25, abs=0.03)


def test_our_mountain_car_has_the_states_and_rewards_of_gymnasiums():
    theirs, ours = map(gymnasium.make, ("MountainCarContinuous-v0", "MountainCarPositions-v0"))
    state, _ = theirs.reset(seed=7)
    position, _ = ours.reset(seed=7)
    for _ in range(999):
        np.testing.assert_allclose(position, state[:1], atol=1e-6)
        # a push in the direction of motion always reaches the goal
        push = np.array([1.0 if state[1] >= 0 else -1.0], np.float32)
        state, reward, *ends, _ = theirs.step(push)
        position, own_reward, *own_ends, _ = ours.step(push)
        assert own_reward == pytest.approx(reward) and own_ends == ends
        if ends[0]:
            return
    pytest.fail("the car must arrive within 999 steps")


def test_a_push_does_not_move_the_car_of_the_next_episode():
    env = gymnasium.make("MountainCarPositions-v0")
    rest, push = np.zeros(1, np.float32), np.ones(1, np.float32)
    moved = []
    for _ in range(2):
        moved.append(env.reset(seed=0)[0] - env.step(rest)[0])
        env.step(push)
    assert moved[0] == moved[1]
