"""Action distributions, built from the actor's outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Normal
from torch.nn import functional

FORBIDDEN = -1e9  # logit of a forbidden action: its probability is exactly 0
LARGEST_TANH = 1.0 - 1e-6  # atanh of this is 7.25; atanh(1) would be infinite


def split_choices(logits: Tensor, sizes: Sequence[int]) -> Tensor:
    """Split logits [..., A] into rows [..., D, K] per action, padded with FORBIDDEN."""
    rows = logits.split(sizes, -1)
    padded = [functional.pad(row, (0, max(sizes) - row.shape[-1]), value=FORBIDDEN) for row in rows]
    return torch.stack(padded, -2)


NODES, WEIGHTS = np.polynomial.hermite.hermgauss(24)  # quadrature for the entropy


class SquashedNormal:
    """Distribution of actions tanh(x) [..., A] in (-1, 1), where x is normal."""

    def __init__(self, means: Tensor, log_std: Tensor) -> None:
        self.normal = Normal(means, log_std.exp(), validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density [...], including the change-of-variables term for tanh."""
        before = value.clamp(-LARGEST_TANH, LARGEST_TANH).atanh()
        return (self.normal.log_prob(before) - _log_slope(before)).sum(-1)

    def entropy(self) -> Tensor:
        """Return the entropy [...] by Gauss-Hermite quadrature; no closed form exists."""
        means, std = self.normal.loc, self.normal.scale
        points = means.new_tensor(NODES) * math.sqrt(2.0)
        shares = means.new_tensor(WEIGHTS) / math.sqrt(math.pi)
        slopes = _log_slope(means[..., None] + std[..., None] * points) @ shares  # [..., A]
        return (self.normal.entropy() + slopes).sum(-1)


def _log_slope(before: Tensor) -> Tensor:
    """Return log(1 - tanh(x)^2), the log of tanh's slope, without cancellation."""
    return 2.0 * (math.log(2.0) - before - functional.softplus(-2.0 * before))
