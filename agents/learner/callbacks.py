"""Call the user's callbacks; stop training if a callback or --stop_at says so."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agents.learner.policy import Policy
from agents.learner.settings import TrainConfig
from rl_dist.checkpoint.trust import import_own
from rl_dist.errors import UserError, one_line, streams
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World, connection_broke
from rl_dist.run_dir import RunDir
from rl_dist.telemetry.metrics import without_nan

Callback = Callable[["Moment"], object]  # returns False to stop training
Callbacks = Mapping[str, Callback | None]  # keys are the values of `Moment.kind`


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Argument that a callback receives. Its metrics are the same on all ranks."""

    kind: str  # iteration, evaluation or checkpoint
    metrics: Mapping[str, Any]  # metrics of this iteration, as in metrics.jsonl
    run_dir: Path
    checkpoint: Path | None  # the saved file if kind is checkpoint, else None
    policy: Policy  # this rank's copy; its weights are equal on all ranks
    rank: int

    @property
    def is_main_process(self) -> bool:
        """Return True on rank 0, the only rank that should write files or print."""
        return self.rank == 0


@dataclass
class UserCallbacks:
    """Calls the user's callbacks on this rank; stops all ranks after the same iteration."""

    functions: Callbacks
    directory: RunDir
    policy: Policy
    world: World
    stop: tuple[str, float] = ("", 0.0)  # metric, and the value that ends the run
    stop_requested: bool = False  # True after a callback has returned False

    def on_iteration(self, metrics: Mapping[str, Any], decisive: Mapping[str, Any]) -> str:
        """Call the callbacks after an iteration; return the reason to stop, or "".

        Every rank must call this, and all ranks get the same reason.

        Args:
            decisive: the same metrics, but with means of the last 100 episodes.
        """
        name, limit = self.stop
        if not name and not any(self.functions.values()):
            return ""
        # Losses are NaN if no gradient step was taken. Pass None instead, as in metrics.jsonl.
        metrics = without_nan(metrics)
        self._call("iteration", metrics)
        if any(name.startswith("valid/") for name in metrics):
            self._call("evaluation", metrics)
        value = decisive.get(name)
        reason = "a callback asked to stop" if self.stop_requested else ""
        if not reason and isinstance(value, int | float) and value >= limit:
            reason = f"{name} {value:.6g} has reached {limit:g}"
        return next(filter(None, all_gather_json(reason, self.world)), "")

    def on_checkpoint(self, metrics: Mapping[str, Any], path: Path) -> None:
        """Call the callback after a checkpoint was saved."""
        self._call("checkpoint", metrics, path)

    def _call(self, kind: str, metrics: Mapping[str, Any], path: Path | None = None) -> None:
        """Call the callback of this kind, if any; record whether it asks to stop."""
        callback = self.functions.get(kind)
        if callback is None:
            return
        moment = Moment(
            kind=kind,
            metrics=metrics,
            run_dir=self.directory.path,
            checkpoint=path,
            policy=self.policy,
            rank=self.world.rank,
        )
        self.world.set_phase(f"{kind} callback")
        try:
            # With quiet=True, the output of callbacks is still shown.
            with streams(lambda stream: getattr(stream, "silenced", stream)):
                answer = callback(moment)
        except BaseException as error:  # even SystemExit; Ctrl-C only sets a flag
            # If the connection broke, another rank has ended. That rank reports the cause.
            if isinstance(error, UserError) or connection_broke(error):
                raise
            log = self.directory.log_of(self.world.rank)
            raise UserError(
                f"the {kind} callback raised {one_line(error)}; traceback in {log}", exit_code=1
            ) from error
        self.stop_requested |= isinstance(answer, bool | np.bool_) and not answer


def named_callbacks(config: TrainConfig) -> Callbacks:
    """Return the function of --callback for each kind of moment; {} without the flag."""
    if not config.callback:
        return {}
    function = import_own("callback", config.callback)
    return dict.fromkeys(("iteration", "evaluation", "checkpoint"), function)
