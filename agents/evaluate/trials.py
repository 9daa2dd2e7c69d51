"""Let the ranks share the trials of a task; end an evaluation if a stop signal arrives."""

import copy
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agents.learner.controller import PolicyController
from agents.learner.network.seeds import VALIDATION_STREAM, stream_seeds
from agents.learner.settings import AUTO_INTERVAL
from agents.learner.trainer import Training
from envs.task import Counts, EvaluationOptions, Record, Task, Trial
from envs.vector.guards import Interruption
from rl_dist.process_group.collectives import all_gather_json, all_reduce_max
from rl_dist.process_group.process_ends import stopped_in_evaluation
from rl_dist.process_group.world import World, stop_flag


class Stopped(Interruption):
    """Raised by a stop signal during an evaluation."""


def _stop(signum: int, frame: object) -> None:
    stop_flag.replace(signal.SIG_DFL)
    stop_flag.signum = signum  # tells the launch code that the signal has arrived
    raise Stopped(signum)


def until_stopped(evaluate: Callable[[], None], world: World, run_dir: Path | None = None) -> int:
    """Call `evaluate`, and end it if a stop signal arrives; return the exit code.

    With several ranks, a signal ends each process immediately, and the launcher reports the stop.
    A Python signal handler would not help, because it cannot interrupt a rank that is waiting for
    other ranks.

    Args:
        run_dir: run directory, for the evaluation at the end of training; otherwise None.
    """
    stop_flag.replace(_stop if world.size == 1 else signal.SIG_DFL)
    try:
        # A signal may have arrived before the line above replaced the handler.
        if signum := all_reduce_max(stop_flag.signum, world):
            raise Stopped(signum)
        evaluate()
    except Stopped as stopped:
        (signum,) = stopped.args
        if world.is_main_process:
            print(stopped_in_evaluation(signum, run_dir))
        return 128 + signum
    finally:
        stop_flag.replace(signal.SIG_DFL)  # nothing is left to save: a signal may end the process
    return 0


def run_trial(trial: Trial, world: World) -> dict[str, Record]:
    """Let each agent act on all episodes or markets of a trial, divided among the ranks.

    Every rank must call this.

    Returns:
        The results of each agent in the order of the episodes or markets, the same on every rank.
    """
    first = trial.count * world.rank // world.size
    end = trial.count * (world.rank + 1) // world.size
    records: dict[str, Record] = {}
    for name, agent in trial.agents.items():
        # Use a copy, because the state in an agent fits only the number of environments of one run.
        local = trial.run(copy.copy(agent), range(first, end)) if first < end else {}
        parts = [part for part in all_gather_json(local, world) if part]
        records[name] = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return records


def validate(task: Task, training: Training) -> dict[str, float]:
    """Validate the policy; return metrics named valid/..., or {} if the task has no validation now.

    Every rank must call this.
    """
    agent = PolicyController(training.policy, training.normalizers.obs)
    trial = task.validation(agent, options_of(training, VALIDATION_STREAM))
    if trial is None:
        return {}
    figures = trial.figures(run_trial(trial, training.world))
    return {f"valid/{name}": value for name, value in figures.items()}


def options_of(training: Training, stream: int, **options: Any) -> EvaluationOptions:
    """Return options to evaluate the policy in training; `stream` selects the episodes' seeds."""
    train = training.run.config.train
    return EvaluationOptions(
        seeds=partial(stream_seeds, train.seed, stream),
        counts=Counts(
            global_step=training.global_step,
            episodes=training.episodes,
            validated=training.validated,
        ),
        directory=training.run.directory,
        writes=training.world.is_main_process,
        within_budget=train.validate_every == AUTO_INTERVAL,
        **options,
    )
