"""The evaluation that ends a training, and its summary."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from agents.evaluate.command import judge_run
from agents.run.config import (
    JUDGING,
    SUMMARY,
    RunConfig,
)
from agents.trainer import Training
from envs.task import GymTask
from envs.trading.task import TradingTask
from envs.vector.faults import Interruption
from rl_dist.process_group.collectives import agree_max
from rl_dist.process_group.hashes import parameter_hash
from rl_dist.process_group.process_ends import STOP_SIGNALS
from rl_dist.process_group.world import end_at_signals, stop_flag
from rl_dist.speedup.outcome import describe, outcome_of
from rl_dist.telemetry.metrics import write_whole


class Stopped(Interruption):
    """A signal came while judging; no `except Exception` of a task catches it."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


def _stop(signum: int, frame: Any) -> None:
    for other in STOP_SIGNALS:
        signal.signal(other, signal.SIG_DFL)
    raise Stopped(signum)


def judge(config: RunConfig, task: TradingTask | GymTask, training: Training, run_dir: Path) -> int:
    """Judge the trained policy and write the result; returns the exit code.

    Everything is saved: a signal simply ends this.
    """
    end_at_signals()
    world = training.world
    world.enter(JUDGING)
    if world.size == 1:  # several ranks may wait for each other where Python sees no signal; their launcher does
        for each in (one for one in STOP_SIGNALS if signal.getsignal(one) is not signal.SIG_IGN):
            signal.signal(each, _stop)
    try:
        if signum := agree_max(stop_flag.signum, world):  # it came when training had just ended
            raise Stopped(signum)
        parts = training.policy, training.obs_normalizer, world
        summary, text = judge_run(task, config, *parts, run_dir / "plots")
        if world.main:
            finish(config, run_dir, training, summary, text)
    except Stopped as stopped:
        if world.main:
            name = signal.Signals(stopped.signum).name
            print(f"stopped by {name} while judging; training is saved: python -m agents.evaluate {run_dir} judges it")
        return 128 + stopped.signum
    return 0


def finish(config: RunConfig, run_dir: Path, training: Training, summary: dict, text: str) -> None:
    """Write summary.json and the learning curve, and print the result."""
    from agents.evaluate.plots import plot_learning_curve  # matplotlib: half a second, needed at the end only

    counters = {name: getattr(training, name) for name in ("iteration", "global_step", "episodes")}
    found = counters | {"parameter_sha256": parameter_hash(training.policy), "test": summary}
    scaling = outcome_of(run_dir) if training.ppo.strategy.mode == "ddp" else None  # the others the model does not know
    if scaling:
        found["scaling"] = scaling
    simulated = config.task.is_trading and config.data.data == "simulated"
    title = f"{config.task.env}, {config.policy.policy}, seed {config.train.seed}"
    plot_learning_curve(run_dir, run_dir / "plots" / "learning_curve.png", title, simulated)
    write_whole(run_dir / SUMMARY, json.dumps(found, indent=2) + "\n")  # the last: who finds it, finds all
    print(f"\n{text}\n")
    if scaling:
        print(describe(scaling))
    print(f"run directory: {run_dir} (plots/, metrics.jsonl, summary.json, checkpoints/)")
