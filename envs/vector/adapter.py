"""Adapt vector environments and lists of environments to the TorchEnv interface."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium.vector.utils import batch_space, iterate
from numpy import ndarray
from torch import Tensor

from envs.vector.batched import has_snapshots
from envs.vector.guards import EnvironmentFaultError, HangWatch, end_process
from envs.vector.layout import Layout, Metrics, Part, StepResult
from envs.vector.same_step import SameStep, row_of
from envs.vector.space_json import to_json
from envs.vector.spaces import (
    MASK_KEY,
    ActionDecoder,
    ObservationEncoder,
    RowFaultError,
    Space,
    check_masks,
    check_rows,
)
from envs.vector.tensors import LIFE, MISSING_RESETS, RESETS, ArrayEnv, Snapshot, step_result

_LOGGER = logging.getLogger(__name__)
LAST_ROW = "life/last_row"  # entry of a snapshot of `OneByOne`: the last observation rows
MAX_REWARD = 1e30  # a reward with a larger absolute value is an error, like an infinite one
Arrays = tuple[ndarray, ...]  # in the order of STEP_FIELDS
T = TypeVar("T")


def guarded(method: Callable[..., T]) -> Callable[..., T]:
    """Decorate a method of an adapter so that its HangWatch watches the calls."""

    def watched(self: Any, *args: object, **kwargs: object) -> T:
        return self.watch.call(None, partial(method, self, *args, **kwargs))

    return watched


@dataclass(eq=False)
class TorchVectorEnv(ArrayEnv):
    """Adapts a numpy vector environment to the TorchEnv interface.

    The adapter checks everything that the environments return and watches how long each call
    takes. The vector environment must use autoreset SAME_STEP and accept a list with one seed for
    each environment.
    """

    env: Any  # a vector environment; in `OneByOne`, a list of single environments
    _: KW_ONLY
    make: Any = None  # returns a new environment to replace a failed one
    max_episode_steps: int | None = None  # step limit for single environments
    note: str = ""  # see `TorchEnv.note`
    # Ends the process if a call into an environment hangs and cannot be interrupted.
    end: Callable[[str], None] = end_process
    # The flags below are described in `envs.task.TaskConfig`.
    info_mask: bool = False
    previous_action: bool = False
    previous_reward: bool = False

    def __post_init__(self) -> None:
        env = self.env
        self._set_up(env.num_envs, env.single_observation_space, env.single_action_space)
        self.can_snapshot = has_snapshots(env)
        if isinstance(env, SameStep):
            env.mark = self.mark

    def _set_up(self, num_envs: int, observations: Space, actions: Space) -> None:
        self.num_envs = num_envs
        self.device = torch.device(self.device)
        self.lives = np.zeros(num_envs, LIFE)
        self.watch = HangWatch(self.env_timeout, self.describe, self.end, self.heartbeat)
        self.decoder = ActionDecoder(actions, self.env_id)
        self.encoder = ObservationEncoder(observations, self.env_id, self.decoder)
        self.spaces_json = to_json(observations, actions)

        # layout of the row that the learner sees
        parts = list(self.encoder.parts)
        mask_size = self.decoder.mask_size
        if self.info_mask:
            if not mask_size or any(part.kind == "mask" for part in parts):
                raise ValueError(
                    f"info_mask does nothing with environment {self.env_id}: its actions are not "
                    f"choices, or its observations already contain {MASK_KEY}; omit info_mask"
                )
            parts.append(Part(MASK_KEY, "mask", (mask_size,)))
        # number of columns before those of the previous action and reward
        self.row_size = sum(part.size for part in parts)
        if self.previous_action:
            size = mask_size or math.prod(self.decoder.space.shape)
            parts.append(Part("previous_action", "plain", (size,)))
        if self.previous_reward:
            parts.append(Part("previous_reward", "vector", (1,)))
        self.layout = Layout(tuple(parts))
        self.row_type = self.encoder.row_type(self.layout)
        self.single_action_space = self.decoder.space

    def step(
        self,
        actions: Tensor,  # [B] int64, or [B, A] float
    ) -> StepResult:
        """Step all environments (see `TorchEnv.step`) and return newly allocated tensors."""
        self.lives["lifetime_step"] += 1
        return step_result(self.step_arrays(actions.detach().cpu().numpy()), self.device)

    def reset_arrays(self, seeds: Sequence[int]) -> ndarray:
        """Start all environments; return their observations as a new array [B, F]."""
        obs = np.zeros((self.num_envs, self.layout.size), self.row_type)
        obs[:, : self.row_size] = self._reset_envs(seeds)
        return obs

    def step_arrays(self, actions: ndarray) -> Arrays:
        """Step all environments; return new arrays in the order of STEP_FIELDS."""
        rewards, obs, final_obs, terminated, truncated = self._step_envs(self.decoder(actions))
        if self.previous_action or self.previous_reward:
            columns = []
            if self.previous_action:
                columns.append(self.decoder.encode(actions))
            if self.previous_reward:
                columns.append(rewards[:, None].astype(np.float32))
            previous = np.concatenate(columns, axis=1)
            # The first observation of an episode has no previous action and reward: set them to 0.
            continues = ~(terminated | truncated)[:, None]  # [B, 1]
            obs = np.concatenate([obs, previous * continues], axis=1)
            final_obs = np.concatenate([final_obs, previous], axis=1)
        return rewards, obs, final_obs, terminated, truncated

    def get_arrays(self) -> Snapshot:
        """Return a snapshot as arrays [B, ...] of float64 or int64."""
        columns = {f"life/{name}": self.lives[name] for name, _ in LIFE} | self._get_env_states()
        stacked = {name: np.asarray(values) for name, values in columns.items()}
        return {
            name: array.astype("f8" if array.dtype.kind == "f" else "i8", casting="safe")
            for name, array in stacked.items()
        }

    def set_arrays(self, state: Snapshot) -> None:
        """Restore a snapshot from the result of `get_arrays`."""
        # Reset first, because some environments create their state in the first reset.
        self._reset_envs([0] * self.num_envs)
        arrays = {name: array.copy() for name, array in state.items()}
        for name, _ in LIFE:
            self.lives[name] = arrays.pop(f"life/{name}")
        self._set_env_states(arrays)

    def take_metrics(self) -> Metrics:
        """Return (sum, count) of every metric that was reported since the last call."""
        return self.env.take_metrics() if isinstance(self.env, SameStep) else {}

    def close(self) -> None:
        """Close the environments; log a failure instead of raising it."""
        self.watch.close_env(None, self.env)
        self.watch.close()

    # ---- calls into the vector environment

    @guarded
    def _reset_envs(self, seeds: Sequence[int]) -> ndarray:
        self._before = self.encoder(self.env.reset(seed=seeds)[0], self.num_envs)
        return self._before

    @guarded
    def _step_envs(self, actions: object) -> Arrays:
        raw_obs, raw_rewards, *flags, info = self.env.step(actions)
        obs = self.encoder(raw_obs, self.num_envs)
        rewards = np.array(raw_rewards, np.float64).reshape(self.num_envs)
        terminated, truncated = (np.array(flag, bool).reshape(self.num_envs) for flag in flags)
        check_rows(np.abs(rewards) <= MAX_REWARD, "reward is", rewards)  # NaN fails this check, too
        final_obs = obs.copy()
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            try:
                final_obs[ended] = self._last_rows_of(info, ended)
            except RowFaultError as fault:
                raise RowFaultError(None, f"final {fault}") from None
            if isinstance(self.env, SameStep) and "final_obs" in info:
                self.mark(MISSING_RESETS, terminated | truncated)
                self.mark(RESETS, (obs != final_obs).any(axis=1))
        self._before = obs
        return rewards, obs, final_obs, terminated, truncated

    def _last_rows_of(self, info: dict, ended: ndarray) -> ndarray:
        """Return the last observations [N, F] of the N environments whose episodes ended."""
        if "final_obs" in info:
            finals = [row_of(info["final_obs"], row) for row in ended]
            return self.encoder(finals, len(ended), is_last=True)
        if self.can_snapshot:  # `_before` is not part of a snapshot
            raise ValueError("it has get_state, so it must return last observations (final_obs)")
        return self._before[ended]

    @guarded
    def _get_env_states(self) -> dict:
        return self.env.get_state()

    @guarded
    def _set_env_states(self, state: Snapshot) -> None:
        self.env.set_state(state)


class OneByOne(TorchVectorEnv):
    """Adapts a list of single environments to the TorchEnv interface.

    As long as restarts are left, a new environment replaces one that fails. The interrupted episode
    is reported as truncated, with reward 0 and the last valid observation. The next episode runs in
    the new environment.
    """

    def __post_init__(self) -> None:
        self._set_up(len(self.env), self.env[0].observation_space, self.env[0].action_space)
        self._actions_space = batch_space(self.env[0].action_space, self.num_envs)
        self._last_rows = [np.zeros(self.row_size, self.row_type)] * self.num_envs
        # Maps a row to the first observation of its next episode. Between calls, only rows in which
        # a restart has begun the next episode have an entry.
        self._first_rows: dict[int, ndarray] = {}
        self._metrics: dict[str, ndarray] = defaultdict(lambda: np.zeros(2))  # (sum, count)
        self.can_snapshot = all(map(has_snapshots, self.env))

    def begin_again(self, last_obs: ndarray) -> None:
        """Take over from a dead process; the next step truncates all running episodes.

        `lives` and `last_obs` [B, F] are the values that the dead process left in shared memory.
        """
        self._last_rows = list(last_obs[:, : self.row_size].copy())
        for row in range(self.num_envs):
            self._restarting(row, self._begin_life)

    def take_metrics(self) -> Metrics:
        """Return (sum, count) of every metric that was reported since the last call."""
        metrics = {name: (pair[0].item(), int(pair[1])) for name, pair in self._metrics.items()}
        self._metrics.clear()
        return metrics

    def close(self) -> None:
        """Close the environments; log failures instead of raising them."""
        for row, env in enumerate(self.env):
            self.watch.close_env(row, env)
        self.watch.close()

    # ---- episodes

    def _reset_envs(self, seeds: Sequence[int]) -> ndarray:
        self._first_rows = {}
        return np.stack([self._first_row(row, seed) for row, seed in enumerate(seeds)])

    def _first_row(self, row: int, seed: int | None = None) -> ndarray:
        """Return the first observation of a new episode, which a restart may have begun."""
        if row not in self._first_rows:
            self._restarting(row, self._begin, seed)
        self._last_rows[row] = self._first_rows.pop(row)
        return self._last_rows[row]

    def _begin(self, row: int, seed: int | None) -> None:
        """Reset one environment; store its first observation in `_first_rows`."""
        self.lives["age"][row] = 0
        obs, info = self.env[row].reset(seed=seed)
        self._first_rows[row] = self._row_of(obs, info)

    def _step_envs(self, actions: object) -> Arrays:
        outcomes = []
        for row, action in enumerate(iterate(self._actions_space, actions)):
            outcome = None
            if row not in self._first_rows:
                outcome = self._restarting(row, self._step, action)
            if outcome is None:  # a restart has interrupted the episode, so report its end
                outcome = 0.0, self._last_rows[row], False, True
            reward, final_row, terminated, truncated = outcome
            obs = self._first_row(row) if terminated or truncated else final_row
            outcomes.append((reward, obs, final_row, terminated, truncated))
        return tuple(np.array(column) for column in zip(*outcomes, strict=True))

    def _step(self, row: int, action: object) -> tuple[float, ndarray, bool, bool]:
        """Step one environment; return reward, observation, terminated and truncated."""
        obs, reward, terminated, truncated, info = self.env[row].step(action)
        reward = np.asarray(reward, np.float64).item()
        if not abs(reward) <= MAX_REWARD:  # this test also refuses NaN
            raise RowFaultError(row, f"reward is {reward}")
        self.lives["age"][row] += 1
        truncated = bool(truncated or self.lives["age"][row] == self.max_episode_steps)
        if isinstance(metrics := info.get("metrics"), dict):
            for name, value in metrics.items():
                with suppress(TypeError, ValueError):  # ignore a value that is not a number
                    if math.isfinite(number := float(value)):
                        self._metrics[name] += number, 1
        self._last_rows[row] = self._row_of(obs, None if terminated or truncated else info)
        return reward, self._last_rows[row], bool(terminated), truncated

    def _row_of(self, obs: object, info: dict | None) -> ndarray:
        """Encode an observation and, with `info_mask`, append the mask from `info`.

        If `info` is None, the observation is the last of its episode. No action follows, so the
        mask allows all actions.
        """
        rows = self.encoder([obs], 1, is_last=info is None)
        if self.info_mask:
            masks = np.ones((1, self.decoder.mask_size), np.float32)
            if info is not None:
                masks = self.decoder.flat_masks(info[MASK_KEY], 1)
                check_masks(masks, self.decoder.sizes)
            rows = np.concatenate([rows, masks], axis=1)
        return rows[0]

    # ---- restarts

    def _restarting(self, row: int, call: Callable[..., T], *args: object) -> T | None:
        """Return the result of a call; if it fails, rebuild the environment and return None."""
        attempt: Callable[[], T | None] = partial(call, row, *args)
        while True:  # each failure uses up one restart
            try:
                return self.watch.call(row, attempt)
            except EnvironmentFaultError as fault:
                used = int(self.lives["restarts"][row])
                if used >= self.env_restarts:
                    limit = f" (after {used} restarts, --env_restarts allows no more)"
                    raise EnvironmentFaultError(f"{fault}{limit}") from fault
                self.lives["restarts"][row] += 1
                _LOGGER.warning("%s; rebuilt, %d of %d", fault, used + 1, self.env_restarts)
            self.watch.close_env(row, self.env[row])
            attempt = partial(self._make_again, row)

    def _make_again(self, row: int) -> None:
        """Make a new environment for a row and begin an episode in it."""
        self.env[row] = self.make()
        self._begin_life(row)

    def _begin_life(self, row: int) -> None:
        """Begin an episode with a seed derived from `life_seed` and the restart count."""
        life = self.lives[row]
        entropy = np.random.SeedSequence([int(life["life_seed"]), int(life["restarts"])])
        self._begin(row, int(entropy.generate_state(1)[0]) >> 1)  # 31 bits

    # ---- snapshots

    @guarded
    def _get_env_states(self) -> dict:
        states = [env.get_state() for env in self.env]
        columns = {name: [state[name] for state in states] for name in states[0]}
        return columns | {LAST_ROW: self._last_rows}

    @guarded
    def _set_env_states(self, state: Snapshot) -> None:
        self._last_rows = list(state.pop(LAST_ROW).astype(self.row_type))
        for row, env in enumerate(self.env):
            env.set_state(
                {
                    name: column[row] if column.ndim > 1 else column[row].item()
                    for name, column in state.items()
                }
            )
