"""Snapshots of environments: an optional protocol, and its stacking into tensors.

A single environment takes part by offering

    get_state() -> dict[str, np.ndarray | float | int | bool]     everything its future depends on
    set_state(state)                                              arrays arrive as float64 or int64

with the same names and shapes at every call (its random generator: `from envs.vector.batched import pack_generator`).
A native vector environment offers the same two methods with arrays of leading dimension num_envs.
TimeLimit's count is added here. An example, to be trained as `--env my_module:Drift-v0`:

    class Drift(gymnasium.Env):
        ...
        def get_state(self):
            return {"position": self.position, "age": self.age, "generator": pack_generator(self.np_random)}

        def set_state(self, state):
            self.position, self.age = state["position"], state["age"]
            unpack_generator(self.np_random, state["generator"])

    gymnasium.register("Drift-v0", entry_point=Drift, max_episode_steps=100)

`python -m rl_dist.resume_check --env my_module:Drift-v0` proves that nothing was forgotten. Before `set_state` a
new environment is reset once. Without the protocol training says at its start that after a resume episodes begin
anew: other ones than before, but the same at every resume from that checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from torch import Tensor

from envs.vector.guards import GuardedEnv

_GUARD = "guard/"
_STATELESS = (GuardedEnv, OrderEnforcing, PassiveEnvChecker)


@dataclass(frozen=True)
class _StatefulEnv:
    """One sub-environment that can be saved, with its guard and the time limits around it."""

    env: Any
    limits: tuple[TimeLimit[Any, Any], ...]
    guard: GuardedEnv | None

    def get_state(self) -> dict[str, Any]:
        counts = {f"time_limit/{i}": limit._elapsed_steps for i, limit in enumerate(self.limits)}
        guard = self.guard.guard_state() if self.guard else {}
        return {**self.env.get_state(), **counts, **{_GUARD + name: value for name, value in guard.items()}}

    def set_state(self, state: dict[str, Any]) -> None:
        guard = {name.removeprefix(_GUARD): state.pop(name) for name in list(state) if name.startswith(_GUARD)}
        if self.guard and guard:
            self.guard.restore_guard(guard)
        for i, limit in enumerate(self.limits):
            limit._elapsed_steps = state.pop(f"time_limit/{i}")
        self.env.set_state(state)


Stateful = Any | list[_StatefulEnv]  # a native vector environment, or one entry per sub-environment


def _has_protocol(env: Any) -> bool:
    return callable(getattr(env, "get_state", None)) and callable(getattr(env, "set_state", None))


def _find_in_wrappers(env: gymnasium.Env[Any, Any]) -> _StatefulEnv | None:
    guard = env if isinstance(env, GuardedEnv) else None
    limits: list[TimeLimit[Any, Any]] = []
    while not _has_protocol(env):
        if isinstance(env, TimeLimit):
            limits.append(env)
        elif not isinstance(env, _STATELESS):
            return None  # an environment without the protocol, or a wrapper that may hold state of its own
        env = env.env
    return _StatefulEnv(env, tuple(limits), guard)


def find_stateful(env: VectorEnv[Any, Any, Any]) -> Stateful | None:
    """Return what can be saved of a vector environment, None if any part cannot."""
    if isinstance(env, SyncVectorEnv):
        found = [_find_in_wrappers(one) for one in env.envs]
        return None if None in found else found
    return env if _has_protocol(env) else None


def _stack(name: str, values: Sequence[Any]) -> Tensor:
    arrays = [np.asarray(value) for value in values]
    target = np.float64 if any(array.dtype.kind == "f" for array in arrays) else np.int64
    one_shape = len({array.shape for array in arrays}) == 1
    if not one_shape or not all(np.can_cast(array.dtype, target) for array in arrays):
        raise ValueError(f"state {name!r} must hold float64 or int64 numbers of one shape, got {arrays[0]!r}")
    return torch.from_numpy(np.stack(arrays).astype(target))


def get_states(stateful: Stateful) -> dict[str, Tensor]:
    """Return the state of all environments, each tensor [B, ...] float64 or int64.

    Raises:
        ValueError: environments differ in the names or shapes of their states, or hold no numbers.
    """
    if not isinstance(stateful, list):
        return {name: _stack(name, array) for name, array in stateful.get_state().items()}
    states = [one.get_state() for one in stateful]
    if any(state.keys() != states[0].keys() for state in states):
        raise ValueError("every environment's get_state must return the same names at every call")
    return {name: _stack(name, [state[name] for state in states]) for name in states[0]}


def set_states(stateful: Stateful, state: Mapping[str, Tensor]) -> None:
    """Put all environments into a state returned by `get_states`."""
    arrays = {name: tensor.detach().cpu().numpy().copy() for name, tensor in state.items()}
    if not isinstance(stateful, list):
        stateful.set_state(arrays)
        return
    for row, one in enumerate(stateful):
        one.set_state({name: a[row].item() if a.ndim == 1 else a[row].copy() for name, a in arrays.items()})
