"""Training as a function: the same path as the command."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from agents.api.policy import LoadedPolicy, load_policy
from agents.rank import run_rank
from agents.run.callbacks import Callback, Callbacks
from agents.run.start import Run, prepare
from rl_dist.errors import UserError, one_line, reported
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
        """Return the figures of the evaluation that ended the run; empty: it was stopped.

        Runs on real prices have none, as their test span stays closed: summary.json holds those of
        the spans "train" and "valid".
        """
        return RunDir(self.run_dir).summary().get("test", {})

    @property
    def policy(self) -> LoadedPolicy:
        """Return the policy of its best checkpoint if there is one, else of the newest."""
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
    """Train to the end, as train_distributed.py does with the same flags.

        >>> from agents import train
        >>> run = train(env="CartPole-v1", total_steps=20_000)
        >>> run.test["return"], run.metrics[-1]["loss/entropy"]
        >>> action, state = run.policy.predict(observation)

    One rank trains in this process. Several are new processes, which import the main module again:
    keep the call below `if __name__ == "__main__":`, and let callbacks be functions of a module.

    Args:
        env: Gymnasium id, or module:id.
        num_ranks: training processes, as num_gpus says it too.
        on_iteration, on_evaluation, on_checkpoint: called by every rank with a `Moment`; False
            ends the training after this iteration, on all ranks.
        settings: flags by name: True is --name, False --no-name, None no flag, a mapping JSON.

    Raises:
        UserError: the settings do not fit, or training failed; it gives the reason, also printed.
    """
    # a new rank imports the script, which must not come here before the rank begins its work
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(SCRIPT_RAN_AGAIN)
    named = {"env": env, "num_gpus": num_ranks} | settings
    callbacks = {"iteration": on_iteration, "evaluation": on_evaluation}
    callbacks["checkpoint"] = on_checkpoint
    reported.pop("error", None)  # of an earlier training
    for kind, callback in callbacks.items():
        if not (callback is None or callable(callback)):
            raise UserError(
                f"on_{kind} must be a function, got {callback!r:.80}: give the function itself, "
                "or callback='module:function'"
            )
    with ExitStack() as held:
        run = _prepare(held, as_flags(_flat(named)))
        in_new_processes = run.resolved.num_ranks > 1 or run.config.launch.max_restarts
        if "RANK" not in os.environ and in_new_processes:
            _check_importable(callbacks, run)
        try:
            code = run.launch(run_rank, callbacks)
        finally:
            close_logging()
        if 0 < code < 128:
            raise UserError(f"training failed with code {code}: {_reason()}", exit_code=code)
        return TrainedRun(run_dir=run.path.absolute(), exit_code=code)


def _prepare(held: ExitStack, words: list[str]) -> Run:
    """Choose and check the run; what is printed for users of the command becomes an error."""
    try:
        run = prepare(held, words)
    except SystemExit as leaving:  # a flag that cannot be read
        raise leaving.__cause__ or UserError("the settings do not fit") from None
    if isinstance(run, int):
        raise UserError(_reason(), exit_code=run)
    return run


def _reason() -> str:
    """Return the error that was printed; under torchrun only some ranks print one."""
    return reported.get("error", "the lines above say why")


def _check_importable(callbacks: Callbacks, run: Run) -> None:
    """Refuse callbacks that new processes cannot import."""
    try:
        ForkingPickler.dumps(callbacks)  # as a start of ranks will
    except Exception as error:  # of several kinds
        run.discard(2)
        raise UserError(
            f"on_iteration, on_evaluation and on_checkpoint must be functions of a module, for "
            f"ranks are new processes that import them: {one_line(error, named=False)}"
        ) from None


def _flat(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags whose lists are words: stop_at=("valid/return", 475)."""
    for name, value in named.items():
        if callable(value) and name in ("core", "callback"):
            module = value.__module__.replace("__main__", "module")
            own = f"{module}:{getattr(value, '__name__', 'Name')}"
            raise UserError(f"{name} is {value!r:.80}: give its name: {name}={own!r}")
    return {
        name: " ".join(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in named.items()
    }
