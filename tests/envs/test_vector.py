"""Test that all vector environments meet the contract; test errors in creation."""

import gymnasium
import numpy as np
import pytest
import torch
from env_steps import play, same
from gymnasium.wrappers import TimeAwareObservation
from misbehaving_envs import Saved
from test_trading import MARKETS, make_env

from agents.learner.network.seeds import ENVIRONMENT_STREAM, stream_seeds
from envs import make_vector_env
from envs.memory_tasks import CartPoleVectorEnv
from envs.vector.adapter import OneByOne

SEEDS = stream_seeds(1, ENVIRONMENT_STREAM, 0, 8)


KINDS = [  # (id, vectorization, number of features, whether the state can be saved)
    ("CartPole-v1", "auto", 4, True),
    ("CartPole-v1", "sync", 4, False),
    ("Pendulum-v1", "auto", 3, False),
    ("FrozenLake-v1", "auto", 16, False),
    ("Recall-v0", "auto", 7, True),
    ("Recall-v0", "sync", 7, False),
    ("misbehaving_envs:SavedWithLimit-v0", "auto", 2, True),
    ("trading", "", 33, True),
]


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]} {kind[1]}")
def kind(request):
    """Return a function that makes environments, their number of features, can_snapshot."""
    env_id, vectorization, num_features, can_snapshot = request.param

    def make(count=8, **options):
        if env_id == "trading":  # episodes are short, so several starts are drawn
            return make_env(count, MARKETS, episode_days=2)
        return make_vector_env(env_id, count, vectorization=vectorization, **options)

    return make, num_features, can_snapshot


@pytest.fixture
def played(kind):
    """Return an environment, its first observations, a copy of them, and 60 steps."""
    make, _, _ = kind
    env = make()
    first, _ = env.reset(seed=SEEDS)
    return env, first, first.clone(), play(env, 60)


def test_a_first_observation_has_all_features(kind):
    make, num_features, _ = kind
    env = make()
    assert env.layout.size == num_features
    first, info = env.reset(seed=SEEDS)
    assert first.dtype == torch.float32 and first.shape == (8, num_features) and info == {}


def test_a_returned_tensor_does_not_change_later(played):
    _, first, kept, _ = played
    assert torch.equal(first, kept)


def test_steps_return_one_row_per_environment_in_known_types(played):
    *_, steps = played
    types = [torch.float32, torch.float64, torch.bool, torch.bool, torch.float32]
    assert [tensor.dtype for tensor in steps] == types
    assert {tensor.shape[:2] for tensor in steps} == {(60, 8)}


def test_within_an_episode_the_final_observation_is_the_observation(played):
    *_, (obs, _, terminated, truncated, final_obs) = played
    ended = terminated | truncated
    assert torch.equal(final_obs[~ended], obs[~ended])


def test_two_batches_of_4_equal_one_batch_of_8(kind, played):
    make, _, _ = kind
    _, first, _, steps = played
    halves = []
    for rows in (slice(0, 4), slice(4, 8)):
        half = make(4, env_offset=rows.start)
        assert torch.equal(half.reset(seed=SEEDS[rows])[0], first[rows])
        halves.append(play(half, 60, rows=rows, num_envs=8))
    assert same([torch.cat(pair, dim=1) for pair in zip(*halves, strict=True)], steps)


def test_an_environment_knows_whether_its_state_can_be_saved(kind):
    make, _, can_snapshot = kind
    assert make().can_snapshot is can_snapshot


WITH_STATE = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[3]], indirect=True)


@WITH_STATE
def test_a_state_has_one_row_of_numbers_per_environment(played):
    env, *_ = played
    state = env.get_state()
    assert all(len(t) == 8 and t.dtype in (torch.float64, torch.int64) for t in state.values())


@WITH_STATE
def test_a_new_environment_continues_from_a_state_bit_for_bit(kind, played, tmp_path):
    env, *_, (_, _, terminated, truncated, _) = played
    assert (terminated | truncated).any(), "episodes must end, so that random generators matter"
    torch.save(env.get_state(), tmp_path / "state.pt")
    make, _, _ = kind
    continued = make()
    continued.set_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same(play(continued, 60, first=60), play(env, 60, first=60))


def test_a_snapshot_contains_all_that_a_restart_depends_on():
    class Failing(Saved):
        def step(self, action):
            return super().step(action if self.life != 8 else "none")

    options = {"make": Saved, "env_id": "Saved-v0", "env_restarts": 1}
    env, continued, again = (OneByOne([Saved(), Failing()], **options) for _ in range(3))
    env.reset(seed=SEEDS[:2])
    play(env, 8)
    continued.set_state(env.get_state())
    assert same(play(continued, 9, first=8), play(env, 9, first=8))
    again.set_state(env.get_state())
    assert env.restarts == continued.restarts == again.restarts == [0, 1]


