"""Fit a module, epoch by epoch, and evaluate it."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from rl_dist.checkpoint.store import BEST_FILE, latest_checkpoint, load_checkpoint, save_agreed
from rl_dist.errors import UserError, one_line
from rl_dist.files import check_layout
from rl_dist.process_group.collectives import (
    all_gather_json,
    all_reduce_max,
    all_reduce_sum,
    broadcast_from_rank0,
    check_in_sync,
)
from rl_dist.process_group.world import World, stop_flag
from rl_dist.run_dir import RunDir
from rl_dist.strategies.strategy import Strategy
from rl_dist.supervised.batches import SharedLoader, batch_named, epoch_seed, to_device
from rl_dist.supervised.config import FitConfig, FitResult
from rl_dist.telemetry.loggers import GuardedLogger, open_tensorboard
from rl_dist.telemetry.metrics import without_nan

STOP_EVERY = 10  # batches between two checks for a stop signal on any rank
PROGRESS = ("epoch", "best_epoch", "best_loss", "bad_in_a_row", "history")  # in a checkpoint
Metric = Callable[[Any, Any], Tensor]  # (outputs, targets) -> one or more values for each sample
Criterion = Callable[[Any, Any], Tensor]  # (outputs, targets) -> mean loss of the batch
logger = logging.getLogger(__name__)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mark where the largest of the outputs [N, C] is that of the target class [N].

    accuracy(torch.tensor([[0.1, 0.9]]), torch.tensor([1])) is tensor([True]).
    """
    return outputs.argmax(-1) == targets


# ---- one pass over the data


@dataclass(frozen=True)
class Task:
    """A module, and how its outputs are measured."""

    module: nn.Module
    criterion: Criterion
    strategy: Strategy
    metrics: Mapping[str, Metric]

    def use(
        self, loader: SharedLoader, phase: str, epoch: int = 0, state: FitState | None = None
    ) -> tuple[dict[str, float], int]:
        """Use every batch once, to train if a state is given; all ranks call.

        Returns:
            The mean loss, the metrics and the number of samples; and 0, or the stop signal that
            ended a training early.
        """
        strategy, world = self.strategy, loader.world
        world.set_phase(phase)
        accumulation = state.config.grad_accumulation if state else 1
        sums: dict[str, Any] = defaultdict(float)
        loader.start(epoch)
        with batch_named(phase, 0, world):
            loaded = iter(loader.loader)
        for number, samples in enumerate(loader.batches):
            # place of the batch in its step; the last step may have fewer parts
            place = number % accumulation
            parts = min(accumulation, len(loader.batches) - (number - place))
            last = place == parts - 1
            with batch_named(phase, number, world), torch.set_grad_enabled(state is not None):
                inputs, targets = to_device(next(loaded), world.device)
                if state and place == 0:
                    state.optimizer.zero_grad()
                with strategy.accumulating(last):
                    with strategy.autocast():
                        outputs = self.module(inputs)
                        loss = self.criterion(outputs, targets)
                    if state:
                        strategy.backward(loss / parts)
                self._add(sums, loss, outputs, targets, len(samples))
                if state and last:
                    state.step(f"{phase}, batch {number}")
            world.heartbeat()
            stop = state and number % STOP_EVERY == 0
            if stop and (signum := all_reduce_max(stop_flag.signum, world)):
                return {}, signum
        totals = all_reduce_sum(sums, world)
        names = ("loss", *self.metrics)
        means = {name: float(totals[name] / totals[f"count of {name}"]) for name in names}
        return means | {"samples": float(totals["count of loss"])}, 0

    @torch.no_grad()
    def _add(
        self, sums: dict[str, Any], loss: Tensor, outputs: Any, targets: Any, count: int
    ) -> None:
        """Add the loss and the metrics of a batch in float64, on the device."""
        sums["loss"] += loss.double().reshape(()) * count
        sums["count of loss"] += count
        for name, metric in self.metrics.items():
            values = metric(outputs, targets)
            if not values.ndim:  # a mean would give small batches the weight of large ones
                raise UserError(f"metric {name} must return a tensor of one value for each sample")
            sums[name] += values.sum(dtype=torch.float64)
            sums[f"count of {name}"] += values.numel()

    def evaluate(self, loader: SharedLoader) -> dict[str, float]:
        """Return the mean loss, the metrics and the number of samples; all ranks call."""
        was_training = self.module.training
        self.module.eval()
        try:
            return self.use(loader, "evaluation")[0]
        finally:
            self.module.train(was_training)


