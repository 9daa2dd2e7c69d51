"""Inputs that `predict` refuses in one line, and actions that it draws."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_export import ALL, SIZED, VECTOR, agent_of

from agents.api.policy import LoadedPolicy
from agents.network.noise import action_noise
from envs.vector.layout import Layout, Part
from rl_dist.errors import UserError

IMAGE = {"camera": np.zeros((2, 13, 12, 3), np.uint8), "speed": np.zeros(4), "gear": 1}
MASKED = {"action_mask": np.ones(7, np.int8), "place": np.zeros(4)}
STATE = np.zeros((1, 6, 8), np.float32)  # of the cascade, one observation
WRONG = {  # policy, observation, other arguments, the error
    "no key": ("images", {"camera": IMAGE["camera"], "speed": np.zeros(4)}, {}, "gear"),
    "shape": ("clstm", np.zeros(3), {}, r"shape is \(3,\); one has \(4,\)"),
    "empty": ("clstm", np.zeros((0, 4)), {}, r"shape is \(0, 4\); one has"),
    "text": ("clstm", np.array(["a"] * 4), {}, "could not convert"),
    "NaN": ("clstm", np.full(4, np.nan), {}, "observation is nan at 0"),
    "NaN state": (
        "clstm", np.zeros(4), {"state": (STATE * np.nan, np.zeros((1, 0, 4)), np.zeros((1, 0)))},
        "reward or state holds NaN",
    ),
    "image of floats": (
        "images", IMAGE | {"camera": np.zeros((2, 13, 12, 3))}, {}, "camera has type float64",
    ),
    "choice outside": ("images", IMAGE | {"gear": 3}, {}, "gear has a value outside"),
    "mask of nothing": (
        "several masked choices", MASKED | {"action_mask": np.array([0] * 4 + [1] * 3)}, {},
        "allows no option",
    ),
    "mask of halves": (
        "several masked choices", MASKED | {"action_mask": np.full(7, 0.5)}, {}, "another number",
    ),
    "other batch": (
        "clstm", np.zeros((2, 4)), {"state": (STATE, np.zeros((1, 0, 4)), np.zeros((1, 0)))},
        "state does not fit 2 observation",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_in_one_line(name, tmp_path):
    form, observation, arguments, words = WRONG[name]
    policy = LoadedPolicy(agent_of(form, tmp_path))
    with pytest.raises(UserError, match=words) as refused:
        policy.predict(observation, **arguments)
    assert "\n" not in str(refused.value)


def test_a_mask_of_info_that_allows_nothing_is_refused_and_none_is_warned_of(tmp_path):
    mask = Part("action_mask", "mask", (3,))
    policy = LoadedPolicy(agent_of("start of choices", tmp_path, (mask,)))
    assert policy.predict(np.zeros(4), action_masks=[0, 1, 0])[0] == 6
    with pytest.raises(UserError, match="allows no option"):
        policy.predict(np.zeros(4), action_masks=[0, 0, 0])
    with pytest.warns(UserWarning, match="action_masks") as said:
        policy.predict(np.zeros(4))
    assert said[0].filename == __file__


ALLOWED = [1, 0, 0], [0, 1]  # one allowed action for each of the two choices


@pytest.mark.parametrize(
    ("shape", "masks"),
    [
        ((4,), ALLOWED),
        ((1, 4), [1, 0, 0, 0, 1]),
        ((2, 4), [ALLOWED] * 2),
        ((2, 4), np.array([[1, 0, 0, 0, 1]] * 2)),
    ],
)
def test_masks_come_in_every_form_of_training(shape, masks, tmp_path, monkeypatch):
    monkeypatch.setitem(ALL, "choices", (SIZED, VECTOR, spaces.MultiDiscrete([3, 2])))
    policy = LoadedPolicy(agent_of("choices", tmp_path, (Part("action_mask", "mask", (5,)),)))
    assert (policy.predict(np.zeros(shape), action_masks=masks)[0] == [0, 1]).all()
    with pytest.raises(UserError, match="action_masks must be 3 mask"):
        policy.predict(np.zeros((3, 4)), action_masks=masks)


def test_a_policy_whose_observations_were_read_otherwise_is_refused(tmp_path):
    agent = agent_of("images", tmp_path)
    camera, *others = agent.policy.layout.parts
    agent.policy.layout = Layout((Part("camera", "vector", (camera.size,)), *others))
    with pytest.raises(UserError, match=r"parts vector\[936\] .* image\[6, 13, 12\]"):
        LoadedPolicy(agent)


def test_sampled_actions_are_white_noise_of_no_training(tmp_path):
    """By the same seed the first environment of a training would draw other numbers."""
    agent = agent_of("clstm", tmp_path)
    policy = LoadedPolicy(agent, seed=7)
    with torch.no_grad():  # in the middle of the bounds, the deviation a tenth of their width
        agent.policy.actor_head.weight.zero_()
        agent.policy.log_std.fill_(np.log(0.2))
    obs = np.zeros((1, 4))
    drawn = np.array([policy.predict(obs, deterministic=False)[0] for _ in range(400)])
    noise = (drawn[:, 0, 0] - [0.2, 446.5]) / [0.02, 90.7]  # [400, A]
    assert np.abs(noise.mean(0)).max() < 0.2 and np.abs(noise.std(0) - 1).max() < 0.15
    assert np.abs((noise[1:] * noise[:-1]).mean(0)).max() < 0.2
    trained = action_noise(policy._decode.space, 7, 0, 1, 0, 400)[:, 0].numpy()
    assert np.abs((noise * trained).mean(0)).max() < 0.2
    again = LoadedPolicy(agent, seed=7)
    assert np.array_equal(drawn[0], again.predict(obs, deterministic=False)[0])
