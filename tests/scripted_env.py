"""Vector environment with scripted episodes, so that tests know every number."""

import numpy as np
import torch
from gymnasium import spaces

from envs.vector.layout import Layout, TorchEnv

TERMINATED = (True, False)
TRUNCATED = (False, True)
BOTH = (True, True)


class ScriptedEnv(TorchEnv):
    """Environment that repeats scripted episodes.

    Script b is a list of (length, (terminated, truncated)) for the episodes of environment b. The
    observation is (environment number, episode number, age, 1). The reward of a step is
    100 * environment + 10 * episode + age, with the age before the step; info["raw_rewards"] is
    twice as large. `received` collects the actions.
    """

    def __init__(self, scripts):
        self.scripts = scripts
        self.num_envs = len(scripts)
        self.device = torch.device("cpu")
        self.layout = Layout.vector(4)
        self.single_action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.received = []

    def reset(self, *, seed=None):
        self.episode = torch.zeros(self.num_envs)
        self.age = torch.zeros(self.num_envs)
        return self._observe(), {}

    def _observe(self):
        numbers = torch.arange(float(self.num_envs))
        return torch.stack([numbers, self.episode, self.age, torch.ones(self.num_envs)], dim=1)

    def step(self, actions):
        self.received.append(actions.clone())
        rewards = (100.0 * torch.arange(self.num_envs) + 10.0 * self.episode + self.age).double()
        self.age = self.age + 1
        current = [
            script[int(e) % len(script)]
            for script, e in zip(self.scripts, self.episode, strict=True)
        ]
        over = [age >= length for age, (length, _) in zip(self.age.tolist(), current, strict=True)]
        flags = [
            end if ended else (False, False) for ended, (_, end) in zip(over, current, strict=True)
        ]
        terminated, truncated = torch.tensor(flags).unbind(1)
        final_obs = self._observe()
        ended = terminated | truncated
        self.episode = self.episode + ended
        self.age = self.age * ~ended
        info = {"final_obs": final_obs, "raw_rewards": 2.0 * rewards}
        return self._observe(), rewards, terminated, truncated, info
