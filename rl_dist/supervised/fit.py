"""Supervised training and evaluation of any module, with any loader and loss.

    strategy = Strategy(StrategyConfig(), world)
    module = strategy.wrap(net.to(world.device))
    optimizer = torch.optim.Adam(strategy.parameters, lr=1e-3)
    result = fit(module, train_loader, optimizer, nn.CrossEntropyLoss(), strategy,
                 validation=valid_loader, metrics={"accuracy": accuracy})
    figures = evaluate(module, test_loader, nn.CrossEntropyLoss(), strategy, {"accuracy": accuracy})

Batches are pairs of inputs and targets; the module maps inputs to outputs, the criterion outputs
and targets to their mean loss. Batch sizes are totals over ranks, figures count every sample of all
ranks once, and all ranks call together. A criterion whose mean is not over samples alike (class
weights, ignore_index) divides by the weights of a rank's share of a batch: gradients and losses are
then means of such means, and depend on the number of ranks and the batch size.
"""

from __future__ import annotations

import logging
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

from rl_dist.errors import UserError, one_line
from rl_dist.flags import configuration, setting
from rl_dist.process_group.collectives import all_reduce_max, all_reduce_sum
from rl_dist.process_group.world import World, broadcast_from_rank0, stop_flag
from rl_dist.strategies.loaders import SharedLoader, epoch_seed, pair_of, to_device
from rl_dist.strategies.strategy import Strategy
from rl_dist.supervised.state import FitState, open_board, restore, save

__all__ = ["BatchError", "FitConfig", "FitResult", "accuracy", "evaluate", "fit"]

Metric = Callable[[Any, Any], Tensor]  # (outputs, targets) -> one or more values for each sample
Criterion = Callable[[Any, Any], Tensor]  # (outputs, targets) -> mean loss of the batch
STOP_EVERY = 10  # batches between two looks for a stop signal on any rank
logger = logging.getLogger(__name__)


class BatchError(RuntimeError):
    """A batch could not be loaded or used; names epoch, batch and rank."""


@configuration
class FitConfig:
    """How long and how to fit: FitConfig(epochs=20, patience=3)."""

    epochs: int = setting(10, "epochs", within=(1, 10**6), main=True)
    """Passes over the training data, at most."""
    patience: int = setting(0, "epochs", within=(0, 10**6), main=True)
    """Stop after this many epochs in a row without a better validation loss; 0: never."""
    grad_accumulation: int = setting(1, within=(1, 10**6))
    """Batches whose gradients add up to one optimizer step: the effect of a batch_size this many
    times larger, in less memory."""
    max_grad_norm: float = setting(1e6, within=(1e-6, 1e30))
    """Scale the gradient of all ranks down to this norm."""
    max_bad_steps: int = setting(10, "steps", within=(0, 10**9))
    """Skip this many steps in a row whose loss or gradient is NaN or inf, then stop."""
    seed: int = setting(1, within=(0, 2**63 - 1), main=True)
    """Seed of the shuffling, and of what the module draws."""
    keep_checkpoints: int = setting(3, "files", within=(1, 10**6))
    """Newest checkpoints to keep."""
    progress: bool = setting(True)
    """Show a progress bar on a terminal, and a line for every epoch."""


@dataclass(frozen=True)
class FitResult:
    """The end of fitting."""

    history: list[dict[str, float]]  # one record per epoch: train/loss, valid/loss, ...
    best_epoch: int  # whose weights the module holds now: by validation loss, else the last
    signum: int = 0  # of the signal that ended it early


