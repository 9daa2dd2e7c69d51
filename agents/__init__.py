"""Recurrent PPO on vector environments, on one rank or many.

Import the names in `__all__` from this package. Using a name for the first time imports its module.

    from agents import load_policy, train
"""

from importlib import import_module
from typing import Any

import rl_dist  # noqa: F401  # must be imported before torch, because it sets OpenMP variables

_HOMES = {
    "train": "api",
    "train_seeds": "api",
    "load_policy": "api",
    "LoadedPolicy": "api",
    "Moment": "run.callbacks",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
