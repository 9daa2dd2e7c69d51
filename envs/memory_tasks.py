"""Tasks that need memory: Recall, CartPolePositions and MountainCarPositions."""

from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.envs.classic_control.continuous_mountain_car import Continuous_MountainCarEnv
from numpy import ndarray

from envs.vector.batched import BatchedEnv, Outcome, SingleEnv

_START_BOUND = 0.05  # CartPole draws each start coordinate from [-0.05, 0.05]
# constants of the mountain car's dynamics and rewards
_GRAVITY = 0.0025
_COST = 0.1  # a step costs 0.1 times the squared action
_PRIZE = 100.0


class RecallVectorEnv(BatchedEnv):
    """Recall-v0: a tiny task that needs memory.

    The first observation shows one of `num_cues` cues. The next `delay` observations show only
    noise. Then the query flag is 1, and the action earns a reward of 1 if it is the cue's number.
    Without memory, the best possible mean return is 1 / num_cues.

    Observation [num_cues + num_noise + 1]: the cue (one-hot at the first step, else zeros), noise
    in [-1, 1], the query flag. An episode terminates after delay + 2 steps.
    """

    state_names = ("cue", "noise")

    def __init__(
        self, num_envs: int = 1, *, num_cues: int = 4, delay: int = 8, num_noise: int = 2
    ) -> None:
        low = np.array([0.0] * num_cues + [-1.0] * num_noise + [0.0], dtype=np.float32)
        super().__init__(num_envs, spaces.Box(low, np.ones_like(low)), spaces.Discrete(num_cues))
        self.num_cues = num_cues
        self.query_age = delay + 1
        self.cue = np.zeros(num_envs, dtype=np.int64)
        self.noise = np.zeros((num_envs, delay + 2, num_noise))

    def draw(self, generator: np.random.Generator) -> ndarray:
        """Draw uniform numbers in [0, 1) for the cue and for the noise of every step."""
        return generator.random(1 + self.noise[0].size)

    def begin(self, rows: ndarray, draws: ndarray) -> None:
        """Start new episodes with the drawn cues and noise."""
        self.cue[rows] = (draws[:, 0] * self.num_cues).astype(np.int64)
        self.noise[rows] = 2.0 * draws[:, 1:].reshape(len(rows), *self.noise.shape[1:]) - 1.0

    def observe(self) -> ndarray:
        """Return the observations; an observation after the query is all zeros."""
        obs = np.zeros(self.observation_space.shape or (), dtype=np.float32)
        (starting,) = np.nonzero(self.elapsed == 0)
        obs[starting, self.cue[starting]] = 1.0
        (running,) = np.nonzero(self.elapsed <= self.query_age)
        obs[running, self.num_cues : -1] = self.noise[running, self.elapsed[running]]
        obs[:, -1] = self.elapsed == self.query_age
        return obs

    def advance(self, actions: ndarray) -> Outcome:
        """Reward the correct answer to the query; end episodes after the query."""
        is_query = self.elapsed == self.query_age
        return (is_query & (actions == self.cue)).astype(np.float64), is_query


class ControlEnv(BatchedEnv):
    """Base class of the control tasks.

    The array `state` is [B, S]; `draw` returns a start state [S].
    """

    state: ndarray
    state_names = ("state",)
    observed = slice(None)  # the columns of the state that the agent observes

    def begin(self, rows: ndarray, draws: ndarray) -> None:
        """Start new episodes from the states in `draws`."""
        self.state[rows] = draws

    def observe(self) -> ndarray:
        """Return the observed columns of the state."""
        return self.state[:, self.observed].astype(np.float32)


