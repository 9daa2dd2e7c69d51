"""Environments that return NaN or print, and one of known returns, as `faulty_envs:ID`."""

import os

import gymnasium
import numpy as np


class Walk(gymnasium.Env):
    """Rewards 1 a step, `length` steps long; at step `nan_at` of a life it observes NaN."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=9, nan_at=0):
        self.length = length
        self.nan_at = nan_at
        self.life = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.age, self.life = self.age + 1, self.life + 1
        obs = np.full(2, np.nan if self.life == self.nan_at else 0.5, np.float32)
        return obs, 1.0, self.age == self.length, False, {}


class Raises(Walk):
    """Raises at its third step, some calls below."""

    def step(self, action):
        return self._stumble() if self.life == 2 else super().step(action)

    def _stumble(self):
        raise RuntimeError("fell over")


class Chatty(Walk):
    """Prints, in Python and beside it."""

    def reset(self, *, seed=None, options=None):
        print("hello from an environment")
        os.write(1, b"and from its library\n")
        return super().reset(seed=seed)


gymnasium.register("Walk-v0", entry_point=Walk)
gymnasium.register("Raises-v0", entry_point=Raises)
gymnasium.register("Chatty-v0", entry_point=Chatty)
gymnasium.register("NanAtFive-v0", entry_point=Walk, kwargs={"nan_at": 5})
