"""CartPolePositions-v1: CartPole-v1 without velocities; balance takes memory.

CartPole-v1 itself is here as a batch, too: each environment has its own seed, and goes the way of
Gymnasium's to the last bit. The time limit is part of the environment, so that a snapshot holds it.

Source of the dynamics: gymnasium/envs/classic_control/cartpole.py (Barto, Sutton, Anderson 1983).
"""

from __future__ import annotations

from functools import partial

import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from envs.vector.batched import BatchedEnv, SingleEnv

_START_BOUND = 0.05  # every start coordinate is uniform in [-0.05, 0.05], as in CartPole-v1


class CartPoleVectorEnv(BatchedEnv):
    """A batch of CartPole-v1."""

    state_names = ("state", "elapsed")
    observed: tuple[int, ...] = (0, 1, 2, 3)  # of the state (x, x_dot, theta, theta_dot)

    def __init__(self, num_envs: int = 1, *, max_episode_steps: int = 500) -> None:
        self._physics = CartPoleEnv()  # read for its constants only
        space = self._physics.observation_space
        assert isinstance(space, spaces.Box)
        observed = list(self.observed)
        seen = spaces.Box(space.low[observed], space.high[observed])
        super().__init__(num_envs, seen, spaces.Discrete(2))
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
        """Return the observed columns of the state."""
        return self.state[:, self.observed].astype(np.float32)

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


class CartPolePositionsVectorEnv(CartPoleVectorEnv):
    """A batch that observes cart positions (m) and pole angles (rad).

    length: half of the pole's (m); masspole: its mass (kg); force_mag: the push (N), as CartPoleEnv
    has them.
    """

    observed = (0, 2)

    def __init__(
        self,
        num_envs: int = 1,
        *,
        max_episode_steps: int = 500,
        length: float = 0.5,
        masspole: float = 0.1,
        force_mag: float = 10.0,
    ) -> None:
        given = {"length": length, "masspole": masspole, "force_mag": force_mag}
        for name, value in given.items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        super().__init__(num_envs, max_episode_steps=max_episode_steps)
        it = self._physics
        it.length, it.masspole, it.force_mag = length, masspole, force_mag
        it.total_mass, it.polemass_length = masspole + it.masscart, masspole * length


CartPolePositionsEnv = partial(SingleEnv, CartPolePositionsVectorEnv)
