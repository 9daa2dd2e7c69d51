"""The job of a run as its directory tells it: flags, how long, how fast."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_dist.config import REMOVED, declarations
from rl_dist.errors import UnknownFlagError, UserError
from rl_dist.hardware.plain_files import read_plain
from rl_dist.launch.launcher import LaunchConfig
from rl_dist.launch.short_run import without
from rl_dist.speedup.calibration import SCALINGS
from rl_dist.telemetry.metrics import METRICS_FILE

CONFIG_FILE = "config.json"
TRADING = "StockTrading-v0"
OF_TRADING = ("data", "market", "trading")
WARM_UP = 2  # iterations left out of a run's own throughput
NO_FLAGS = REMOVED | {
    name for name, item in declarations(LaunchConfig).items() if not (item.is_flag and item.stored)
}
FIX = "give the flags of training instead of RUN_DIR"


def read_config(run_dir: Path) -> dict[str, dict[str, Any]]:
    """A run's configuration by section.

    Raises:
        UserError: names the file, and what is wrong with it.
    """
    path = run_dir / CONFIG_FILE
    config = _parse(_read(run_dir, CONFIG_FILE), path)
    sections = isinstance(config, dict) and all(isinstance(v, dict) for v in config.values())
    if not sections or not {"task", "train"} <= set(config):
        raise UserError(f"{path} is no configuration of a run with sections task and train; {FIX}")
    if not isinstance(config["task"].get("env"), str):
        raise UserError(f"{path} does not say which env was trained; {FIX}")
    return config


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics.

    Raises:
        UserError: there are none, or what they hold is no record.
    """
    path = run_dir / METRICS_FILE
    lines = _read(run_dir, METRICS_FILE).rpartition(b"\n")[0].splitlines()
    records = [_parse(line, path) for line in lines]
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise UserError(f"{path} is damaged: line {number} is no JSON object")
    return records


def flags_of_run(run_dir: Path) -> list[str]:
    """The training flags of a run."""
    return flags_of(read_config(run_dir))


def flags_of(config: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Flags that make a configuration, without those that cannot take effect."""
    trading = config["task"]["env"] == TRADING
    simulated = config.get("data", {}).get("data") == "simulated"
    by_steps = config["train"].get("total_steps")
    flags = []
    for section, values in config.items():
        if section in OF_TRADING and (not trading or (section == "market" and not simulated)):
            continue
        for name, value in values.items():
            idle = (section == "task" and trading and name != "env") or (
                name == "num_episodes" and by_steps
            )
            if name in NO_FLAGS or value == "" or idle:
                continue
            flags.append(f"--{name}={'none' if value is None else value}")
    return flags


def blame_config(error: UserError, run_dir: Path, flags: list[str]) -> UserError:
    """Say that an unknown flag is of the run's configuration, if it is."""
    if not isinstance(error, UnknownFlagError) or without(flags, [error.flag]) == flags:
        return error
    unknown = f"{error.flag}, which this version does not know"
    return UserError(f"{CONFIG_FILE} of {run_dir} has {unknown}; {FIX}")


def budget_of(run_dir: Path | None, num_episodes: int | None, total_steps: int) -> tuple[int, int]:
    """Episodes and steps to train: as given, or as the run's configuration has them."""
    train = read_config(run_dir)["train"] if run_dir else {}
    steps = total_steps or (0 if num_episodes else _count(run_dir, train, "total_steps", 0, 0))
    return num_episodes or _count(run_dir, train, "num_episodes", 5000, 1), steps


def measured_of(run_dir: Path | None) -> dict[tuple[int, str], float]:
    """Steps/s that a run itself measured, by its number of ranks and its scaling.

    Of a weak run only the number it began with counts: resumed on another, it keeps its totals.
    """
    if run_dir is None:
        return {}
    scaling = str(read_config(run_dir)["train"].get("scaling", "strong"))
    rates: dict[int, list[float]] = {}
    for record in read_records(run_dir):
        ranks, rate = record.get("ranks"), record.get("time/sps")
        if isinstance(ranks, list) and isinstance(rate, int | float) and 0 < rate < math.inf:
            rates.setdefault(len(ranks), []).append(float(rate))
    if scaling == "weak":
        rates = dict(list(rates.items())[:1])
    return {
        (ranks, way): statistics.median(found[WARM_UP:] or found)
        for ranks, found in rates.items()
        for way in (SCALINGS if ranks == 1 else (scaling,))  # one rank alone is the same job
    }


def _read(run_dir: Path, name: str) -> bytes:
    if not all((run_dir / needed).is_file() for needed in (CONFIG_FILE, METRICS_FILE)):
        needed = f"{CONFIG_FILE} and {METRICS_FILE}"
        raise UserError(f"{run_dir} is no run directory: it holds no {needed}")
    try:
        return read_plain(run_dir / name, None)
    except OSError as error:
        raise UserError(f"{run_dir / name} cannot be read: {error.strerror or error}") from None


def _parse(text: bytes, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from None


def _count(run_dir: Path | None, train: dict[str, Any], name: str, default: int, least: int) -> int:
    value = train.get(name, default)
    if not isinstance(value, int) or value < least:
        words = f"{name} must be a whole number from {least}, got {value!r}"
        raise UserError(f"{run_dir}/{CONFIG_FILE}: {words}")
    return value
