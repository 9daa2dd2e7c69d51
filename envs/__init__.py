"""Registers our environments with Gymnasium, makes batches of any of them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from envs.vector.faults import is_own_fault
from envs.vector.hangs import own_place_of
from rl_dist.errors import UserError, check_one_copy, did_you_mean, no_module, one_line

check_one_copy(__file__)
# torch and pandas are loaded when a factory is called, not when ids are registered
if TYPE_CHECKING:
    from envs.vector.adapter import TorchVectorEnv

TRADING_ID = "StockTrading-v0"
# Gymnasium's own batch has one generator for all its environments
OWN_BATCHES = {"CartPole-v1": "envs.memory_tasks.cartpole_positions:CartPoleVectorEnv"}

_LOGGER = logging.getLogger(__name__)
_ENTRY_POINTS = {
    TRADING_ID: ("trading.task:StockTradingEnv", "trading.task:make_trading_vector_env"),
}
for _env_id, _module in (
    ("Recall-v0", "recall"),
    ("CartPolePositions-v1", "cartpole_positions"),
    ("PocMemory-v0", "poc_memory"),
    ("MemoryLength-v0", "memory_length"),
    ("MountainCarPositions-v0", "mountain_car_positions"),
):
    _name = f"memory_tasks.{_module}:{_env_id.partition('-')[0]}"
    _ENTRY_POINTS[_env_id] = (f"{_name}Env", f"{_name}VectorEnv")
for _env_id, (_single, _batch) in _ENTRY_POINTS.items():
    if _env_id not in gymnasium.registry:
        gymnasium.register(
            _env_id, entry_point=f"envs.{_single}", vector_entry_point=f"envs.{_batch}"
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
    """Make a batch of any Gymnasium id or `module:id` but the trading one.

    `vectorization` "auto" uses the environment's own vector form, or one of OWN_BATCHES, if it
    takes one seed per environment and autoreset SAME_STEP. Otherwise, with "sync" and with restarts
    one environment steps after the other. Other options are of TorchVectorEnv; what cannot be made
    raises ValueError.
    """
    from envs.vector.adapter import TorchVectorEnv

    if env_id.rsplit(":", 1)[-1] == TRADING_ID:
        raise ValueError(
            f"{TRADING_ID} needs market data: make it with gymnasium.make_vec or envs.trading.task"
        )
    spec = find_spec(env_id)
    kwargs = dict(env_kwargs or {})
    native = vectorization == "auto" and not options.get("env_restarts")
    if native and not kwargs and str(spec.entry_point).startswith("gymnasium."):
        own = OWN_BATCHES.get(spec.id, spec.vector_entry_point)
        spec = replace(spec, vector_entry_point=own)
    if native := native and spec.vector_entry_point is not None:
        try:
            native = _seeds_each(_construct(spec, env_id, 2, kwargs, True, heartbeat))
        except ValueError as error:
            _LOGGER.info("%s: using one environment after the other", error)
            native = False
    return TorchVectorEnv(
        _construct(spec, env_id, num_envs, kwargs, native, heartbeat),
        env_id=env_id,
        heartbeat=heartbeat,
        **options,
    )


def find_spec(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    """Find an id, importing the module of `module:id`; unknown ones raise ValueError."""
    module, _, name = env_id.rpartition(":")
    _refuse_file(env_id, module, name)
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        known = list(gymnasium.registry)
        fix = "give a Gymnasium id or module:id"
        if module:
            known = [one for one in known if f"{_module_of(one)}.".startswith(f"{module}.")]
            fix = f"{module} registers {', '.join(known[:5]) or 'none, see gymnasium.register'}"
        fix = did_you_mean(name, known) or fix
        raise ValueError(f"unknown environment {env_id!r}: {fix}") from error
    except BaseException as error:
        if not is_own_fault(error):
            raise
        raised = f"its module raised {one_line(error)}{own_place_of(error)}: check it and the "
        why = no_module(module, error) or f"{raised}Python path"
        raise ValueError(f"environment {env_id!r}: {why}") from error


def _refuse_file(env_id: str, module: str, name: str) -> None:
    """Say which module a file is."""
    if not module.endswith(".py"):
        return
    path = PurePath(module).with_suffix("")
    inside = not path.is_absolute() and ".." not in path.parts
    own = ".".join(path.parts) if inside else path.name
    where = "" if inside else f", and run in {path.parent} or add that to PYTHONPATH"
    raise ValueError(f"environment {env_id!r} names a file: name its module, {own}:{name}{where}")


def _module_of(env_id: str) -> str:
    """Return the module of what makes a registered environment: a class, or its name."""
    entry = gymnasium.registry[env_id].entry_point
    return entry.partition(":")[0] if isinstance(entry, str) else getattr(entry, "__module__", "")


def _construct(
    spec: gymnasium.envs.registration.EnvSpec,
    env_id: str,
    num_envs: int,
    kwargs: dict[str, Any],
    native: bool,
    heartbeat: Callable[[], None],
) -> VectorEnv[Any, Any, Any]:
    """Build a native or a SAME_STEP SyncVectorEnv; what its code raises becomes a ValueError."""

    def make() -> gymnasium.Env[Any, Any]:
        heartbeat()
        # ours checks every step anyway
        env = gymnasium.make(spec, disable_env_checker=True, **kwargs)
        for name in ("observation_space", "action_space"):
            if not isinstance(found := getattr(env, name, None), gymnasium.Space):
                raise UserError(f"its {name} is {found!r:.80}, not one of gymnasium.spaces")
        return env

    try:
        if native:
            return gymnasium.make_vec(
                spec, num_envs, vectorization_mode="vector_entry_point", **kwargs
            )
        return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    except BaseException as error:
        if not is_own_fault(error):
            raise
        # gymnasium wraps a TypeError of the constructor
        cause = error.__cause__ if "raised from the environment creator" in str(error) else None
        reason = one_line(cause or error, named=not isinstance(error, UserError))
        given = f" with {kwargs}" if kwargs else ""
        raise ValueError(
            f"environment {env_id}{given} cannot be made: {reason}{own_place_of(cause or error)}"
        ) from error


def _seeds_each(env: VectorEnv[Any, Any, Any]) -> bool:
    """Return whether a batch of two is SAME_STEP and takes one seed for each; close it."""
    try:
        first = np.array(env.reset(seed=[11, 12])[0])  # type: ignore[arg-type]
        second = np.array(env.reset(seed=[12, 11])[0])  # type: ignore[arg-type]
    except Exception:  # environments are foreign code and refuse a list in many ways
        return False
    finally:
        env.close()
    same_step = env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP
    return same_step and np.array_equal(first, second[::-1])
