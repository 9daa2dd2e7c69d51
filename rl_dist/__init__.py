"""Distributed runtime: ranks, collectives, metrics, checkpoints; nothing of RL.

The functions below may be imported from here; what they need is loaded when they are first asked for.

    from rl_dist import Strategy, StrategyConfig, evaluate, fit, get_gpu_info, launch_distributed_training
"""

import os
import sys
from importlib import import_module
from typing import Any

try:
    os.getcwd()
except OSError:  # torch's libraries would end this process while they are loaded, in words of their own
    sys.stderr.write("error: the current directory no longer exists: change to another one\n")
    sys.exit(2)

_HOMES = {
    "get_gpu_info": "hardware",
    "print_gpu_info": "hardware",
    "get_multi_gpu_status": "monitor",
    "clear_gpu_memory": "monitor",
    "estimate_training_speedup": "speedup",
    "print_training_speedup_estimates": "speedup",
    "launch_distributed_training": "training_process",
    "largest_batch_size": "batch_size",
    "fastest_batch_size": "batch_size",
    "check_loader": "loader_check",
    "Strategy": "strategy",
    "StrategyConfig": "strategy",
    "FitConfig": "supervised",
    "accuracy": "supervised",
    "evaluate": "supervised",
    "fit": "supervised",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
