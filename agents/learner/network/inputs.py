"""Network inputs: statistics that normalise observations, and encoders.

The statistics stay fixed during an iteration. At the end of the iteration, every rank sums up its
rollout, the sums of all ranks are added, and the totals are merged into the statistics. A rank sums
up deviations from the fixed mean, in float64, so that neither the order of ranks nor a large offset
of the observations reduces the precision.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from envs.vector.layout import Layout, Part
from rl_dist.errors import UserError

LARGE = 64  # smallest height and width in pixels for the CNN of Mnih et al.; it leaves few of less
NATURE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # its channels, kernel sizes and strides
NATURE_OUTPUTS = 512
LARGEST_MAP = 6  # largest height and width of the last convolution's output, in pixels
CHANNELS = (16, 32, 64)  # channels of successive convolutions, see `small_encoder`
# how many numbers are summed up at once, chosen for the cache of a CPU core and for GPU memory
BLOCK_NUMBERS = {"cpu": 2**16, "cuda": 2**24}
CLIP = 10.0  # normalised values are clipped to [-CLIP, CLIP]


class RunningMoments(nn.Module):
    """Mean and variance of F quantities over all samples merged so far.

    If `columns` is given, columns that it does not list always keep mean 0 and variance 1.
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
        """Return the count, the sums and the sums of squares of samples [..., F].

        Both kinds of sums are taken over deviations from the current mean.
        """
        rows = samples.flatten(0, -2)
        mean = self.mean[self.index]
        totals = mean.new_zeros(2, len(mean))
        # blocks of rows, because float64 copies of all rows would need much memory
        block_rows = BLOCK_NUMBERS[rows.device.type] // max(1, len(mean))
        for block in rows.split(max(1, block_rows)):
            if len(mean) < block.shape[1]:  # otherwise, the copy would take half of the time
                block = block.index_select(1, self.index)
            deviations = block.double() - mean
            totals += torch.stack([deviations.sum(0), deviations.square().sum(0)])
        return torch.cat([mean.new_full((1,), len(rows)), totals.flatten()])

    def merge(self, sums: Tensor) -> None:
        """Merge `sums`, added over all ranks, into the statistics."""
        count = sums[0]
        deviations, squares = sums[1:].chunk(2)
        total = self.count + count
        shift = deviations / total
        # formula of Chan et al. (1979) for merging variances, with deviations from the old mean
        merged = (self.variance[self.index] * self.count + squares) / total - shift.square()
        self.variance[self.index] = merged.clamp(min=0.0)
        self.mean[self.index] += shift
        self.count.copy_(total)


