"""Example of your own environment: the agent must remember a cue and name it later.

Run this command in this folder, or copy this file into your own folder and run it there:

    python ../train_distributed.py --env own_environment:Cue-v0 --total_steps 20000
"""

import gymnasium
import numpy as np
from gymnasium import spaces

DELAY = 4  # steps between the cue and the question


class CueEnv(gymnasium.Env):
    """A task that shows a cue and, after a delay, gives reward 1 for naming the cue."""

    observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)  # one-hot cue, question flag
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        """Choose a random cue and show it."""
        super().reset(seed=seed)
        self.cue = self.np_random.integers(2)
        self.age = 0
        return np.eye(3, dtype=np.float32)[self.cue], {}

    def step(self, action):
        """Advance one step; after the question, reward the correct answer and terminate."""
        asked = self.age == DELAY
        reward = float(asked and action == self.cue)
        self.age += 1
        obs = np.array([0, 0, self.age == DELAY], np.float32)
        info = {"metrics": {"right_answers": reward}} if asked else {}  # metric env/right_answers
        return obs, reward, asked, False, info


gymnasium.register("Cue-v0", entry_point="own_environment:CueEnv")
