"""Observations are flattened to rows, actions converted back, masks checked."""

import logging

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envs.vector.adapter import OneByOne, TorchVectorEnv
from envs.vector.guards import EnvironmentFaultError
from envs.vector.layout import Layout
from envs.vector.spaces import ActionDecoder, ObservationEncoder
from rl_dist.errors import UserError
from rl_dist.files import log_once

NESTED = spaces.Dict(
    camera=spaces.Box(0, 255, (10, 8, 3), np.uint8),
    pose=spaces.Tuple((spaces.Box(-1, 1, (2, 2)), spaces.Discrete(3, start=5))),
    keys=spaces.MultiBinary(3),
    digits=spaces.MultiDiscrete([2, 3]),
    action_mask=spaces.MultiBinary(7),
)
CHOICES = spaces.Dict(
    move=spaces.Discrete(3, start=-1),
    grip=spaces.Tuple((spaces.MultiBinary(1), spaces.MultiDiscrete([2]))),
)
PLAIN = spaces.Box(-1, 1, (1,))
ALL = [1] * 7  # an action mask for CHOICES that allows every option


class GivenEnv(gymnasium.Env):
    """Environment whose observation and info the test sets; episodes have 3 steps."""

    def __init__(self, observation_space, action_space=CHOICES, **info):
        self.observation_space, self.action_space = observation_space, action_space
        self.info, self.actions, self.last_obs = info, [], None
        observation_space.seed(0)
        self.obs = observation_space.sample()
        if isinstance(self.obs, dict):
            self.obs["action_mask"] = np.array(ALL, np.int8)

    def reset(self, *, seed=None, options=None):
        self.age = 0
        return self.obs, self.info

    def step(self, action):
        self.age += 1
        self.actions.append(action)
        obs = self.last_obs if self.last_obs and self.age == 3 else self.obs
        return obs, float(self.age), False, self.age >= 3, self.info


def batch_of(*envs, **options):
    """Return a batch of the environments, and environment 0's first observation."""
    env = OneByOne(list(envs), env_id="Given-v0", **options)
    return env, env.reset(seed=list(range(len(envs))))[0][0]


def test_a_line_says_that_images_of_floats_are_not_read_as_images(caplog):
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        ObservationEncoder(spaces.Box(0, 1, (20, 20, 3)), "Given-v0", None)
    assert "1,200 numbers" in caplog.text


def test_a_nested_observation_becomes_a_row_of_named_parts():
    inner = GivenEnv(NESTED)
    env, row = batch_of(inner)
    assert env.layout.describe() == (
        "camera image[3, 10, 8]; pose/0 vector[4]; pose/1 plain[3]; keys plain[3]; "
        "digits plain[5]; action_mask mask[7]"
    )
    camera, digits, pose = inner.obs["camera"], inner.obs["digits"], inner.obs["pose"]
    expected = [
        *camera.transpose(2, 0, 1).ravel(),
        *(*pose[0].ravel(), *np.eye(3)[pose[1] - 5], *inner.obs["keys"]),
        *(*np.eye(2)[digits[0]], *np.eye(3)[digits[1]], *ALL),
    ]
    np.testing.assert_allclose(row.numpy(), expected, rtol=1e-6)
    assert row.shape == (env.layout.size,)
    assert Layout.from_json(env.layout.to_json()) == env.layout


@pytest.mark.parametrize("dtype, value", [(np.float64, 1.7e9 + 2), (np.int64, 50_000_001)])
def test_observations_that_are_not_float32_keep_all_digits(dtype, value):
    inner = GivenEnv(spaces.Box(0, 2**40, (1,), dtype))
    inner.obs = np.array([value], dtype)
    assert batch_of(inner)[1].item() == value


def test_digits_that_the_type_of_the_space_loses_are_reported(caplog):
    inner = GivenEnv(spaces.Dict(price=spaces.Box(-np.inf, np.inf, (1,))))
    inner.obs = {"price": np.array([1.7e9 + 2])}
    batch_of(inner)
    assert "price has values above" in caplog.text and "declare float64" in caplog.text


@pytest.mark.parametrize(
    # axes: frames and channels first, if there are any, then height and width; () for no image
    "shape, largest, axes",
    [
        ((84, 84), 1, (0, 1)),
        ((4, 20, 30), 255, (0, 1, 2)),
        ((20, 30, 4), 5, (2, 0, 1)),
        ((20, 30), 10, (0, 1)),
        ((4, 10, 12, 3), 255, (0, 3, 1, 2)),
        ((128,), 255, ()),
        ((4, 4, 3), 255, ()),
        ((65, 70, 70), 255, ()),
    ],
)
def test_large_byte_arrays_are_images_with_channels_first(shape, largest, axes):
    inner = GivenEnv(spaces.Box(0, largest, shape, np.uint8))
    env, row = batch_of(inner)
    (part,) = env.layout.parts
    expected = inner.obs.ravel()
    if axes:
        *channels, height, width = (shape[axis] for axis in axes)
        assert (part.kind, part.shape) == ("image", (int(np.prod(channels)), height, width))
        expected = inner.obs.transpose(axes).ravel() * (255 / largest)
        assert (row.dtype is torch.uint8) == (255 % largest == 0)
    else:
        assert (part.kind, part.shape) == ("vector", (np.prod(shape),))
    np.testing.assert_allclose(row.numpy(), expected, rtol=1e-6)


