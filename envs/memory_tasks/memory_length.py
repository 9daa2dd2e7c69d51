"""MemoryLength-v0: one bit to keep for some steps, by bsuite's memory_len.

The first observation, shown twice, holds the bit as -1 or +1; the last action of the episode earns
1 if it names the bit, else -1. Observed at every step is the share of the time that is left.

Source of the rules: google-deepmind/bsuite, bsuite/environments/memory_chain.py, with one bit.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from gymnasium import spaces

from envs.vector.batched import BatchedEnv, SingleEnv


class MemoryLengthVectorEnv(BatchedEnv):
    """A batch that observes the time left, the query and the bit, [B, 3]."""

    state_names = ("bit", "age")

    def __init__(self, num_envs: int = 1, *, length: int = 30) -> None:
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        low = np.array([0.0, 0.0, -1.0], np.float32)
        super().__init__(num_envs, spaces.Box(low, np.ones_like(low)), spaces.Discrete(2))
        self.length = length
        self.bit = np.zeros(num_envs, dtype=np.int64)
        self.age = np.zeros(num_envs, dtype=np.int64)  # steps taken in this episode

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Draw the bit."""
        return generator.integers(2, size=1).astype(np.float64)

    def begin(self, rows: np.ndarray, draws: np.ndarray) -> None:
        """Start new episodes."""
        self.bit[rows] = draws[:, 0].astype(np.int64)
        self.age[rows] = 0

    def observe(self) -> np.ndarray:
        """Return the observations: of the step before, as in the source."""
        shown = np.maximum(self.age - 1, 0)
        obs = np.zeros((self.num_envs, 3), dtype=np.float32)  # one bit: the query is always 0
        obs[:, 0] = 1.0 - shown / self.length
        obs[:, 2] = np.where(shown == 0, 2 * self.bit - 1, 0)
        return obs

    def advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Judge the action of the last step."""
        over = self.age == self.length
        rewards = np.where(actions == self.bit, 1.0, -1.0) * over
        self.age += 1
        return rewards, over, np.zeros(self.num_envs, dtype=bool)


MemoryLengthEnv = partial(SingleEnv, MemoryLengthVectorEnv)
