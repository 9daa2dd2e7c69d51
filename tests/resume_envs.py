"""A user's environments: `--env resume_envs:Drift-v0`, and one that cannot be saved."""

import gymnasium
import numpy as np

from envs.vector.batched import pack_generator, unpack_generator

SIZE = 2  # of the observation


class Forgetful(gymnasium.Env):
    """A random walk that the action pushes; it starts anywhere and ends too far away."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (SIZE,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.age = self.np_random.normal(), 0
        return self.observe(), {}

    def observe(self):
        return np.array([self.position, self.age, *[0.0] * (SIZE - 2)], np.float32)

    def step(self, action):
        self.position += 0.5 * self.np_random.normal() + (0.1 if action else -0.1)
        self.age += 1
        return self.observe(), float(-abs(self.position)), bool(abs(self.position) > 3.0), False, {}


class Drift(Forgetful):
    """The same with the protocol of envs/vector/batched.py."""

    def get_state(self):
        return {
            "position": self.position,
            "age": self.age,
            "generator": pack_generator(self.np_random),
        }

    def set_state(self, state):
        self.position, self.age = state["position"], state["age"]
        unpack_generator(self.np_random, state["generator"])


gymnasium.register("Forgetful-v0", entry_point=Forgetful, max_episode_steps=12)
gymnasium.register("Drift-v0", entry_point=Drift, max_episode_steps=12)