class Sums:
    """Loss and metrics summed over samples, in float64, on the device."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        if taken := sorted({"loss", "samples"} & set(metrics)):
            raise UserError(f"no metric can be called {taken[0]}, which is reported anyway")
        self.metrics = metrics
        self.counts: dict[str, int] = dict.fromkeys(("loss", *metrics), 0)
        self.totals: dict[str, Any] = dict.fromkeys(self.counts, 0.0)

    @torch.no_grad()
    def add(self, loss: Tensor, outputs: Any, targets: Any, count: int) -> None:
        """Take the mean loss and the outputs of a batch of `count` samples."""
        self.totals["loss"] = self.totals["loss"] + loss.double().reshape(()) * count
        self.counts["loss"] += count
        for name, metric in self.metrics.items():
            values = metric(outputs, targets)
            # a mean would count small batches as large ones
            if not isinstance(values, Tensor) or not values.ndim:
                raise UserError(
                    f"metric {name} must return a tensor of at least one value for each sample"
                )
            self.totals[name] = self.totals[name] + values.sum(dtype=torch.float64)
            self.counts[name] += values.numel()

    def means(self, world: World) -> dict[str, float]:
        """Average over all samples of all ranks; all of them call."""
        counts = {f"count of {name}": float(count) for name, count in self.counts.items()}
        reduced = all_reduce_sum(self.totals | counts, world)
        means = {name: float(reduced[name] / reduced[f"count of {name}"]) for name in self.totals}
        return means | {"samples": float(reduced["count of loss"])}


def check_loss(loss: Any) -> Tensor:
    """Return what a criterion returned, if it is one number; else raise a UserError."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    raise UserError(f"the criterion must return the mean loss of a batch as one number, got {got}")


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mark where the largest of the outputs [N, C] is that of the target class [N].

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

        result = fit(module, loader, optimizer, criterion, strategy, validation=held_out)

    Every epoch begins by seeding torch from `config.seed`, epoch and rank, so that a resumed run
    goes on as if it had not stopped; a stop signal ends an epoch early, and resuming repeats it.
    After an epoch BatchNorm's statistics are averaged over ranks; other buffers become rank 0's.

    Args:
        module: what `strategy.wrap` returned.
        loader: of training; its batch_size is the total over ranks.
        criterion: mean loss of a batch over its samples; see above for weighted means.
        validation: decides which epoch is the best, and when to stop (`patience`).
        metrics: by name; what they return is averaged over all values of all samples.
        scheduler: torch's, stepped after every epoch; ReduceLROnPlateau sees the validation loss.
        run_dir: gets checkpoints/, metrics.jsonl and TensorBoard's; `resume` goes on from there.
        extra: plain values and tensors to store in checkpoints as "extra".

    Raises:
        BatchError: a batch raised, on any rank: nothing is swallowed.
        UserError: bad sizes, a foreign checkpoint, or too many steps without a finite gradient.
    """
    config, metrics = config or FitConfig(), metrics or {}
    validated = validation is not None
    _check_parts(module, optimizer, strategy, scheduler, config.patience, validated)
    batches = _shared(loader, strategy, training=True, seed=config.seed)
    held_out = _shared(validation, strategy, training=False) if validation is not None else None
    facts = {
        "optimizer": type(optimizer).__name__,
        "scheduler": type(scheduler).__name__ if scheduler is not None else "none",
        "seed": config.seed,
        "batch_size": batches.global_batch_size,
        "grad_accumulation": config.grad_accumulation,
        "samples": len(batches.dataset),  # type: ignore[arg-type]
    }
    state = FitState(strategy, optimizer, scheduler, dict(extra or {}), facts)
    restore(state, run_dir, resume=resume)
    signum, shown = 0, config.progress
    board = open_board(state, run_dir)
    while not signum and state.epoch < config.epochs and not state.is_stale(config.patience):
        started = time.perf_counter()
        trained, signum = _train_epoch(state, module, batches, criterion, metrics, config)
        if signum:
            break
        seconds = time.perf_counter() - started
        _merge_buffers(module, strategy.world)
        record = {"epoch": state.epoch + 1.0}
        record |= {f"train/{name}": value for name, value in trained.items()}
        if held_out is not None:
            found = evaluate(module, held_out, criterion, strategy, metrics, progress=shown)
            record |= {f"valid/{name}": value for name, value in found.items()}
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(record["valid/loss"])
        elif scheduler is not None:
            scheduler.step()
        # keep, report
        best = state.add(record) and validated
        save(state, run_dir, board, keep=config.keep_checkpoints, best=best)
        _print_epoch(record, config, strategy.world, trained["samples"] / seconds, best)
        signum = all_reduce_max(stop_flag.signum, strategy.world)
    if board:
        board.close()
    if not signum and validated:
        state.return_to_best()
    return FitResult(state.history, state.best_epoch if validated else state.epoch, signum)


def _check_parts(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    scheduler: Any,
    patience: int,
    validated: bool,
) -> None:
    """Refuse what would fail after an epoch, or train something else."""
    known = {id(parameter) for parameter in (*strategy.parameters, *module.parameters())}
    stepped = [id(each) for group in optimizer.param_groups for each in group["params"]]
    if module is not strategy.module:
        raise UserError("fit takes the module that strategy.wrap returned last: wrap it first")
    if patience and not validated:
        raise UserError(f"patience {patience} needs validation")
    if isinstance(scheduler, ReduceLROnPlateau) and not validated:
        raise UserError("ReduceLROnPlateau looks at the validation loss: give one")
    if known.isdisjoint(stepped):
        raise UserError(
            "the optimizer holds no parameter of the module: make it of strategy.parameters"
        )


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
    """Compute mean loss and metrics over all samples of all ranks, each counted once.

        figures = evaluate(module, held_out, criterion, strategy, {"accuracy": accuracy})

    Returns:
        "loss", each metric by its name, and "samples", how many were seen.
    """
    world = strategy.world
    world.set_phase("evaluation")
    shared = _shared(loader, strategy, training=False)
    sums, was_training = Sums(metrics or {}), module.training
    module.eval()
    try:
        for number, inputs, targets in _batches(shared, "evaluation", world, progress):
            with _named("evaluation", number, world):
                with strategy.autocast():
                    outputs = module(inputs)
                    loss = check_loss(criterion(outputs, targets))
                sums.add(loss, outputs, targets, shared.lengths[number])
    finally:
        module.train(was_training)
    return sums.means(world)


def _train_epoch(
    state: FitState,
    module: nn.Module,
    loader: SharedLoader,
    criterion: Criterion,
    metrics: Mapping[str, Metric],
    config: FitConfig,
) -> tuple[dict[str, float], int]:
    """Pass once over the training data; also return the signal that ended it early, or 0."""
    strategy, optimizer, world = state.strategy, state.optimizer, state.strategy.world
    epoch, num_batches = state.epoch + 1, len(loader)
    where = f"epoch {epoch}"
    world.set_phase(where)
    world.forget_waits()  # or their marks would pile up
    loader.set_epoch(epoch)
    torch.manual_seed(epoch_seed(config.seed, epoch, world.rank))
    module.train()
    sums = Sums(metrics)
    for number, inputs, targets in _batches(loader, where, world, config.progress):
        # of the batch in its step, whose last one may have fewer
        place = number % config.grad_accumulation
        parts = min(config.grad_accumulation, num_batches - (number - place))
        with _named(where, number, world):
            if place == 0:
                optimizer.zero_grad(set_to_none=True)
            with strategy.accumulating(last=place == parts - 1):
                with strategy.autocast():
                    outputs = module(inputs)
                    loss = check_loss(criterion(outputs, targets))
                strategy.backward(loss / parts)
            sums.add(loss.detach(), outputs, targets, loader.lengths[number])
            if place == parts - 1:
                _, stepped = strategy.step(optimizer, config.max_grad_norm)
                # an overflow is part of the search for a loss scale
                if not strategy.overflowed:
                    _count_bad(
                        state, bool(stepped), config.max_bad_steps, f"{where}, batch {number}"
                    )
        if number % STOP_EVERY == 0 and (signum := all_reduce_max(stop_flag.signum, world)):
            return {}, signum
    return sums.means(world), 0


def _count_bad(state: FitState, stepped: bool, most: int, place: str) -> None:
    """Count steps left out in a row; raises UserError if there are more than `most`."""
    state.bad_in_a_row = 0 if stepped else state.bad_in_a_row + 1
    bad = f"loss or gradient is NaN or inf ({state.bad_in_a_row} in a row, at most {most})"
    if not stepped and state.strategy.world.is_main_process:
        logger.warning("%s: %s: the step is left out", place, bad)
    if state.bad_in_a_row > most:
        raise UserError(f"{bad}: lower the learning rate, or raise max_bad_steps", exit_code=1)


def _shared(
    loader: DataLoader, strategy: Strategy, *, training: bool, seed: int = 0
) -> SharedLoader:
    if not isinstance(loader, SharedLoader):
        return strategy.loader(loader, training=training, seed=seed)
    if loader.training != training:
        raise UserError(
            f"a loader made with training={loader.training} is given where training={training} is "
            "wanted: give the DataLoader that it was made of"
        )
    return loader


def _batches(
    loader: SharedLoader, where: str, world: World, progress: bool
) -> Iterator[tuple[int, Any, Any]]:
    """Yield numbered batches, on the rank's device, and show how far they are."""
    hidden = not (progress and world.is_main_process and sys.stderr.isatty())
    looks: dict[str, Any] = {"unit": " batches", "leave": False, "dynamic_ncols": True}
    with tqdm(total=len(loader), desc=where, disable=hidden, **looks) as bar:
        with _named(where, 0, world):
            batches = iter(loader)
        for number in range(len(loader)):
            with _named(where, number, world):
                inputs, targets = to_device(pair_of(next(batches)), world.device)
            yield number, inputs, targets
            world.heartbeat()
            bar.update()


