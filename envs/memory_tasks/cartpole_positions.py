"""CartPolePositions-v1: CartPole-v1 without velocities; balance takes memory.

Source of the dynamics: gymnasium/envs/classic_control/cartpole.py (Barto, Sutton, Anderson 1983).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from envs.vector.batched import BatchedEnv, pack_generator, unpack_generator

_START_BOUND = 0.05  # every start coordinate is uniform in [-0.05, 0.05], as in CartPole-v1
# cart position (m) and pole angle (rad) in the state (x, x_dot, theta, theta_dot)
_POSITIONS = [0, 2]


def _positions_space(cart_pole: CartPoleEnv) -> spaces.Box:
    space = cart_pole.observation_space
    assert isinstance(space, spaces.Box)
    return spaces.Box(space.low[_POSITIONS], space.high[_POSITIONS])


class CartPolePositionsEnv(CartPoleEnv):
    """CartPole-v1 whose observation is cart position (m) and pole angle (rad).

    The time limit is part of the environment, so that a snapshot holds it.
    """

    def __init__(self, *, max_episode_steps: int = 500, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.observation_space = _positions_space(self)
        self.max_episode_steps = max_episode_steps
        self._elapsed = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode near the upright position."""
        obs, info = super().reset(seed=seed, options=options)
        self._elapsed = 0
        return obs[_POSITIONS], info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Push left (0) or right (1); reward 1 per step."""
        obs, reward, terminated, _, info = super().step(action)
        self._elapsed += 1
        truncated = self._elapsed >= self.max_episode_steps
        return obs[_POSITIONS], float(reward), terminated, truncated, info

    def get_state(self) -> dict[str, np.ndarray | int]:
        """Return everything the future depends on."""
        generator = pack_generator(self.np_random)
        return {"state": np.array(self.state), "elapsed": self._elapsed, "generator": generator}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `get_state` was called."""
        self.state = np.array(state["state"], dtype=np.float64)
        self.steps_beyond_terminated = None
        self._elapsed = int(state["elapsed"])
        unpack_generator(self.np_random, state["generator"])


class CartPolePositionsVectorEnv(BatchedEnv):
    """CartPolePositions-v1 for a whole batch, equal to the single one bit for bit."""

    state_names = ("state", "elapsed")

    def __init__(self, num_envs: int = 1, *, max_episode_steps: int = 500) -> None:
        self._physics = CartPoleEnv()  # read for its constants only
        super().__init__(num_envs, _positions_space(self._physics), spaces.Discrete(2))
        self.max_episode_steps = max_episode_steps
        self.state = np.zeros((num_envs, 4))  # x (m), x_dot (m/s), theta (rad), theta_dot (rad/s)
        self.elapsed = np.zeros(num_envs, dtype=np.int64)

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Draw the start state."""
        return generator.uniform(-_START_BOUND, _START_BOUND, 4)

    def begin(self, rows: np.ndarray, draws: np.ndarray) -> None:
        """Start new episodes from the drawn states."""
        self.state[rows] = draws
        self.elapsed[rows] = 0

    def observe(self) -> np.ndarray:
        """Return cart positions and pole angles."""
        return self.state[:, _POSITIONS].astype(np.float32)

    def advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Integrate one Euler step in CartPoleEnv.step's order: equal to the last bit."""
        it = self._physics
        x, x_dot, theta, theta_dot = self.state.T
        force = np.where(actions == 1, it.force_mag, -it.force_mag)
        cos, sin = np.cos(theta), np.sin(theta)
        temp = (force + it.polemass_length * np.square(theta_dot) * sin) / it.total_mass
        theta_acc = (it.gravity * sin - cos * temp) / (
            it.length * (4.0 / 3.0 - it.masspole * np.square(cos) / it.total_mass)
        )
        x_acc = temp - it.polemass_length * theta_acc * cos / it.total_mass
        rates = np.stack([x_dot, x_acc, theta_dot, theta_acc], axis=1)
        self.state = self.state + it.tau * rates
        self.elapsed += 1
        terminated = np.abs(self.state[:, 0]) > it.x_threshold
        terminated |= np.abs(self.state[:, 2]) > it.theta_threshold_radians
        return np.ones(self.num_envs), terminated, self.elapsed >= self.max_episode_steps
