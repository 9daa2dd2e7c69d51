"""Recurrent PPO on vector environments, on one rank or many.

`__all__` lists the public names. The module that defines a name is imported when the name is first
used, so `import agents` is fast.

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
claim("envs")  # `import envs` must find our package, not a folder of the user's project

__version__ = "0.6.0.dev0"

_MODULES = {  # public name -> module of this package that defines it
    "train": "api",
    "train_seeds": "api",
    "load_policy": "api",
    "LoadedPolicy": "api",
    "Moment": "learner.callbacks",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
