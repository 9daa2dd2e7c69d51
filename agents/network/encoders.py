"""What turns rows of observations into what a core reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from envs.vector.layout import Layout
from rl_dist.errors import UserError

LARGEST_MAP = 6  # pixels along each side of what the last convolution puts out
CHANNELS = (16, 32, 64)  # of the first convolutions; all others have as many as the last


class ImageEncoder(nn.Sequential):
    """Small CNN of an image [N, C, H, W]: convolutions that halve it, then a layer."""

    def __init__(self, shape: tuple[int, ...], num_outputs: int) -> None:
        channels, *sides = shape
        layers: list[nn.Module] = []
        while not layers or max(sides) > LARGEST_MAP:
            wider = CHANNELS[min(len(layers) // 2, len(CHANNELS) - 1)]
            layers += [nn.Conv2d(channels, wider, 3, stride=2, padding=1), nn.ReLU()]
            channels, sides = wider, [(side + 1) // 2 for side in sides]
        size = channels * sides[0] * sides[1]
        super().__init__(*layers, nn.Flatten(), nn.Linear(size, num_outputs), nn.Tanh())


class Encoder(nn.Module):
    """Reads a row: numbers as they are, images by a CNN, masks not at all."""

    def __init__(self, layout: Layout, image_size: int) -> None:
        super().__init__()
        self._parts = [(part, place) for part, place in layout.slices() if part.kind != "mask"]
        shapes = [part.shape for part, _ in self._parts if part.kind == "image"]
        self.images = nn.ModuleList(ImageEncoder(shape, image_size) for shape in shapes)
        sizes = [image_size if p.kind == "image" else p.size for p, _ in self._parts]
        self.num_outputs = sum(sizes)
        if not self.num_outputs:
            raise UserError(
                "the observation holds nothing but a mask: give the policy something to see, such "
                "as --previous_action"
            )
        self._as_it_is = not shapes and len(self._parts) == len(layout.parts)

    def forward(self, rows: Tensor) -> Tensor:
        """Encode rows [..., F] as [..., E]."""
        if self._as_it_is:
            return rows
        images = iter(self.images)
        encoded = []
        for part, place in self._parts:
            values = rows[..., place]
            if part.kind == "image":
                flat = next(images)(values.reshape(-1, *part.shape))
                values = flat.to(rows.dtype).unflatten(0, rows.shape[:-1])
            encoded.append(values)
        return torch.cat(encoded, dim=-1)
