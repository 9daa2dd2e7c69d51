"""Running statistics of observations and rewards, merged over ranks.

They are frozen while an iteration runs; sums gathered during the rollout are merged afterwards.
The sums are float64, additive over ranks and taken around the frozen mean: neither the order of
ranks nor large offsets cost precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from envs.vector.layout import Layout


class RunningMoments(nn.Module):
    """Mean and variance of [F] quantities over everything merged so far.

    With `columns`, of these alone: the others keep mean 0 and variance 1.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor
    index: Tensor  # of the columns

    def __init__(self, num_features: int, columns: Sequence[int] | None = None) -> None:
        super().__init__()
        self.all_columns = columns is None
        index = torch.arange(num_features) if columns is None else torch.tensor([*columns]).long()
        self.register_buffer("index", index, persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(num_features, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(num_features, dtype=torch.float64))

    def sums(self, samples: Tensor) -> Tensor:
        """Sums [2F + 1] of samples [..., F]: count, sums, square sums around the mean."""
        own = samples.flatten(0, -2)
        own = own if self.all_columns else own.index_select(1, self.index)
        deviations = own.double() - self.mean.index_select(0, self.index)
        count = deviations.new_full((1,), len(deviations))
        return torch.cat([count, deviations.sum(0), deviations.square().sum(0)])

    def restart(self) -> None:
        """Forget the samples but not their mean: the next ones are summed around it."""
        self.count.zero_()

    def merge(self, sums: Tensor) -> None:
        """Merge a summary made by `sums` (added over all ranks) into the statistics."""
        count, deviations, squares = sums[0], *sums[1:].chunk(2)
        total = self.count + count
        shift = deviations / total
        # Chan et al. (1979), parallel variance, written around the old mean
        mean, variance = (each.index_select(0, self.index) for each in (self.mean, self.variance))
        merged = (variance * self.count + squares) / total - shift.square()
        self.variance.index_copy_(0, self.index, merged.clamp(min=0.0))
        self.mean.index_copy_(0, self.index, mean + shift)
        self.count.copy_(total)


class Normalizer(nn.Module):
    """Shift and scale to mean 0 and deviation 1, clipped; identity when disabled."""

    def __init__(
        self,
        num_features: int,
        *,
        columns: Sequence[int] | None = None,  # that have statistics; None: all
        enabled: bool = True,
        center: bool = True,
        clip: float = 10.0,
    ):
        super().__init__()
        self.moments = RunningMoments(num_features, columns)
        self.enabled = enabled
        self.center = center
        self.clip = clip

    def forward(self, values: Tensor) -> Tensor:
        """Normalised values, same shape [..., F] and type."""
        return self.frozen(values.dtype)(values)

    def frozen(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """The function for values of this type, as the statistics are now."""
        if not self.enabled:
            return lambda values: values
        shift, scale = self.constants(dtype)
        return lambda values: ((values - shift) * scale).clamp(-self.clip, self.clip)

    def constants(self, dtype: torch.dtype) -> tuple[Tensor | float, Tensor]:
        """Shift and scale [F], as the statistics are now."""
        scale = (self.moments.variance + 1e-8).rsqrt().to(dtype)
        return self.moments.mean.to(dtype) if self.center else 0.0, scale


def observation_normalizer(layout: Layout, enabled: bool) -> Normalizer:
    """Return the normaliser of rows, which leaves all but vectors alone."""
    vectors = layout.columns("vector")
    columns = None if len(vectors) == layout.size else vectors
    return Normalizer(layout.size, columns=columns, enabled=enabled)
