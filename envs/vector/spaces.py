"""How numpy environments look to agents: flat observations, actions in [-1, 1]."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor


def _refusal(env_id: str, kind: str, space: Any, cure: str) -> ValueError:
    shown = " ".join(str(space).split())
    shown = shown if len(shown) <= 160 else shown[:160] + "..."
    return ValueError(f"environment {env_id} has {kind} space {shown}, which is not supported: {cure}")


class ObservationEncoder:
    """Encode Box (flattened) or Discrete (one-hot) observations as [B, F] float32."""

    def __init__(self, source: spaces.Space[Any], env_id: str) -> None:
        self._shape = source.shape or ()
        self._start: int | None = None
        if isinstance(source, spaces.Box) and source.low.size:
            with np.errstate(over="ignore"):  # float64 bounds may be beyond float32
                low, high = source.low.astype(np.float32).ravel(), source.high.astype(np.float32).ravel()
        elif isinstance(source, spaces.Discrete):
            self._start = int(source.start)
            low, high = np.zeros(int(source.n), np.float32), np.ones(int(source.n), np.float32)
        else:
            cure = "it must be Box or Discrete; gymnasium.wrappers.FlattenObservation may help"
            raise _refusal(env_id, "observation", source, cure)
        self.space = spaces.Box(low, high, dtype=np.float32)

    def __call__(self, raw: Any, count: int) -> np.ndarray:
        """Return a fresh array [count, F] float32.

        Raises:
            ValueError: a wrong shape, or a Discrete observation outside its space.
        """
        source = np.asarray(raw)
        if source.shape != (count, *self._shape):
            raise ValueError(f"shape {source.shape} is not {(count, *self._shape)}")
        if self._start is None:
            with np.errstate(over="ignore"):  # becomes infinity, which the caller reports
                return np.array(source, dtype=np.float32).reshape(count, -1)
        encoded = np.zeros((count, self.space.shape[0]), dtype=np.float32)
        index = source.astype(np.int64) - self._start
        if ((index < 0) | (index >= encoded.shape[1])).any():
            raise ValueError(f"a value is outside {self._start}..{self._start + encoded.shape[1] - 1}")
        encoded[np.arange(count), index] = 1.0
        return encoded


class ActionDecoder:
    """Turn agents' actions into an environment's: Discrete from 0, Box from [-1, 1]."""

    def __init__(self, target: spaces.Space[Any], env_id: str) -> None:
        self.space: spaces.Discrete | spaces.Box
        self._target = target
        if isinstance(target, spaces.Discrete):
            self.space = spaces.Discrete(int(target.n))
        elif isinstance(target, spaces.Box) and np.issubdtype(target.dtype, np.floating) and target.low.size:
            self._fit(target)
        else:
            raise _refusal(env_id, "action", target, "it must be Discrete or a Box of floats")

    def _fit(self, target: spaces.Box) -> None:
        """Where both bounds are finite, [-1, 1] is stretched over them; elsewhere actions pass through."""
        low, high = target.low.astype(np.float64).ravel(), target.high.astype(np.float64).ravel()
        finite = np.isfinite(low) & np.isfinite(high)
        self._low = np.where(finite, -1.0, low)
        self._high = np.where(finite, 1.0, high)
        self._scale = np.ones_like(low)
        self._offset = np.zeros_like(low)
        self._scale[finite] = 0.5 * (high[finite] - low[finite])
        self._offset[finite] = 0.5 * (high[finite] + low[finite])
        self.space = spaces.Box(self._low.astype(np.float32), self._high.astype(np.float32), dtype=np.float32)

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
        scaled = np.clip(given.astype(np.float64), self._low, self._high) * self._scale + self._offset
        shaped = scaled.reshape(count, *self._target.shape).astype(self._target.dtype)
        return np.clip(shaped, self._target.low, self._target.high)  # rounding may exceed the bounds
