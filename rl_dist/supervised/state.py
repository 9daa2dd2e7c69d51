"""The state of `fit` between epochs: saved, compared over ranks, restored."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_dist.checkpoint.store import (
    BEST_FILE,
    CHECKPOINT_DIR,
    MEASURED,
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from rl_dist.errors import UserError, one_line
from rl_dist.process_group.collectives import all_gather_json, check_in_sync
from rl_dist.run_dir import RunDir
from rl_dist.strategies.strategy import Strategy
from rl_dist.telemetry.loggers import Board, Guarded
from rl_dist.telemetry.metrics import without_nan

logger = logging.getLogger(__name__)

# tells our event files from those that the caller may write into the same folder
EVENTS_SUFFIX = ".fit"
# what a checkpoint holds as it is
PLAIN = ("epoch", "best_epoch", "best_loss", "bad_in_a_row", "history", "facts", "extra")


@dataclass
class FitState:
    """The content of a checkpoint of `fit`: epochs, the best one, what trains."""

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scheduler: Any
    extra: dict[str, Any]  # the caller's
    # of the job: a resumed one must have the same
    facts: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    best_epoch: int = 0
    best_loss: float = math.inf
    bad_in_a_row: int = 0  # steps skipped since the last good one
    history: list[dict[str, float]] = field(default_factory=list)
    best_weights: dict[str, Tensor] | None = None

    def is_stale(self, patience: int) -> bool:
        """Return True if `patience` epochs were no better; never if it is 0."""
        return 0 < patience <= self.epoch - self.best_epoch

    def add(self, record: dict[str, float]) -> bool:
        """Take an epoch's record; return True if it is the best; all ranks must call."""
        self.epoch += 1
        self.history.append(record)
        improved = record.get("valid/loss", math.inf) < self.best_loss
        if improved:
            self.best_epoch = self.epoch
            self.best_loss = record["valid/loss"]
            weights = self.strategy.module_state().items()
            self.best_weights = {name: value.detach().cpu().clone() for name, value in weights}
        return improved

    def return_to_best(self) -> None:
        """Give the module the weights of the best epoch."""
        if self.best_weights is not None and self.best_epoch != self.epoch:
            optimizer_state = self.strategy.optimizer_state(self.optimizer)
            self.strategy.load(self.best_weights, self.optimizer, optimizer_state)

    def to_dict(self) -> dict[str, Any]:
        """Return a checkpoint's content; all ranks must call."""
        return {name: getattr(self, name) for name in PLAIN} | {
            "module": self.strategy.module_state(),
            "optimizer": self.strategy.optimizer_state(self.optimizer),
            "strategy": self.strategy.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
        }

    def load(self, state: dict[str, Any], best: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's content, and from that of the best epoch."""
        saved = state["facts"]
        differing = [
            f"{name} {now} (it has {saved[name]})"
            for name, now in self.facts.items()
            if saved.get(name, now) != now
        ]
        if differing:
            raise UserError(f"this differs from the run to resume: {', '.join(differing)}")
        try:
            self.strategy.load(state["module"], self.optimizer, state["optimizer"])
            self.strategy.load_state_dict(state["strategy"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
        except Exception as error:  # torch's of many kinds: other names, shapes and types
            raise UserError(
                f"the checkpoint is of another module or optimizer: {one_line(error)}"
            ) from error
        for name in ("epoch", "best_epoch", "best_loss", "history"):
            setattr(self, name, state[name])
        self.bad_in_a_row = state["bad_in_a_row"]
        if self.best_epoch == self.epoch:
            self.best_weights = state["module"]
        elif best is not None and best["epoch"] == self.best_epoch:
            self.best_weights = best["module"]
        # a later one is of a process that was killed while it wrote
        elif self.best_epoch and (best is None or best["epoch"] <= self.epoch):
            raise UserError(f"{BEST_FILE} no longer holds epoch {self.best_epoch}: put it back")


def restore(state: FitState, run_dir: str | Path | None, *, resume: bool) -> None:
    """Take up the newest valid checkpoint, if there is one; all ranks must call."""
    if run_dir is None:
        if resume:
            raise UserError("resume needs a run_dir with checkpoints: name it")
        return
    world = state.strategy.world
    folder = RunDir(run_dir).checkpoints
    found, problem = "", ""
    if world.is_main_process:
        found = str(latest_checkpoint(run_dir) or "") if resume else ""
        if not found and any(folder.glob("*.pt")):
            fix = "resume it, or name another run_dir"
            fix = "they are damaged: move them away" if resume else fix
            problem = f"{run_dir} holds checkpoints already: {fix}"
    found, problem = all_gather_json([found, problem], world)[0]  # of the main process
    if problem:
        raise UserError(problem)
    if found:
        best = folder / BEST_FILE
        state.load(load_checkpoint(found), load_checkpoint(best) if best.exists() else None)
        logger.info("going on from %s, epoch %d", found, state.epoch)


def save(
    state: FitState, run_dir: str | Path | None, board: Guarded | None, *, keep: int, best: bool
) -> None:
    """Write a checkpoint and the records so far; all ranks call and fail together."""
    if run_dir is None:
        return
    world = state.strategy.world
    content, problem = state.to_dict(), ""
    check_in_sync(content["module"], world)
    if world.is_main_process:
        content[MEASURED] = {"valid/loss": state.best_loss} if best else {}
        folder = Path(run_dir, CHECKPOINT_DIR)
        try:
            save_checkpoint(folder, content, iteration=state.epoch, keep=keep, best=best)
            RunDir(run_dir).write_records(without_nan(state.history))
        except (CheckpointError, UserError) as error:
            problem = str(error)
    problem = all_gather_json(problem, world)[0]
    if problem:
        raise UserError(problem, exit_code=1)
    if board:
        board.write(without_nan(state.history[-1]), state.epoch)
        board.flush()


def open_board(state: FitState, run_dir: str | Path | None) -> Guarded | None:
    """Open TensorBoard's record, and write the epochs so far again.

    None: there is none here, or it cannot be written, and fitting goes on without.
    """
    if run_dir is None or not state.strategy.world.is_main_process:
        return None
    try:
        for file in Path(run_dir).glob("events.out.tfevents.*" + EVENTS_SUFFIX):
            file.unlink()
        board = Guarded("TensorBoard", Board(run_dir, purge_step=1, suffix=EVENTS_SUFFIX))
    except OSError as error:
        logger.warning("%s gets no record for TensorBoard: %s", run_dir, error.strerror)
        return None
    for record in state.history:
        board.write(without_nan(record), int(record["epoch"]))
    return board