class CartPoleVectorEnv(ControlEnv):
    """CartPole-v1 as a batch, bit for bit equal to Gymnasium's single environment.

    Source of the dynamics: gymnasium/envs/classic_control/cartpole.py (Barto, Sutton, Anderson
    1983).
    """

    def __init__(self, num_envs: int = 1, *, max_episode_steps: int = 500) -> None:
        self._physics = CartPoleEnv()  # used only for its constants
        space: Any = self._physics.observation_space
        observed = spaces.Box(space.low[self.observed], space.high[self.observed])
        super().__init__(num_envs, observed, spaces.Discrete(2))
        self.max_episode_steps = max_episode_steps
        self.state = np.zeros((num_envs, 4))  # x (m), x_dot (m/s), theta (rad), theta_dot (rad/s)

    def draw(self, generator: np.random.Generator) -> ndarray:
        """Return a random start state."""
        return generator.uniform(-_START_BOUND, _START_BOUND, 4)

    def advance(self, actions: ndarray) -> Outcome:
        """Simulate one Euler step, in the same order of operations as CartPoleEnv.step."""
        physics = self._physics
        x, x_dot, theta, theta_dot = self.state.T
        force = np.where(actions == 1, physics.force_mag, -physics.force_mag)
        cos, sin = np.cos(theta), np.sin(theta)
        temp = (force + physics.polemass_length * np.square(theta_dot) * sin) / physics.total_mass
        theta_acc = (physics.gravity * sin - cos * temp) / (
            physics.length * (4.0 / 3.0 - physics.masspole * np.square(cos) / physics.total_mass)
        )
        x_acc = temp - physics.polemass_length * theta_acc * cos / physics.total_mass
        rates = np.stack([x_dot, x_acc, theta_dot, theta_acc], axis=1)
        self.state = self.state + physics.tau * rates
        terminated = np.abs(self.state[:, 0]) > physics.x_threshold
        terminated |= np.abs(self.state[:, 2]) > physics.theta_threshold_radians
        return np.ones(self.num_envs), terminated


class CartPolePositionsVectorEnv(CartPoleVectorEnv):
    """CartPolePositions-v1: CartPole-v1 with the velocities hidden.

    An observation holds the position of the cart (m) and the angle of the pole (rad). The agent
    needs memory to estimate the velocities.
    """

    observed = slice(None, None, 2)


class MountainCarPositionsVectorEnv(ControlEnv):
    """MountainCarPositions-v0: sparse rewards, continuous actions, hidden velocity.

    The task is MountainCarContinuous-v0, but observations show only the position. Every action has
    a cost, and only reaching the summit earns a reward. Exploration with white noise never reaches
    the summit, so a policy that explores with white noise learns to stand still.

    Source of the dynamics: gymnasium/envs/classic_control/continuous_mountain_car.py (Moore 1990).
    """

    observed = slice(1)

    def __init__(self, num_envs: int = 1, *, max_episode_steps: int = 999) -> None:
        self._physics = Continuous_MountainCarEnv()  # used only for its constants
        bounds = (self._physics.min_position, self._physics.max_position)
        observations = spaces.Box(*bounds, (1,), np.float32)
        super().__init__(num_envs, observations, spaces.Box(-1.0, 1.0, (1,), np.float32))
        self.max_episode_steps = max_episode_steps
        self.state = np.zeros((num_envs, 2))  # position (m), velocity (m per step)

    def draw(self, generator: np.random.Generator) -> ndarray:
        """Return a start state: a random position, and velocity 0."""
        return np.array([generator.uniform(-0.6, -0.4), 0.0])

    def advance(self, actions: ndarray) -> Outcome:
        """Simulate one step of all cars."""
        physics = self._physics
        position, velocity = self.state.T
        force = np.clip(actions[:, 0].astype(np.float64), -1.0, 1.0)
        velocity = velocity + force * physics.power - _GRAVITY * np.cos(3.0 * position)
        velocity = np.clip(velocity, -physics.max_speed, physics.max_speed)
        position = np.clip(position + velocity, physics.min_position, physics.max_position)
        velocity[(position == physics.min_position) & (velocity < 0)] = 0.0
        self.state = np.stack([position, velocity], axis=1)
        arrived = (position >= physics.goal_position) & (velocity >= physics.goal_velocity)
        return _PRIZE * arrived - _COST * np.square(force), arrived


RecallEnv = partial(SingleEnv, RecallVectorEnv)
CartPolePositionsEnv = partial(SingleEnv, CartPolePositionsVectorEnv)
MountainCarPositionsEnv = partial(SingleEnv, MountainCarPositionsVectorEnv)
