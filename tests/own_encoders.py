"""User-defined encoders: the first ones fulfil the contract of an encoder, the others break it."""

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


class Loose:
    """Class that is not a torch module."""

    num_outputs = 5

    def __init__(self, layout, hidden_size):
        pass


class Numberless(Plain):
    """Encoder without a whole number of outputs."""

    def __init__(self, layout, hidden_size):
        super().__init__(layout, hidden_size)
        self.num_outputs = 5.0


class Narrow(Signs):
    """Return fewer features than num_outputs."""

    def forward(self, rows):
        return super().forward(rows)[..., 1:]


class Rounded(Signs):
    """Return whole numbers."""

    def forward(self, rows):
        return super().forward(rows).long()


class Infinite(Signs):
    """Fail for the rows of zeros that pad sequences."""

    def forward(self, rows):
        return super().forward(rows) + rows.abs().sum(-1, keepdim=True).log()


class Counting(Signs):
    """Store the number of calls."""

    calls = 0

    def forward(self, rows):
        self.calls += 1
        return super().forward(rows) + self.calls


class Dropping(Signs):
    """Drop features at random."""

    def forward(self, rows):
        return nn.functional.dropout(super().forward(rows))


class Normed(Signs):
    """Normalise features by the statistics of their batch."""

    def __init__(self, layout, hidden_size):
        super().__init__(layout, hidden_size)
        self.norm = nn.BatchNorm1d(self.num_outputs)

    def forward(self, rows):
        features = super().forward(rows)
        return self.norm(features.reshape(-1, self.num_outputs)).view_as(features)


class Mixing(Signs):
    """Let the features of a row depend on the other rows of its batch."""

    def forward(self, rows):
        features = super().forward(rows)
        return features - features.mean(-2, keepdim=True) if rows.ndim > 1 else features


class LookingAhead(Signs):
    """Add the features of the next step."""

    def forward(self, rows):
        features = super().forward(rows)
        return features + features.roll(-1, 0) if rows.ndim > 2 else 2 * features


class Detached(Signs):
    """Pass no gradient to any parameter."""

    def forward(self, rows):
        return super().forward(rows).detach()


class Idle(Signs):
    """Have a layer that is never used."""

    def __init__(self, layout, hidden_size):
        super().__init__(layout, hidden_size)
        self.more = nn.Linear(2, 2)


class Broken(Signs):
    """Raise an error in the forward pass."""

    def forward(self, rows):
        raise KeyError("no such cell")
