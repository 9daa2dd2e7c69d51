"""Train a module epoch by epoch, and evaluate it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from rl_dist.checkpoint.content import FitSchema, State
from rl_dist.checkpoint.store import BEST_FILE, latest_checkpoint, load_checkpoint, save_agreed
from rl_dist.errors import UserError, one_line
from rl_dist.files import check_layout
from rl_dist.flags import Field, configuration
from rl_dist.process_group.collectives import (
    all_gather_json,
    all_reduce_max,
    all_reduce_sum,
    check_in_sync,
)
from rl_dist.process_group.world import World, stop_flag
from rl_dist.run_dir import RunDir
from rl_dist.strategies.strategy import Strategy
from rl_dist.supervised.batches import check_shares, epoch_seed, shared_batches
from rl_dist.supervised.passes import Criterion, Metric, Pass
from rl_dist.telemetry.loggers import GuardedLogger, open_tensorboard
from rl_dist.telemetry.metrics import without_nan

STOP_EVERY = 10  # number of optimizer steps between two checks for stop signals
# fields of `Fitting` that are saved in a checkpoint
SAVED = ("epoch", "best_epoch", "best_loss", "bad_in_a_row", "history", "extra")


@configuration
class FitConfig:
    """Settings of `fit`: FitConfig(epochs=20, patience=3)."""

    epochs: int = Field(10, ge=1, le=10**6)
    """Largest number of passes over the training data."""
    patience: int = Field(0, ge=0, le=10**6)
    """Stop after this many epochs in a row without a lower validation loss; 0: never."""
    grad_accumulation: int = Field(1, ge=1, le=10**6)
    """Number of batches whose gradients are averaged for one optimizer step. The effect is that of
    a batch_size that is this many times larger, but less memory is needed."""
    max_grad_norm: float = Field(1e6, ge=1e-6, le=1e30)
    """Largest norm of the mean gradient over all ranks; a larger gradient is scaled down to it."""
    max_bad_steps: int = Field(10, ge=0, le=10**9)
    """Skip steps whose loss or gradient is NaN or inf; fail if more than this many steps in a row
    are skipped."""
    seed: int = Field(1, ge=0, le=2**63 - 1)
    """Seed for the order of the samples and for random numbers in the module."""
    keep_checkpoints: int = Field(3, ge=1, le=10**6)
    """Number of newest checkpoints to keep."""
    progress: bool = True
    """Print a line for every epoch."""


# ---- one pass over the data


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return for each sample whether its largest output is the output of its target class.

    Outputs are [N, C], targets [N]. For example,
    accuracy(torch.tensor([[0.1, 0.9]]), torch.tensor([1])) returns tensor([True]).
    """
    return outputs.argmax(-1) == targets


@torch.no_grad()
def evaluate(
    module: nn.Module,
    loader: DataLoader,
    criterion: Criterion,
    strategy: Strategy,
    metrics: Mapping[str, Metric] | None = None,
) -> dict[str, float]:
    """Compute the mean loss and metrics over all samples of all ranks.

    Every sample is used exactly once. Every rank must call this.

        figures = evaluate(module, held_out, criterion, strategy, {"accuracy": accuracy})

    Returns:
        The entry "loss", one entry per metric, and the number of samples as "samples".
    """
    check_shares(loader, strategy.world, training=False)
    strategy.world.set_phase("evaluation")
    evaluation = Pass(module, criterion, strategy, metrics or {})
    evaluation.checks = strategy.world.size > 1
    was_training = module.training
    module.eval()
    for num_samples, inputs, targets in shared_batches(loader, strategy.world, training=False):
        evaluation.loss(num_samples, inputs, targets)
    module.train(was_training)
    return evaluation.means()


# ---- training


