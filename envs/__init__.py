"""Register our environments with Gymnasium; make batches of any environment."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from envs.vector.guards import is_own_fault, place_of
from rl_dist.errors import one_line

# Keep this import fast: torch and pandas are imported only when an environment is made.
if TYPE_CHECKING:
    from envs.vector.adapter import TorchVectorEnv

TRADING_ID = "StockTrading-v0"
MEMORY_IDS = ("Recall-v0", "CartPolePositions-v1", "MountainCarPositions-v0")
# Gymnasium's vector CartPole shares one generator among all environments; ours does not.
OUR_BATCHES = {"CartPole-v1": "envs.memory_tasks:CartPoleVectorEnv"}

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
    from envs.vector.adapter import OneByOne, TorchVectorEnv

    spec = find_spec(env_id)
    # The adapter checks every step and enforces the step limit, so wrappers are not needed.
    spec = replace(
        spec,
        order_enforce=False,
        disable_env_checker=True,
        vector_entry_point=OUR_BATCHES.get(env_id, spec.vector_entry_point),
    )
    kwargs = dict(env_kwargs or {})
    make_batch: Any = partial(
        gymnasium.make_vec, spec, vectorization_mode="vector_entry_point", **kwargs
    )

    def make() -> gymnasium.Env[Any, Any]:
        heartbeat()
        return gymnasium.make(spec, **kwargs | {"max_episode_steps": -1})

    options |= {"env_id": env_id, "make": make, "heartbeat": heartbeat}
    one_by_one = vectorization == "sync" or options.get("env_restarts") or options.get("info_mask")
    with _one_line(env_id):
        if spec.vector_entry_point and not one_by_one and _seeds_each(make_batch):
            batch = make_batch(num_envs=num_envs)
        else:
            batch = [make() for _ in range(num_envs)]
    if isinstance(batch, list):
        limit = kwargs.get("max_episode_steps", spec.max_episode_steps)
        return OneByOne(batch, max_episode_steps=limit, **options)
    return TorchVectorEnv(batch, **options)


def find_spec(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    """Return the spec of an id or `module:id`; raise ValueError if it is unknown."""
    module, _, name = env_id.rpartition(":")
    with _one_line(env_id):
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)


@contextmanager
def _one_line(env_id: str) -> Iterator[None]:
    """Turn any error raised while making an environment into a one-line ValueError."""
    try:
        yield
    except BaseException as error:
        if not is_own_fault(error):
            raise
        reason = f"{one_line(error)}{place_of(error)}"
        raise ValueError(f"environment {env_id!r} cannot be made: {reason}") from error


def _seeds_each(make_batch: Callable[..., Any]) -> bool:
    """Return whether batches use SAME_STEP and accept one seed for each environment."""
    try:
        env = make_batch(num_envs=2)
        first, second = env.reset(seed=[11, 11])[0]
        env.close()
    except Exception:  # a list of seeds may raise any error
        return False
    same_step = env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP
    return same_step and np.array_equal(first, second)
