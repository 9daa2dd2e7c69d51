"""Call the user's callbacks, and stop a training early."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agents.config import TrainConfig
from rl_dist.checkpoint.trust import import_own
from rl_dist.errors import FOREIGN_ERRORS, UserError, one_line
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World, connection_broke
from rl_dist.telemetry.metrics import without_nan

if TYPE_CHECKING:
    from agents.policy import Policy

Callback = Callable[["Moment"], Any]  # returns False to stop the training
Callbacks = Mapping[str, Callback | None]  # the callback for each kind of moment


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The argument of a callback; every rank calls it with the same metrics."""

    kind: str  # iteration, evaluation or checkpoint
    metrics: Mapping[str, Any]  # the record of this iteration, as in metrics.jsonl
    run_dir: Path
    checkpoint: Path | None  # the saved file; None for other kinds
    policy: Policy  # the copy of this rank; all are equal
    rank: int

    @property
    def is_main_process(self) -> bool:
        """Return whether this is the rank that writes."""
        return self.rank == 0


@dataclass
class Watch:
    """Calls the callbacks of this rank; all ranks agree whether to stop."""

    callbacks: Callbacks
    world: World
    stop: tuple[str, float] = ("", 0.0)  # a metric and the value that ends the run
    wants_end: bool = field(default=False, init=False)

    def __call__(self, training: Any, metrics: Mapping[str, Any]) -> str:
        """Return the reason to stop after an iteration, the same on all ranks, or ""."""
        metrics = without_nan(metrics)  # None for losses without a step, like null in metrics.jsonl
        self.call("iteration", training, metrics)
        if any(name.startswith("valid/") for name in metrics):
            self.call("evaluation", training, metrics)
        name, limit = self.stop
        value = metrics.get(name)
        reason = "a callback asked for it" if self.wants_end else ""
        if not reason and isinstance(value, int | float) and value >= limit:
            reason = f"{name} is {value:.6g}, at least {limit:g}"
        return next(filter(None, all_gather_json(reason, self.world)), "")

    def call(
        self, kind: str, training: Any, metrics: Mapping[str, Any], path: Path | None = None
    ) -> None:
        """Call the callback for a kind of moment; note if it asks to stop."""
        callback = self.callbacks.get(kind)
        run_dir = training.job.run_dir
        if callback is None:
            return
        moment = Moment(
            kind=kind,
            metrics=metrics,
            run_dir=run_dir,
            checkpoint=path,
            policy=training.policy,
            rank=self.world.rank,
        )
        self.world.set_phase(f"{kind} callback")
        try:
            answer = callback(moment)
        except FOREIGN_ERRORS as error:
            # after a broken connection the end of another rank is the error to report
            if isinstance(error, UserError) or connection_broke(error):
                raise
            name = getattr(callback, "__qualname__", type(callback).__qualname__)
            log = run_dir / "logs" / f"rank_{self.world.rank}.log"
            raise UserError(
                f"callback {callback.__module__}:{name} raised {one_line(error)}; traceback in "
                f"{log}",
                exit_code=1,
            ) from error
        self.wants_end |= isinstance(answer, bool | np.bool_) and not answer


def make_watch(config: TrainConfig, callbacks: Callbacks, world: World) -> Watch | None:
    """Return the watch for --stop_at and callbacks; None if there are none."""
    if config.callback:
        function = import_own("callback", config.callback)
        callbacks = dict.fromkeys(("iteration", "evaluation", "checkpoint"), function)
    if not (config.stop_at or any(callbacks.values())):
        return None
    return Watch(callbacks, world, config.stop)
