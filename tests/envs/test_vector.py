"""The contract of tensor vector environments: Gymnasium's, ours and broken ones."""

from __future__ import annotations

import itertools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from agents.network.seeds import ENVIRONMENT_STREAM, stream_seeds
from envs import make_vector_env
from envs.memory_tasks import CartPoleVectorEnv
from envs.vector.adapter import TorchVectorEnv
from envs.vector.batched import pack_generator, unpack_generator


class ScriptedEnv(gymnasium.Env):
    """Observes (seed, age); an episode has `length` steps, and terminates or is truncated."""

    def __init__(self, observation_space=None, action_space=None, length=5, ends=False):
        self.observation_space = observation_space or spaces.Box(-np.inf, np.inf, (2,))
        self.action_space = action_space or spaces.Discrete(3)
        self.length, self.ends = length, ends
        self.life = self.age = 0
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.first = float(seed)
        self.age = 0
        return self._obs(), {}

    def _obs(self):
        return np.array([self.first, self.age], dtype=np.float32)

    def step(self, action):
        self.life, self.age = self.life + 1, self.age + 1
        self.actions.append(action)
        over = self.age >= self.length
        return self._obs(), float(self.age), self.ends and over, over, {}


def around(*envs, **options):
    """Return the adapter over environments."""
    return TorchVectorEnv(envs, env_id="Scripted-v0", **options)


def random_actions(env, generator):
    if isinstance(env.single_action_space, spaces.Discrete):
        return torch.randint(int(env.single_action_space.n), (env.num_envs,), generator=generator)
    size = (env.num_envs, *env.single_action_space.shape)
    return 3 * torch.rand(size, generator=generator) - 1.5  # beyond the bounds too


def play(env, num_steps, action_seed=0):
    """Return the concatenated outcomes of steps with random actions."""
    generator = torch.Generator().manual_seed(action_seed)
    outcomes = [env.step(random_actions(env, generator)) for _ in range(num_steps)]
    columns = zip(*[(*o[:4], o[4]["final_obs"]) for o in outcomes], strict=True)
    return [torch.stack(column) for column in columns]


@pytest.mark.parametrize(
    ("env_id", "vectorization", "num_features"),
    [
        ("CartPole-v1", "auto", 4),
        ("Pendulum-v1", "auto", 3),
        ("FrozenLake-v1", "auto", 16),
        ("Recall-v0", "auto", 7),
        ("Recall-v0", "sync", 7),
        ("CartPolePositions-v1", "auto", 2),
    ],
)
def test_every_environment_speaks_the_same_tensors(env_id, vectorization, num_features):
    env = make_vector_env(env_id, 6, vectorization=vectorization)
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert env.single_observation_space.shape == (num_features,)
    first, info = env.reset(seed=stream_seeds(1, ENVIRONMENT_STREAM, 0, 6))
    assert first.dtype == torch.float32 and first.shape == (6, num_features) and info == {}
    kept = first.clone()
    obs, rewards, terminated, truncated, final_obs = play(env, 40)
    assert torch.equal(first, kept), "tensors handed out must not change later"
    assert obs.dtype == final_obs.dtype == torch.float32
    assert obs.shape == final_obs.shape == (40, 6, num_features)
    assert rewards.dtype == torch.float64 and rewards.shape == (40, 6)
    assert terminated.dtype == truncated.dtype == torch.bool
    ended = terminated | truncated
    assert torch.equal(final_obs[~ended], obs[~ended])
    env.close()


def test_final_obs_is_the_last_observation_at_truncation_and_at_termination():
    for ends in (False, True):
        env = around(ScriptedEnv(), ScriptedEnv(length=3, ends=ends))
        env.reset(seed=[70, 80])
        obs, rewards, terminated, truncated, final_obs = play(env, 3)
        assert final_obs[2].tolist() == [[70.0, 3.0], [80.0, 3.0]]
        assert obs[2].tolist() == [[70.0, 3.0], [80.0, 0.0]]
        assert rewards[2].tolist() == [3.0, 3.0]
        assert terminated[2].tolist() == [False, ends]
        assert truncated.tolist() == [[False, False], [False, False], [False, True]]


@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "Pendulum-v1", "Recall-v0", "CartPolePositions-v1"]
)
def test_two_batches_of_four_are_one_batch_of_eight(env_id):
    def life(first, count):
        env = make_vector_env(env_id, count, env_offset=first)
        start, _ = env.reset(seed=stream_seeds(3, ENVIRONMENT_STREAM, first, count))
        generator = torch.Generator().manual_seed(0)
        whole = make_vector_env(env_id, 8)  # only shows the shape of the actions of all eight
        columns = [start]
        for _ in range(60):
            obs, rewards, *_ = env.step(random_actions(whole, generator)[first : first + count])
            columns += [obs, rewards[:, None]]
        return torch.cat([column.double() for column in columns], dim=1)

    assert torch.equal(life(0, 8), torch.cat([life(0, 4), life(4, 4)]))


