"""Recurrent PPO on vector environments, on one rank or many.

Import the names in `__all__` from this package. Using a name for the first time imports its module.

    from agents import load_policy, train
"""

from importlib import import_module
from typing import Any

try:  # rl_dist must be imported before torch, because it sets OpenMP variables
    from rl_dist import claim
except ImportError as error:
    raise ImportError(
        f"{error.path} hides the package rl_dist of this program: rename the folder rl_dist"
    ) from None
claim("envs")

__version__ = "0.6.0.dev0"

_HOMES = {
    "train": "api",
    "train_seeds": "api",
    "load_policy": "api",
    "LoadedPolicy": "api",
    "Moment": "learner.callbacks",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