STRETCHED = spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float64)
UNBOUNDED = spaces.Box(np.array([-np.inf, 0.0]), np.array([np.inf, np.inf]), dtype=np.float64)
BOXES = spaces.Tuple((spaces.Box(0.0, 10.0, (1,)), spaces.Box(-1.0, 1.0, (2, 1))))


@pytest.mark.parametrize(
    "space, seen, action, received",
    [
        (STRETCHED, "Box", [0.5, -7.0], [1.0, 0.0]),
        (UNBOUNDED, "Box", [-30.0, -1.0], [-30.0, 0.0]),
        (BOXES, "Box", [0.0, -3.0, 0.5], [[5.0], [[-1.0], [0.5]]]),
        (spaces.Discrete(3, start=-1), "Discrete", 0, -1),
        (CHOICES, "MultiDiscrete", [0, 1, 0], [[[1], [0]], -1]),  # Gymnasium sorts keys
    ],
)
def test_actions_are_clipped_stretched_shifted_and_nested(space, seen, action, received):
    def plain(value):
        if isinstance(value, dict | tuple):
            return [plain(part) for part in (value.values() if isinstance(value, dict) else value)]
        return value.tolist()

    inner = GivenEnv(PLAIN, space)
    env, _ = batch_of(inner)
    assert type(env.single_action_space).__name__ == seen
    env.step(torch.tensor([action]))
    assert plain(inner.actions[0]) == received and inner.actions[0] in space


@pytest.mark.parametrize(
    "observation, action, options, named",
    [
        (
            spaces.Dict(a=spaces.Tuple([spaces.Text(5)])),
            CHOICES,
            {},
            "observation space Text.* of a/0",
        ),
        (spaces.Dict(action_mask=spaces.MultiBinary(3)), CHOICES, {}, "action_mask must have 7"),
        (PLAIN, spaces.Tuple((spaces.Discrete(2), PLAIN)), {}, "action space Tuple"),
        (PLAIN, spaces.Box(0, 9, (2,), np.int64), {}, "action space Box"),
        (NESTED, CHOICES, {"info_mask": True}, "info_mask"),
        (PLAIN, PLAIN, {"info_mask": True}, "info_mask"),
    ],
)
def test_unsupported_spaces_are_refused_by_name(observation, action, options, named):
    with pytest.raises(ValueError, match=f"Given-v0.*{named}|{named}.*Given-v0"):
        batch_of(GivenEnv(observation, action), **options)


@pytest.mark.parametrize(
    "observation, name, value, problem",
    [
        (NESTED, "pose", (np.zeros(1), 5), r"pose/0 has shape \(1,\), not \(2, 2\)"),
        (NESTED, "camera", np.zeros((10, 8, 3)), "camera has type float64, not uint8"),
        (NESTED, "camera", np.full((10, 8, 3), 256), "camera has a value outside its space: 256"),
        (NESTED, "digits", np.array([0, 0.5]), "digits has a value outside"),
        (NESTED, "action_mask", np.array([1, 2, 1, 1, 1, 1, 1]), "action_mask"),
        (PLAIN, "action_mask", np.array([1, 1, 1, 0, 0, 1, 1]), "action_mask"),
        (PLAIN, "action_mask", [1, 1], r"action_mask must have 7 .*\[2\]"),
        (PLAIN, "other", 0, "'action_mask'"),
    ],
)
def test_the_error_for_a_wrong_observation_or_mask_names_environment_and_step(
    observation, name, value, problem
):
    in_info = observation is PLAIN
    good, bad = (GivenEnv(observation, action_mask=ALL) for _ in range(2))
    env, _ = batch_of(good, bad, env_offset=4, info_mask=in_info)
    actions = torch.tensor([[0, 1, 0]] * 2)
    env.step(actions)
    if in_info:
        bad.info = {name: value}
    else:
        bad.obs = bad.obs | {name: value}
    with pytest.raises(EnvironmentFaultError, match=f"number 5 at its step 2: .*{problem}"):
        env.step(actions)


def test_masks_and_the_last_action_and_reward_are_parts_of_the_row():
    # Each subspace of the action space has a mask.
    masks = (np.array([1, 0, 1], np.int8), np.array([1, 1]), np.array([0, 1]))
    inner = GivenEnv(PLAIN, action_mask=masks)
    env, row = batch_of(inner, info_mask=True, previous_action=True, previous_reward=True)
    assert env.layout.kinds() == "vector[1] mask[7] plain[7] vector[1]"
    mask, action = [1, 0, 1, 1, 1, 0, 1], torch.tensor([[2, 0, 1]])
    assert row[1:].tolist() == mask + [0] * 8
    seen = [0, 0, 1, 1, 0, 0, 1]
    assert env.step(action)[0][0, 1:].tolist() == mask + [*seen, 1.0]
    env.step(action)
    obs, _, _, truncated, info = env.step(action)
    assert truncated.all() and obs[0, 1:].tolist() == mask + [0] * 8
    assert info["final_obs"][0, 1:].tolist() == ALL + [*seen, 3.0]


