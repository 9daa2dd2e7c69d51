"""Supervised training and evaluation of any module, with any loader and loss.

    strategy = Strategy(StrategyConfig(), world)
    module = strategy.wrap(net.to(world.device))
    optimizer = torch.optim.Adam(strategy.parameters, lr=1e-3)
    result = fit(module, train_loader, optimizer, nn.CrossEntropyLoss(), strategy,
                 validation=valid_loader, metrics={"accuracy": accuracy})
    figures = evaluate(module, test_loader, nn.CrossEntropyLoss(), strategy, {"accuracy": accuracy})

Batches are pairs of inputs and targets; the module maps inputs to outputs, the criterion outputs
and targets to their mean loss. Batch sizes are totals over ranks, figures count every sample of all
ranks once, and all ranks call together. A criterion whose mean weights samples differently (class
weights, ignore_index) divides by the weights of a rank's share of a batch: gradients and losses are
then means of such means, and depend on the number of ranks and the batch size.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from tqdm import tqdm

from rl_dist.checkpoint.store import BEST_FILE, latest_checkpoint, load_checkpoint, save_agreed
from rl_dist.errors import UserError, one_line
from rl_dist.flags import Field, configuration
from rl_dist.process_group.collectives import (
    all_gather_json,
    all_reduce_max,
    all_reduce_sum,
    check_in_sync,
)
from rl_dist.process_group.world import World, broadcast_from_rank0, stop_flag
from rl_dist.run_dir import RunDir
from rl_dist.strategies.strategy import Strategy
from rl_dist.supervised.batches import SharedLoader, epoch_seed, iterate, named
from rl_dist.supervised.evaluation import Criterion, Judge, Metric, Sums
from rl_dist.telemetry.loggers import Board, Guarded
from rl_dist.telemetry.metrics import without_nan

STOP_EVERY = 10  # batches between two looks for a stop signal on any rank
logger = logging.getLogger(__name__)


@configuration
class FitConfig:
    """How long and how to fit: FitConfig(epochs=20, patience=3)."""

    epochs: int = Field(10, ge=1, le=10**6)
    """Passes over the training data, at most."""
    patience: int = Field(0, ge=0, le=10**6)
    """Stop after this many epochs in a row without a better validation loss; 0: never."""
    grad_accumulation: int = Field(1, ge=1, le=10**6)
    """Batches whose gradients add up to one optimizer step: the effect of a batch_size this many
    times larger, in less memory."""
    max_grad_norm: float = Field(1e6, ge=1e-6, le=1e30)
    """Scale the gradient of all ranks down to this norm."""
    max_bad_steps: int = Field(10, ge=0, le=10**9)
    """Skip this many steps in a row whose loss or gradient is NaN or inf, then stop."""
    seed: int = Field(1, ge=0, le=2**63 - 1)
    """Seed of the shuffling, and of what the module draws."""
    keep_checkpoints: int = Field(3, ge=1, le=10**6)
    """Newest checkpoints to keep."""
    progress: bool = True
    """Show a progress bar on a terminal, and a line for every epoch."""


@dataclass(frozen=True)
class FitResult:
    """The end of fitting."""

    history: list[dict[str, float]]  # one record per epoch: train/loss, valid/loss, ...
    best_epoch: int  # whose weights the module holds now: by validation loss, else the last
    signum: int = 0  # of the signal that ended it early


@dataclass
class FitState:
    """The state of a fit between epochs, which a checkpoint holds."""

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scheduler: Any
    extra: dict[str, Any]  # of the caller
    facts: dict[str, Any]  # of the job: a resumed one must have the same
    epoch: int = 0
    best_epoch: int = 0
    best_loss: float = math.inf
    bad_in_a_row: int = 0  # steps skipped since the last good one
    history: list[dict[str, float]] = field(default_factory=list)
    best_weights: dict[str, Tensor] | None = None

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

    def count_bad(self, stepped: bool, most: int, place: str) -> None:
        """Count steps skipped in a row; raises UserError if there are more than `most`."""
        self.bad_in_a_row = 0 if stepped else self.bad_in_a_row + 1
        bad = f"loss or gradient is NaN or inf ({self.bad_in_a_row} in a row, at most {most})"
        if not stepped and self.strategy.world.is_main_process:
            logger.warning("%s: %s: the step is skipped", place, bad)
        if self.bad_in_a_row > most:
            raise UserError(f"{bad}: lower the learning rate, or raise max_bad_steps", exit_code=1)

    def save(self, run: RunDir, *, keep: int, best: bool) -> None:
        """Write the records so far and a checkpoint; all ranks call and fail together."""
        world = self.strategy.world
        module = self.strategy.module_state()
        optimizer = self.strategy.optimizer_state(self.optimizer)
        check_in_sync(module, world)
        state: dict[str, Any] | None = None
        if world.is_main_process:
            names = (
                "epoch",
                "best_epoch",
                "best_loss",
                "bad_in_a_row",
                "history",
                "facts",
                "extra",
            )
            state = {name: getattr(self, name) for name in names}
            state |= {"module": module, "optimizer": optimizer}
            state["strategy"] = self.strategy.state_dict()
            state["scheduler"] = self.scheduler and self.scheduler.state_dict()
            run.write_records(without_nan(self.history))
        measured = {"valid/loss": self.best_loss} if best else {}
        options: dict[str, Any] = {"keep": keep, "measured": measured, "best": best}
        _, problem = save_agreed(run.path, state, world, iteration=self.epoch, **options)
        if problem:
            raise UserError(problem, exit_code=1)

    def restore(self, run: RunDir, resume: bool) -> None:
        """Continue from the newest valid checkpoint, if any; all ranks must call."""
        newest, problem = "", ""
        if self.strategy.world.is_main_process:
            newest = str(latest_checkpoint(run.path) or "") if resume else ""
            if not newest and any(run.checkpoints.glob("*.pt")):
                fix = "they are damaged: move them away" if resume else "resume it"
                problem = f"{run.path} holds checkpoints already: {fix}, or name another run_dir"
        newest, problem = all_gather_json([newest, problem], self.strategy.world)[0]
        if problem:
            raise UserError(problem)
        if newest:
            self.load(load_checkpoint(newest), run.checkpoints / BEST_FILE)
            logger.info("continuing from %s, epoch %d", newest, self.epoch)

    def load(self, state: dict[str, Any], best_file: Path) -> None:
        """Continue from the content of a checkpoint, and the weights of the best epoch."""
        saved = state["facts"] | state["extra"]
        differing = [
            f"{name} {now} (it has {saved[name]})"
            for name, now in (self.facts | self.extra).items()
            if str(saved.get(name, now)) != str(now)
        ]
        if differing:
            raise UserError(f"this differs from the run to resume: {', '.join(differing)}")
        try:
            self.strategy.load(state["module"], self.optimizer, state["optimizer"])
            self.strategy.load_state_dict(state["strategy"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
        except Exception as error:  # torch's of many kinds: other names, shapes and types
            problem = f"the checkpoint is of another module or optimizer: {one_line(error)}"
            raise UserError(problem) from error
        for name in ("epoch", "best_epoch", "best_loss", "bad_in_a_row", "history"):
            setattr(self, name, state[name])
        if self.best_epoch:
            best = state if self.best_epoch == self.epoch else load_checkpoint(best_file)
            if best["epoch"] == self.best_epoch:
                self.best_weights = best["module"]
            # one of a later epoch is of a process that was killed while it saved
            elif best["epoch"] <= self.epoch:
                raise UserError(f"{best_file} does not hold epoch {self.best_epoch}: put it back")


def fit(
    module: nn.Module,
    loader: DataLoader,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion,
    strategy: Strategy,
    *,
    validation: DataLoader | None = None,
    metrics: Mapping[str, Metric] | None = None,
    scheduler: Any = None,
    config: FitConfig | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> FitResult:
    """Fit a module that `strategy` wrapped; all ranks call together.

        result = fit(module, loader, optimizer, criterion, strategy, validation=held_out)

    Every epoch begins by seeding torch from `config.seed`, epoch and rank, so that a resumed run
    continues as if it had not stopped; a stop signal ends an epoch early, and resuming repeats it.
    After an epoch BatchNorm's statistics are averaged over ranks; other buffers become rank 0's.

    Args:
        module: what `strategy.wrap` returned.
        loader: of training; its batch_size is the total over ranks.
        criterion: mean loss of a batch over its samples; see above for weighted means.
        validation: decides which epoch is the best, and when to stop (`patience`).
        metrics: by name; what they return is averaged over all values of all samples.
        scheduler: torch's, stepped after every epoch; ReduceLROnPlateau sees the validation loss.
        run_dir: gets checkpoints/, metrics.jsonl and TensorBoard's; `resume` continues from there.
        extra: plain values to store in checkpoints as "extra"; a resumed run must give the same.

    Raises:
        BatchError: a batch raised, on any rank: nothing is swallowed.
        UserError: bad sizes, a foreign checkpoint, or too many steps without a finite gradient.
    """
    config, world = config or FitConfig(), strategy.world
    if validation is None and (config.patience or isinstance(scheduler, ReduceLROnPlateau)):
        raise UserError("patience and ReduceLROnPlateau look at the validation loss: give one")
    if module is not strategy.module:
        raise UserError("fit takes the module that strategy.wrap returned last: wrap it first")
    train = SharedLoader(loader, world, training=True, seed=config.seed)
    held_out = SharedLoader(validation, world, training=False) if validation is not None else None
    facts = {
        "optimizer": type(optimizer).__name__,
        "scheduler": type(scheduler).__name__ if scheduler is not None else "none",
        "seed": config.seed,
        "batch_size": train.batch_size,
        "grad_accumulation": config.grad_accumulation,
        "samples": train.num_samples,
    }
    state = FitState(strategy, optimizer, scheduler, dict(extra or {}), facts)
    run = RunDir(run_dir) if run_dir is not None else None
    board: Guarded | None = None
    if run:
        state.restore(run, resume)
        if world.is_main_process:
            board = Guarded("TensorBoard", Board(run.path, purge_step=state.epoch + 1))
    elif resume:
        raise UserError("resume needs a run_dir with checkpoints: name it")
    judge = Judge(module, criterion, strategy, metrics or {}, config.progress)
    signum = _fit_epochs(state, judge, train, held_out, config, run, board)
    if board:
        board.close()
    if not signum and state.best_weights and state.best_epoch != state.epoch:
        strategy.load(state.best_weights, optimizer, strategy.optimizer_state(optimizer))
    return FitResult(state.history, state.best_epoch if held_out else state.epoch, signum)


def _fit_epochs(
    state: FitState,
    judge: Judge,
    train: SharedLoader,
    held_out: SharedLoader | None,
    config: FitConfig,
    run: RunDir | None,
    board: Guarded | None,
) -> int:
    """Train, validate and save epoch by epoch; return the signal that ended it, or 0."""
    scheduler, world = state.scheduler, state.strategy.world
    signum = 0
    while not signum and state.epoch < config.epochs:
        if 0 < config.patience <= state.epoch - state.best_epoch:
            break
        started = time.perf_counter()
        figures, signum = _train_epoch(state, judge, train, config)
        if signum:
            break
        seconds = time.perf_counter() - started
        _merge_buffers(judge.module, world)
        record = {"epoch": state.epoch + 1.0}
        record |= {f"train/{name}": value for name, value in figures.items()}
        if held_out:
            record |= {f"valid/{name}": value for name, value in judge.evaluate(held_out).items()}
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(record["valid/loss"])
        elif scheduler is not None:
            scheduler.step()
        best = state.add(record)
        if run:
            state.save(run, keep=config.keep_checkpoints, best=best)
        if board:
            board.write(without_nan(record), state.epoch)
            board.flush()
        line = f"epoch {state.epoch}/{config.epochs}: "
        line += "".join(f"{name} {record[name]:.4g}, " for name in record if "/" in name)
        line += f"{figures['samples'] / seconds:,.0f} samples/s{', best so far' * best}"
        logger.info(line)
        if config.progress and world.is_main_process:
            tqdm.write(line, file=sys.stdout)
        signum = all_reduce_max(stop_flag.signum, world)
    return signum


def _train_epoch(
    state: FitState, judge: Judge, loader: SharedLoader, config: FitConfig
) -> tuple[dict[str, float], int]:
    """Pass once over the training data; also return the signal that ended it early, or 0."""
    strategy, optimizer, world = state.strategy, state.optimizer, state.strategy.world
    epoch = state.epoch + 1
    where = f"epoch {epoch}"
    world.set_phase(where)
    world.forget_waits()  # or their marks would pile up
    torch.manual_seed(epoch_seed(config.seed, epoch, world.rank))
    judge.module.train()
    sums = Sums(judge.metrics)
    for number, count, inputs, targets in iterate(loader, where, epoch, config.progress):
        # place of the batch in its step; the last step may have fewer parts
        place = number % config.grad_accumulation
        parts = min(config.grad_accumulation, len(loader.batches) - (number - place))
        last = place == parts - 1
        with named(where, number, world):
            if place == 0:
                optimizer.zero_grad()
            with strategy.accumulating(last):
                outputs, loss = judge.outputs_and_loss(inputs, targets)
                strategy.backward(loss / parts)
            sums.add(loss.detach(), outputs, targets, count)
            if last:
                _, stepped = strategy.step(optimizer, config.max_grad_norm)
                # an overflow is part of the search for a loss scale
                if not strategy.overflowed:
                    state.count_bad(bool(stepped), config.max_bad_steps, f"{where}, batch {number}")
        if number % STOP_EVERY == 0 and (signum := all_reduce_max(stop_flag.signum, world)):
            return {}, signum
    return sums.means(world), 0


def _merge_buffers(module: nn.Module, world: World) -> None:
    """Make the buffers of the ranks equal: each rank saw its share of every batch.

    BatchNorm's running statistics become the mean over ranks, all others those of rank 0.
    """
    if world.size == 1:
        return
    averaged: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        for key, value in part.named_buffers(recurse=False):
            if not isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                with world.waiting("buffers of the main process"):
                    broadcast_from_rank0(value)
            elif value.is_floating_point():
                averaged[f"{name}.{key}"] = value
    for name, total in (all_reduce_sum(averaged, world) if averaged else {}).items():
        averaged[name].copy_(total / world.size)
