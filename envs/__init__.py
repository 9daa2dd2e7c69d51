"""The worlds: registers ours with Gymnasium, makes batches of any environment."""

from __future__ import annotations

import difflib
import importlib
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from envs.vector.faults import is_own_fault, one_line
from rl_dist.seeding import ENVIRONMENT_STREAM, stream_seeds

if TYPE_CHECKING:  # torch and pandas are loaded when a factory is called, not when ids are registered
    from envs.vector.adapter import TorchVectorEnv

TRADING_ID = "StockTrading-v0"
VECTORIZATIONS = ("auto", "sync", "native")

_LOGGER = logging.getLogger(__name__)
_ENTRY_POINTS = {
    TRADING_ID: ("envs.trading.environment:StockTradingEnv", "envs.trading.environment:make_trading_vector_env"),
    "Recall-v0": ("envs.memory_tasks.recall:RecallEnv", "envs.memory_tasks.recall:RecallVectorEnv"),
    "CartPolePositions-v1": (
        "envs.memory_tasks.cartpole_positions:CartPolePositionsEnv",
        "envs.memory_tasks.cartpole_positions:CartPolePositionsVectorEnv",
    ),
}
for _env_id, (_single, _batch) in _ENTRY_POINTS.items():
    if _env_id not in gymnasium.registry:
        gymnasium.register(_env_id, entry_point=_single, vector_entry_point=_batch)


def make_vector_env(
    env_id: str,
    num_envs: int,
    *,
    first_global_index: int = 0,
    seed: int = 1,
    stream: int = ENVIRONMENT_STREAM,
    device: str = "cpu",
    vectorization: str = "auto",
    env_kwargs: Mapping[str, Any] | None = None,
    beat: Callable[[], None] = lambda: None,
    **guard: Any,
) -> TorchVectorEnv:
    """Make a batch of any Gymnasium id or `module:id` but the trading one.

    The batch is environments first_global_index, ... of the run; `seed` and `stream` give the seeds of a
    first reset without seeds. `vectorization` "auto" uses a native vector environment if it takes one seed
    per environment and autoreset SAME_STEP, else steps one after the other ("sync"); "native" forces it,
    logs what is given up and lists it in `given_up`. `beat` says that work goes on; `guard`: env_timeout,
    env_restarts, end and kind of TorchVectorEnv.

    Raises:
        ValueError: an unknown id, environment arguments it does not take, unsupported spaces, or bad sizes.
    """
    from envs.vector.adapter import TorchVectorEnv

    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, got {num_envs}")
    if vectorization not in VECTORIZATIONS:
        raise ValueError(f"vectorization must be one of {', '.join(VECTORIZATIONS)}, got {vectorization!r}")
    if env_id.rsplit(":", 1)[-1] == TRADING_ID:
        raise ValueError(f"{TRADING_ID} needs market data: make it with gymnasium.make_vec or envs.trading.task")
    default_seeds = stream_seeds(seed, stream, first_global_index, num_envs)
    spec = find_spec(env_id)
    kwargs = dict(env_kwargs or {})
    native, takes_seed_list = False, True
    if vectorization != "sync":
        native, takes_seed_list = _probe_native(spec, kwargs, forced=vectorization == "native")
    return TorchVectorEnv(
        _construct(spec, num_envs, kwargs, native=native, beat=beat),
        env_id=env_id,
        first_global_index=first_global_index,
        default_seeds=default_seeds,
        device=device,
        force_native=native and vectorization == "native",
        takes_seed_list=takes_seed_list,
        beat=beat,
        **guard,
    )


def find_spec(env_id: str) -> gymnasium.envs.registration.EnvSpec:
    """Find an id, importing the module of `module:id`; unknown ones raise ValueError."""
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return gymnasium.spec(name)
    except (ImportError, TypeError) as error:  # TypeError: a relative name
        raise ValueError(f"environment {env_id!r}: {error}: check its module and the Python path") from error
    except gymnasium.error.Error as error:
        close = difflib.get_close_matches(name, gymnasium.registry, n=3)
        cure = f"did you mean {' or '.join(close)}?" if close else "give a Gymnasium id or module:id"
        raise ValueError(f"unknown environment {env_id!r}: {cure}") from error
    except BaseException as error:
        if not is_own_fault(error):
            raise
        raise ValueError(f"environment {env_id!r}: its module raised {one_line(error)}") from error


def _construct(
    spec: gymnasium.envs.registration.EnvSpec,
    num_envs: int,
    kwargs: dict[str, Any],
    *,
    native: bool,
    beat: Callable[[], None] = lambda: None,
) -> VectorEnv[Any, Any, Any]:
    """Build a native or a SAME_STEP SyncVectorEnv; whatever its code raises becomes one ValueError line."""
    def make() -> gymnasium.Env[Any, Any]:
        beat()
        return gymnasium.make(spec, disable_env_checker=True, **kwargs)  # ours checks every step anyway

    try:
        if native:
            return gymnasium.make_vec(spec, num_envs, vectorization_mode="vector_entry_point", **kwargs)
        return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    except BaseException as error:
        if not is_own_fault(error):
            raise
        given = f" with {kwargs}" if kwargs else ""
        raise ValueError(f"environment {spec.id}{given} cannot be made: {one_line(error)}") from error


def _probe_native(
    spec: gymnasium.envs.registration.EnvSpec, kwargs: dict[str, Any], *, forced: bool
) -> tuple[bool, bool]:
    """Return whether to use the native vector environment, and whether reset takes one seed for each."""
    from envs.vector.adapter import seeds_are_per_environment

    if spec.vector_entry_point is None:
        if forced:
            raise ValueError(f"environment {spec.id} has no native vector environment: choose 'sync'")
        return False, True
    try:
        probe = _construct(spec, 2, kwargs, native=True)
    except ValueError as error:
        if forced:
            raise
        _LOGGER.info("%s: using one environment after the other", error)
        return False, True
    same_step = probe.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP
    takes_seed_list = seeds_are_per_environment(probe)
    if forced or (same_step and takes_seed_list):
        return True, takes_seed_list
    return False, True
