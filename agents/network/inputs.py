"""Inputs of the network: statistics to normalise rows, and encoders to read them.

The statistics are frozen while an iteration runs; the sums of its rollout are merged afterwards.
Sums are float64, add up over ranks, and are taken around the frozen mean, so that neither the order
of ranks nor a large offset costs precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from envs.vector.layout import Layout
from rl_dist.errors import UserError

LARGEST_MAP = 6  # pixels along each side of the last convolution's output
CHANNELS = (16, 32, 64)  # channels after each convolution; further ones keep the last number
CLIP = 10.0  # normalised numbers are at most this far from 0


class RunningMoments(nn.Module):
    """Mean and variance of [F] quantities over everything merged so far.

    With `columns`, only these have statistics: the others keep mean 0 and variance 1.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor
    index: Tensor  # columns that have statistics

    def __init__(self, num_features: int, columns: Sequence[int] | None = None) -> None:
        super().__init__()
        index = torch.tensor(range(num_features) if columns is None else columns).long()
        self.register_buffer("index", index, persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(num_features, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(num_features, dtype=torch.float64))

    def sums(self, samples: Tensor) -> Tensor:
        """Return count, sums and square sums around the mean of samples [..., F]."""
        rows = samples.flatten(0, -2).index_select(1, self.index)
        deviations = rows.double() - self.mean[self.index]
        count = deviations.new_full((1,), len(deviations))
        return torch.cat([count, deviations.sum(0), deviations.square().sum(0)])

    def restart(self) -> None:
        """Forget the samples but not their mean: the next sums are taken around it."""
        self.count.zero_()

    def merge(self, sums: Tensor) -> None:
        """Merge `sums` of all ranks into the statistics."""
        count, deviations, squares = sums[0], *sums[1:].chunk(2)
        total = self.count + count
        shift = deviations / total
        # Chan et al. (1979), variance in parallel, here around the old mean
        merged = (self.variance[self.index] * self.count + squares) / total - shift.square()
        self.variance[self.index] = merged.clamp(min=0.0)
        self.mean[self.index] += shift
        self.count.copy_(total)


class Normalizer(nn.Module):
    """Shift and scale to mean 0 and deviation 1, clipped; the identity when disabled."""

    def __init__(
        self,
        num_features: int,
        *,
        columns: Sequence[int] | None = None,  # columns with statistics; None: all
        enabled: bool = True,
        center: bool = True,
    ) -> None:
        super().__init__()
        self.moments = RunningMoments(num_features, columns)
        self.enabled = enabled
        self.center = center

    def forward(self, values: Tensor) -> Tensor:
        """Return normalised values of the same shape [..., F] and type."""
        return self.frozen(values.dtype)(values)

    def frozen(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """Return the function for values of this type, with the present statistics."""
        if not self.enabled:
            return lambda values: values
        shift = self.moments.mean.to(dtype) if self.center else 0.0
        scale = (self.moments.variance + 1e-8).rsqrt().to(dtype)
        return lambda values: ((values - shift) * scale).clamp(-CLIP, CLIP)


def observation_normalizer(layout: Layout, enabled: bool) -> Normalizer:
    """Return a normaliser of observation rows; it scales vector columns only."""
    return Normalizer(layout.size, columns=layout.columns("vector"), enabled=enabled)


class Normalizers(nn.Module):
    """Normalisers of observations, and of rewards by their discounted returns."""

    def __init__(self, layout: Layout, *, scale_obs: bool, scale_rewards: bool) -> None:
        super().__init__()
        self.obs = observation_normalizer(layout, scale_obs)
        self.rewards = Normalizer(1, enabled=scale_rewards, center=False)

    def sums(self, raw_obs: Tensor, discounted_returns: Tensor) -> dict[str, Tensor]:
        """Return this rank's sums for both statistics."""
        return {
            "unscaled obs": self.obs.moments.sums(raw_obs),
            "discounted returns": self.rewards.moments.sums(discounted_returns[..., None]),
        }

    def merge(self, sums: Mapping[str, Tensor]) -> None:
        """Merge `sums` of all ranks into both statistics."""
        self.obs.moments.merge(sums["unscaled obs"])
        self.rewards.moments.merge(sums["discounted returns"])

    def restart(self) -> None:
        """Forget the samples of both statistics, but not their means."""
        self.obs.moments.restart()
        self.rewards.moments.restart()

    def return_deviation(self) -> Tensor | float:
        """Return the deviation of discounted returns, measured in scaled rewards."""
        if self.rewards.enabled:
            return 1.0
        moments = self.rewards.moments
        return torch.where(moments.count > 0, moments.variance[0].sqrt(), 0.0)  # 0: no samples yet


def image_encoder(shape: tuple[int, ...], num_outputs: int) -> nn.Sequential:
    """Return a CNN for images [N, C, H, W]: convolutions that halve them, a layer."""
    channels, *sides = shape
    layers: list[nn.Module] = []
    while not layers or max(sides) > LARGEST_MAP:
        wider = CHANNELS[min(len(layers) // 2, len(CHANNELS) - 1)]
        layers += [nn.Conv2d(channels, wider, 3, stride=2, padding=1), nn.ReLU()]
        channels = wider
        sides = [(side + 1) // 2 for side in sides]
    size = channels * sides[0] * sides[1]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(size, num_outputs), nn.Tanh())


class Encoder(nn.Module):
    """Reads a row: numbers as they are, images by a CNN, masks not at all."""

    def __init__(self, layout: Layout, image_size: int) -> None:
        super().__init__()
        self._parts = [(part, place) for part, place in layout.slices() if part.kind != "mask"]
        shapes = [part.shape for part, _ in self._parts if part.kind == "image"]
        self.images = nn.ModuleList(image_encoder(shape, image_size) for shape in shapes)
        self._unchanged = not shapes and len(self._parts) == len(layout.parts)
        sizes = [image_size if part.kind == "image" else part.size for part, _ in self._parts]
        self.num_outputs = sum(sizes)
        if not sizes:
            raise UserError(
                "the observation holds nothing but a mask: give the policy something to see, such "
                "as --previous_action"
            )

    def forward(self, rows: Tensor) -> Tensor:
        """Encode rows [..., F] as [..., E]."""
        if self._unchanged:
            return rows
        images = iter(self.images)
        encoded = []
        for part, place in self._parts:
            values = rows[..., place]
            if part.kind == "image":
                features = next(images)(values.reshape(-1, *part.shape))
                values = features.to(rows.dtype).unflatten(0, rows.shape[:-1])
            encoded.append(values)
        return torch.cat(encoded, dim=-1)
