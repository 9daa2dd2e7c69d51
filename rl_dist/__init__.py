"""Distributed training runtime, independent of reinforcement learning.

The runtime starts ranks and provides collectives, metrics and checkpoints. The names in `__all__`
can be imported from this package; each module is loaded when one of its names is first used.

    from rl_dist import Strategy, StrategyConfig, evaluate, fit, launch_distributed_training
"""

import os
from importlib import import_module
from typing import Any

# OpenMP reads the variables below when torch is loaded. By default, a waiting OpenMP thread spins
# for milliseconds before it sleeps. If other programs use the same cores, spinning threads take CPU
# time from the threads for which they wait. With a short spin, OpenMP is equally fast on free cores
# and leaves busy cores to other threads (see docs/performance.md).
SPIN_COUNT = "1000"  # number of spins before a waiting thread sleeps: a few microseconds in all
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():  # neither variable is set
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPIN_COUNT}

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
