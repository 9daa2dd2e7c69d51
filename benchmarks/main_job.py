"""The main job, at its default sizes or small, as several benchmarks train it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from agents.policy import PolicyConfig
from agents.ppo import PPOConfig
from agents.rollout import episode_metrics
from agents.sizes import TrainConfig
from agents.trainer import Job, Training
from envs.trading.task import TradingTask, prepare_task
from envs.trading_config import DataConfig, SimulatedMarketConfig, TradingConfig
from rl_dist.process_group.world import World

SMALL = TrainConfig(num_envs=8, num_steps=16, bptt_steps=8, batch_size=8)


def trading_task(num_stocks: int = 30, trading: TradingConfig | None = None) -> TradingTask:
    """The simulated market on 16 worlds."""
    simulated = SimulatedMarketConfig(num_stocks=num_stocks, num_worlds=16)
    return prepare_task(DataConfig(), simulated, trading or TradingConfig())


def main_job(
    world: World,
    run_dir: str | Path,
    task: TradingTask | None = None,
    train: TrainConfig | None = None,
    policy: PolicyConfig | None = None,
    ppo: PPOConfig | None = None,
) -> Training:
    """The main job, its normalisers warmed up."""
    task = task or trading_task()
    job = Job(
        train=train or TrainConfig(),
        policy=policy or PolicyConfig(),
        ppo=ppo or PPOConfig(),
        make_env=lambda count, first: task.training_env(count, first, world.device),
        run_dir=Path(run_dir),
    )
    training = Training(job, world)
    training.warm_up_normalizers()
    return training


def iterate(training: Training) -> tuple[float, float]:
    """One iteration as in `agents.trainer.train`; seconds of collecting and of updating."""
    started = time.perf_counter()
    training.iteration += 1
    rollout = training.collect(training.iteration * training.job.train.num_steps)
    collected = time.perf_counter()
    training.update(rollout)
    updated = time.perf_counter()
    use = training.monitor.take()
    episode_metrics(rollout, {}, training.env_restarts, use, training.world)
    return collected - started, updated - collected


def median_s(call: Callable[[], object], times: int) -> float:
    """Median seconds of a call."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return median(taken)


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows a script's docstring, and the defaults of flags that have help."""

    class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
        pass

    return argparse.ArgumentParser(description=doc, formatter_class=Formatter)