@contextmanager
def _named(where: str, number: int, world: World) -> Iterator[None]:
    """Name the batch that raised; errors for the user pass."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        problem = one_line(error)
        if "in DataLoader worker process" in problem:  # a traceback, which what it raised ends
            problem = str(error).strip().splitlines()[-1]
        raise BatchError(f"{where}, batch {number}, rank {world.rank}: {problem}") from error


def _merge_buffers(module: nn.Module, world: World) -> None:
    """Make the ranks' buffers alike, each of which saw its share of every batch.

    BatchNorm's running statistics become the mean over ranks, all others those of rank 0.
    """
    if world.size == 1:
        return
    averaged: dict[str, Tensor] = {}
    for name, part in module.named_modules():
        for key, value in part.named_buffers(recurse=False):
            if key in part._non_persistent_buffers_set:
                continue
            if not isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                with world.waiting("buffers of the main process"):
                    broadcast_from_rank0(value)
            elif value.is_floating_point():
                averaged[f"{name}.{key}"] = value
    for name, total in (all_reduce_sum(averaged, world) if averaged else {}).items():
        averaged[name].copy_(total / world.size)


def _print_epoch(
    record: dict[str, float], config: FitConfig, world: World, samples_per_s: float, best: bool
) -> None:
    figures = {name: value for name, value in record.items() if "samples" not in name}
    line = f"epoch {figures.pop('epoch'):.0f}/{config.epochs}: "
    line += ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
    line += f", {samples_per_s:,.0f} samples/s{', best so far' * best}"
    logger.info(line)
    if config.progress and world.is_main_process:
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()
