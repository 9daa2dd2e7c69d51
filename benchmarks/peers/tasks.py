"""The environments of the comparison, in numpy: Gymnasium's CartPole-v1 and a market like trading.

`StockLike-v0` has the shapes and the arithmetic of a trading task (181 observations, 30 continuous
actions, episodes of 252 steps) on random numbers; it is made to be stepped, not to be learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

NUM_STOCKS, NUM_DAYS, EPISODE_STEPS = 30, 3000, 252
NUM_OBS = 1 + 6 * NUM_STOCKS
LARGEST_ORDER, CASH, FEE = 100.0, 1e6, 0.001


class StockLikeVectorEnv(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """All environments in one batch, SAME_STEP; first episodes begin at a random age."""

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int = 1) -> None:
        rng = np.random.default_rng(0)
        walk = rng.normal(0.0002, 0.01, (NUM_DAYS, NUM_STOCKS)).cumsum(0)
        self.prices = (50.0 * np.exp(walk)).astype(np.float32)  # [days, stocks]
        self.indicators = rng.standard_normal((NUM_DAYS, 4 * NUM_STOCKS), np.float32)
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (NUM_OBS,), np.float32)
        self.single_action_space = spaces.Box(-1.0, 1.0, (NUM_STOCKS,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin new episodes everywhere."""
        seeds = list(range(self.num_envs)) if seed is None or isinstance(seed, int) else seed
        self.rngs = [np.random.default_rng(one) for one in seeds]
        self.age = np.array([rng.integers(EPISODE_STEPS) for rng in self.rngs])  # [B]
        self.day = np.zeros(self.num_envs, np.int64)
        self.cash = np.zeros(self.num_envs, np.float32)
        self.shares = np.zeros((self.num_envs, NUM_STOCKS), np.float32)
        ages = self.age.copy()
        self._begin(np.arange(self.num_envs))
        self.age = ages
        return self._observe(), {}

    def _begin(self, rows: np.ndarray) -> None:
        last = NUM_DAYS - EPISODE_STEPS - 1
        self.day[rows] = [self.rngs[row].integers(last) for row in rows]
        self.age[rows], self.cash[rows], self.shares[rows] = 0, CASH, 0.0

    def _observe(self) -> np.ndarray:
        parts = [self.cash[:, None] / CASH, self.prices[self.day] * 0.01, self.shares * 0.01]
        return np.concatenate([*parts, self.indicators[self.day]], axis=1, dtype=np.float32)

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Sell, then buy as much of the orders as the cash allows."""
        price = self.prices[self.day]  # [B, stocks]
        before = self.cash + (self.shares * price).sum(1)
        orders = np.clip(actions, -1.0, 1.0) * LARGEST_ORDER
        sold = np.minimum(np.maximum(-orders, 0.0), self.shares)
        cash = self.cash + (sold * price).sum(1) * (1.0 - FEE)
        wanted = np.maximum(orders, 0.0)
        cost = (wanted * price).sum(1) * (1.0 + FEE)
        part = np.minimum(1.0, cash / np.maximum(cost, 1e-6))  # [B]
        self.shares = (self.shares - sold + wanted * part[:, None]).astype(np.float32)
        self.cash = (cash - cost * part).astype(np.float32)
        self.day, self.age = self.day + 1, self.age + 1
        after = self.cash + (self.shares * self.prices[self.day]).sum(1)
        rewards = (after - before) * 1e-4
        terminated = self.age >= EPISODE_STEPS
        truncated = np.zeros(self.num_envs, bool)
        obs = self._observe()
        if not terminated.any():
            return obs, rewards, terminated, truncated, {}
        self._begin(np.flatnonzero(terminated))
        info = {"final_obs": obs, "_final_obs": terminated}
        return self._observe(), rewards, terminated, truncated, info


class CartPoleVectorEnv(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """Gymnasium's CartPole-v1 in one batch, SAME_STEP, for a trainer that cannot step 64 of it."""

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int = 1) -> None:
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin new episodes everywhere."""
        self.rng = np.random.default_rng(seed)
        self.state = self.rng.uniform(-0.05, 0.05, (self.num_envs, 4))
        self.age = np.zeros(self.num_envs, np.int64)
        return self.state.astype(np.float32), {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Move by Euler's method, as Gymnasium does."""
        x, x_speed, angle, turning = self.state.T
        force = np.where(actions == 1, 10.0, -10.0)
        cosine, sine = np.cos(angle), np.sin(angle)
        push = (force + 0.05 * turning**2 * sine) / 1.1
        turn = (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3.0 - 0.1 * cosine**2 / 1.1))
        speed_up = push - 0.05 * turn * cosine / 1.1
        rates = np.stack([x_speed, speed_up, turning, turn], axis=1)
        self.state = self.state + 0.02 * rates
        self.age += 1
        terminated = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.2095)
        truncated = (self.age >= 500) & ~terminated
        ended = terminated | truncated
        obs = self.state.astype(np.float32)
        info = {"final_obs": obs, "_final_obs": ended} if ended.any() else {}
        self.state[ended] = self.rng.uniform(-0.05, 0.05, (int(ended.sum()), 4))
        self.age[ended] = 0
        rewards = np.ones(self.num_envs)
        return self.state.astype(np.float32), rewards, terminated, truncated, info


def vector_env(task: str, num_envs: int) -> VectorEnv[Any, Any, Any]:
    """Return what a trainer steps by Gymnasium's interface of vector environments."""
    if task == "stocks":
        return StockLikeVectorEnv(num_envs)
    makers = [lambda: gymnasium.make("CartPole-v1")] * num_envs
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


if "StockLike-v0" not in gymnasium.registry:
    gymnasium.register("StockLike-v0", vector_entry_point="tasks:StockLikeVectorEnv")
