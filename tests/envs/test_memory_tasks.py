"""The memory tasks: their rules; Gymnasium takes them all."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.utils.env_checker import check_env

from agents.network.seeds import ENVIRONMENT_STREAM, EVALUATION_STREAM, stream_seeds
from envs.memory_tasks import CartPolePositionsEnv, CartPolePositionsVectorEnv, RecallVectorEnv

IDS = ["Recall-v0", "CartPolePositions-v1", "MountainCarPositions-v0"]
SEEDS = stream_seeds(1, ENVIRONMENT_STREAM, 0, 8)


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.filterwarnings("error::UserWarning")
def test_the_single_environments_pass_gymnasiums_checker(env_id):
    check_env(gymnasium.make(env_id).unwrapped, skip_render_check=True)


@pytest.mark.parametrize("env_id", IDS)
def test_gymnasium_makes_the_batch_by_itself_and_an_integer_seed_counts_up(env_id):
    batch = gymnasium.make_vec(env_id, 3)
    listed = gymnasium.make_vec(env_id, 3)
    np.testing.assert_array_equal(batch.reset(seed=5)[0], listed.reset(seed=[5, 6, 7])[0])
    assert batch.reset()[0] in batch.observation_space


@pytest.mark.parametrize("pole", [{}, {"length": 0.8, "masspole": 0.15, "force_mag": 8.0}])
def test_cart_pole_positions_follows_cart_pole_exactly_from_the_same_start(pole):
    batch = CartPolePositionsVectorEnv(4, **pole)
    batch.reset(seed=SEEDS[:4])
    originals = [CartPoleEnv() for _ in range(4)]
    for original, start in zip(originals, batch.state, strict=True):
        for name, value in pole.items():
            setattr(original, name, value)
        original.total_mass = original.masspole + original.masscart
        original.polemass_length = original.masspole * original.length
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


def test_cart_pole_positions_truncates_at_its_own_limit():
    env = CartPolePositionsEnv(max_episode_steps=3)
    env.reset(seed=1)
    assert [env.step(1)[2:4] for _ in range(3)] == [(False, False)] * 2 + [(False, True)]


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


def test_recall_shows_the_cue_once_and_gives_full_reward_to_memory():
    shown = []

    def remember(obs, memory):
        cue = obs[:, :4]
        shown.append(cue.any())
        memory = np.where(cue.any(axis=1), cue.argmax(axis=1), 0 if memory is None else memory)
        return memory, memory

    returns, length = episode_returns(RecallVectorEnv(16), remember, 20)
    np.testing.assert_array_equal(returns, 1.0)
    assert length == 10 and shown == ([True] + [False] * 9) * 20


@pytest.mark.parametrize("answer", range(4))
def test_recall_gives_a_quarter_to_every_constant_answer(answer):
    constant = lambda obs, _: (np.full(len(obs), answer), None)  # noqa: E731
    returns, _ = episode_returns(RecallVectorEnv(64), constant, 50)
    assert returns.mean() == pytest.approx(0.25, abs=0.03)  # standard error 0.008


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
    rest, push = np.zeros(1, np.float32), np.ones(1, np.float32)
    moved = []
    for _ in range(2):  # a push of the episode before is forgotten
        moved.append(env.reset(seed=0)[0] - env.step(rest)[0])
        env.step(push)
    assert moved[0] == moved[1]
    env.reset(seed=0)
    results = [env.step(rest) for _ in range(20)]
    assert sum(reward for _, reward, *_ in results) == 0.0
    assert [truncated for *_, truncated, _ in results].index(True) == 19
