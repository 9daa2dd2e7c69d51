"""SlowSteps-v0: an environment whose steps take about a millisecond of computing, more or less.

`--env benchmarks.slow_env:SlowSteps-v0` from the checkout: rollouts and their spread decide.
"""

from __future__ import annotations

import time

import gymnasium
import numpy as np

ROUNDS = 14_000  # of plain Python, about a millisecond
WAIT_S = 2e-3


class SlowSteps(gymnasium.Env):
    """Rewards an action near the last observation; every step computes for 0.5 to 1.5 ms."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._seen = np.zeros(4, np.float32)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict]:
        """A fresh episode of 50 steps."""
        super().reset(seed=seed)
        self._steps = 0
        self._seen = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        return self._seen, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Compute, then go on."""
        total = 0
        for number in range(int(ROUNDS * self.np_random.uniform(0.5, 1.5))):
            total += number * number
        reward = -abs(float(action[0]) - float(self._seen[0]))
        self._seen = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        self._steps += 1
        return self._seen, reward, False, self._steps >= 50, {"total": total}


class Waiting(SlowSteps):
    """The same, but every step waits for 2 ms, as for a simulator behind a socket."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Wait, then go on."""
        time.sleep(WAIT_S)
        reward = -abs(float(action[0]) - float(self._seen[0]))
        self._seen = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        self._steps += 1
        return self._seen, reward, False, self._steps >= 50, {}


gymnasium.register("SlowSteps-v0", f"{__name__}:SlowSteps")
gymnasium.register("Waiting-v0", f"{__name__}:Waiting")
