"""The job of a run as its directory records it: flags, duration, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_dist.errors import UserError
from rl_dist.flags import declarations
from rl_dist.launch.config import LaunchConfig
from rl_dist.run_dir import RunDir

CONFIG_FILE = "config.json"
TRADING = "StockTrading-v0"
OF_TRADING = ("data", "market", "trading")
NO_FLAGS = (
    {"data_digest", "callback", "threads"}  # threads are those of another number of ranks
    | {
        name
        for name, item in declarations(LaunchConfig).items()
        if not (item.is_flag and item.stored)
    }
)


def read_config(run_dir: Path) -> dict[str, dict[str, Any]]:
    """A run's configuration by section.

    Raises:
        UserError: names the file, and what is wrong with it.
    """
    config = RunDir(run_dir).config()
    sections = isinstance(config, dict) and all(isinstance(v, dict) for v in config.values())
    env = config.get("task", {}).get("env") if sections else None
    if not isinstance(env, str) or "train" not in config:
        what = "is no configuration of a run with task, env and train"
        raise UserError(f"{run_dir / CONFIG_FILE} {what}; give flags of training instead")
    return config


def flags_of_run(run_dir: Path) -> list[str]:
    """The training flags of a run."""
    return flags_of(read_config(run_dir))


def flags_of(config: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Flags that make a configuration, without those that cannot take effect."""
    trading = config["task"]["env"] == TRADING
    idle = set() if trading else set(OF_TRADING)
    if config.get("data", {}).get("data") != "simulated":
        idle.add("market")
    flags = []
    for section, values in config.items():
        for name, value in values.items():
            other = trading and section == "task" and name != "env"
            if section in idle or other or name in NO_FLAGS or value == "":
                continue
            if name == "num_episodes" and config["train"].get("total_steps"):
                continue
            if (name, value) == ("precision", "auto"):  # what it meant in older versions
                value = "fp32"
            flag = "preset" if name == "chosen_preset" else name
            flags.append(f"--{flag}={'none' if value is None else value}")
    return flags


def budget_of(run_dir: Path | None, num_episodes: int | None, total_steps: int) -> tuple[int, int]:
    """Episodes and steps to train: as given, or as the run's configuration has them."""
    train = read_config(run_dir)["train"] if run_dir else {}
    of_run = {"num_episodes": train.get("num_episodes", 5000), "total_steps": 0}
    if not num_episodes:
        of_run["total_steps"] = train.get("total_steps", 0)
    for name, value in of_run.items():
        if not isinstance(value, int) or value < 0:
            words = f"{name} must be a whole number from 0, got {value!r}"
            raise UserError(f"{run_dir}/{CONFIG_FILE}: {words}")
    return num_episodes or of_run["num_episodes"], total_steps or of_run["total_steps"]
