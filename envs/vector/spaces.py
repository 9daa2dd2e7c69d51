"""How numpy environments look to agents: flat observations, actions in [-1, 1]."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor


def _refusal(env_id: str, kind: str, space: Any, fix: str) -> ValueError:
    shown = " ".join(str(space).split())[:160]
    return ValueError(
        f"environment {env_id} has {kind} space {shown}, which is not supported: {fix}"
    )


class ObservationEncoder:
    """Encode Box (flattened) or Discrete (one-hot) observations as [B, F] float32."""

    def __init__(self, source: spaces.Space[Any], env_id: str) -> None:
        if not (isinstance(source, spaces.Discrete) or _is_box(source)):
            fix = "it must be Box or Discrete; gymnasium.wrappers.FlattenObservation may help"
            raise _refusal(env_id, "observation", source, fix)
        self._source = source
        flat = spaces.flatten_space(source)
        assert isinstance(flat, spaces.Box)
        with np.errstate(over="ignore"):  # float64 bounds may be beyond float32
            self.space = spaces.Box(flat.low.astype(np.float32), flat.high.astype(np.float32))

    def __call__(self, raw: Any, count: int) -> np.ndarray:
        """Return a fresh array [count, F] float32.

        Raises:
            ValueError: a wrong shape, or a Discrete observation outside its space.
        """
        values = np.asarray(raw)
        wanted = (count, *(self._source.shape or ()))
        if values.shape != wanted:
            raise ValueError(f"shape {values.shape} is not {wanted}")
        if not isinstance(self._source, spaces.Discrete):
            with np.errstate(over="ignore"):  # becomes infinity, which the caller reports
                return np.array(values, dtype=np.float32).reshape(count, -1)
        encoded = np.zeros((count, int(self._source.n)), dtype=np.float32)
        index = values.astype(np.int64) - int(self._source.start)
        if ((index < 0) | (index >= self._source.n)).any():
            raise ValueError(f"a value is outside {self._source}")
        encoded[np.arange(count), index] = 1.0
        return encoded


class ActionDecoder:
    """Turn agents' actions into an environment's: Discrete from 0, Box from [-1, 1].

    Where both bounds of a Box are finite, [-1, 1] is stretched over them.
    """

    def __init__(self, target: spaces.Space[Any], env_id: str) -> None:
        self.space: spaces.Discrete | spaces.Box
        self._target = target
        if isinstance(target, spaces.Discrete):
            self.space = spaces.Discrete(int(target.n))
            return
        if not (_is_box(target) and np.issubdtype(target.dtype, np.floating)):
            raise _refusal(env_id, "action", target, "it must be Discrete or a Box of floats")
        assert isinstance(target, spaces.Box)
        low = target.low.astype(np.float64).ravel()
        high = target.high.astype(np.float64).ravel()
        finite = np.isfinite(low) & np.isfinite(high)
        self._low = np.where(finite, -1.0, low)
        self._high = np.where(finite, 1.0, high)
        self._scale = np.ones_like(low)
        self._offset = np.zeros_like(low)
        self._scale[finite] = 0.5 * (high[finite] - low[finite])
        self._offset[finite] = 0.5 * (high[finite] + low[finite])
        self.space = spaces.Box(self._low.astype(np.float32), self._high.astype(np.float32))

    def __call__(self, actions: Tensor, count: int) -> np.ndarray:
        """Return [count, ...] actions in the environment's own shape, type and bounds.

        Raises:
            ValueError: a wrong shape, or actions that are not finite.
        """
        wanted = (count, *(self.space.shape or ()))
        if tuple(actions.shape) != wanted:
            raise ValueError(f"actions must have shape {wanted}, got {tuple(actions.shape)}")
        given = actions.detach().cpu().numpy()
        if isinstance(self._target, spaces.Discrete):
            return given.astype(np.int64) + int(self._target.start)
        assert isinstance(self._target, spaces.Box)
        if not np.isfinite(given).all():
            raise ValueError("actions must be finite, got NaN or infinity: the policy has diverged")
        clipped = np.clip(given.astype(np.float64), self._low, self._high)
        scaled = clipped * self._scale + self._offset
        shaped = scaled.reshape(count, *self._target.shape).astype(self._target.dtype)
        # rounding may exceed the bounds
        return np.clip(shaped, self._target.low, self._target.high)


def _is_box(space: spaces.Space[Any]) -> bool:
    """Return whether a space is a Box with at least one number."""
    return isinstance(space, spaces.Box) and space.low.size > 0
