"""Compute losses and metrics in one pass over the data."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from rl_dist.errors import UserError
from rl_dist.process_group.collectives import all_reduce_sum
from rl_dist.strategies.strategy import Strategy

CHECKED_ROWS = 8  # the criterion is checked on this many samples of a batch
# (outputs, targets) -> tensor; every sample must contribute the same number of values
Metric = Callable[[Any, Any], Tensor]
# (outputs, targets) -> mean loss over the batch, or equally many losses for every sample
Criterion = Callable[[Any, Any], Tensor]


@dataclass
class Pass:
    """Computes the losses of all batches in one pass, and the means over this pass.

    With several ranks, or with grad_accumulation above 1, results are means over parts of batches.
    Then every sample must have the same weight in the criterion. If `checks` is True, `loss` also
    calls the criterion on single samples, and `means` refuses a criterion with unequal weights.
    """

    module: nn.Module
    criterion: Criterion
    strategy: Strategy
    metrics: Mapping[str, Metric]
    checks: bool = False  # whether to check that the criterion weighs samples equally
    # sums by name; all ranks must have the same names
    sums: dict[str, Any] = field(default_factory=lambda: defaultdict(float, uneven=0.0))

    def loss(self, num_samples: int, inputs: object, targets: object) -> Tensor:
        """Compute a batch's loss in the strategy's precision, and update the sums."""
        with self.strategy.autocast():
            outputs = self.module(inputs)
            loss = self.criterion(outputs, targets).mean()
            if self.checks:
                self.check_criterion(num_samples, outputs, targets)
        # If a criterion ignores all targets of a batch, its loss is NaN, but its gradient is 0.
        # Make the gradient NaN, too, so that the step is skipped.
        one_or_nan = loss.detach() * 0.0 + 1.0
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda gradient: gradient * one_or_nan)
        with torch.no_grad():
            self.sums["samples"] += num_samples
            self.sums["loss"] += num_samples * loss.double()
            for name, metric in self.metrics.items():
                values = metric(outputs, targets)
                self.sums[name] += values.sum(dtype=torch.float64)
                self.sums[f"values of {name}"] += values.numel()
        return loss

    @torch.no_grad()
    def check_criterion(self, num_samples: int, outputs: object, targets: object) -> None:
        """Check that the loss of several samples is the mean of their single losses.

        Along the first axis, a tensor may have several entries for each sample, such as the words
        of a text. A tensor without such an axis is passed to the criterion unchanged.
        """
        pair = outputs, targets
        supported = Tensor, int, float, str, type(None)
        if others := [leaf for leaf in tree_leaves(pair) if not isinstance(leaf, supported)]:
            raise UserError(
                f"fit cannot take single samples from a {type(others[0]).__name__} to check the "
                "criterion: return tensors, or dicts or tuples of tensors"
            )

        def loss_of(rows: list[int]) -> Tensor:
            def take(leaf: object) -> object:
                if not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf) % num_samples:
                    return leaf
                return leaf.unflatten(0, (num_samples, -1))[rows].flatten(0, 1)

            return self.criterion(*tree_map(take, pair)).mean()

        # Use the first sample twice: a criterion that returns a sum is then noticed even if this
        # rank has only one sample.
        chosen = [0, *range(min(num_samples, CHECKED_ROWS))]
        whole = loss_of(chosen)
        losses = torch.stack([loss_of([row]) for row in chosen])
        tolerance = torch.finfo(whole.dtype).eps ** 0.5 * losses.abs().max()
        equal = (whole - losses.mean()).abs() <= tolerance  # False if one loss is NaN
        self.sums["uneven"] += whole.isfinite() & ~equal

    def means(self) -> dict[str, float]:
        """Return the means and the number of samples over all ranks; every rank must call this.

        Raise UserError if the criterion does not weigh every sample equally.
        """
        sums = all_reduce_sum(self.sums, self.strategy.world)
        if sums["uneven"]:
            raise UserError(
                "the criterion's loss of a batch is not the mean of its samples' losses (ignored "
                "targets, class weights, a sum?), so training would depend on the number of ranks: "
                "return one loss per sample (reduction='none'); fit takes their mean"
            )
        means = {"loss": float(sums["loss"] / sums["samples"])}
        for name in self.metrics:
            means[name] = float(sums[name] / sums[f"values of {name}"])
        return means | {"samples": float(sums["samples"])}
