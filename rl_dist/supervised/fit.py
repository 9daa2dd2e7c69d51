"""Supervised training and evaluation of any module, with any loader and loss.

    strategy = Strategy(StrategyConfig(), world)
    module = strategy.wrap(net.to(world.device))
    optimizer = torch.optim.Adam(strategy.parameters, lr=1e-3)
    result = fit(module, train_loader, optimizer, nn.CrossEntropyLoss(), strategy,
                 validation=valid_loader, metrics={"accuracy": accuracy}, config=FitConfig(epochs=10, patience=3))
    figures = evaluate(module, test_loader, nn.CrossEntropyLoss(), strategy, {"accuracy": accuracy})

Batches are pairs of inputs and targets; the module maps inputs to outputs, the criterion outputs and targets to their
mean loss. Batch sizes are totals over ranks, figures count every sample of all ranks once, and all ranks call together.
A criterion whose mean is not over samples alike (class weights, ignore_index) divides by the weights of a rank's share
of a batch: gradients and losses are then means of such means, and depend on the number of ranks and the batch size.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from tqdm import tqdm

from rl_dist.config import flag
from rl_dist.errors import UserError
from rl_dist.parallel.loaders import SharedLoader, epoch_seed, pair_of, to_device
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.collectives import agree_max, sum_over_ranks
from rl_dist.process_group.world import World, stop_flag, take_from_main
from rl_dist.supervised.state import FitState, restore, save, tensorboard_of
from rl_dist.supervised.sums import Metric, Sums, check_loss

__all__ = ["BatchError", "FitConfig", "FitResult", "accuracy", "evaluate", "fit"]

Criterion = Callable[[Any, Any], Tensor]  # (outputs, targets) -> mean loss of the batch
STOP_EVERY = 10  # batches between two looks for a stop signal on any rank
logger = logging.getLogger(__name__)


class BatchError(RuntimeError):
    """A batch could not be loaded or used; names epoch, batch and rank."""


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How long and how to fit: FitConfig(epochs=20, patience=3)."""

    epochs: int = flag(10, "passes over the training data, at most", "epochs")
    patience: int = flag(0, "stop after so many epochs in a row without a better validation loss; 0 = never", "epochs")
    grad_accumulation: int = flag(
        1, "batches whose gradients add up to one step: as with a batch_size this many times larger, in less memory"
    )
    max_grad_norm: float = flag(1e6, "clip the reduced gradient to this norm")
    max_bad_steps: int = flag(10, "skip this many steps in a row whose loss or gradient is NaN or inf, then stop")
    seed: int = flag(1, "seed of shuffling, and of what the module draws")
    keep_checkpoints: int = flag(3, "newest checkpoints to keep", "files")
    progress: bool = flag(True, "show a progress bar on a terminal, and a line for every epoch")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("epochs", 1, 10**6),
            ("patience", 0, 10**6),
            ("grad_accumulation", 1, 10**6),
            ("max_grad_norm", 1e-6, 1e30),
            ("max_bad_steps", 0, 10**9),
            ("seed", 0, 2**63 - 1),
            ("keep_checkpoints", 1, 10**6),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) and name != "max_grad_norm":
                raise ValueError(f"{name} must be a whole number, got {value!r}")
            if not low <= value <= high:
                raise ValueError(f"{name} must be {low:g}..{high:g}, got {value:g}")