class Normalizer(nn.Module):
    """If enabled, scales values to standard deviation 1 and clips them.

    With `center`, it first subtracts the mean.
    """

    limit: Tensor  # largest magnitude of the results, [F]

    def __init__(
        self,
        num_features: int,
        *,
        columns: Sequence[int] | None = None,  # columns to normalise; None: all of them
        enabled: bool = True,
        center: bool = True,
    ) -> None:
        super().__init__()
        self.moments = RunningMoments(num_features, columns)
        self.enabled = enabled
        self.center = center
        # columns without statistics stay as they are
        limit = torch.full((num_features,), torch.inf)
        self.register_buffer("limit", limit.index_fill_(0, self.moments.index, CLIP), False)

    def forward(self, values: Tensor) -> Tensor:
        """Normalise values [..., F]; keep their shape and type."""
        return self.frozen(values.dtype)(values)

    def frozen(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """Return a function that normalises values of `dtype` with fixed statistics."""
        if not self.enabled:
            return lambda values: values
        shift = self.moments.mean.to(dtype) if self.center else 0.0
        scale = (self.moments.variance + 1e-8).rsqrt().to(dtype)
        high = self.limit.to(dtype)
        low = -high
        return lambda values: ((values - shift) * scale).clamp(low, high)


class Normalizers(nn.Module):
    """Normalisers for observations and rewards.

    Rewards are divided by the standard deviation of discounted returns.
    """

    def __init__(self, layout: Layout, *, scale_obs: bool, scale_rewards: bool) -> None:
        super().__init__()
        columns = layout.columns("vector")  # only these columns are normalised
        enabled = scale_obs and bool(columns or not layout.columns("image"))
        self.obs = Normalizer(layout.size, columns=columns, enabled=enabled)
        self.rewards = Normalizer(1, enabled=scale_rewards, center=False)

    def sums(self, raw_obs: Tensor, discounted_returns: Tensor) -> dict[str, Tensor]:
        """Return this rank's sums for both normalisers."""
        return {
            "unscaled obs": self.obs.moments.sums(raw_obs),
            "discounted returns": self.rewards.moments.sums(discounted_returns[..., None]),
        }

    def merge(self, sums: Mapping[str, Tensor]) -> None:
        """Merge `sums`, added over all ranks, into both normalisers."""
        self.obs.moments.merge(sums["unscaled obs"])
        self.rewards.moments.merge(sums["discounted returns"])

    def restart(self) -> None:
        """Set the sample counts to 0; keep the means, because `sums` subtracts them."""
        self.obs.moments.count.zero_()
        self.rewards.moments.count.zero_()

    def return_deviation(self) -> Tensor | float:
        """Return the standard deviation of discounted returns, in the units of PPO's rewards.

        Scaled rewards have been divided by this deviation, so the result is 1 for them.
        """
        if self.rewards.enabled:
            return 1.0
        moments = self.rewards.moments
        # before the first sample, return 0
        return torch.where(moments.count > 0, moments.variance[0].sqrt(), 0.0)


def is_large(part: Part) -> bool:
    """Return True for an image that `image_encoder` reads with the CNN of Mnih et al."""
    return part.kind == "image" and min(part.shape[1:]) >= LARGE


def image_encoder(part: Part, num_outputs: int) -> nn.Sequential:
    """Return a CNN for images [N, C, H, W].

    Large images are read by the CNN of Mnih et al., https://doi.org/10.1038/nature14236, with
    `NATURE_OUTPUTS` outputs; smaller ones by stride-2 convolutions and a linear layer.
    """
    channels, *sides = part.shape
    layers: list[nn.Module] = []
    if is_large(part):
        num_outputs = NATURE_OUTPUTS
        for outputs, kernel, stride in NATURE:
            layers += [nn.Conv2d(channels, outputs, kernel, stride), nn.ReLU()]
            channels = outputs
    while not is_large(part) and (not layers or max(sides) > LARGEST_MAP):
        # `layers` has 2 entries per convolution; all further convolutions have the last size
        outputs = CHANNELS[min(len(layers) // 2, len(CHANNELS) - 1)]
        layers += [nn.Conv2d(channels, outputs, 3, stride=2, padding=1), nn.ReLU()]
        channels = outputs
        sides = [(side + 1) // 2 for side in sides]
    convolutions = nn.Sequential(*layers, nn.Flatten())
    size = convolutions(torch.zeros(1, *part.shape)).shape[1]
    last = nn.ReLU() if is_large(part) else nn.Tanh()
    return convolutions.extend([nn.Linear(size, num_outputs), last])


class Encoder(nn.Module):
    """Encodes rows: keeps vector columns, encodes images with CNNs, drops masks."""

    images: Any

    def __init__(self, layout: Layout, image_size: int) -> None:
        """Create the CNNs; that of a small image has `image_size` outputs."""
        super().__init__()
        self._parts = [(part, place) for part, place in layout.slices() if part.kind != "mask"]
        images = [part for part, _ in self._parts if part.kind == "image"]
        self.images = nn.ModuleList(image_encoder(part, image_size) for part in images)
        self._unchanged = not images and len(self._parts) == len(layout.parts)
        sizes = [part.size for part, _ in self._parts if part.kind != "image"]
        self.num_outputs = sum(sizes) + sum(image[-2].out_features for image in self.images)
        if not self._parts:
            raise UserError(
                "the observation contains only an action mask: add something that the policy can "
                "observe, for example with --previous_action"
            )

    def forward(self, rows: Tensor) -> Tensor:
        """Encode observation rows [..., F] as features [..., E]."""
        if self._unchanged:
            return rows
        images = iter(self.images)
        encoded = []
        for part, place in self._parts:
            values = rows[..., place]
            if part.kind == "image":
                image = next(images)
                dtype = image[0].weight.dtype
                pixels = values.reshape(-1, *part.shape)
                if is_large(part) and pixels.is_cpu:  # a gradient step then takes 3/4 of the time
                    pixels = pixels.contiguous(memory_format=torch.channels_last)
                values = image(pixels.to(dtype) / 255.0).unflatten(0, rows.shape[:-1])
            encoded.append(values)
        return torch.cat(encoded, dim=-1)
