"""Recall-v0 and CartPolePositions-v1: their rules, and a batch equal to single environments."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.utils.env_checker import check_env

from envs.memory_tasks.cartpole_positions import CartPolePositionsEnv, CartPolePositionsVectorEnv
from envs.memory_tasks.recall import RecallEnv, RecallVectorEnv
from rl_dist.seeding import ENVIRONMENT_STREAM, EVALUATION_STREAM, stream_seeds

SEEDS = stream_seeds(1, ENVIRONMENT_STREAM, 0, 8)


@pytest.mark.parametrize("env_id", ["Recall-v0", "CartPolePositions-v1"])
@pytest.mark.filterwarnings("error::UserWarning")
def test_the_single_environments_pass_gymnasiums_checker(env_id):
    check_env(gymnasium.make(env_id).unwrapped, skip_render_check=True)


@pytest.mark.parametrize("env_id", ["Recall-v0", "CartPolePositions-v1"])
def test_gymnasium_makes_the_batch_by_itself_and_an_integer_seed_counts_up(env_id):
    batch = gymnasium.make_vec(env_id, 3)
    listed = gymnasium.make_vec(env_id, 3)
    np.testing.assert_array_equal(batch.reset(seed=5)[0], listed.reset(seed=[5, 6, 7])[0])
    assert batch.reset()[0] in batch.observation_space


@pytest.mark.parametrize(
    ("make_batch", "make_single", "num_actions", "num_steps"),
    [
        (RecallVectorEnv, RecallEnv, 4, 45),
        (CartPolePositionsVectorEnv, CartPolePositionsEnv, 2, 200),
    ],
)
def test_a_batch_equals_single_environments_bit_for_bit(
    make_batch, make_single, num_actions, num_steps
):
    batch = make_batch(8)
    singles = [make_single() for _ in SEEDS]
    obs, _ = batch.reset(seed=SEEDS)
    for single, seed, row in zip(singles, SEEDS, obs, strict=True):
        np.testing.assert_array_equal(single.reset(seed=seed)[0], row)
    rng = np.random.default_rng(0)
    num_ended = 0
    for _ in range(num_steps):
        actions = rng.integers(num_actions, size=8)
        obs, rewards, terminated, truncated, info = batch.step(actions)
        for i, single in enumerate(singles):
            last_obs, reward, single_terminated, single_truncated, _ = single.step(actions[i])
            assert reward == rewards[i]
            assert (single_terminated, single_truncated) == (terminated[i], truncated[i])
            if terminated[i] or truncated[i]:
                num_ended += 1
                np.testing.assert_array_equal(info["final_obs"][i], last_obs)
                last_obs, _ = single.reset()
            np.testing.assert_array_equal(obs[i], last_obs)
    assert num_ended > 8


def test_cart_pole_positions_follows_cart_pole_exactly_from_the_same_start():
    batch = CartPolePositionsVectorEnv(4)
    batch.reset(seed=SEEDS[:4])
    originals = [CartPoleEnv() for _ in range(4)]
    for original, start in zip(originals, batch.state, strict=True):
        original.reset(seed=0)
        original.state = start.copy()
    running = np.ones(4, dtype=bool)
    rng = np.random.default_rng(3)
    for _ in range(60):
        actions = rng.integers(2, size=4)
        _, rewards, terminated, _, info = batch.step(actions)
        for i in np.flatnonzero(running):
            full_obs, reward, original_terminated, _, _ = originals[i].step(actions[i])
            assert (rewards[i], terminated[i]) == (reward, original_terminated)
            if terminated[i]:
                running[i] = False
                np.testing.assert_array_equal(info["final_obs"][i], full_obs[[0, 2]])
            else:
                np.testing.assert_array_equal(batch.state[i], originals[i].state)
    assert not running.any()


@pytest.mark.parametrize(
    "make", [CartPolePositionsEnv, lambda **kwargs: CartPolePositionsVectorEnv(1, **kwargs)]
)
def test_cart_pole_positions_truncates_at_its_own_limit(make):
    env = make(max_episode_steps=3)
    env.reset(seed=[1] if isinstance(env, CartPolePositionsVectorEnv) else 1)
    action = np.array([1]) if isinstance(env, CartPolePositionsVectorEnv) else 1
    ends = [[bool(end) for end in env.step(action)[2:4]] for _ in range(3)]
    assert ends == [[False, False], [False, False], [False, True]]


def episode_returns(env, policy, num_episodes):
    """Play whole lockstep episodes; policy(obs, memory) -> actions, memory."""
    obs, _ = env.reset(seed=stream_seeds(9, EVALUATION_STREAM, 0, env.num_envs))
    memory = None
    total = np.zeros(env.num_envs)
    length = 0
    for _ in range(num_episodes):
        terminated = np.zeros(env.num_envs, dtype=bool)
        while not terminated.any():
            actions, memory = policy(obs, memory)
            obs, rewards, terminated, truncated, _ = env.step(actions)
            assert not truncated.any()
            total += rewards
            length += 1
    return total / num_episodes, length / num_episodes


def test_recall_gives_full_reward_to_memory():
    def remember(obs, memory):
        cue = obs[:, :4]
        memory = np.where(cue.any(axis=1), cue.argmax(axis=1), 0 if memory is None else memory)
        return memory, memory

    returns, length = episode_returns(RecallVectorEnv(16), remember, 20)
    np.testing.assert_array_equal(returns, 1.0)
    assert length == 10


@pytest.mark.parametrize("answer", range(4))
def test_recall_gives_a_quarter_to_every_constant_answer(answer):
    constant = lambda obs, _: (np.full(len(obs), answer), None)  # noqa: E731
    returns, _ = episode_returns(RecallVectorEnv(64), constant, 50)
    assert returns.mean() == pytest.approx(0.25, abs=0.03)  # standard error 0.008


def test_recall_query_tells_nothing_about_the_cue():
    env = RecallVectorEnv(2000)
    obs, _ = env.reset(seed=list(range(2000)))
    cues = obs[:, :4].argmax(axis=1)
    for _ in range(9):
        obs, rewards, terminated, _, _ = env.step(np.zeros(2000, dtype=np.int64))
        assert not obs[:, :4].any() and not rewards.any() and not terminated.any()
    np.testing.assert_array_equal(obs[:, -1], 1.0)
    noise_by_cue = np.array([obs[cues == cue, 4:6].mean(axis=0) for cue in range(4)])
    assert np.abs(noise_by_cue).max() < 0.12  # standard error 0.026


@pytest.mark.parametrize("arguments", [{"num_cues": 1}, {"delay": -1}, {"num_noise": -1}])
def test_recall_refuses_sizes_without_sense(arguments):
    with pytest.raises(ValueError, match="num_cues must be at least 2, delay and num_noise"):
        RecallEnv(**arguments)