@dataclass
class Fitting:
    """The state of `fit` during training, and its result."""

    optimizer: torch.optim.Optimizer
    strategy: Strategy
    scheduler: LRScheduler | None
    config: FitConfig
    extra: State  # settings that must not change when the training is resumed
    epoch: int = 0  # number of epochs completed so far
    # epoch with the lowest validation loss; without validation, the last epoch
    best_epoch: int = 0
    best_loss: float = math.inf
    bad_in_a_row: int = 0  # number of steps that were skipped since the last successful step
    # for each epoch, a record with train/loss, valid/loss, ...
    history: list[dict[str, float]] = field(default_factory=list)
    signum: int = 0  # signal that stopped training early; 0: none
    best_weights: dict[str, Tensor] | None = None  # None without validation

    def train_epoch(self, loader: DataLoader, training: Pass) -> dict[str, float] | None:
        """Train on each batch once; return means of loss and metrics, or None after a signal.

        Raise UserError if the loss or gradient was NaN or infinite in too many steps in a row.
        """
        world = self.strategy.world
        seed = self.config.seed
        epoch = self.epoch + 1
        world.set_phase(f"epoch {epoch}")
        world.forget_waits()  # otherwise, the list of waits would grow with every epoch
        torch.manual_seed(epoch_seed(seed, epoch, world.rank))
        training.module.train()
        training.checks = world.size * self.config.grad_accumulation > 1 and not self.epoch
        batches = shared_batches(loader, world, training=True, seed=seed, epoch=epoch)
        # A step uses `grad_accumulation` batches; the last step of an epoch may use fewer.
        steps = iter(lambda: list(islice(batches, self.config.grad_accumulation)), [])
        for number, parts in enumerate(steps):
            self.optimizer.zero_grad()
            for part, (num_samples, inputs, targets) in enumerate(parts, 1):
                with self.strategy.accumulating(last=part == len(parts)):
                    try:
                        loss = training.loss(num_samples, inputs, targets)
                    except ValueError as error:  # BatchNorm needs several values per channel
                        if num_samples > 1:
                            raise
                        raise UserError(
                            f"{one_line(error)}; every rank gets 1 sample of a batch: if the "
                            f"module has BatchNorm, use batch_size {2 * world.size} or larger"
                        ) from error
                    self.strategy.backward(loss / len(parts))
            # DDP reduces no gradient at all if one gradient is missing
            if self.strategy.mode == "ddp" and len(world.gradient_waits) <= number:
                named = self.strategy.bare.named_parameters()
                unused = [name for name, p in named if p.requires_grad and p.grad is None]
                raise UserError(
                    f"the loss does not depend on the parameters {unused}: freeze them with "
                    "requires_grad_(False) before wrap, or set find_unused_parameters=True in "
                    "StrategyConfig"
                )
            _, stepped = self.strategy.step(self.optimizer, self.config.max_grad_norm)
            if not self.strategy.overflowed:  # else, the loss scale may be the only cause
                self.bad_in_a_row = 0 if stepped else self.bad_in_a_row + 1
            if self.bad_in_a_row > self.config.max_bad_steps:
                raise UserError(
                    f"loss or gradient was NaN or inf in {self.bad_in_a_row} steps in a row, more "
                    f"than max_bad_steps {self.config.max_bad_steps}: lower the learning rate",
                    exit_code=1,
                )
            if number == 0:
                training.means()  # raises an error if the criterion is wrong
            if number % STOP_EVERY == 0 and all_reduce_max(stop_flag.signum, world):
                return None
        merge_buffers(training.module, world)
        return training.means()

    def end_epoch(self, record: dict[str, float]) -> bool:
        """Add the record of an epoch; if valid/loss improved, store the weights and return True.

        Every rank must call this.
        """
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(record["valid/loss"])
        elif self.scheduler is not None:
            self.scheduler.step()
        self.epoch += 1
        self.history.append(record)
        improved = record.get("valid/loss", math.inf) < self.best_loss
        if improved or "valid/loss" not in record:
            self.best_epoch = self.epoch
        if improved:
            self.best_loss = record["valid/loss"]
            weights = self.strategy.module_state().items()
            self.best_weights = {name: value.detach().cpu().clone() for name, value in weights}
        return improved

    def save(self, run: RunDir, improved: bool) -> None:
        """Write a checkpoint and all records so far.

        Every rank must call this; if writing the checkpoint fails, every rank raises a UserError.
        """
        world = self.strategy.world
        state: State = {name: getattr(self, name) for name in SAVED}
        state["module"] = self.strategy.module_state()
        state["optimizer"] = self.strategy.optimizer_state(self.optimizer)
        state["strategy"] = self.strategy.state_dict()
        state["scheduler"] = self.scheduler and self.scheduler.state_dict()
        check_in_sync(state["module"], world)
        if world.is_main_process:
            run.write_records(without_nan(self.history))
        save_agreed(
            run.path,
            state if world.is_main_process else None,
            world,
            iteration=self.epoch,
            keep=self.config.keep_checkpoints,
            measured={},
            best=improved,
        )

    def restore(self, run: RunDir, resume: bool) -> None:
        """Load the newest valid checkpoint if there is one; every rank must call this.

        Raise UserError if `resume` is False and the run directory holds checkpoints, or if the
        checkpoint was saved with different settings.
        """
        newest = ""
        if self.strategy.world.is_main_process:
            check_layout(run.path)
            newest = str(latest_checkpoint(run.path, FitSchema) or "") if resume else ""
            if not newest and any(run.checkpoints.glob("*.pt")):
                raise UserError(f"{run.path} holds checkpoints: resume it, or use another run_dir")
        newest = all_gather_json(newest, self.strategy.world)[0]
        if not newest:
            return

        try:
            state = load_checkpoint(newest, FitSchema)
            for name, saved in state["extra"].items():
                current = self.extra[name]
                if str(current) != str(saved):
                    raise UserError(f"{name} is {current}, but {saved} in the run to resume")
            self.strategy.load(state["module"], self.optimizer, state["optimizer"])
            self.strategy.load_state_dict(state["strategy"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
            for name in SAVED:
                setattr(self, name, state[name])
            # If the process was killed while saving, best.pt may be from the epoch after this
            # checkpoint. In that case, the epoch is now repeated and best.pt is written again.
            if self.best_loss < math.inf:
                self.best_weights = load_checkpoint(run.checkpoints / BEST_FILE, FitSchema)[
                    "module"
                ]
        except Exception as error:  # a mismatch can raise many types of errors
            raise UserError(f"{newest} does not fit this training: {one_line(error)}") from error


def fit(
    module: nn.Module,
    loader: DataLoader,
    optimizer: torch.optim.Optimizer,
    criterion: Criterion,
    strategy: Strategy,
    *,
    validation: DataLoader | None = None,
    metrics: Mapping[str, Metric] | None = None,
    scheduler: LRScheduler | None = None,
    config: FitConfig | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    extra: Mapping[str, object] | None = None,
) -> Fitting:
    """Train a module that `strategy` has wrapped; every rank must call this.

        result = fit(module, loader, optimizer, criterion, strategy, validation=held_out)

    A resumed run repeats the epoch that a stop signal interrupted, so it has the same result as an
    uninterrupted run. At the end, the weights of the best epoch are loaded into the module, unless
    a signal stopped the training or there is no validation.

    Args:
        module: the result of `strategy.wrap`.
        loader: training data; its batch_size is the total over all ranks.
        criterion: returns the mean loss of a batch or one loss per sample (see `Pass`).
        validation: held-out data; its loss decides which epoch is best and when training stops.
        scheduler: takes a step after every epoch; ReduceLROnPlateau receives the validation loss.
        resume: continue from the newest checkpoint in `run_dir`, if there is one.
        extra: plain values to store in checkpoints; they must not change when a run is resumed.
    """
    config = config or FitConfig()
    world = strategy.world
    if module is not strategy.module:
        raise UserError("fit needs the module that the last call of strategy.wrap returned")
    check_shares(loader, world, training=True)
    if validation is not None:
        check_shares(validation, world, training=False)
    settings = {
        **(extra or {}),
        "optimizer": type(optimizer).__name__,
        "scheduler": type(scheduler).__name__,
        "seed": config.seed,
        "batch_size": loader.batch_size,
        "grad_accumulation": config.grad_accumulation,
        "samples": len(loader.sampler),  # type: ignore[arg-type]
    }
    fitting = Fitting(optimizer, strategy, scheduler, config, settings)
    run = RunDir(run_dir) if run_dir is not None else None
    tensorboard: GuardedLogger | None = None
    if run:
        fitting.restore(run, resume)
        if world.is_main_process:
            tensorboard = open_tensorboard(run.path, purge_step=fitting.epoch + 1)
    while not fitting.signum and fitting.epoch < config.epochs:
        if 0 < config.patience <= fitting.epoch - fitting.best_epoch:
            break
        means = fitting.train_epoch(loader, Pass(module, criterion, strategy, metrics or {}))
        if means is not None:
            record = {"epoch": fitting.epoch + 1.0}
            record |= {f"train/{name}": mean for name, mean in means.items()}
            if validation is not None:
                means = evaluate(module, validation, criterion, strategy, metrics)
                record |= {f"valid/{name}": mean for name, mean in means.items()}
            improved = fitting.end_epoch(record)
            if run:
                fitting.save(run, improved)
            if tensorboard:
                tensorboard.write(without_nan(record), fitting.epoch)
                tensorboard.flush()
            if config.progress and world.is_main_process:
                texts = (f"{name} {value:.4g}" for name, value in record.items())
                print(", ".join(texts), flush=True)
        fitting.signum = all_reduce_max(stop_flag.signum, world)
    if tensorboard:
        tensorboard.close()
    if not fitting.signum and fitting.best_weights and fitting.best_epoch != fitting.epoch:
        strategy.load(fitting.best_weights, optimizer, strategy.optimizer_state(optimizer))
    return fitting


def merge_buffers(module: nn.Module, world: World) -> None:
    """Average floating-point buffers, such as BatchNorm's statistics, over ranks.

    The buffers differ between ranks, because each rank processes only a part of every batch.
    """
    buffers = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
    if world.size > 1 and buffers:
        for name, total in all_reduce_sum(buffers, world).items():
            buffers[name].copy_(total / world.size)
