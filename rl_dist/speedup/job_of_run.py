"""Read the job of a run from its directory, as flags of the training script."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_dist.errors import UserError
from rl_dist.run_dir import RunDir

TRADING = "StockTrading-v0"
OF_TRADING = {"data", "market", "trading"}
# threads are those of another number of ranks
NO_FLAGS = {"data_digest", "callback", "threads", "chosen_strategy", "chosen_on", "on_event"}


def read_config(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return a run's configuration by section.

    Raises:
        UserError: names the file and what is wrong with it.
    """
    run = RunDir(run_dir)
    config = run.config()
    sections = isinstance(config, dict) and all(isinstance(part, dict) for part in config.values())
    train, task = (config.get(name, {}) if sections else {} for name in ("train", "task"))
    lengths = [train.get(name, 0) for name in ("num_episodes", "total_steps")]
    numbers = train and all(isinstance(length, int) and length >= 0 for length in lengths)
    if not numbers or not isinstance(task.get("env"), str):
        problem = "is no configuration of a run with an env and a length"
        raise UserError(f"{run.config_path} {problem}; give flags of training instead")
    return config


def flags_of(config: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return flags that make a configuration, without those that cannot take effect."""
    trading = config["task"]["env"] == TRADING
    idle = set() if trading else OF_TRADING
    if config.get("data", {}).get("data") != "simulated":
        idle = idle | {"market"}
    flags = []
    for section, values in config.items():
        for name, value in values.items():
            other = trading and section == "task" and name != "env"
            if section in idle or other or name in NO_FLAGS or value == "":
                continue
            if name == "num_episodes" and config["train"].get("total_steps"):
                continue
            flag = "preset" if name == "chosen_preset" else name
            flags.append(f"--{flag}={'none' if value is None else value}")
    return flags
