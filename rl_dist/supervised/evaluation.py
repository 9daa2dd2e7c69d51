"""Mean loss and metrics of a module over samples, each counted once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rl_dist.errors import UserError
from rl_dist.process_group.collectives import all_reduce_sum
from rl_dist.process_group.world import World
from rl_dist.strategies.strategy import Strategy
from rl_dist.supervised.batches import SharedLoader, iterate, named

Metric = Callable[[Any, Any], Tensor]  # (outputs, targets) -> one or more values for each sample
Criterion = Callable[[Any, Any], Tensor]  # (outputs, targets) -> mean loss of the batch


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mark where the largest of the outputs [N, C] is that of the target class [N].

    accuracy(torch.tensor([[0.1, 0.9]]), torch.tensor([1])) is tensor([True]).
    """
    return outputs.argmax(-1) == targets


class Sums:
    """Loss and metrics summed over samples, in float64, on the device."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        if metrics.keys() & {"loss", "samples"}:
            raise UserError("loss and samples are reported anyway: give the metric another name")
        self.metrics = metrics
        self.sums: dict[str, Any] = {}

    @torch.no_grad()
    def add(self, loss: Tensor, outputs: Any, targets: Any, count: int) -> None:
        """Take the mean loss and the outputs of a batch of `count` samples."""
        self._add("loss", loss.double().reshape(()) * count, count)
        for name, metric in self.metrics.items():
            values = metric(outputs, targets)
            if not values.ndim:  # a mean would count small batches as large ones
                raise UserError(f"metric {name} must return a tensor of one value for each sample")
            self._add(name, values.sum(dtype=torch.float64), values.numel())

    def _add(self, name: str, total: Tensor, count: int) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.sums[f"count of {name}"] = self.sums.get(f"count of {name}", 0.0) + count

    def means(self, world: World) -> dict[str, float]:
        """Average over all samples of all ranks; all of them call."""
        sums = all_reduce_sum(self.sums, world)
        names = ("loss", *self.metrics)
        means = {name: float(sums[name] / sums[f"count of {name}"]) for name in names}
        return means | {"samples": float(sums["count of loss"])}


@dataclass(frozen=True)
class Judge:
    """A module, and what its outputs are measured by."""

    module: nn.Module
    criterion: Criterion
    strategy: Strategy
    metrics: Mapping[str, Metric]
    progress: bool  # show a bar

    def outputs_and_loss(self, inputs: Any, targets: Any) -> tuple[Any, Tensor]:
        """Return the outputs and the mean loss of a batch."""
        with self.strategy.autocast():
            outputs = self.module(inputs)
            return outputs, self.criterion(outputs, targets)

    @torch.no_grad()
    def evaluate(self, shared: SharedLoader) -> dict[str, float]:
        """Return the mean loss, the metrics and the number of samples; all ranks call."""
        self.strategy.world.set_phase("evaluation")
        sums, was_training = Sums(self.metrics), self.module.training
        self.module.eval()
        try:
            batches = iterate(shared, "evaluation", 0, self.progress)
            for number, count, inputs, targets in batches:
                with named("evaluation", number, shared.world):
                    outputs, loss = self.outputs_and_loss(inputs, targets)
                    sums.add(loss, outputs, targets, count)
        finally:
            self.module.train(was_training)
        return sums.means(shared.world)


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
        "loss", each metric by its name, and "samples", the number seen.
    """
    shared = SharedLoader(loader, strategy.world, training=False)
    return Judge(module, criterion, strategy, metrics or {}, progress).evaluate(shared)
