"""MountainCarPositions-v0: sparse reward, continuous actions, no velocities.

MountainCarContinuous-v0 shown by its position alone. Effort costs, and only the summit pays, which
no noise that is white in time reaches: a policy then learns to stand still (mean return 0).

Source of the dynamics: gymnasium/envs/classic_control/continuous_mountain_car.py (Moore 1990).
"""

from __future__ import annotations

from functools import partial

import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.continuous_mountain_car import Continuous_MountainCarEnv

from envs.vector.batched import BatchedEnv, SingleEnv

_GRAVITY = 0.0025
_COST = 0.1  # of the squared action
_PRIZE = 100.0


class MountainCarPositionsVectorEnv(BatchedEnv):
    """A batch that observes the positions of the cars, [B, 1]."""

    state_names = ("position", "velocity", "elapsed")

    def __init__(self, num_envs: int = 1, *, max_episode_steps: int = 999) -> None:
        self._physics = Continuous_MountainCarEnv()  # read for its constants only
        bounds = (self._physics.min_position, self._physics.max_position)
        observations = spaces.Box(*bounds, (1,), np.float32)
        super().__init__(num_envs, observations, spaces.Box(-1.0, 1.0, (1,), np.float32))
        self.max_episode_steps = max_episode_steps
        self.position = np.zeros(num_envs)
        self.velocity = np.zeros(num_envs)
        self.elapsed = np.zeros(num_envs, dtype=np.int64)

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Draw the start position."""
        return generator.uniform(-0.6, -0.4, 1)

    def begin(self, rows: np.ndarray, draws: np.ndarray) -> None:
        """Start new episodes at the drawn positions, at rest."""
        self.position[rows] = draws[:, 0]
        self.velocity[rows] = 0.0
        self.elapsed[rows] = 0

    def observe(self) -> np.ndarray:
        """Return the positions."""
        return self.position[:, None].astype(np.float32)

    def advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Move all cars one step on."""
        it = self._physics
        force = np.clip(actions[:, 0].astype(np.float64), -1.0, 1.0)
        velocity = self.velocity + force * it.power - _GRAVITY * np.cos(3.0 * self.position)
        velocity = np.clip(velocity, -it.max_speed, it.max_speed)
        self.position = np.clip(self.position + velocity, it.min_position, it.max_position)
        stopped = (self.position == it.min_position) & (velocity < 0)
        self.velocity = np.where(stopped, 0.0, velocity)
        self.elapsed += 1
        terminated = (self.position >= it.goal_position) & (self.velocity >= it.goal_velocity)
        rewards = _PRIZE * terminated - _COST * np.square(force)
        return rewards, terminated, self.elapsed >= self.max_episode_steps


MountainCarPositionsEnv = partial(SingleEnv, MountainCarPositionsVectorEnv)
