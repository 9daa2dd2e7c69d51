"""Test inputs that `predict` refuses, and actions that it samples."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policies import small
from test_export import VECTOR, agent_of, make_agent

from agents.api import LoadedPolicy
from agents.network.noise import action_noise
from envs.vector.layout import Part

IMAGE = {"camera": np.zeros((2, 13, 12, 3), np.uint8), "speed": np.zeros(4), "gear": 1}
PLACE = np.zeros(4)
ONE_STATE = np.zeros((1, 6, 8)), np.zeros((1, 0, 4)), np.zeros((1, 0))
MASK = np.array([1, 0, 0, 0, 0, 0, 0])
MASKED = "several masked choices"


@pytest.mark.parametrize(
    ("form", "observation", "state", "problem"),
    [
        ("images", {"camera": IMAGE["camera"], "speed": PLACE}, None, "gear"),
        ("images", IMAGE | {"gear": 3}, None, "gear has a value outside"),
        ("clstm", np.zeros(3), None, "shape"),
        ("clstm", np.full(4, np.nan), None, "observation is nan"),
        ("clstm", np.zeros((2, 4)), ONE_STATE, "the state of 2 observations"),
        (MASKED, {"action_mask": MASK, "place": PLACE}, None, "allows no option"),
    ],
)
def test_what_does_not_fit_is_refused(form, observation, state, problem, tmp_path):
    policy = LoadedPolicy(agent_of(form, tmp_path))
    with pytest.raises((ValueError, KeyError), match=problem):
        policy.predict(observation, state)


ALLOWED = [1, 0, 0], [0, 1]  # a mask for each choice; one option is allowed


def test_masks_come_in_every_form_of_training(tmp_path):
    kind = small(), VECTOR, spaces.MultiDiscrete([3, 2])
    policy = LoadedPolicy(make_agent(*kind, tmp_path, (Part("action_mask", "mask", (5,)),)))
    for shape, masks in (((4,), ALLOWED), ((1, 4), [1, 0, 0, 0, 1]), ((2, 4), [ALLOWED] * 2)):
        assert (policy.predict(np.zeros(shape), action_masks=masks)[0] == [0, 1]).all()
    for masks in (ALLOWED, np.zeros((3, 5))):
        with pytest.raises(ValueError, match="shape|allows no option"):
            policy.predict(np.zeros((3, 4)), action_masks=masks)


def test_sampled_actions_are_white_noise_of_no_training(tmp_path):
    """Training with the same seed draws other noise in its first environment."""
    agent = agent_of("clstm", tmp_path)
    policy = LoadedPolicy(agent, seed=7)
    with torch.no_grad():  # mean: middle of the bounds; deviation: a tenth of their width
        agent.policy.actor_head.weight.zero_()
        agent.policy.log_std.fill_(np.log(0.2))
    obs = np.zeros((1, 4))
    drawn = np.array([policy.predict(obs, deterministic=False)[0] for _ in range(400)])
    noise = (drawn[:, 0, 0] - [0.2, 446.5]) / [0.02, 90.7]  # [400, A]
    assert np.abs(noise.mean(0)).max() < 0.2 and np.abs(noise.std(0) - 1).max() < 0.15
    trained = action_noise(spaces.Box(-1.0, 1.0, (2,)), 7, 0, 1, 0, 400)[:, 0].numpy()
    for other in (np.roll(noise, 1, 0), trained):
        assert np.abs((noise * other).mean(0)).max() < 0.2
    again = LoadedPolicy(agent, seed=7)
    assert np.array_equal(drawn[0], again.predict(obs, deterministic=False)[0])