def test_the_previous_action_is_an_input_as_the_environment_received_it():
    decoder = ActionDecoder(spaces.Box(-2.0, 2.0, (2,)), "of this test")
    assert decoder.encode(np.array([[3.0, -0.5]])).tolist() == [[1.0, -0.5]]


PAIR = spaces.Tuple([spaces.Discrete(2), spaces.MultiDiscrete([2, 3])])
BITS = {n: spaces.MultiBinary(n) for n in range(1, 8)}
FORMS = {  # form: (action space, space of the mask, mask)
    "as the actions": (
        spaces.Dict(b=spaces.Discrete(2), a=PAIR),  # the keys are not sorted
        spaces.Dict(a=spaces.Tuple([BITS[2], BITS[5]]), b=BITS[2]),
        {"a": ([1, 1], [0, 1, 0, 1, 1]), "b": [1, 0]},
    ),
    "one per choice": (
        spaces.Tuple([spaces.Discrete(2), PAIR]),
        spaces.Tuple([BITS[2], spaces.Tuple([BITS[2], spaces.Tuple([BITS[2], BITS[3]])])]),
        ([1, 0], ([1, 1], ([0, 1], [0, 1, 1]))),
    ),
}


@pytest.mark.parametrize("place", ["observation", "info"])
@pytest.mark.parametrize("form", FORMS)
def test_a_mask_is_used_in_every_form_that_the_actions_allow(form, place):
    actions, space, mask = FORMS[form]
    inner = GivenEnv(PLAIN, actions, action_mask=mask)
    if place == "observation":
        inner.observation_space = spaces.Dict(state=spaces.Dict(action_mask=space, pose=PLAIN))
        inner.obs = {"state": {"action_mask": mask, "pose": [0.0]}}
    env, row = batch_of(inner, info_mask=place == "info")
    assert row[env.layout.columns("mask")].tolist() == [1, 0, 1, 1, 0, 1, 0, 1, 1]


@pytest.mark.parametrize(
    "actions, entry, space",
    [
        (CHOICES, "mask", BITS[7]),
        (CHOICES, "Mask", spaces.Box(0, 255, (7,), np.uint8)),
        (CHOICES, "ActionMask", BITS[3]),
        (PAIR, "valid", spaces.Tuple([BITS[2], BITS[5]])),
        (CHOICES, "action_mask", spaces.Dict(move=BITS[3])),
        (PAIR, "action_mask", spaces.Tuple([BITS[2], BITS[5], BITS[2]])),
        (spaces.MultiDiscrete([2, 3]), "action_mask", spaces.Tuple([BITS[3], BITS[2]])),
        (PLAIN, "action_mask", BITS[1]),
    ],
)
def test_what_looks_like_a_mask_but_cannot_be_used_is_refused(actions, entry, space):
    with pytest.raises(ValueError, match=f"Given-v0.*{entry}"):
        batch_of(GivenEnv(spaces.Dict(state=spaces.Dict({entry: space})), actions))


def test_a_second_mask_is_refused():
    inner = GivenEnv(spaces.Dict({name: spaces.Dict(action_mask=BITS[7]) for name in "ab"}))
    with pytest.raises(ValueError, match="several action_mask"):
        batch_of(inner)


def test_an_entry_called_mask_that_masks_no_actions_is_an_input():
    names = spaces.Dict(mask=spaces.Box(0, 1, (9,)), available=spaces.Box(0, np.inf, (7,)))
    assert batch_of(GivenEnv(names))[0].layout.kinds() == "vector[9] vector[7]"


@pytest.mark.parametrize("last_mask", [[0, 0, 0], [1]])
@pytest.mark.parametrize("native", [False, True])
def test_the_mask_of_an_observation_without_a_next_action_is_not_checked(native, last_mask):
    inner = GivenEnv(spaces.Dict(action_mask=BITS[3]), spaces.Discrete(3))
    inner.obs, inner.last_obs = ({"action_mask": np.array(m)} for m in ([0, 1, 1], last_mask))
    if native:
        batch = SyncVectorEnv([lambda: inner], autoreset_mode=AutoresetMode.SAME_STEP)
        env = TorchVectorEnv(batch, env_id="Given-v0")
    else:
        env = OneByOne([inner], env_id="Given-v0")
    env.reset(seed=[1])
    for _ in range(3):
        obs, *_, info = env.step(torch.tensor([1]))
    assert obs.tolist() == [[0, 1, 1]] and info["final_obs"].tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("text", ["[]", "x", '[["a", "b", [1]]]', '[["a", "image", [3]]]'])
def test_a_damaged_layout_is_refused(text):
    with pytest.raises(UserError, match="layout"):
        Layout.from_json(text)
