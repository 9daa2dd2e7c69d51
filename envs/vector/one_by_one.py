"""Step single environments one after the other and replace those that fail."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector.utils import batch_space, iterate
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from envs.vector.adapter import LIFE, Arrays, TorchVectorEnv, warn_once
from envs.vector.batched import has_snapshots
from envs.vector.guards import MAX_REWARD, EnvironmentFaultError
from envs.vector.spaces import MASK_KEY, RowFaultError, check_masks, flat_mask

_LOGGER = logging.getLogger(__name__)


class OneByOne(TorchVectorEnv):
    """Adapts a list of single environments to the TorchEnv interface.

    As long as restarts are left, an environment that fails is replaced by a new one. Its
    interrupted episode is reported as truncated, with reward 0 and the last valid observation. The
    next episode runs in the new environment.
    """

    def __post_init__(self) -> None:
        self._set_up(len(self.env), self.env[0].observation_space, self.env[0].action_space)
        self._actions_space = batch_space(self.env[0].action_space, self.num_envs)
        self._last_rows = [np.zeros(self.row_size, np.float32)] * self.num_envs
        # First observation of the next episode, by row, where a restart has already begun it.
        self._first_rows: dict[int, np.ndarray] = {}
        self._metrics: dict[str, tuple[float, int]] = {}
        self.can_snapshot = all(has_snapshots(self._unwrapped(env)[0]) for env in self.env)

    def begin_again(self, last_obs: np.ndarray) -> None:
        """Continue in place of a process that died; the next step truncates all episodes.

        `lives` and `last_obs` [B, F] are the values that the dead process left in shared memory.
        """
        self._last_rows = list(last_obs[:, : self.row_size].copy())
        for row in range(self.num_envs):
            self._guarded(row, self._begin_life)

    def take_metrics(self) -> dict[str, tuple[float, int]]:
        """Return (sum, count) of every metric that was reported since the last call."""
        metrics = self._metrics
        self._metrics = {}
        return metrics

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments; log a failure instead of raising it."""
        for row, env in enumerate(self.env):
            self.watch.close_env(row, env)
        self.watch.close()

    # ---- episodes

    def _call_reset(self, seeds: Any) -> np.ndarray:
        if seeds is not None:
            self._first_rows = {}
        return np.stack(
            [self._first_row(row, seeds and seeds[row]) for row in range(self.num_envs)]
        )

    def _first_row(self, row: int, seed: int | None = None) -> np.ndarray:
        """Begin an episode unless a restart already did; return its first observation."""
        if row not in self._first_rows:
            self._guarded(row, self._begin, seed)
        self._last_rows[row] = self._first_rows.pop(row)
        return self._last_rows[row]

    def _begin(self, row: int, seed: int | None) -> None:
        obs, info = self.env[row].reset(seed=seed)
        self._first_rows[row] = self._row_of(obs, info)

    def _call_step(self, actions: Any) -> Arrays:
        outcomes = []
        for row, action in enumerate(iterate(self._actions_space, actions)):
            outcome = None
            if row not in self._first_rows:
                outcome = self._guarded(row, self._step, action)
            if outcome is None:  # the environment was restarted, which ends the episode
                outcome = self._last_rows[row], 0.0, False, True
            final_row, reward, terminated, truncated = outcome
            obs = self._first_row(row) if terminated or truncated else final_row
            outcomes.append((obs, reward, terminated, truncated, final_row))
        return tuple(np.array(column) for column in zip(*outcomes, strict=True))

    def _step(self, row: int, action: Any) -> tuple[np.ndarray, float, bool, bool]:
        obs, reward, terminated, truncated, info = self.env[row].step(action)
        reward = np.asarray(reward, np.float64).item()
        if not abs(reward) <= MAX_REWARD:  # also true for NaN
            raise RowFaultError(row, f"reward is {reward}")
        metrics = info.get("metrics")
        for name, value in metrics.items() if isinstance(metrics, dict) else ():
            self._add_metric(name, value)
        # No action follows the last observation of an episode, so its mask is not needed.
        self._last_rows[row] = self._row_of(obs, None if terminated or truncated else info)
        return self._last_rows[row], reward, bool(terminated), bool(truncated)

    def _row_of(self, obs: Any, info: dict[str, Any] | None) -> np.ndarray:
        """Encode an observation and, with `info_mask`, append info's mask (None: ones)."""
        rows = self.encoder([obs], 1)
        if self.info_mask:
            all_ones = np.ones(self.decoder.mask_size)
            masks = flat_mask(all_ones if info is None else info[MASK_KEY])[None]
            check_masks(masks, self.decoder.sizes)
            rows = np.concatenate([rows, masks], axis=1)
        return rows[0]

    def _add_metric(self, name: str, value: Any) -> None:
        """Add one number from info["metrics"] to its running sum and count."""
        number = math.nan
        with suppress(TypeError, ValueError):
            number = float(value)
        if math.isfinite(number):
            total, count = self._metrics.get(name, (0.0, 0))
            self._metrics[name] = total + number, count + 1
        else:
            warn_once(f"info['metrics'][{name!r}] is skipped where it is not one finite number")

    # ---- restarts

    def _guarded(self, row: int, call: Callable[..., Any], *args: Any) -> Any:
        """Call into an environment; if the call fails, replace it and return None."""
        attempt: Callable[[], Any] = partial(call, row, *args)
        while True:  # every failure uses up one restart
            try:
                return self.watch.call(row, attempt)
            except EnvironmentFaultError as fault:
                used = int(self.lives["restarts"][row])
                if used >= self.env_restarts:
                    again = f" (after {used} restarts, --env_restarts)" * bool(used)
                    raise EnvironmentFaultError(f"{fault}{again}") from fault
                self.lives["restarts"][row] = used + 1
                _LOGGER.warning("%s; made again, %d of %d", fault, used + 1, self.env_restarts)
            self.watch.close_env(row, self.env[row])
            attempt = partial(self._make_again, row)

    def _make_again(self, row: int) -> None:
        self.env[row] = self.make()
        self._begin_life(row)

    def _begin_life(self, row: int) -> None:
        """Begin an episode with a seed derived from `life_seed` and the restart count."""
        life = self.lives[row]
        entropy = np.random.SeedSequence([int(life["life_seed"]), int(life["restarts"])])
        self._begin(row, int(entropy.generate_state(1, np.uint64)[0]) >> 1)

    # ---- snapshots

    def _unwrapped(self, env: Any) -> tuple[Any, list[Any]]:
        """Remove TimeLimit and OrderEnforcing; return the environment and time limits.

        Other wrappers are kept, because they may hold state that a snapshot would miss.
        """
        limits: list[Any] = []
        while isinstance(env, TimeLimit | OrderEnforcing) and not has_snapshots(env):
            if isinstance(env, TimeLimit):
                limits.append(env)
            env = env.env
        return env, limits

    def _call_get_state(self) -> dict[str, Any]:
        states = []
        for wrapped in self.env:
            env, limits = self._unwrapped(wrapped)
            elapsed = {f"time_limit/{i}": limit._elapsed_steps for i, limit in enumerate(limits)}
            states.append(env.get_state() | elapsed)
        columns: dict[str, Any] = {n: [state[n] for state in states] for n in states[0]}
        columns |= {f"guard/{name}": self.lives[name] for name, _ in LIFE}
        return columns | ({"guard/last_row": self._last_rows} if self.env_restarts else {})

    def _call_set_state(self, state: dict[str, np.ndarray]) -> None:
        # Snapshots from a vector environment, or without --env_restarts, lack some entries.
        for name, _ in LIFE:
            self.lives[name] = state.pop(f"guard/{name}", self.lives[name])
        last_rows = state.pop("guard/last_row", self._last_rows)
        self._last_rows = [np.asarray(row, np.float32) for row in last_rows]
        for row, wrapped in enumerate(self.env):
            env, limits = self._unwrapped(wrapped)
            env_state = {
                name: column[row] if column.ndim > 1 else column[row].item()
                for name, column in state.items()
            }
            for i, limit in enumerate(limits):
                limit._elapsed_steps = env_state.pop(f"time_limit/{i}")
            env.set_state(env_state)
