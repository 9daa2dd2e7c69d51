"""An environment that misbehaves once in its life, registered as `misbehaving_envs:Misbehaving-v0`."""

import ctypes
import time

import gymnasium
import numpy as np

from envs import environment_seeds
from envs.batched import pack_generator, unpack_generator


def lock_twice(library):
    """Waits for ever, whatever signal comes."""
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


class Misbehaving(gymnasium.Env):
    """Observes (random walk, age). Environments of seed 1 do what `misdeeds` says of their global number.

    One made anew has another seed, and behaves. With the stream "evaluation" it is the judged ones that misbehave.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, misdeeds=None, at=20, length=7, stream="environment"):
        self.at, self.length = at, length
        self.by_seed = {environment_seeds(1, stream, int(n), 1)[0]: m for n, m in (misdeeds or {}).items()}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.life, self.misdeed = 0, self.by_seed.get(seed)
        self.age, self.walk = 0, 0.0
        return self._obs(), {}

    def _obs(self):
        return np.array([self.walk, self.age], np.float32)

    def step(self, action):
        self.life, self.age = self.life + 1, self.age + 1
        self.walk += float(self.np_random.normal()) + 0.1 * int(action)
        misdeed = self.misdeed if self.life == self.at else None
        if misdeed == "raise":
            raise KeyError("no such price")
        if misdeed == "hang":
            while True:
                time.sleep(0.01)
        if misdeed == "hang in C":
            lock_twice(ctypes.CDLL(None))  # lets other threads run
        if misdeed == "hang in C, holding the interpreter":
            lock_twice(ctypes.PyDLL(None))
        obs = np.full(2, np.nan, np.float32) if misdeed == "nan" else self._obs()
        obs = np.zeros(3, np.float32) if misdeed == "shape" else obs
        reward = float("inf") if misdeed == "reward" else 1.0
        return obs, reward, False, self.age == self.length, {}


class Saved(Misbehaving):
    """The same with the protocol of envs/snapshots.py; it behaves once it was saved."""

    def get_state(self):
        own = {"life": self.life, "age": self.age, "walk": self.walk}
        return own | {"generator": pack_generator(self.np_random)}

    def set_state(self, state):
        self.life, self.age, self.walk, self.misdeed = state["life"], state["age"], state["walk"], None
        unpack_generator(self.np_random, state["generator"])


gymnasium.register("Misbehaving-v0", entry_point=Misbehaving)
gymnasium.register("MisbehavingSaved-v0", entry_point=Saved)
