"""Train from Python, by the same steps as the command."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.api.policy import LoadedPolicy, load_policy
from agents.rank import run_rank
from agents.run.callbacks import Callback
from agents.run.choice import parse_training
from agents.run.start import start
from rl_dist.errors import UserError, explains_errors, reported
from rl_dist.launch.child import as_flags
from rl_dist.process_group.process_ends import SCRIPT_RAN_AGAIN
from rl_dist.run_dir import RunDir
from rl_dist.telemetry.metrics import close_logging


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A training that has ended."""

    run_dir: Path
    exit_code: int  # 0, or 128 + the signal that stopped it after saving

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of every iteration, as in metrics.jsonl."""
        return RunDir(self.run_dir).records()

    @property
    def test(self) -> dict[str, Any]:
        """Return the figures of the last evaluation; empty if the run was stopped.

        They are empty for real prices as well, because the test span stays closed: summary.json
        holds the figures of the spans "train" and "valid".
        """
        return RunDir(self.run_dir).summary().get("test", {})

    @property
    def policy(self) -> LoadedPolicy:
        """Return the policy that `load_policy` finds in the run directory."""
        return load_policy(self.run_dir)


def train(
    env: str | None = None,
    *,
    num_ranks: int | None = None,
    on_iteration: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
    **settings: Any,
) -> TrainedRun:
    """Train as train_distributed.py does with the same flags.

        >>> from agents import train
        >>> run = train(env="CartPole-v1", total_steps=20_000)
        >>> run.test["return"], run.metrics[-1]["loss/entropy"]
        >>> action, state = run.policy.predict(observation)

    One rank trains in this process. Several ranks are new processes, which import the main module
    again: put the call below `if __name__ == "__main__":`, and define callbacks in a module.

    Args:
        env: Gymnasium id, or module:id.
        num_ranks: number of training processes, another name of num_gpus.
        on_iteration, on_evaluation, on_checkpoint: called by every rank with a `Moment`. If one
            returns False, all ranks stop after this iteration.
        settings: flags by name: True is --name, False is --no-name, None is no flag, and a mapping
            becomes JSON.

    Raises:
        UserError: the settings do not fit, or the training failed. The reason is also printed.
    """
    # A new rank that imports a script without this guard comes here.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(SCRIPT_RAN_AGAIN)
    callbacks = {
        "iteration": on_iteration,
        "evaluation": on_evaluation,
        "checkpoint": on_checkpoint,
    }
    flags = {"env": env, "num_gpus": num_ranks} | settings
    for name, value in flags.items():
        if isinstance(value, list | tuple):  # stop_at=("valid/return", 475)
            flags[name] = " ".join(map(str, value))
    reported.clear()  # it may hold the error of an earlier training
    try:
        parsed = parse_training(as_flags(flags))
        code = explains_errors(start)(parsed, run_rank, callbacks)
    except SystemExit as leaving:  # the parser has printed why
        raise leaving.__cause__ or UserError("the settings do not fit") from None
    finally:
        close_logging()
    if 0 < code < 128:
        # under torchrun, some ranks leave the error to another rank
        raise UserError(reported.get("error", "the lines above say why"), exit_code=code)
    return TrainedRun(run_dir=Path(reported["run_dir"]).absolute(), exit_code=code)
