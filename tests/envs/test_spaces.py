"""Spaces of all kinds become rows, and actions of all kinds come out; masks are checked."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from envs.vector import adapter
from envs.vector.adapter import TorchVectorEnv
from envs.vector.batched import pack_generator, unpack_generator
from envs.vector.guards import EnvironmentFaultError
from envs.vector.layout import Layout
from rl_dist.errors import UserError

OBSERVATIONS = spaces.Dict(
    camera=spaces.Box(0, 255, (10, 8, 3), np.uint8),
    pose=spaces.Tuple((spaces.Box(-1, 1, (2, 2)), spaces.Discrete(3, start=5))),
    keys=spaces.MultiBinary(3),
    digits=spaces.MultiDiscrete([2, 3]),
    action_mask=spaces.MultiBinary(7),
)
ACTIONS = spaces.Dict(
    move=spaces.Discrete(3, start=-1),
    grip=spaces.Tuple((spaces.MultiBinary(1), spaces.MultiDiscrete([2]))),
)


class DrawnEnv(gymnasium.Env):
    """Draws its observations from its space; episodes end after three steps."""

    def __init__(self, observation_space=OBSERVATIONS, action_space=ACTIONS, mask=None, info=None):
        self.observation_space, self.action_space = observation_space, action_space
        self.mask, self.info = mask, info or {}
        self.age, self.actions = 0, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self.draw(), dict(self.info)

    def draw(self):
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.observation = self.observation_space.sample()
        if isinstance(self.observation_space, spaces.Dict):
            self.observation["action_mask"] = np.array(
                [1] * 7 if self.mask is None else self.mask, np.int8
            )
        return self.observation

    def step(self, action):
        self.age += 1
        self.actions.append(action)
        return self.draw(), float(self.age), False, self.age >= 3, dict(self.info)

    def get_state(self):
        return {"age": self.age, "generator": pack_generator(self.np_random)}

    def set_state(self, state):
        self.age = state["age"]
        unpack_generator(self.np_random, state["generator"])


def around(*envs, **options):
    return TorchVectorEnv(envs, make=lambda: envs[0], env_id="Drawn-v0", **options)


def draw_actions(env, generator):
    sizes = env.single_action_space.nvec.tolist()
    columns = [torch.randint(size, (env.num_envs,), generator=generator) for size in sizes]
    return torch.stack(columns, dim=1)


def test_a_nested_observation_becomes_one_row_of_named_parts():
    inner = DrawnEnv()
    env = around(inner)
    row = env.reset(seed=[3])[0][0]
    kinds = {part.name: (part.kind, part.shape) for part in env.layout.parts}
    assert kinds == {
        "action_mask": ("mask", (7,)), "camera": ("image", (3, 10, 8)),
        "digits": ("plain", (5,)), "keys": ("plain", (3,)),
        "pose/0": ("vector", (4,)), "pose/1": ("plain", (3,)),
    }  # fmt: skip
    found = {part.name: row[place].numpy() for part, place in env.layout.slices()}
    seen = inner.observation
    image = found["camera"].reshape(3, 10, 8)
    np.testing.assert_allclose(image, seen["camera"].transpose(2, 0, 1) / 255.0, rtol=1e-6)
    assert found["pose/0"].tolist() == seen["pose"][0].ravel().tolist()
    assert found["pose/1"].argmax() == seen["pose"][1] - 5 and found["pose/1"].sum() == 1
    assert found["keys"].tolist() == seen["keys"].tolist()
    first, second = found["digits"][:2], found["digits"][2:]
    assert [first.argmax(), second.argmax()] == seen["digits"].tolist()
    assert env.single_observation_space.shape == row.shape == (env.layout.size,)
    assert Layout.from_json(env.layout.to_json()) == env.layout
    described = dict(words.split(": ") for words in env.layout.describe().split("; "))
    assert described["camera"] == "image 3 x 10 x 8 through the CNN"
    assert described["digits"] == "5 numbers as is" and described["pose/0"] == "4 numbers"


BYTES = {  # shape of an image: its axes of frames, channels, height and width
    (84, 84): (0, 1),
    (4, 20, 30): (0, 1, 2),
    (20, 30, 4): (2, 0, 1),
    (10, 10, 12): (2, 0, 1),  # 10 x 10 is a square
    (12, 10, 10): (0, 1, 2),
    (4, 10, 12, 3): (0, 3, 1, 2),
    (4, 3, 12, 10): (0, 1, 2, 3),
}
FLAT = [  # shape and type of what is none
    ((128,), np.uint8),
    ((20, 30), np.float32),
    ((4, 4, 3), np.uint8),
    ((64, 3, 64), np.uint8),
    ((12, 10, 3, 4), np.uint8),  # frames last
    ((9, 9, 65), np.uint8),
    ((22, 9, 10, 3), np.uint8),
    ((2, 2, 9, 9, 3), np.uint8),
    ((20, 30, 4), np.float32),
]


@pytest.mark.parametrize("shape", BYTES)
def test_images_are_bytes_whose_frames_become_channels(shape, caplog):
    inner = DrawnEnv(spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(2))
    env = around(inner)
    row = env.reset(seed=[1])[0][0].numpy()
    (part,) = env.layout.parts
    sides = [shape[axis] for axis in BYTES[shape]]
    assert (part.kind, part.shape) == ("image", (int(np.prod(sides[:-2])), *sides[-2:]))
    pixels = inner.observation.transpose(BYTES[shape]).reshape(part.shape) / 255
    np.testing.assert_allclose(row.reshape(part.shape), pixels, rtol=1e-6)
    assert not caplog.records
    assert env.layout.describe() == f"image {' x '.join(map(str, part.shape))} through the CNN"


@pytest.mark.parametrize("most", [1, 10, 255])
def test_pixels_are_divided_by_the_largest_that_their_space_allows(most):
    inner = DrawnEnv(spaces.Box(0, most, (8, 9, 3), np.uint8), spaces.Discrete(2))
    row = around(inner).reset(seed=[1])[0][0].numpy()
    np.testing.assert_allclose(row.max(), inner.observation.max() / most, rtol=1e-6)
    assert row.max() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(("shape", "dtype"), FLAT)
def test_three_axes_or_more_that_are_no_image_are_named(shape, dtype, caplog):
    adapter._warn_once.cache_clear()
    env = around(DrawnEnv(spaces.Box(0, 255, shape, dtype), spaces.Discrete(2)))
    (part,) = env.layout.parts
    assert (part.kind, part.shape) == ("vector", (np.prod(shape),))
    assert env.reset(seed=[1])[0].max() > 1.0
    assert env.layout.describe() == f"{part.size} numbers"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (len(shape) > 2)
    for line in said:
        named = f"observation {list(shape)} of {np.dtype(dtype)} is read as {part.size} numbers"
        assert named in line


def test_nested_actions_come_out_as_the_environment_wants_them():
    inner = [DrawnEnv(), DrawnEnv()]
    env = around(*inner)
    assert env.single_action_space == spaces.MultiDiscrete([3, 2, 2])
    env.reset(seed=[1, 2])
    env.step(torch.tensor([[0, 1, 0], [2, 0, 1]]))
    for one, expected in zip(inner, [(-1, [1], [0]), (1, [0], [1])], strict=True):
        action = one.actions[0]
        got = (action["move"], list(action["grip"][0]), list(action["grip"][1]))
        assert got == expected and action in one.action_space


def test_boxes_in_a_tuple_are_one_box():
    space = spaces.Tuple((spaces.Box(0.0, 10.0, (1,)), spaces.Box(-1.0, 1.0, (2, 1))))
    inner = DrawnEnv(spaces.Discrete(2), space)
    env = around(inner)
    env.reset(seed=[1])
    env.step(torch.tensor([[0.0, -3.0, 0.5]]))
    assert [part.tolist() for part in inner.actions[0]] == [[5.0], [[-1.0], [0.5]]]


MASKS = {"nothing": [1, 1, 1, 0, 0, 1, 1], "two": [1, 2, 1, 1, 1, 1, 1]}


@pytest.mark.parametrize("where", ["observation", "info"])
@pytest.mark.parametrize("kind", MASKS)
def test_a_useless_mask_names_environment_and_step(where, kind):
    options = {"mask": [1] * 7}
    plain = spaces.Box(-1, 1, (2,))
    good = DrawnEnv() if where == "observation" else DrawnEnv(plain, info={"action_mask": [1] * 7})
    bad = DrawnEnv(**options) if where == "observation" else DrawnEnv(plain, info=dict(good.info))
    env = around(good, bad, env_offset=4, info_mask=where == "info")
    env.reset(seed=[1, 2])
    actions = torch.tensor([[0, 1, 0], [0, 1, 0]])
    env.step(actions)
    if where == "observation":
        bad.mask = MASKS[kind]
    else:
        bad.info["action_mask"] = MASKS[kind]
    wanted = "allows no action of choice 1" if kind == "nothing" else "another number"
    with pytest.raises(EnvironmentFaultError, match=f"number 5 at its step 2: .*{wanted}"):
        env.step(actions)


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ({}, "--info_mask asks for"),
        ({"action_mask": [1, 1]}, "2 numbers, not 7"),
    ],
)
def test_an_info_without_a_fitting_mask_is_a_fault(info, problem):
    env = around(DrawnEnv(spaces.Discrete(2), info=info), info_mask=True)
    with pytest.raises(EnvironmentFaultError, match=problem):
        env.reset(seed=[1])


def test_a_mask_in_info_that_nobody_asked_for_is_mentioned_once(caplog):
    env = around(DrawnEnv(spaces.Discrete(2), info={"action_mask": [1] * 7}))
    env.reset(seed=[1])
    env.step(torch.tensor([[0, 0, 0]]))
    said = [record.getMessage() for record in caplog.records]
    assert said == ["info has an action_mask that is not used: --info_mask uses it"]
    assert [part.kind for part in env.layout.parts] == ["plain"]


def test_a_mask_that_cannot_be_used_is_refused_at_the_start():
    with pytest.raises(ValueError, match="info_mask does nothing"):
        around(DrawnEnv(), info_mask=True)
    short = spaces.Dict(action_mask=spaces.MultiBinary(3))
    with pytest.raises(ValueError, match="part 'action_mask' .* 7 numbers"):
        around(DrawnEnv(short))


def test_a_tuple_of_masks_in_info_is_one_mask():
    masks = (np.array([1, 0, 1], np.int8), np.array([1, 1]), np.array([0, 1]))
    env = around(DrawnEnv(spaces.Discrete(2), info={"action_mask": masks}), info_mask=True)
    assert env.reset(seed=[1])[0][0].tolist()[2:] == [1, 0, 1, 1, 1, 0, 1]


def test_the_last_action_and_reward_are_zero_at_an_episodes_start():
    plain = spaces.Box(-1, 1, (1,))
    info = {"action_mask": [1, 0, 1, 1, 1, 1, 1]}
    inner = DrawnEnv(plain, info=info)
    env = around(inner, info_mask=True, previous_action=True, previous_reward=True)
    kinds = [(part.name, part.kind) for part in env.layout.parts[1:]]
    assert kinds == [
        ("action_mask", "mask"), ("previous_action", "plain"), ("previous_reward", "vector"),
    ]  # fmt: skip
    assert env.reset(seed=[1])[0][0, 1:].tolist() == [1, 0, 1, 1, 1, 1, 1] + [0] * 8
    action = torch.tensor([[2, 0, 1]])
    seen = [0, 0, 1, 1, 0, 0, 1]
    obs = env.step(action)[0]
    assert obs[0, 8:].tolist() == [*seen, 1.0]
    env.step(action)
    obs, _, _, truncated, info = env.step(action)
    assert truncated.all() and obs[0, 8:].tolist() == [0] * 8
    assert info["final_obs"][0, 1:].tolist() == [1] * 7 + [*seen, 3.0]


def test_a_snapshot_of_nested_observations_continues_bit_for_bit():
    options = {"previous_action": True, "previous_reward": True, "env_restarts": 1}
    env, other = (around(DrawnEnv(), DrawnEnv(), **options) for _ in range(2))
    env.reset(seed=[1, 2])
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        env.step(draw_actions(env, generator))
    other.set_state(env.get_state())
    for _ in range(5):
        actions = draw_actions(env, generator)
        for one, expected in zip(other.step(actions)[:4], env.step(actions)[:4], strict=True):
            assert torch.equal(one, expected)


@pytest.mark.parametrize(
    ("lacking", "problem"),
    [
        ("keys", "no part 'keys'"),
        ("pose", r"pose/0 has shape \(1,\), not \(2, 2\)"),
        ("digits", "digits has a value outside MultiDiscrete"),
    ],
)
def test_a_part_that_is_missing_or_unlike_its_space_is_named(lacking, problem):
    class Lacking(DrawnEnv):
        def draw(self):
            found = super().draw()
            if self.age:
                del found[lacking]
                found |= {lacking: unlike[lacking]} if lacking in unlike else {}
            return found

    unlike = {"pose": (np.zeros(1), 5), "digits": np.array([0, 3])}
    env = around(DrawnEnv(), Lacking())
    env.reset(seed=[1, 2])
    with pytest.raises(EnvironmentFaultError, match=f"number 1 at its step 1: .*{problem}"):
        env.step(torch.tensor([[0, 0, 0]] * 2))


def test_a_restarted_environment_repeats_its_last_nested_observation():
    class Falling(DrawnEnv):
        def step(self, action):
            if self.age == 1:
                raise KeyError("fell")
            return super().step(action)

    env = around(Falling(), env_restarts=1)
    env.reset(seed=[1])
    actions = torch.tensor([[0, 0, 0]])
    obs = env.step(actions)[0]
    _, _, _, truncated, info = env.step(actions)
    assert truncated.all() and torch.equal(info["final_obs"], obs)


def test_unbounded_actions_are_said_once(caplog):
    for _ in range(2):
        around(DrawnEnv(spaces.Discrete(2), spaces.Box(-np.inf, 1.0, (2,))))
    assert sum("without bounds" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("text", ["[]", "x", '[["a", "b", [1]]]', '[["a", "image", [3]]]', "3"])
def test_what_is_no_layout_is_one_line(text):
    with pytest.raises(UserError, match="layout"):
        Layout.from_json(text)
