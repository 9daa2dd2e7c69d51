"""Train from Python, with the same steps as train_distributed.py."""

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
    """A run whose training is finished or stopped."""

    run_dir: Path
    exit_code: int  # 0, or 128 + the signal that stopped it after saving

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of every iteration, as in metrics.jsonl."""
        return RunDir(self.run_dir).records()

    @property
    def test(self) -> dict[str, Any]:
        """Return the results of the final evaluation; empty if the run was stopped.

        They are also empty for real prices, because the test span stays closed. summary.json has
        the results on the spans "train" and "valid".
        """
        return RunDir(self.run_dir).summary().get("test", {})

    @property
    def policy(self) -> LoadedPolicy:
        """Load the policy from the run directory, see `load_policy`."""
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
    """Train as train_distributed.py does when given the same flags.

        >>> from agents import train
        >>> run = train(env="CartPole-v1", total_steps=20_000)
        >>> run.test["return"], run.metrics[-1]["loss/entropy"]
        >>> action, state = run.policy.predict(observation)

    A single rank trains in this process. Several ranks run in new processes, which import the main
    module again: put the call below `if __name__ == "__main__":`, and define callbacks in a module.

    Args:
        env: Gymnasium id, or module:id.
        num_ranks: number of training processes, the same as num_gpus.
        on_iteration, on_evaluation, on_checkpoint: called by every rank with a `Moment`. If a
            callback returns False, all ranks stop after this iteration.
        settings: flags by name: True becomes --name, False becomes --no-name, None is skipped, and
            a mapping becomes JSON.

    Raises:
        UserError: the settings are wrong, or training failed. The reason is also printed.
    """
    # A new rank reaches this line if it imports a script that has no such guard.
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
    reported.clear()  # it may hold the error of an earlier call
    try:
        parsed = parse_training(as_flags(flags))
        code = explains_errors(start)(parsed, run_rank, callbacks)
    except SystemExit as leaving:  # the parser has already printed the reason
        raise leaving.__cause__ or UserError("the settings do not fit") from None
    finally:
        close_logging()
    if 0 < code < 128:
        # Under torchrun, this rank may have no error to report: another rank prints it.
        raise UserError(reported.get("error", "the lines above say why"), exit_code=code)
    return TrainedRun(run_dir=Path(reported["run_dir"]).absolute(), exit_code=code)