@pytest.fixture
def cart_poles():
    """Return our batch of 6 CartPole environments, and 6 single ones of Gymnasium."""
    return [make_vector_env("CartPole-v1", 6, vectorization=v) for v in ("auto", "sync")]


def test_our_batch_of_cart_pole_replaces_single_environments(cart_poles):
    batch, single = cart_poles
    assert isinstance(batch.env, CartPoleVectorEnv) and isinstance(single, OneByOne)
    assert batch.spaces_json == single.spaces_json


def test_our_batch_of_cart_pole_equals_gymnasiums_environment_bit_for_bit(cart_poles):
    batch, single = cart_poles
    obs, _ = batch.reset(seed=SEEDS[:6])
    assert torch.equal(obs, single.reset(seed=SEEDS[:6])[0])
    generator, limits = torch.Generator().manual_seed(0), 0
    for _ in range(520):
        actions = torch.randint(2, (6,), generator=generator)
        # the first two environments balance their pole until the limit of 500 steps
        actions[:2] = (obs[:2, 2] + obs[:2, 3] > 0).long()
        *columns, info = batch.step(actions)
        *expected, expected_info = single.step(actions)
        assert same([*columns, info["final_obs"]], [*expected, expected_info["final_obs"]])
        obs, limits = columns[0], limits + int(columns[3].sum())
    assert limits == 2


@pytest.mark.parametrize(
    "options",
    [
        {"env_id": "Recall-v0", "env_restarts": 1},
        {"env_id": "CartPole-v1", "env_kwargs": {"sutton_barto_reward": True}},
    ],
)
def test_environments_are_stepped_one_by_one_if_a_batch_lacks_a_feature(options):
    assert isinstance(make_vector_env(num_envs=2, **options), OneByOne)


class Clock(Saved):
    """Environment that observes the step limit in its spec."""

    def _obs(self):
        return np.float32([0, self.spec.max_episode_steps])


gymnasium.register(
    "Clock-v0",
    Clock,
    max_episode_steps=6,
    additional_wrappers=[TimeAwareObservation.wrapper_spec()],
)


@pytest.mark.parametrize("kwargs, limit", [({}, 6), ({"max_episode_steps": 4}, 4)])
def test_environments_and_wrappers_see_the_step_limit_that_ends_their_episodes(kwargs, limit):
    env = make_vector_env(f"{__name__}:Clock-v0", 1, env_kwargs=kwargs)
    env.reset(seed=[0])
    *_, truncated, final_obs = play(env, limit)
    assert truncated.flatten().tolist() == [False] * (limit - 1) + [True]
    assert final_obs[-1].tolist() == [[0, limit, limit]]


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
@pytest.mark.parametrize("space", [None, "a Box of the package gym"])
def test_a_missing_or_foreign_space_is_named(name, space, monkeypatch):
    monkeypatch.setattr(Saved, name, space)
    with pytest.raises(ValueError, match=f"{name} .*Saved.*{space}"):
        make_vector_env("misbehaving_envs:SavedWithLimit-v0", 1)


class UnmadeEnv(gymnasium.Env):
    """Environment that raises an error in its constructor."""

    def __init__(self, how):
        raise KeyError("how")


gymnasium.register("Unmade-v0", UnmadeEnv)
UNMADE = f"{__name__}:Unmade-v0"


@pytest.mark.parametrize(
    "env_id, kwargs, message",
    [
        ("CartPol-v1", {}, "'CartPol-v1' .* Did you mean: `CartPole`"),
        ("no_such_module:Task-v0", {}, "No module named 'no_such_module'.*PYTHONPATH"),
        ("broken_module:Task-v0", {}, r"KeyError: 'seven' \(broken_module.py:1\)"),
        ("ALE/Nowhere-v5", {}, "module:id"),
        ("my_module", {}, "module:id"),
        ("CartPole-v1", {"colour": 1}, "cannot be made: TypeError.* argument 'colour'"),
        (UNMADE, {"how": "stumble"}, r"KeyError: 'how' \(test_vector.py:"),
    ],
)
def test_an_environment_that_cannot_be_made_is_one_line(
    env_id, kwargs, message, tmp_path, monkeypatch
):
    (tmp_path / "broken_module.py").write_text("{}['seven']")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        make_vector_env(env_id, 2, env_kwargs=kwargs)
    assert "\n" not in str(error.value)
