"""An environment with as many actions as a test asks for."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Many(gymnasium.Env):
    """Says nothing and never ends."""

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)

    def __init__(self, actions):
        self.action_space = eval(actions, vars(spaces))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 0.0, False, False, {}


gymnasium.register("Many-v0", entry_point=Many)
