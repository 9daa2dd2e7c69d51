"""Loss and metrics of `fit` and `evaluate`, summed over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_dist.errors import UserError
from rl_dist.process_group.collectives import all_reduce_sum
from rl_dist.process_group.world import World

Metric = Callable[[Any, Any], Tensor]  # (outputs, targets) -> one or more values for each sample


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