def test_seeds_are_the_documented_words_of_numpys_seed_sequence():
    word = np.random.SeedSequence([7, 1, 12]).generate_state(1, np.uint64)[0]
    assert stream_seeds(7, ENVIRONMENT_STREAM, 12, 1) == [int(word) // 2]


NAMES = spaces.Tuple([spaces.Text(5)])
MIXED = spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1)))


@pytest.mark.parametrize(
    ("kind", "space", "shown"),
    [
        ("observation", spaces.Text(3), r" has observation space Text\(1, 3,"),
        ("observation", spaces.Dict(a=NAMES), r": observation part 'a/0' has space Text\(1, 5,"),
        ("action", spaces.Text(3), r" has action space Text\(1, 3,"),
        ("action", MIXED, " has action space Tuple"),
        ("action", spaces.Box(0, 9, (2,), np.int64), " has action space Box"),
    ],
    ids=str,
)
def test_spaces_without_a_row_of_numbers_are_refused_by_name(kind, space, shown):
    found = f"Scripted-v0{shown}.*, not supported: "
    with pytest.raises(ValueError, match=found):
        around(ScriptedEnv(**{f"{kind}_space": space}))


STRETCHED = spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float64)
UNBOUNDED = spaces.Box(np.array([-np.inf, 0.0]), np.array([np.inf, np.inf]), dtype=np.float64)


@pytest.mark.parametrize(
    ("space", "seen", "actions", "received"),
    [
        (STRETCHED, spaces.Box(-1, 1, (2,)), [[0.5, 0.0], [7.0, -7.0]], [[1.0, 5.0], [2.0, 0.0]]),
        (UNBOUNDED, UNBOUNDED, [[-30.0, -1.0]], [[-30.0, 0.0]]),
        (spaces.Discrete(3, start=-1), spaces.Discrete(3), [0], [-1]),
    ],
)
def test_actions_are_clipped_stretched_over_the_bounds_and_shifted(space, seen, actions, received):
    inner = ScriptedEnv(action_space=space)
    env = around(inner)
    assert type(env.single_action_space) is type(seen)
    assert np.array_equal(getattr(env.single_action_space, "low", 0), getattr(seen, "low", 0))
    env.reset(seed=[1])
    for action in actions:
        env.step(torch.tensor([action]))
    np.testing.assert_array_equal(inner.actions, received)


def test_actions_that_are_not_finite_are_not_blamed_on_the_environment():
    env = make_vector_env("Pendulum-v1", 2)
    env.reset()
    with pytest.raises(ValueError, match="actions must"):
        env.step(torch.full((2, 1), float("nan")))


