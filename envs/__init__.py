"""Register our environments with Gymnasium; make batches of any environment."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TimeLimit

from envs.vector.adapter import OneByOne, TorchVectorEnv
from envs.vector.batched import BatchedEnv
from envs.vector.guards import is_own_fault, place_of
from envs.vector.same_step import (
    SameStep,
    argument_names,
    autoreset_mode,
    find_seed_form,
    plain,
    resets_by_mask,
)
from rl_dist.errors import one_line

TRADING_ID = "StockTrading-v0"
MEMORY_IDS = ("Recall-v0", "CartPolePositions-v1", "MountainCarPositions-v0")
# Vector versions that replace those of Gymnasium. In Gymnasium's vector CartPole, all environments
# share one random generator. In our version, each environment has its own generator.
VECTOR_VERSIONS = {"CartPole-v1": "envs.memory_tasks:CartPoleVectorEnv"}

# Arguments for the vector versions that accept them. Clipped rewards would hide a game's score.
BATCH_ARGUMENTS = {"autoreset_mode": AutoresetMode.SAME_STEP, "reward_clipping": False}

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
    """Make environments from a Gymnasium id, `module:id`, or a `module:name` that makes one.

    Args:
        vectorization: "sync" steps single environments one after another. "auto" steps all
            environments in one call of the environment's vector version if `native_batch` accepts
            it; otherwise, and whenever `env_restarts` or `info_mask` is used, it does the same as
            "sync", and `note` of the result says why. For CartPole-v1, "auto" uses this project's
            vector version.
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
    limit = kwargs.get("max_episode_steps", spec.max_episode_steps)

    def make() -> gymnasium.Env:
        heartbeat()
        env = gymnasium.make(spec, **kwargs)
        if limit and limit > 0:
            # Environments and wrappers may read the limit, but only the adapter enforces it.
            env = _without_limit(env)
            env.unwrapped.spec.max_episode_steps = limit  # type: ignore[union-attr]
        return env

    note = ""
    make_batch = None
    with making(env_id):
        if spec.vector_entry_point and vectorization == "auto":
            try:
                for name in ("env_restarts", "info_mask"):
                    if options.get(name):
                        raise ValueError(f"{name} needs single environments")
                make_batch = native_batch(spec, kwargs)
            except ValueError as error:
                note = f"{env_id} is stepped one environment at a time: {error}"
                if not spec.entry_point:
                    raise ValueError(f"it has only a vector version, but {error}") from error
        batch: Any = make_batch(num_envs) if make_batch else [make() for _ in range(num_envs)]
    first, prefix = (batch, "single_") if make_batch else (batch[0], "")
    for name in (f"{prefix}observation_space", f"{prefix}action_space"):
        space = getattr(first, name, None)
        if not isinstance(space, gymnasium.Space):
            raise ValueError(
                f"the {name} of environment {env_id!r} must be a space of gymnasium.spaces, but is "
                f"{space!s:.80} ({type(space).__module__})"
            )
    options |= {"env_id": env_id, "make": make, "heartbeat": heartbeat}
    if isinstance(batch, list):
        return OneByOne(batch, max_episode_steps=limit, note=note, **options)
    return TorchVectorEnv(batch, **options)


def native_batch(
    spec: gymnasium.envs.registration.EnvSpec, kwargs: dict[str, Any]
) -> Callable[[int], Any]:
    """Return a function that makes the vector version of an environment, given a number.

    The vector version is used only if each environment has its own seed and its true last
    observation.

    Raises:
        ValueError: the vector version cannot be used; the message says why.
    """
    entry_point = spec.vector_entry_point
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    accepted = argument_names(creator)
    arguments: Any = {name: v for name, v in BATCH_ARGUMENTS.items() if name in accepted}
    make_vec: Any = partial(
        gymnasium.make_vec, spec, vectorization_mode="vector_entry_point", **arguments | kwargs
    )
    try:
        trial = make_vec(num_envs=2)
    except Exception as error:  # a batch may fail with any error
        raise ValueError(f"its vector version raised {one_line(error)}") from error
    if isinstance(trial, BatchedEnv):
        return lambda num_envs: make_vec(num_envs=num_envs)
    seed_form = find_seed_form(trial, 2)
    starts_by_mask = autoreset_mode(trial) != AutoresetMode.SAME_STEP
    fits = seed_form and (not starts_by_mask or resets_by_mask(trial, 2))
    trial.close()
    if not seed_form:
        raise ValueError("its vector version does not take one seed per environment")
    if not fits:
        raise ValueError(
            "its vector version starts episodes a step late (autoreset mode NEXT_STEP) and knows "
            "no reset_mask"
        )
    return lambda num_envs: SameStep(
        make_vec(num_envs=num_envs), num_envs, seed_form, starts_by_mask, plain
    )


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
        with making(env_id):
            importlib.import_module(module)
    return name


def find_spec(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    """Return the spec of an id or `module:id`, or of a `module:name` that makes an environment.

    Raises:
        ValueError: the module cannot be imported, or the name is unknown.
    """
    name = import_home(env_id)
    if maker := own_maker(env_id):
        return gymnasium.envs.registration.EnvSpec(name, entry_point=maker)
    with making(env_id):
        try:
            return gymnasium.spec(name)
        except gymnasium.error.Error as error:
            hint = "if a module registers it, write module:id, such as ale_py:ALE/Pong-v5"
            if module := env_id.rpartition(":")[0]:
                file = sys.modules[module].__file__
                hint = f"{module} ({file}) neither registers it nor has a function or class {name}"
            raise ValueError(f"{one_line(error)}; {hint}") from error


def own_maker(env_id: str) -> Callable[..., Any] | None:
    """Return the class or function that `module:name` names; None if it is a registered id."""
    name = import_home(env_id)
    module = sys.modules.get(env_id.rpartition(":")[0])
    maker = getattr(module, name, None)
    return maker if callable(maker) and name not in gymnasium.registry else None


def makes_batch(env_id: str) -> bool:
    """Return whether `module:name` names a class or function that makes a batch."""
    maker = own_maker(env_id)
    return maker is not None and "num_envs" in argument_names(maker)


@contextmanager
def making(env_id: str) -> Iterator[None]:
    """Turn an error raised while making an environment into a one-line ValueError.

    An interruption by the user or by a signal handler is raised unchanged.
    """
    try:
        yield
    except BaseException as error:
        if not is_own_fault(error):
            raise
        reason = f"{one_line(error)}{place_of(error)}"
        if isinstance(error, ModuleNotFoundError):
            reason += "; if the module is yours, run in its folder, or set PYTHONPATH to the folder"
        raise ValueError(f"environment {env_id!r} cannot be made: {reason}") from error
