"""What `fit` carries from epoch to epoch: saved, compared over ranks, restored."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_dist.checkpoint.file import load_checkpoint
from rl_dist.checkpoint.folder import BEST_FILE, CHECKPOINT_DIR, MEASURED, latest_checkpoint, save_checkpoint
from rl_dist.checkpoint.seal import CheckpointError
from rl_dist.errors import UserError
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.collectives import check_in_sync, gather_json
from rl_dist.process_group.world import World
from rl_dist.telemetry.metrics import EVENT_FILES, METRICS_FILE, Board, write_whole

logger = logging.getLogger(__name__)

EVENTS_SUFFIX = ".fit"  # tells our event files from those that the caller may write into the same folder


@dataclass
class FitState:
    """Everything that a checkpoint of `fit` holds: epochs, the best, what trains."""

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scheduler: Any
    extra: dict[str, Any]  # the caller's
    facts: dict[str, Any] = field(default_factory=dict)  # of the job: a resumed one must have the same
    epoch: int = 0
    best_epoch: int = 0
    best_loss: float = math.inf
    bad_in_a_row: int = 0  # steps skipped since the last good one
    history: list[dict[str, float]] = field(default_factory=list)
    best_weights: dict[str, Tensor] | None = None

    @property
    def stale(self) -> int:
        """Epochs since the best one."""
        return self.epoch - self.best_epoch

    def look(self, record: dict[str, float]) -> bool:
        """Take the record of the next epoch; all ranks must call.

        Returns:
            Whether its validation loss is the best so far.
        """
        self.epoch += 1
        self.history.append(record)
        improved = record.get("valid/loss", math.inf) < self.best_loss  # never, if it is NaN
        if improved:
            self.best_epoch, self.best_loss = self.epoch, record["valid/loss"]
            weights = self.strategy.module_state()
            self.best_weights = {name: value.detach().cpu().clone() for name, value in weights.items()}
        return improved

    def return_to_best(self) -> None:
        """Give the module the weights of the best epoch."""
        if self.best_weights is not None and self.best_epoch != self.epoch:
            optimizer_state = self.strategy.optimizer_state(self.optimizer)
            self.strategy.load(self.best_weights, self.optimizer, optimizer_state)

    def to_dict(self) -> dict[str, Any]:
        """A checkpoint's content; all ranks must call."""
        return {
            "epoch": self.epoch,
            "best_epoch": self.best_epoch,
            "best_loss": self.best_loss,
            "bad_in_a_row": self.bad_in_a_row,
            "history": self.history,
            "module": self.strategy.module_state(),
            "optimizer": self.strategy.optimizer_state(self.optimizer),
            "strategy": self.strategy.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "facts": self.facts,
            "extra": self.extra,
        }

    def load(self, state: dict[str, Any], best: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's content, and from that of the best epoch.

        Raises:
            UserError: it is of another job, or another module.
        """
        facts = state.get("facts")
        if facts is None:
            raise UserError("this is no checkpoint of fit: name the run directory that fit wrote")
        compared = ((name, now, facts.get(name)) for name, now in self.facts.items() if name in facts)
        differing = [f"{name} {now} (it has {there})" for name, now, there in compared if now != there]
        if differing:
            raise UserError(f"this differs from the run to resume: {', '.join(differing)}; use the values it has")
        try:
            self.strategy.load(state["module"], self.optimizer, state["optimizer"])
            self.strategy.load_state_dict(state.get("strategy", {}))
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
        except Exception as error:  # torch's of many kinds: other names, shapes and types
            told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise UserError(f"the checkpoint is of another module or optimizer: {told}") from error
        self.epoch, self.best_epoch, self.best_loss = state["epoch"], state["best_epoch"], state["best_loss"]
        self.bad_in_a_row, self.history = state.get("bad_in_a_row", 0), state["history"]
        if self.best_epoch == self.epoch:
            self.best_weights = state["module"]
        elif best is not None and best["epoch"] == self.best_epoch:
            self.best_weights = best["module"]
        elif self.best_epoch and (best is None or best["epoch"] <= self.epoch):  # later: killed while it was written
            raise UserError(f"{BEST_FILE} no longer holds epoch {self.best_epoch}, the best one: put it back")


def restore(state: FitState, run_dir: str | Path | None, *, resume: bool) -> None:
    """Take up the newest valid checkpoint, if there is one; all ranks must call.

    Raises:
        UserError: nothing to resume from is named, or a fresh start would overwrite checkpoints.
    """
    if run_dir is None:
        if resume:
            raise UserError("resume needs a run_dir with checkpoints: name it")
        return
    world, folder = state.strategy.world, Path(run_dir, CHECKPOINT_DIR)
    found, problem = "", ""
    if world.main:
        newest = latest_checkpoint(run_dir)
        found = str(newest) if newest and resume else ""
        if not found and any(folder.glob("*.pt")):
            problem = f"{run_dir} holds checkpoints{' that are damaged' if resume else ''} already: "
            problem += "move them away" if resume else "resume it, or name another run_dir"
    found, problem = gather_json([found, problem], world)[0]  # of the main process
    if problem:
        raise UserError(problem)
    if found:
        best = folder / BEST_FILE
        newest_state = load_checkpoint(found)
        state.load(newest_state, load_checkpoint(best) if best.exists() else None)
        logger.info("going on from %s, epoch %d", found, state.epoch)


def save(state: FitState, run_dir: str | Path | None, *, keep: int, best: bool) -> None:
    """Write a checkpoint and the records so far; all ranks must call.

    Raises:
        DesyncError: the ranks drifted apart.
        UserError: on all ranks: it cannot be written.
    """
    if run_dir is None:
        return
    world = state.strategy.world
    content, problem = state.to_dict(), ""
    check_in_sync(content["module"], world)
    if world.main:
        content[MEASURED] = {"valid/loss": state.best_loss} if best else {}
        try:
            save_checkpoint(Path(run_dir, CHECKPOINT_DIR), content, iteration=state.epoch, keep=keep, best=best)
            lines = "".join(json.dumps(_plain(record)) + "\n" for record in state.history)
            write_whole(Path(run_dir, METRICS_FILE), lines)
        except (CheckpointError, UserError) as error:
            problem = str(error)
    problem = _of_main(problem, world)
    if problem:
        raise UserError(problem, exit_code=1)


@contextmanager
def tensorboard_of(state: FitState, run_dir: str | Path | None) -> Iterator[Callable[[dict[str, float]], None]]:
    """A function that adds an epoch's record to TensorBoard, on the main process.

    What a run did before it goes on is written anew from its checkpoint: every epoch stands there once. Where it
    cannot be written, fitting goes on without.
    """
    if run_dir is None or not state.strategy.world.main:
        yield lambda record: None
        return
    try:
        for file in Path(run_dir).glob(EVENT_FILES + EVENTS_SUFFIX):
            file.unlink()
        board = Board(run_dir, purge_step=1, suffix=EVENTS_SUFFIX)
    except OSError as error:
        logger.warning("%s gets no record for TensorBoard: %s", run_dir, error.strerror or error)
        yield lambda record: None
        return

    def write(record: dict[str, float]) -> None:
        plain = {name: value for name, value in _plain(record).items() if name != "epoch"}
        board.write(plain, int(record["epoch"]))
        board.flush()

    try:
        for record in state.history:
            write(record)
        yield write
    finally:
        board.close()


def _of_main(text: str, world: World) -> str:
    return gather_json(text, world)[0]


def _plain(record: dict[str, float]) -> dict[str, float | None]:
    """NaN and infinities become null."""
    return {name: value if math.isfinite(value) else None for name, value in record.items()}