@dataclass(frozen=True)
class FitResult:
    """How fitting ended."""

    history: list[dict[str, float]]  # one record per epoch: train/loss, valid/loss, ...
    best_epoch: int  # whose weights the module holds now: by validation loss, else the last
    signum: int = 0  # of the signal that ended it early


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether the largest of the outputs [N, C] is that of the target class [N].

    accuracy(torch.tensor([[0.1, 0.9]]), torch.tensor([1])) is tensor([True]).
    """
    return outputs.argmax(-1) == targets


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

        result = fit(module, loader, optimizer, nn.CrossEntropyLoss(), strategy, validation=held_out)

    Every epoch begins by seeding torch from `config.seed`, the epoch and the rank, so that a resumed run goes on as if
    it had not stopped; a stop signal ends an epoch early, and resuming repeats it. Running statistics of BatchNorm are
    averaged over ranks after every epoch; other buffers become those of rank 0.

    Args:
        module: what `strategy.wrap` returned.
        loader: of training; its batch_size is the total over ranks.
        optimizer: of `strategy.parameters`, made after `strategy.wrap`.
        criterion: mean loss of a batch over its samples; see above for weighted means.
        validation: decides which epoch is the best, and when to stop (`patience`).
        metrics: by name; what they return is averaged over all values of all samples.
        scheduler: a torch learning-rate scheduler, stepped after every epoch; ReduceLROnPlateau sees the validation
            loss.
        run_dir: gets, after every epoch, checkpoints/ (the best one as best.pt), metrics.jsonl and what TensorBoard
            shows.
        resume: go on from the newest valid checkpoint in `run_dir`, if there is one.
        extra: plain values and tensors to store in checkpoints as "extra".

    Raises:
        BatchError: a batch raised, on any rank: nothing is swallowed.
        UserError: bad sizes, a foreign checkpoint, or too many steps without a finite gradient.
    """
    config = config or FitConfig()
    _check_parts(module, optimizer, strategy, validated=validation is not None, scheduler=scheduler, config=config)
    task = _Task(module, optimizer, criterion, strategy, dict(metrics or {}), config)
    shared = _shared(loader, strategy, training=True, seed=config.seed)
    judged = None if validation is None else _shared(validation, strategy, training=False, seed=config.seed)
    state = FitState(strategy, optimizer, scheduler, dict(extra or {}), _facts(shared, config, optimizer, scheduler))
    restore(state, run_dir, resume=resume)
    signum = 0
    with tensorboard_of(state, run_dir) as to_tensorboard:
        while state.epoch < config.epochs and not signum and not (config.patience and state.stale >= config.patience):
            epoch = state.epoch + 1
            started = time.perf_counter()
            trained, signum = _train_epoch(task, shared, epoch, state)
            if signum:
                break
            seconds = time.perf_counter() - started
            _merge_buffers(module, strategy.world)
            record = {"epoch": float(epoch)} | {f"train/{name}": value for name, value in trained.items()}
            if judged is not None:
                found = evaluate(module, judged, criterion, strategy, task.metrics, progress=config.progress)
                record |= {f"valid/{name}": value for name, value in found.items()}
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(record["valid/loss"])
            elif scheduler is not None:
                scheduler.step()
            improved = state.look(record)
            save(state, run_dir, keep=config.keep_checkpoints, best=improved and judged is not None)
            to_tensorboard(record)
            _tell(task, record, trained["samples"] / seconds, best=improved and judged is not None)
            signum = agree_max(stop_flag.signum, strategy.world)
    if not signum and judged is not None:
        state.return_to_best()
    return FitResult(state.history, state.best_epoch if judged is not None else state.epoch, signum)


def _check_parts(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    *,
    validated: bool,
    scheduler: Any,
    config: FitConfig,
) -> None:
    """Refuse what would fail after an epoch, or train something else."""
    if module is not strategy.module:
        raise UserError("fit takes the module that strategy.wrap returned last: wrap it first")
    if config.patience and not validated:
        raise UserError(f"patience {config.patience} does nothing without validation data: give a validation loader")
    if isinstance(scheduler, ReduceLROnPlateau) and not validated:
        raise UserError("scheduler ReduceLROnPlateau looks at the validation loss: give a validation loader")
    known = {id(parameter) for parameter in (*strategy.parameters, *module.parameters())}
    if not any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
        raise UserError("the optimizer holds no parameter of the module: make it of strategy.parameters, after wrap")


def _facts(
    loader: SharedLoader, config: FitConfig, optimizer: torch.optim.Optimizer, scheduler: Any
) -> dict[str, Any]:
    """What a resumed fit must have as the run had it."""
    return {
        "optimizer": type(optimizer).__name__,
        "scheduler": type(scheduler).__name__ if scheduler is not None else "none",
        "seed": config.seed,
        "batch_size": loader.global_batch_size,
        "grad_accumulation": config.grad_accumulation,
        "samples": len(loader.dataset),  # type: ignore[arg-type]
    }


@torch.no_grad()
def evaluate(
    module: nn.Module,
    loader: DataLoader,
    criterion: Criterion,
    strategy: Strategy,
    metrics: Mapping[str, Metric] | None = None,
    *,
    progress: bool = True,
) -> dict[str, float]:
    """Mean loss and metrics over all samples of all ranks, each counted once.

        figures = evaluate(module, held_out, nn.CrossEntropyLoss(), strategy, {"accuracy": accuracy})

    Returns:
        "loss", each metric by its name, and "samples", how many were seen.

    Raises:
        BatchError: a batch raised.
    """
    strategy.world.enter("evaluation")
    shared = _shared(loader, strategy, training=False, seed=0)
    sums, was_training = Sums(metrics or {}), module.training
    module.eval()
    try:
        bar = _bar(len(shared), "evaluation", strategy.world, progress)
        for number, inputs, targets in _batches(shared, "evaluation", strategy.world):
            with _named("evaluation", number, strategy.world):
                with strategy.autocast():
                    outputs = module(inputs)
                    loss = check_loss(criterion(outputs, targets))
                sums.add(loss, outputs, targets, shared.lengths[number])
            strategy.world.beat()
            bar.update()
        bar.close()
    finally:
        module.train(was_training)
    return sums.means(strategy.world)


