"""Snapshots of environments: an optional protocol, and its stacking into tensors.

A single environment takes part by offering

    get_state() -> dict[str, np.ndarray | float | int | bool]  everything its future depends on
    set_state(state)                                           arrays arrive as float64 or int64

with the same names and shapes at every call; a native vector environment the same with leading
dimension num_envs. docs/own_environment.md has an example. A new environment is reset once before
`set_state`. Without the protocol episodes begin again after a resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv
from torch import Tensor


def has_protocol(env: Any) -> bool:
    """Return whether an environment has get_state and set_state."""
    return callable(getattr(env, "get_state", None)) and callable(getattr(env, "set_state", None))


def get_states(env: VectorEnv[Any, Any, Any]) -> dict[str, Tensor]:
    """Return the state of all environments, each tensor [B, ...] float64 or int64."""
    if not isinstance(env, SyncVectorEnv):
        return {name: _stack(name, array) for name, array in env.get_state().items()}  # type: ignore[attr-defined]
    states = [one.get_state() for one in env.envs]  # type: ignore[attr-defined]
    if any(state.keys() != states[0].keys() for state in states):
        raise ValueError("every environment's get_state must return the same names at every call")
    return {name: _stack(name, [state[name] for state in states]) for name in states[0]}


def _stack(name: str, values: Sequence[Any]) -> Tensor:
    arrays = [np.asarray(value) for value in values]
    target = np.float64 if any(array.dtype.kind == "f" for array in arrays) else np.int64
    one_shape = len({array.shape for array in arrays}) == 1
    if not one_shape or not all(np.can_cast(array.dtype, target) for array in arrays):
        raise ValueError(
            f"state {name!r} must hold float64 or int64 numbers of one shape, got {arrays[0]!r}"
        )
    return torch.from_numpy(np.stack(arrays).astype(target))


def set_states(env: VectorEnv[Any, Any, Any], state: Mapping[str, Tensor]) -> None:
    """Put all environments into a state returned by `get_states`."""
    arrays = {name: tensor.detach().cpu().numpy().copy() for name, tensor in state.items()}
    if not isinstance(env, SyncVectorEnv):
        env.set_state(arrays)  # type: ignore[attr-defined]
        return
    for row, one in enumerate(env.envs):
        one.set_state(  # type: ignore[attr-defined]
            {name: a[row].item() if a.ndim == 1 else a[row].copy() for name, a in arrays.items()}
        )
