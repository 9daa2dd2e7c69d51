"""Two published memory tasks: `benchmarks.published_tasks:PocMemory-v0`, `...:MemoryLength-v0`."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envs.vector.batched import BatchedEnv, SingleEnv

_FROZEN = 2  # steps for which the signs of PocMemory are shown
_ENDS = 5  # places on each side of the middle, 0.2 apart; the outermost are the ends
_STARTS = 2  # an episode begins at most this far from the middle
_PRIZE = 1.6
_COST = 0.1


class PocMemoryVectorEnv(BatchedEnv):
    """PocMemory-v0: which end of a corridor is good is shown at the start only.

    Observed are the left sign, the position and the right sign, [B, 3]. Two steps long the agent
    stands still and sees the signs of both ends, -1 and +1; then it walks and sees its position
    alone. A step costs 0.1, the good end earns 1.6, the bad one costs as much, and both end the
    episode. The best possible mean return is 1.2.

    Source of the rules: MarcoMeter/recurrent-ppo-truncated-bptt, environments/poc_memory_env.py,
    with freeze=True as that project trains it.
    """

    state_names = ("place", "right", "age")

    def __init__(self, num_envs: int = 1) -> None:
        super().__init__(num_envs, spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2))
        self.place = np.zeros(num_envs, dtype=np.int64)  # from -_ENDS to _ENDS
        self.right = np.ones(num_envs, dtype=np.int64)  # sign of the right end
        self.age = np.zeros(num_envs, dtype=np.int64)  # steps taken in this episode

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Draw the start and the sign of the right end."""
        start, good = generator.integers(-_STARTS, _STARTS + 1), generator.integers(2)
        return np.array([start, 2 * good - 1], dtype=np.float64)

    def begin(self, rows: np.ndarray, draws: np.ndarray) -> None:
        """Start new episodes."""
        self.place[rows], self.right[rows] = draws.T.astype(np.int64)
        self.age[rows] = 0

    def observe(self) -> np.ndarray:
        """Return the observations."""
        signs = self.right * (self.age <= _FROZEN)
        return np.stack([-signs, self.place / _ENDS, signs], axis=1).astype(np.float32)

    def advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Walk left (0) or right (1)."""
        walks = self.age >= _FROZEN
        self.place += np.where(actions == 1, 1, -1) * walks
        self.age += 1
        over = np.abs(self.place) == _ENDS
        at_good = np.sign(self.place) == self.right
        rewards = np.where(over, np.where(at_good, _PRIZE, -_PRIZE), -_COST * walks)
        return rewards, over, np.zeros(self.num_envs, dtype=bool)


class MemoryLengthVectorEnv(BatchedEnv):
    """MemoryLength-v0: one bit to keep for some steps, by bsuite's memory_len.

    Observed are the time left, the query and the bit, [B, 3]. The first observation, shown twice,
    holds the bit as -1 or +1; the last action of the episode earns 1 if it names the bit, else -1.

    Source of the rules: google-deepmind/bsuite, bsuite/environments/memory_chain.py, with one bit.
    """

    state_names = ("bit", "age")

    def __init__(self, num_envs: int = 1, *, length: int = 30) -> None:
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


_BATCHES: dict[str, Any] = {"PocMemory": PocMemoryVectorEnv, "MemoryLength": MemoryLengthVectorEnv}
for _name, _batch in _BATCHES.items():
    _single = partial(SingleEnv, _batch)
    gymnasium.register(f"{_name}-v0", entry_point=_single, vector_entry_point=_batch)
