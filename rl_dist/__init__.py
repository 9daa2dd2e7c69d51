"""Distributed runtime: ranks, collectives, metrics, checkpoints; nothing of RL.

The names below may be imported from here; what they need is loaded when first asked for.

    from rl_dist import Strategy, StrategyConfig, evaluate, fit, launch_distributed_training
"""

import os
from importlib import import_module
from typing import Any

# OpenMP reads these when torch is loaded. By default its threads spin for milliseconds while they
# wait for each other, and beside other programs take the cores from those they wait for. With a
# short spin they keep their speed on free cores and yield busy ones: docs/performance.md.
SPIN_COUNT = "1000"  # some microseconds
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():  # the user has not decided
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPIN_COUNT}

_HOMES = {
    "get_gpu_info": "machine",
    "print_gpu_info": "machine",
    "get_multi_gpu_status": "machine",
    "clear_gpu_memory": "machine",
    "estimate_training_speedup": "speedup.estimate",
    "print_training_speedup_estimates": "speedup.estimate",
    "launch_distributed_training": "launch.child",
    "fastest_batch_size": "strategies.measure",
    "check_loader": "supervised.batches",
    "Strategy": "strategies.strategy",
    "StrategyConfig": "strategies.config",
    "FitConfig": "supervised.config",
    "accuracy": "supervised.fit",
    "evaluate": "supervised.fit",
    "fit": "supervised.fit",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