@dataclass(frozen=True)
class _Task:
    """What an epoch needs to know."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    criterion: Criterion
    strategy: Strategy
    metrics: dict[str, Metric]
    config: FitConfig


def _train_epoch(task: _Task, loader: SharedLoader, epoch: int, state: FitState) -> tuple[dict[str, float], int]:
    """One pass over the training data; the signal number that ended it early, or 0."""
    config, world, num_batches = task.config, task.strategy.world, len(loader)
    world.enter(f"epoch {epoch}")
    loader.set_epoch(epoch)
    torch.manual_seed(epoch_seed(config.seed, epoch, world.rank))
    task.module.train()
    sums, where = Sums(task.metrics), f"epoch {epoch}"
    bar = _bar(num_batches, f"{where}/{config.epochs}", world, config.progress)
    for number, inputs, targets in _batches(loader, where, world):
        place = number % config.grad_accumulation  # of the batch in its step, whose last one may have fewer
        parts = min(config.grad_accumulation, num_batches - (number - place))
        with _named(where, number, world):
            if place == 0:
                task.optimizer.zero_grad(set_to_none=True)
            with task.strategy.accumulating(last=place == parts - 1):
                with task.strategy.autocast():
                    outputs = task.module(inputs)
                    loss = check_loss(task.criterion(outputs, targets))
                task.strategy.backward(loss / parts)
            sums.add(loss.detach(), outputs, targets, loader.lengths[number])
            if place == parts - 1:
                _, stepped = task.strategy.step(task.optimizer, config.max_grad_norm)
                if not task.strategy.overflowed:  # else it is part of the search for a loss scale
                    _count_bad(state, stepped, config, f"{where}, batch {number}")
        world.beat()
        bar.update()
        if number % STOP_EVERY == 0 and (signum := agree_max(stop_flag.signum, world)):
            bar.close()
            return {}, signum
    bar.close()
    return sums.means(world), 0


def _count_bad(state: FitState, stepped: bool, config: FitConfig, place: str) -> None:
    state.bad_in_a_row = 0 if stepped else state.bad_in_a_row + 1
    if not stepped and state.strategy.world.main:
        count = f"{state.bad_in_a_row} in a row, more than {config.max_bad_steps} end training"
        logger.warning("%s: loss or gradient is NaN or inf, the step is left out (%s)", place, count)
    if state.bad_in_a_row > config.max_bad_steps:
        raise UserError(
            f"loss or gradient was NaN or inf in {state.bad_in_a_row} steps in a row, more than max_bad_steps "
            f"{config.max_bad_steps}: lower the learning rate",
            exit_code=1,
        )


def _shared(loader: DataLoader, strategy: Strategy, *, training: bool, seed: int) -> SharedLoader:
    if not isinstance(loader, SharedLoader):
        return strategy.loader(loader, training=training, seed=seed)
    if loader.training != training:
        raise UserError(
            f"a loader that Strategy.loader made with training={loader.training} is given where training={training} "
            "is wanted: give the DataLoader that it was made of"
        )
    return loader


def _batches(loader: SharedLoader, where: str, world: World) -> Iterator[tuple[int, Any, Any]]:
    """Numbered batches, on the rank's device."""
    with _named(where, 0, world):
        batches = iter(loader)
    for number in range(len(loader)):
        with _named(where, number, world):
            inputs, targets = to_device(pair_of(next(batches)), world.device)
        yield number, inputs, targets


@contextmanager
def _named(where: str, number: int, world: World) -> Iterator[None]:
    """Say which batch raised; errors that speak for themselves pass."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if in_worker := re.search(r"^Caught .* (in DataLoader worker process \d+)", str(error)):
            last_frame = str(error).rpartition('\n  File "')[2]  # of a traceback, which what the worker raised ends
            what = " ".join(re.sub(r"^.*\n(  .*\n)*", "", last_frame).split()) + f" ({in_worker[1]})"
        told = f"{where}, batch {number}, rank {world.rank}: {what}"
        raise BatchError(told) from error


def _merge_buffers(module: nn.Module, world: World) -> None:
    """Make the ranks' buffers alike, each of which saw its share of every batch.

    BatchNorm's running statistics become the mean over ranks. What others are made of is not known: rank 0's count.
    """
    if world.size == 1:
        return
    averaged: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        kept = part.named_buffers(recurse=False)
        own = {key: value for key, value in kept if key not in part._non_persistent_buffers_set}
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            averaged |= {f"{name}.{key}": value for key, value in own.items() if value.is_floating_point()}
            continue
        for value in own.values():
            with world.waiting("buffers of the main process"):
                take_from_main(value)
    for name, total in (sum_over_ranks(averaged, world) if averaged else {}).items():
        averaged[name].copy_(total / world.size)


def _bar(total: int, what: str, world: World, wanted: bool) -> Any:
    shown = wanted and world.main and sys.stderr.isatty()
    return tqdm(total=total, desc=what, unit=" batches", leave=False, dynamic_ncols=True, disable=not shown)


def _tell(task: _Task, record: dict[str, float], samples_per_s: float, best: bool) -> None:
    shown = [f"{name} {value:.4g}" for name, value in record.items() if name != "epoch" and "samples" not in name]
    line = f"epoch {record['epoch']:.0f}/{task.config.epochs}: {', '.join(shown)}"
    line += f", {samples_per_s:,.0f} samples/s{', best so far' if best else ''}"
    logger.info(line)
    if task.config.progress and task.strategy.world.main:
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()


