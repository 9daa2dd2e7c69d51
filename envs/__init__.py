"""Register our environments with Gymnasium; make batches of any environment."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from envs.vector.guards import is_own_fault, place_of
from rl_dist.errors import did_you_mean, one_line

# Keep this import fast: torch and pandas are imported only when an environment is made.
if TYPE_CHECKING:
    from envs.vector.adapter import TorchVectorEnv

TRADING_ID = "StockTrading-v0"
MEMORY_IDS = ("Recall-v0", "CartPolePositions-v1", "MountainCarPositions-v0")
# Gymnasium's vector CartPole shares one generator among all environments; ours does not.
OUR_CART_POLE = "envs.memory_tasks:CartPoleVectorEnv"

_LOGGER = logging.getLogger(__name__)
for _env_id in MEMORY_IDS:
    _entry_point = f"envs.memory_tasks:{_env_id.partition('-')[0]}"
    gymnasium.register(
        _env_id, entry_point=f"{_entry_point}Env", vector_entry_point=f"{_entry_point}VectorEnv"
    )


def make_vector_env(
    env_id: str,
    num_envs: int,
    *,
    vectorization: str = "auto",
    env_kwargs: Mapping[str, Any] | None = None,
    heartbeat: Callable[[], None] = lambda: None,
    **options: Any,
) -> TorchVectorEnv:
    """Make a batch of environments from a Gymnasium id or `module:id`.

    Args:
        vectorization: "auto" uses the environment's vector version (ours for CartPole-v1) if it has
            autoreset SAME_STEP and accepts one seed per environment. Otherwise, or with "sync",
            `env_restarts` or `info_mask`, single environments are stepped one after the other.
        heartbeat: called before each single environment is made, and later by TorchVectorEnv.
        options: other fields of TorchVectorEnv.

    Raises:
        ValueError: the environment is unknown or cannot be made.
    """
    from envs.vector.adapter import TorchVectorEnv
    from envs.vector.one_by_one import OneByOne

    spec = find_spec(env_id)
    kwargs = dict(env_kwargs or {})

    def make() -> gymnasium.Env[Any, Any]:
        heartbeat()
        # Gymnasium's checker is not needed: OneByOne checks every step.
        return gymnasium.make(spec, disable_env_checker=True, **kwargs)

    vector_spec = spec
    if spec.entry_point == "gymnasium.envs.classic_control.cartpole:CartPoleEnv" and not kwargs:
        vector_spec = replace(spec, vector_entry_point=OUR_CART_POLE)

    def make_batch(count: int) -> VectorEnv[Any, Any, Any]:
        mode = "vector_entry_point"
        return gymnasium.make_vec(vector_spec, count, vectorization_mode=mode, **kwargs)

    one_by_one = vectorization == "sync" or options.get("env_restarts") or options.get("info_mask")
    try:
        envs: Any
        if vector_spec.vector_entry_point and not one_by_one and _seeds_each(make_batch):
            envs = make_batch(num_envs)
        else:
            envs = [make() for _ in range(num_envs)]
    except BaseException as error:
        if not is_own_fault(error):
            raise
        given = f" with {kwargs}" * bool(kwargs)
        reason = f"{one_line(error)}{place_of(error)}"
        raise ValueError(f"environment {env_id}{given} cannot be made: {reason}") from error
    adapter = OneByOne if isinstance(envs, list) else TorchVectorEnv
    return adapter(envs, env_id=env_id, make=make, heartbeat=heartbeat, **options)


def find_spec(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    """Return the spec of an id or `module:id`; raise ValueError if it is unknown."""
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        fix = (
            did_you_mean(name, {*gymnasium.registry, TRADING_ID})
            or "give a Gymnasium id or module:id"
        )
        raise ValueError(f"unknown environment {env_id!r}: {fix}") from error
    except BaseException as error:
        if not is_own_fault(error):
            raise
        raised = f"its module raised {one_line(error)}{place_of(error)}"
        raise ValueError(
            f"environment {env_id!r}: {raised}: check it and the Python path"
        ) from error


def _seeds_each(make_batch: Callable[[int], VectorEnv[Any, Any, Any]]) -> bool:
    """Return whether batches use SAME_STEP and accept one seed per environment."""
    try:
        env = make_batch(2)
        first = np.array(env.reset(seed=[11, 12])[0])  # type: ignore[arg-type]
        second = np.array(env.reset(seed=[12, 11])[0])  # type: ignore[arg-type]
        same_step = env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP
        env.close()
    except Exception as error:  # a refused list of seeds may raise anything
        _LOGGER.info("environments step one after the other: %s", one_line(error))
        return False
    return same_step and np.array_equal(first, second[::-1])