def evaluate(
    module: nn.Module,
    loader: DataLoader,
    criterion: Criterion,
    strategy: Strategy,
    metrics: Mapping[str, Metric] | None = None,
) -> dict[str, float]:
    """Compute mean loss and metrics over all samples of all ranks, each counted once.

        figures = evaluate(module, held_out, criterion, strategy, {"accuracy": accuracy})

    Returns:
        "loss", each metric by its name, and "samples", the number of samples.
    """
    shared = SharedLoader(loader, strategy.world, training=False)
    return Task(module, criterion, strategy, metrics or {}).evaluate(shared)


# ---- training


@dataclass
class FitState:
    """The state of a fit between epochs, which a checkpoint holds."""

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scheduler: Any
    extra: dict[str, Any]  # values of the caller
    facts: dict[str, Any]  # settings that a resumed fit must share
    config: FitConfig = FitConfig()
    epoch: int = 0
    best_epoch: int = 0
    best_loss: float = math.inf
    bad_in_a_row: int = 0  # steps skipped since the last good one
    history: list[dict[str, float]] = field(default_factory=list)
    best_weights: dict[str, Tensor] | None = None

    def add(self, record: dict[str, float]) -> bool:
        """Add an epoch's record; return True if it is the best; all ranks call."""
        self.epoch += 1
        self.history.append(record)
        improved = record.get("valid/loss", math.inf) < self.best_loss
        if improved:
            self.best_epoch = self.epoch
            self.best_loss = record["valid/loss"]
            weights = self.strategy.module_state().items()
            self.best_weights = {name: value.detach().cpu().clone() for name, value in weights}
        return improved

    def step(self, place: str) -> None:
        """Take an optimizer step; raise UserError if too many in a row are not finite."""
        _, stepped = self.strategy.step(self.optimizer, self.config.max_grad_norm)
        if self.strategy.overflowed:  # it is part of the search for a loss scale
            return
        self.bad_in_a_row = 0 if stepped else self.bad_in_a_row + 1
        most = self.config.max_bad_steps
        problem = f"loss or gradient is NaN or inf ({self.bad_in_a_row} in a row, at most {most})"
        if self.bad_in_a_row and self.strategy.world.is_main_process:
            logger.warning("%s: %s: the step is skipped", place, problem)
        if self.bad_in_a_row > most:
            fix = "lower the learning rate, or raise max_bad_steps"
            raise UserError(f"{problem}: {fix}", exit_code=1)

    def save(self, run: RunDir, *, keep: int, best: bool) -> None:
        """Write the records so far and a checkpoint; all ranks call and fail together."""
        world = self.strategy.world
        module = self.strategy.module_state()
        optimizer = self.strategy.optimizer_state(self.optimizer)
        check_in_sync(module, world)
        state: dict[str, Any] | None = None
        if world.is_main_process:
            state = {name: getattr(self, name) for name in (*PROGRESS, "facts", "extra")}
            state |= {"module": module, "optimizer": optimizer}
            state["strategy"] = self.strategy.state_dict()
            state["scheduler"] = self.scheduler and self.scheduler.state_dict()
            run.write_records(without_nan(self.history))
        measured = {"valid/loss": self.best_loss} if best else {}
        _, problem = save_agreed(
            run.path, state, world, iteration=self.epoch, keep=keep, measured=measured, best=best
        )
        if problem:
            raise UserError(problem, exit_code=1)

    def restore(self, run: RunDir, resume: bool) -> None:
        """Continue from the newest valid checkpoint if there is one; all ranks call."""
        newest, problem = "", ""
        if self.strategy.world.is_main_process:
            try:
                check_layout(run.path)
                newest = str(latest_checkpoint(run.path) or "") if resume else ""
            except (ValueError, OSError) as error:
                problem = one_line(error, named=False)
            if not newest and not problem and any(run.checkpoints.glob("*.pt")):
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
        except Exception as error:  # torch raises many kinds for other names, shapes and types
            problem = f"the checkpoint is of another module or optimizer: {one_line(error)}"
            raise UserError(problem) from error
        for name in PROGRESS:
            setattr(self, name, state[name])
        if self.best_epoch:
            best = state if self.best_epoch == self.epoch else load_checkpoint(best_file)
            if best["epoch"] == self.best_epoch:
                self.best_weights = best["module"]
            # a process that was killed while it saved leaves a best.pt of a later epoch
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

    Every epoch begins by seeding torch from `config.seed`, epoch and rank, so a resumed run
    continues as if it had not stopped. A stop signal ends an epoch early, and resuming repeats it.
    After an epoch BatchNorm's statistics are averaged over ranks; other buffers become rank 0's.

    Args:
        module: the result of `strategy.wrap`.
        loader: training data; its batch_size is the total over ranks.
        criterion: mean loss of a batch over its samples; see above for weighted means.
        validation: decides which epoch is the best, and when to stop (`patience`).
        metrics: by name; their values are averaged over all samples.
        scheduler: torch's, stepped after every epoch; ReduceLROnPlateau sees the validation loss.
        run_dir: gets checkpoints/, metrics.jsonl and TensorBoard's; `resume` continues from there.
        extra: plain values to store in checkpoints as "extra"; a resumed run must give the same.

    Raises:
        BatchError: a batch raised, on any rank.
        UserError: bad sizes, a foreign checkpoint, or too many steps without a finite gradient.
    """
    config, world = config or FitConfig(), strategy.world
    if {"loss", "samples"} & set(metrics or {}):
        raise UserError("loss and samples are reported anyway: give the metric another name")
    if validation is None and (config.patience or isinstance(scheduler, ReduceLROnPlateau)):
        raise UserError("patience and ReduceLROnPlateau need the validation loss: give validation")
    if module is not strategy.module:
        raise UserError("fit takes the module that strategy.wrap returned last: wrap it first")
    if resume and run_dir is None:
        raise UserError("resume needs a run_dir with checkpoints: name it")
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
    state = FitState(strategy, optimizer, scheduler, dict(extra or {}), facts, config)
    run = RunDir(run_dir) if run_dir is not None else None
    if run:
        state.restore(run, resume)
    task = Task(module, criterion, strategy, metrics or {})
    signum = _fit_epochs(state, task, train, held_out, run)
    if not signum and state.best_weights and state.best_epoch != state.epoch:
        strategy.load(state.best_weights, optimizer, strategy.optimizer_state(optimizer))
    return FitResult(state.history, state.best_epoch if held_out else state.epoch, signum)


def _fit_epochs(
    state: FitState,
    task: Task,
    train: SharedLoader,
    held_out: SharedLoader | None,
    run: RunDir | None,
) -> int:
    """Train, validate and save epoch by epoch; return the signal that ended it, or 0."""
    config, scheduler, world = state.config, state.scheduler, state.strategy.world
    board: GuardedLogger | None = None
    if run and world.is_main_process:
        board = open_tensorboard(run.path, purge_step=state.epoch + 1)
    signum = 0
    while not signum and state.epoch < config.epochs:
        if 0 < config.patience <= state.epoch - state.best_epoch:
            break
        epoch, started = state.epoch + 1, time.perf_counter()
        world.forget_waits()  # their marks would pile up
        torch.manual_seed(epoch_seed(config.seed, epoch, world.rank))
        task.module.train()
        figures, signum = task.use(train, f"epoch {epoch}", epoch, state)
        if signum:
            break
        seconds = time.perf_counter() - started
        _merge_buffers(task.module, world)
        record = {"epoch": float(epoch)}
        record |= {f"train/{name}": value for name, value in figures.items()}
        if held_out:
            valid = task.evaluate(held_out)
            record |= {f"valid/{name}": value for name, value in valid.items()}
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(record["valid/loss"])
        elif scheduler is not None:
            scheduler.step()
        best = state.add(record)
        if run:
            state.save(run, keep=config.keep_checkpoints, best=best)
        if board:
            board.write(without_nan(record), epoch)
            board.flush()
        line = f"epoch {epoch}/{config.epochs}: "
        line += "".join(f"{name} {record[name]:.4g}, " for name in record if "/" in name)
        line += f"{figures['samples'] / seconds:,.0f} samples/s{', best so far' * best}"
        logger.info(line)
        if config.progress and world.is_main_process:
            print(line, flush=True)
        signum = all_reduce_max(stop_flag.signum, world)
    if board:
        board.close()
    return signum


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
