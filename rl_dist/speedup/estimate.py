"""Estimate the speedup of training on more GPUs: the functions for Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rl_dist.checkpoint.trust import check_named
from rl_dist.errors import UserError
from rl_dist.launch.short_run import without
from rl_dist.speedup.job_of_run import flags_of, read_config
from rl_dist.speedup.machines import GPUS, LINKS, NETWORK, find
from rl_dist.speedup.measure import Measurements
from rl_dist.speedup.report import SpeedupReport, report_of, table

# Flags of training that have no effect here.
CHOSEN = (
    "num_gpus", "gpu_ids", "strategy", "hybrid_form", "shard_size", "fallback", "device",
    "gradient_compression", "scaling", "lr_scaling", "run_dir", "resume", "interactive",
)  # fmt: skip


def estimate_training_speedup(
    flags: Sequence[str] = (),
    *,
    run_dir: str | Path = "",
    gpus: Sequence[int] = (1, 2),
    scaling: str = "both",
    thorough: bool = False,
    gpu: Sequence[str] = (),
    sps: float = 0.0,
    num_episodes: int = 0,
    total_steps: int = 0,
    price_per_hour: float = 0.0,
    device: str = "auto",
    gpus_per_machine: int = 0,
    between: str = NETWORK,
) -> SpeedupReport:
    """Measure short runs and predict training on each number of GPUs.

        report = estimate_training_speedup(["--env", "CartPole-v1"], gpus=[1, 2])
        report.rows[-1]["speedup"]

    Args:
        flags: of train_distributed.py, on top of those of `run_dir` if there is one.
        run_dir: directory of a run that has the job to estimate.
        gpus: numbers of GPUs (ranks).
        scaling: strong (the job's sizes are totals), weak (they are per rank) or both.
        thorough: measure every number of ranks, which takes minutes.
        gpu: names of cards to estimate as well.
        sps: steps/s of one of `gpu`, or without it of one rank here, from a run; 0: unknown.
        num_episodes: length of the training; 0: the run's, or 5000.
        total_steps: environment steps instead of episodes.
        price_per_hour: of one GPU; 0: list prices of `gpu` in US dollars.
        device: auto, cpu or cuda.
        gpus_per_machine: 0: the GPUs here, or on the CPU all ranks.
        between: link between machines.

    Raises:
        UserError: impossible arguments, in one line.
        ShortRunError, BenchError: a short run failed, or its rate kept changing.
    """
    for name in CHOSEN:
        if _has(flags, name):
            raise UserError(f"--{name} has no effect here: use --gpus, or RUN_DIR for a run's job")
    if min(gpus, default=0) < 1:
        raise UserError(f"--gpus must be numbers from 1, got {list(gpus)}")
    if sps and len(gpu) > 1:
        raise UserError(f"--sps {sps:g} is the rate of one card: give one --gpu, not {len(gpu)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA GPU on this machine; use --device cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cards = [find(name, GPUS, "--gpu") for name in gpu]
    network = find(between, LINKS, "--between")
    job, train = [*flags], {}
    if run_dir:
        config = read_config(Path(run_dir))
        _check_modules(config, Path(run_dir), flags)
        job, train = [*without(flags_of(config), CHOSEN), *flags], config["train"]
    if num_episodes or total_steps:
        train = {"num_episodes": num_episodes, "total_steps": total_steps}
    scalings = ("strong", "weak") if scaling == "both" else (scaling,)
    measured = Measurements(job, gpus, scalings, device, gpus_per_machine)
    measured.measure(thorough=thorough, rate_is_known=bool(sps))
    episodes = train.get("num_episodes", 5000)
    return report_of(
        measured,
        cards,
        network,
        sps=sps,
        env_steps=train.get("total_steps") or episodes * measured.steps_per_episode,
        price_per_hour=price_per_hour,
    )


def print_training_speedup_estimates(flags: Sequence[str] = (), **options: Any) -> None:
    """Print the table of `estimate_training_speedup`, which takes the same arguments.

    print_training_speedup_estimates(["--env", "CartPole-v1"], gpus=[1, 2])
    """
    print(table(estimate_training_speedup(flags, **options)))


def _has(flags: Sequence[str], name: str) -> bool:
    return without(flags, [name]) != list(flags)


def _check_modules(config: dict[str, Any], run_dir: Path, flags: Sequence[str]) -> None:
    """Refuse modules that neither the flags nor the user's own run name."""
    task, core = config["task"], config.get("policy", {}).get("core", "")
    env = {"env": task["env"], "env_kwargs": task.get("env_kwargs", "")}
    check_named(run_dir, "task", env, task["env"] if _has(flags, "env") else None)
    check_named(run_dir, "policy", {"core": core}, core if _has(flags, "core") else None)
