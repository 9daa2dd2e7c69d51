"""Random-walk environments that fail on purpose, such as Misbehaving-v0."""

import ctypes
import os
import signal
import time

import gymnasium
import numpy as np

from agents.learner.network import seeds
from envs.vector import guards
from envs.vector.batched import pack_generator, unpack_generator


def lock_twice(library):
    """Deadlock in C: wait forever, even if a signal arrives."""
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def speak():
    """Print through Python and directly to file descriptor 1."""
    print("hello from an environment")
    os.write(1, b"and from its library\n")


def hang():
    while True:
        time.sleep(0.01)


def hang_after_a_call_in_c():
    """Hang in Python after a call in C that lets no other thread run for 2.5 s."""
    ctypes.PyDLL(None).usleep(2_500_000)
    hang()


# misdeed: function that a misbehaving step calls
DEEDS = {
    "speak": speak,
    "hang": hang,
    "hang after a call in C": hang_after_a_call_in_c,
    "take a while": lambda: time.sleep(0.1),
    "exit 77": lambda: os._exit(77),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
}
# misdeed: (index in the result of a step, wrong value)
RETURNS = {
    "nan": (0, np.full(2, np.nan, np.float32)),
    "shape": (0, np.zeros(3, np.float32)),
    "reward": (1, float("inf")),
}


class Misbehaving(gymnasium.Env):
    """Random walk that misbehaves once, at step `at`, counted over all its episodes.

    The observation is (random walk, age in the episode), and the reward is 1. In a run with seed 1,
    `misdeeds` maps the global number of an environment to its misdeed. With stream="evaluation",
    the numbers refer to environments of validation and evaluation, not of training. All other
    environments commit the misdeed `always`; if it is None, they behave well. A restarted
    environment has a new seed, so it counts as one of these others.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, misdeeds=None, at=20, stream="environment", always=None):
        self.at, self.always = at, always
        streams = [seeds.ENVIRONMENT_STREAM]
        if stream == "evaluation":
            streams = [seeds.VALIDATION_STREAM, seeds.EVALUATION_STREAM]
        self.by_seed = {
            seeds.stream_seeds(1, number, int(n), 1)[0]: misdeed
            for n, misdeed in (misdeeds or {}).items()
            for number in streams
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.life, self.misdeed = 0, self.by_seed.get(seed, self.always)
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
        if misdeed == "hang in C":
            # The guard of the environment ends the worker process after this time.
            guards.GRACE_S = 0.5
            lock_twice(ctypes.CDLL(None))  # CDLL releases the GIL, so other threads run
        if misdeed == "hang in C, holding the interpreter":
            lock_twice(ctypes.PyDLL(None))
        if misdeed in DEEDS:
            DEEDS[misdeed]()
        step = [self._obs(), 1.0, False, self.age == 7, {}]
        place, value = RETURNS.get(misdeed, (0, step[0]))
        step[place] = value
        return tuple(step)


class Saved(Misbehaving):
    """Misbehaving environment that saves its state; once restored, it behaves well."""

    def get_state(self):
        own = {"life": self.life, "age": self.age, "walk": self.walk}
        return own | {"generator": pack_generator(self.np_random)}

    def set_state(self, state):
        self.life = state["life"]
        self.age = state["age"]
        self.walk = state["walk"]
        self.misdeed = None
        unpack_generator(self.np_random, state["generator"])


class Wide(Saved):
    """Well-behaved environment with observations that float32 cannot represent."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def _obs(self):
        return 1.7e9 + np.array([self.walk, self.age])


class Measured(Misbehaving):
    """A walk that reports a metric at every step."""

    def step(self, action):
        *outcome, info = super().step(action)
        return *outcome, info | {"metrics": {"number": 1.0}}


gymnasium.register("Measured-v0", entry_point=Measured)
gymnasium.register("Wide-v0", entry_point=Wide)
gymnasium.register("Misbehaving-v0", entry_point=Misbehaving)
gymnasium.register("MisbehavingSaved-v0", entry_point=Saved)
gymnasium.register("Raises-v0", entry_point=Misbehaving, kwargs={"always": "raise", "at": 2})
gymnasium.register("Speaks-v0", entry_point=Misbehaving, kwargs={"always": "speak", "at": 1})
gymnasium.register("SavedWithLimit-v0", entry_point=Saved, max_episode_steps=5)