def test_our_batch_of_cart_pole_goes_gymnasiums_way_to_the_last_bit():
    batch, single = (make_vector_env("CartPole-v1", 6, vectorization=v) for v in ("auto", "sync"))
    assert isinstance(batch.env, CartPoleVectorEnv) and single.guards
    assert batch.spaces_json == single.spaces_json
    seeds = stream_seeds(1, ENVIRONMENT_STREAM, 0, 6)
    obs, _ = batch.reset(seed=seeds)
    assert torch.equal(obs, single.reset(seed=seeds)[0])
    generator, limits = torch.Generator().manual_seed(0), 0
    for _ in range(520):
        actions = torch.randint(2, (6,), generator=generator)
        actions[:2] = (obs[:2, 2] + obs[:2, 3] > 0).long()  # balances to the limit of 500 steps
        *columns, info = batch.step(actions)
        *expected, expected_info = single.step(actions)
        for got, wanted in zip(columns, expected, strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(info["final_obs"], expected_info["final_obs"])
        obs, limits = columns[0], limits + int(columns[3].sum())
    assert limits == 2


@pytest.mark.parametrize(
    "options",
    [
        {"vectorization": "sync"},
        {"env_restarts": 1},
        {"env_kwargs": {"sutton_barto_reward": True}},
        {"env_id": "Recall-v0", "env_restarts": 1},
    ],
)
def test_what_a_batch_lacks_is_stepped_one_by_one(options):
    env = make_vector_env(**{"env_id": "CartPole-v1", "num_envs": 2, **options})
    assert env.guards and env.restarts == [0, 0]


class UnmadeEnv(gymnasium.Env):
    """Lacks a space, or raises when it is made."""

    observation_space = gymnasium.spaces.Discrete(2)

    def __init__(self, how=""):
        if "" + how:
            raise KeyError("how")


gymnasium.register("Unmade-v0", UnmadeEnv)
UNMADE = f"{__name__}:Unmade-v0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env_id": "CartPol-v1"}, "unknown environment 'CartPol-v1': did you mean CartPole-v1"),
        (
            {"env_id": "examples.many_spaces:Order-v0"},
            "unknown environment 'examples.many_spaces:Order-v0': did you mean Orders-v0",
        ),
        (
            {"env_id": "no_such_module:Task-v0"},
            "'no_such_module:Task-v0': there is no module no_such_module in /.* the Python path$",
        ),
        (
            {"env_id": "broken_module:Task-v0"},
            r"KeyError: 'seven' \(broken_module.py:1\): check it",
        ),
        ({"env_kwargs": {"colour": 1}}, "cannot be made: TypeError.* argument 'colour'$"),
        (
            {"env_id": UNMADE, "env_kwargs": {"how": "stumble"}},
            r"KeyError: 'how' \(test_vector.py:",
        ),
        ({"env_id": UNMADE}, f"{UNMADE} cannot be made: AttributeError"),
    ],
)
def test_what_cannot_be_made_is_one_clear_line(arguments, message, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("{}['seven']")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        make_vector_env(**{"env_id": "CartPole-v1", "num_envs": 2, **arguments})
    assert "\n" not in str(error.value)


class TalkativeEnv(ScriptedEnv):
    """Reports numbers, and what is none."""

    def step(self, action):
        odd = {"name": "left", "ragged": [[1], [2, 3]], "three": np.zeros(3), "none": None}
        ratio = np.inf if self.life == 1 and self.first == 70.0 else np.float32(0.5)
        metrics = odd | {"ratio": ratio, "won": True, "one": torch.ones(1)}
        return *super().step(action)[:4], {"metrics": metrics}


def test_of_metrics_only_what_is_no_finite_number_is_left_out_and_said_once(caplog):
    env = around(TalkativeEnv(), TalkativeEnv())
    env.reset(seed=[70, 80])
    play(env, 7)
    sums = {"ratio": (6.5, 13), "won": (14.0, 14), "one": (14.0, 14)}
    assert env.take_metrics() == sums and env.take_metrics() == {}
    for name in ("name", "ragged", "three", "none", "ratio"):
        assert sum(f"['{name}']" in line for line in caplog.messages) == 1


class SavedEnv(ScriptedEnv):
    """A user's environment with the snapshot protocol and randomness of its own."""

    def _obs(self):
        return np.array([self.np_random.random(), self.age], dtype=np.float32)

    def get_state(self):
        own = {"age": self.age, "life": self.life, "level": 0.5}
        return own | {"generator": pack_generator(self.np_random)}

    def set_state(self, state):
        self.age, self.life = state["age"], state["life"]
        unpack_generator(self.np_random, state["generator"])


@pytest.fixture
def saved_env_id():
    gymnasium.register("SavedTest-v0", entry_point=lambda: SavedEnv(length=50), max_episode_steps=7)
    yield "SavedTest-v0"
    del gymnasium.registry["SavedTest-v0"]


@pytest.mark.parametrize(
    ("env_id", "vectorization"),
    [
        *itertools.product(("Recall-v0", "CartPolePositions-v1", "SavedTest-v0"), ("auto", "sync")),
        ("CartPole-v1", "auto"),
    ],
)
def test_a_snapshot_continues_bit_for_bit_in_a_new_environment(
    env_id, vectorization, saved_env_id, tmp_path
):
    env = make_vector_env(env_id, 5, vectorization=vectorization)
    assert env.can_snapshot
    env.reset()
    play(env, 33)
    torch.save(env.get_state(), tmp_path / "state.pt")
    expected = play(env, 60, action_seed=1)

    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(len(t) == 5 and t.dtype in (torch.float64, torch.int64) for t in state.values())
    continued = make_vector_env(env_id, 5, vectorization=vectorization)
    continued.set_state(state)
    assert (expected[2] | expected[3]).any(), "episodes must end for the generators to matter"
    for column, expected_column in zip(play(continued, 60, action_seed=1), expected, strict=True):
        assert torch.equal(column, expected_column)


def test_environments_without_the_protocol_say_that_they_cannot_be_saved():
    env = make_vector_env("Pendulum-v1", 2)
    assert not env.can_snapshot
    with pytest.raises(ValueError, match="Pendulum-v1 cannot be saved"):
        env.get_state()


class RestartableEnv(SavedEnv):
    """Raises in step 9 of a life that began with seed 80."""

    def step(self, action):
        if self.first == 80.0 and self.life == 8:
            raise KeyError("no such price")
        return super().step(action)


def test_a_snapshot_keeps_what_a_restart_depends_on():
    def fresh():
        def make():
            return RestartableEnv(length=50)

        envs = [make(), make()]
        env = TorchVectorEnv(envs, make=make, env_id="Restartable-v0", env_restarts=1)
        env.reset(seed=[70, 80])
        return env

    env, continued = fresh(), fresh()
    play(env, 8)
    continued.set_state(env.get_state())
    pairs = zip(play(continued, 9, action_seed=1), play(env, 9, action_seed=1), strict=True)
    assert all(torch.equal(column, expected) for column, expected in pairs)
    assert env.restarts == continued.restarts == [0, 1]
    again = fresh()
    again.set_state(env.get_state())
    assert again.restarts == [0, 1]
