"""Recall-v0: a tiny task that only memory solves.

The first observation shows one of `num_cues` cues. `delay` observations of pure noise follow. Then
the query flag is up, and the action taken at that moment earns 1 if it is the cue's number. Without
memory the best is 1 / num_cues.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from gymnasium import spaces

from envs.vector.batched import BatchedEnv, SingleEnv


class RecallVectorEnv(BatchedEnv):
    """Recall-v0 for a whole batch of environments.

    Observation [num_cues + num_noise + 1]: the cue (one-hot at the first step, else zero), noise in
    [-1, 1], the query flag. An episode lasts delay + 2 steps and then terminates.
    """

    state_names = ("cue", "age", "noise")

    def __init__(
        self, num_envs: int = 1, *, num_cues: int = 4, delay: int = 8, num_noise: int = 2
    ) -> None:
        if num_cues < 2 or delay < 0 or num_noise < 0:
            raise ValueError(
                "num_cues must be at least 2, delay and num_noise at least 0, "
                f"got {num_cues}, {delay} and {num_noise}"
            )
        low = np.array([0.0] * num_cues + [-1.0] * num_noise + [0.0], dtype=np.float32)
        super().__init__(num_envs, spaces.Box(low, np.ones_like(low)), spaces.Discrete(num_cues))
        self.num_cues = num_cues
        self.query_age = delay + 1
        self.cue = np.zeros(num_envs, dtype=np.int64)
        self.age = np.zeros(num_envs, dtype=np.int64)  # steps taken in this episode
        self.noise = np.zeros((num_envs, delay + 2, num_noise))

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Draw the cue and the noise of every step as uniforms in [0, 1)."""
        return generator.random(1 + self.noise[0].size)

    def begin(self, rows: np.ndarray, draws: np.ndarray) -> None:
        """Start new episodes: a new cue and new noise."""
        self.cue[rows] = (draws[:, 0] * self.num_cues).astype(np.int64)
        self.noise[rows] = 2.0 * draws[:, 1:].reshape(len(rows), *self.noise.shape[1:]) - 1.0
        self.age[rows] = 0

    def observe(self) -> np.ndarray:
        """Return the observations; the one after the query is all zeros."""
        obs = np.zeros(self.observation_space.shape or (), dtype=np.float32)
        (fresh,) = np.nonzero(self.age == 0)
        obs[fresh, self.cue[fresh]] = 1.0
        (running,) = np.nonzero(self.age <= self.query_age)
        obs[running, self.num_cues : -1] = self.noise[running, self.age[running]]
        obs[:, -1] = self.age == self.query_age
        return obs

    def advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Reward the right answer at the query, which ends the episode."""
        asked = self.age == self.query_age
        rewards = (asked & (actions == self.cue)).astype(np.float64)
        self.age += 1
        return rewards, asked, np.zeros(self.num_envs, dtype=bool)


RecallEnv = partial(SingleEnv, RecallVectorEnv)
