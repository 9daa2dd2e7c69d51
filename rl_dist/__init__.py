"""Distributed training runtime, independent of reinforcement learning.

The runtime starts ranks and provides collectives, metrics and checkpoints. The names in `__all__`
can be imported from this package; each module is loaded when one of its names is first used.

    from rl_dist import Strategy, StrategyConfig, evaluate, fit, launch_distributed_training
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).absolute().parents[1])  # the folder that contains our packages
PACKAGES = ("agents", "envs", "examples", "rl_dist")  # users may have folders with the same names
_claimed: list[str] = []  # packages that `import` must always load from ROOT


def users_folders(package: str) -> list[str]:
    """Return the folders in which users may keep modules under the name of our package.

    For example, `envs` gives a folder `envs` in each entry of sys.path. The result is empty if the
    package is not ours.
    """
    path_parts = package.split(".")
    return [str(Path(entry, *path_parts)) for entry in sys.path if path_parts[0] in PACKAGES]


class _Finder:
    """Finds a user's module in a folder that has the name of one of our packages.

    For example, a user can import `envs.my_env` from a folder `envs`, although `envs` is also a
    package of this program.
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        """Find a package in `_claimed`, or a user's module under the name of our package.

        Return None for all other names, so that Python's own finders search for them.
        """
        package = name.rpartition(".")[0]
        folders = [ROOT] if name in _claimed else users_folders(package)
        # If our package has a module of this name, it wins: Python's own finders find this module.
        if not folders or (package and PathFinder.find_spec(name, path)):
            return None
        return PathFinder.find_spec(name, folders)


sys.meta_path.insert(0, _Finder)


def claim(name: str) -> None:
    """Make `import name` load our package, even if the user's package is first in sys.path.

    Raises:
        ImportError: the user's package of this name is already imported.
    """
    _claimed.append(name)
    home = f"{ROOT}/{name}/"
    loaded_file = getattr(sys.modules.get(name), "__file__", home)
    if not loaded_file.startswith(home):
        raise ImportError(
            f"{loaded_file} hides this program's package {home}: rename it, or import agents first"
        )


# OpenMP reads the variables below when torch is loaded. By default, a waiting OpenMP thread spins
# for milliseconds before it sleeps. If other programs use the same cores, spinning threads take CPU
# time from the threads for which they wait. With a short spin, OpenMP is equally fast on free cores
# and leaves busy cores to other threads (see docs/performance.md).
SPIN_COUNT = "1000"  # number of spins before a waiting thread sleeps: a few microseconds in all
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():  # neither variable is set
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPIN_COUNT}

# public name -> module of this package that defines this name
_HOMES = {
    "get_gpu_info": "machine",
    "print_gpu_info": "machine",
    "get_multi_gpu_status": "machine",
    "clear_gpu_memory": "machine",
    "estimate_training_speedup": "speedup.__main__",
    "print_training_speedup_estimates": "speedup.__main__",
    "launch_distributed_training": "launch.child",
    "fastest_batch_size": "strategies.measure",
    "check_loader": "supervised.batches",
    "Strategy": "strategies.strategy",
    "StrategyConfig": "strategies.config",
    "FitConfig": "supervised.fit",
    "accuracy": "supervised.fit",
    "evaluate": "supervised.fit",
    "fit": "supervised.fit",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
