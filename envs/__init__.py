"""Register our environments with Gymnasium; make batches of any environment."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TimeLimit

from envs.vector.adapter import OneByOne, TorchVectorEnv
from envs.vector.guards import is_own_fault, place_of
from rl_dist.errors import one_line

TRADING_ID = "StockTrading-v0"
MEMORY_IDS = ("Recall-v0", "CartPolePositions-v1", "MountainCarPositions-v0")
# Vector versions that replace those of Gymnasium. In Gymnasium's vector CartPole, all environments
# share one random generator. In our version, each environment has its own generator.
VECTOR_VERSIONS = {"CartPole-v1": "envs.memory_tasks:CartPoleVectorEnv"}

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
        vectorization: "sync" steps single environments one after another. "auto" steps all
            environments in one call of the environment's vector version, which must support
            autoreset mode SAME_STEP and accept a list with one seed for each environment. Without
            such a version, and whenever `env_restarts` or `info_mask` is used, "auto" does the same
            as "sync". For CartPole-v1, "auto" uses this project's vector version.
        heartbeat: called before each single environment is made. TorchVectorEnv also calls it to
            report progress.
        options: values of further TorchVectorEnv fields, by name.

    Raises:
        ValueError: the environment is unknown or cannot be made.
    """
    spec = find_spec(env_id)
    # The adapter checks every step and enforces the step limit, so Gymnasium's wrappers that do the
    # same are not needed.
    spec = replace(
        spec,
        order_enforce=False,
        disable_env_checker=True,
        vector_entry_point=VECTOR_VERSIONS.get(env_id, spec.vector_entry_point),
    )
    kwargs = dict(env_kwargs or {})
    make_batch: Any = partial(
        gymnasium.make_vec, spec, vectorization_mode="vector_entry_point", **kwargs
    )

    limit = kwargs.get("max_episode_steps", spec.max_episode_steps)

    def make() -> gymnasium.Env:
        heartbeat()
        env = gymnasium.make(spec, **kwargs)
        if limit and limit > 0:
            # Environments and wrappers may read the limit, but only the adapter enforces it.
            env = _without_limit(env)
            env.unwrapped.spec.max_episode_steps = limit  # type: ignore[union-attr]
        return env

    options |= {"env_id": env_id, "make": make, "heartbeat": heartbeat}
    one_by_one = vectorization == "sync" or options.get("env_restarts") or options.get("info_mask")
    with _one_line(env_id):
        if spec.vector_entry_point and not one_by_one and _can_seed_each(make_batch):
            batch = make_batch(num_envs=num_envs)
        else:
            batch = [make() for _ in range(num_envs)]
    for name in ("observation_space", "action_space"):
        space = getattr(batch[0] if isinstance(batch, list) else batch, name, None)
        if not isinstance(space, gymnasium.Space):
            raise ValueError(
                f"the {name} of environment {env_id!r} must be a space of gymnasium.spaces, but is "
                f"{space!s:.80} ({type(space).__module__})"
            )
    if isinstance(batch, list):
        return OneByOne(batch, max_episode_steps=limit, **options)
    return TorchVectorEnv(batch, **options)


def _without_limit(env: gymnasium.Env) -> gymnasium.Env:
    """Return the environment without its outermost TimeLimit, which `gymnasium.make` added."""
    if isinstance(env, TimeLimit):
        return env.env
    if isinstance(env, gymnasium.Wrapper):
        env.env = _without_limit(env.env)
    return env


def import_home(env_id: str) -> str:
    """Return the id without `module:`; import the module first if one is given."""
    module, _, name = env_id.rpartition(":")
    if module:
        with _one_line(env_id):
            importlib.import_module(module)
    return name


def find_spec(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    """Return Gymnasium's spec of an id or `module:id`.

    Raises:
        ValueError: the module cannot be imported, or the id is not registered.
    """
    name = import_home(env_id)
    with _one_line(env_id):
        try:
            return gymnasium.spec(name)
        except gymnasium.error.Error as error:
            hint = "if a module registers it, write module:id, such as ale_py:ALE/Pong-v5"
            if module := env_id.rpartition(":")[0]:
                file = sys.modules[module].__file__
                hint = f"the import of {module} ({file}) has not registered it"
            raise ValueError(f"{one_line(error)}; {hint}") from error


@contextmanager
def _one_line(env_id: str) -> Iterator[None]:
    """Turn an error raised while making an environment into a one-line ValueError.

    An interruption by the user or by a signal handler is raised unchanged.
    """
    try:
        yield
    except BaseException as error:
        if not is_own_fault(error):
            raise
        reason = f"{one_line(error)}{place_of(error)}"
        raise ValueError(f"environment {env_id!r} cannot be made: {reason}") from error


def _can_seed_each(make_batch: Callable[..., Any]) -> bool:
    """Return whether a batch supports SAME_STEP and seeds each environment separately."""
    try:
        env = make_batch(num_envs=2)
        # Two environments with the same seed must start with the same observation.
        first_obs, second_obs = env.reset(seed=[11, 11])[0]
        env.close()
    except Exception:  # a batch that does not support a list of seeds may raise any error
        return False
    same_step = env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP
    return same_step and np.array_equal(first_obs, second_obs)
