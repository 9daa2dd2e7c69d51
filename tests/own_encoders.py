"""User-defined encoders: the first ones fulfil the contract of an encoder, the others break it."""

import itertools

import torch
from torch import nn


class Signs(nn.Module):
    """Embed the sign of each number of a row; a layer reads the row and the embeddings."""

    num_outputs = 5

    def __init__(self, layout, hidden_size):
        super().__init__()
        self.signs = nn.Embedding(2 * layout.size, 3)
        self.layer = nn.Linear(4 * layout.size, self.num_outputs)

    def forward(self, rows):
        signs = (rows > 0).long() + 2 * torch.arange(rows.shape[-1], device=rows.device)
        return self.layer(torch.cat([rows, self.signs(signs).flatten(-2)], dim=-1))


class Frozen(Signs):
    """Keep random embeddings."""

    def __init__(self, layout, hidden_size):
        super().__init__(layout, hidden_size)
        self.signs.requires_grad_(False)


class Plain(nn.Identity):
    """Encode without parameters."""

    def __init__(self, layout, hidden_size):
        super().__init__()
        self.num_outputs = layout.size


class Numberless(Plain):
    """Have no whole number of outputs."""

    def __init__(self, layout, hidden_size):
        super().__init__(layout, hidden_size)
        self.num_outputs = 5.0


class Idle(Signs):
    """Have a layer that is never used."""

    def __init__(self, layout, hidden_size):
        super().__init__(layout, hidden_size)
        self.more = nn.Linear(2, 2)


def changed(change):
    """Return a class of encoders that return change(features of `Signs`, rows)."""

    class Changed(Signs):
        def forward(self, rows):
            return change(super().forward(rows), rows)

    return Changed


def normed(features, rows):
    flat = features.flatten(0, 1)
    return nn.functional.batch_norm(flat, None, None, training=True).view_as(features)


calls = itertools.count()
Narrow = changed(lambda features, rows: features[..., 1:])
Short = changed(lambda features, rows: features.bfloat16())
Rounded = changed(lambda features, rows: features.long())
Infinite = changed(lambda features, rows: features + rows.abs().sum(-1, keepdim=True).log())
Counting = changed(lambda features, rows: features + next(calls))
Dropping = changed(lambda features, rows: nn.functional.dropout(features))
Normed = changed(normed)
Mixing = changed(lambda features, rows: features + features.mean(1, keepdim=True))
LookingAhead = changed(lambda features, rows: features + features.roll(-1, 0))
Detached = changed(lambda features, rows: features.detach())
Altering = changed(lambda features, rows: features + rows.clamp_(-0.4, 0.4).mean(-1, keepdim=True))
Broken = changed(lambda features, rows: {}["no such cell"])
