"""Numpy vector environments with snapshots and per-environment random generators.

A resumed run can continue an environment from its exact state if the environment has two methods:

    get_state() -> dict[str, np.ndarray | float | int | bool]  return the complete state
    set_state(state)                        restore it; arrays arrive as float64 or int64

`get_state` must return the same names and shapes at every call. In a vector environment every entry
is an array with leading dimension num_envs. A new environment is reset once before `set_state` is
called. If an environment lacks these two methods, a resumed run begins new episodes in it.
docs/own_environment.md has an example.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy import ndarray

Outcome = tuple[ndarray, ndarray]  # rewards and terminated, each [B]


def has_snapshots(env: object) -> bool:
    """Return whether an environment has get_state and set_state."""
    return hasattr(env, "get_state") and hasattr(env, "set_state")


def pack_generator(generator: np.random.Generator) -> ndarray:
    """Pack the state of a PCG64 generator (as in Gymnasium) into an int64 array [22]."""
    text = json.dumps(generator.bit_generator.state)  # at most 176 characters
    return np.frombuffer(text.ljust(176).encode(), np.int64)


def unpack_generator(generator: np.random.Generator, packed: ndarray) -> None:
    """Restore a PCG64 generator from the result of `pack_generator`."""
    generator.bit_generator.state = json.loads(packed.tobytes())


class BatchedEnv(VectorEnv):
    """Base class of SAME_STEP vector environments with a generator per environment.

    A subclass implements `draw`, `begin`, `observe` and `advance`. Its state consists of the
    generators, `elapsed` and the arrays [B, ...] named in `state_names`. An episode that reaches
    `max_episode_steps` is truncated.
    """

    metadata: dict = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}
    state_names: tuple[str, ...] = ()
    max_episode_steps: float = math.inf

    # Methods that subclasses define:
    # `draw(generator)` returns all random numbers that one episode needs, [N] float64.
    # `begin(rows, draws)` starts episodes in some rows with their random numbers [rows, N].
    # `observe()` returns the observations as a new array [B, F] float32.
    # `advance(actions)` simulates one step in all rows. It must not change `elapsed`.
    draw: ClassVar[Callable[..., ndarray]]
    begin: ClassVar[Callable[..., None]]
    observe: ClassVar[Callable[..., ndarray]]
    advance: ClassVar[Callable[..., Outcome]]

    def __init__(
        self, num_envs: int, observation_space: spaces.Box, action_space: spaces.Space
    ) -> None:
        self.num_envs = num_envs
        self.elapsed = np.zeros(num_envs, dtype=np.int64)  # steps taken in the current episode
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)
        self.generators: list[np.random.Generator] = []

    def advance_all(self, actions: ndarray) -> tuple[ndarray, ndarray, ndarray]:
        """Step all rows, update `elapsed`, and return rewards, terminated and truncated."""
        rewards, terminated = self.advance(actions)
        self.elapsed += 1
        return rewards, terminated, self.elapsed >= self.max_episode_steps

    def _begin_episodes(self, rows: ndarray) -> None:
        self.elapsed[rows] = 0
        self.begin(rows, np.stack([self.draw(self.generators[row]) for row in rows]))

    def reset(self, *, seed: Any = None, options: dict | None = None) -> tuple[ndarray, dict]:
        """Start all environments; an integer seed s means the seeds s, s+1, s+2, ..."""
        if isinstance(seed, int):
            seed = range(seed, seed + self.num_envs)
        if seed or not self.generators:
            seeds = seed or [None] * self.num_envs
            self.generators = [seeding.np_random(env_seed)[0] for env_seed in seeds]
        self._begin_episodes(np.arange(self.num_envs))
        return self.observe(), {}

    def step(self, actions: ndarray) -> tuple[ndarray, ndarray, ndarray, ndarray, dict]:
        """Step all environments; info["final_obs"] has the observations before autoreset."""
        rewards, terminated, truncated = self.advance_all(np.asarray(actions))
        final_obs = obs = self.observe()
        ended = terminated | truncated
        if ended.any():
            self._begin_episodes(np.flatnonzero(ended))
            obs = self.observe()
        return obs, rewards, terminated, truncated, {"final_obs": final_obs}

    def get_state(self) -> dict[str, ndarray]:
        """Return a complete snapshot as copied arrays [B, ...]."""
        state = {name: getattr(self, name).copy() for name in (*self.state_names, "elapsed")}
        state["generator"] = np.stack(list(map(pack_generator, self.generators)))
        return state

    def set_state(self, state: Mapping[str, ndarray]) -> None:
        """Restore a snapshot; the environment must have been reset once."""
        for name in (*self.state_names, "elapsed"):
            getattr(self, name)[...] = state[name]
        for generator, packed in zip(self.generators, state["generator"], strict=True):
            unpack_generator(generator, packed)


class SingleEnv(gymnasium.Env):
    """A single environment made from a BatchedEnv with one row; it has no snapshots."""

    metadata: dict = {"render_modes": []}

    def __init__(self, batch_type: type[Any], **kwargs: Any) -> None:
        self._batch: BatchedEnv = batch_type(1, **kwargs)
        self.observation_space = self._batch.single_observation_space
        self.action_space = self._batch.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[ndarray, dict]:
        """Start an episode."""
        super().reset(seed=seed)
        self._batch.generators = [self.np_random]
        return self._batch.reset()[0][0], {}

    def step(self, action: np.int64) -> tuple[ndarray, float, bool, bool, dict]:
        """Take one step."""
        rewards, terminated, truncated = self._batch.advance_all(np.array([action]))
        obs = self._batch.observe()[0]
        return obs, float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {}
