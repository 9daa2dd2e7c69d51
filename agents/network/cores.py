"""Cores behind one interface: LSTM, GRU, minGRU, and one without memory.

A core is a module made of (num_inputs, hidden_size, num_layers). `num_states` is the number of
vectors [H] in its state. It maps inputs [L, N, F] and the state [S, N, H] before them to outputs
[L, N, H] and the state after them; it keeps nothing itself. LSTM and GRU may return the state as a
list of its S vectors [N, H], so that the states of all cores are stacked together. An LSTM of one
layer also takes resets [L, N, 1]: 1 at a step that leaves state and output zero, else 0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

State = Tensor | list[Tensor]
SHUT = -1e4  # added to a gate, makes it zero, and all its gradients


class RememberingCore(nn.RNNBase):
    """LSTM or GRU; the gates that remember have the same place in both."""

    def open_gates(self) -> None:
        """Begin with remembering: these gates open (Jozefowicz et al. 2015)."""
        for layer in range(self.num_layers):
            bias = getattr(self, f"bias_ih_l{layer}")
            nn.init.ones_(bias[self.hidden_size : 2 * self.hidden_size])


class LSTMCore(nn.LSTM, RememberingCore):
    """Layers of LSTM; the state holds h of every layer, then c."""

    def __init__(self, num_inputs: int, size: int, num_layers: int = 1) -> None:
        super().__init__(num_inputs, size, num_layers)
        self.num_states = 2 * num_layers

    def forward(  # type: ignore[override]
        self, inputs: Tensor, state: Tensor, resets: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """See the module."""
        before = state.chunk(2)  # h and c of every layer
        if resets is None and len(inputs) == 1 and not torch.is_grad_enabled():
            outputs, hidden, cells = inputs[0], [], []  # the cell is faster
            for h, c, layer in zip(*before, self.all_weights, strict=True):
                outputs, cell = torch.lstm_cell(outputs, (h, c), *layer)
                hidden.append(outputs)
                cells.append(cell)
            return outputs[None], hidden + cells
        weights: list[Tensor] = [weight for layer in self.all_weights for weight in layer]
        if resets is not None:
            # one more input: fixed weights shut the input, forget and output gates
            shut = weights[0].new_full((4, self.hidden_size), SHUT)
            shut[2] = 0.0  # the candidates
            weights[0] = torch.cat([weights[0], shut.view(-1, 1)], 1)
            inputs = torch.cat([inputs, resets.to(inputs.dtype)], -1)
        # with biases, without dropout, in one direction, and steps come before rows
        outputs, after_h, after_c = torch.lstm(
            inputs, before, weights, True, self.num_layers, 0.0, self.training, False, False
        )
        return outputs, [*after_h, *after_c]


class GRUCore(nn.GRU, RememberingCore):
    """Layers of GRU."""

    def __init__(self, num_inputs: int, size: int, num_layers: int = 1) -> None:
        super().__init__(num_inputs, size, num_layers)
        self.num_states = num_layers

    def forward(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, State]:  # type: ignore[override]
        """See the module."""
        if len(inputs) > 1 or torch.is_grad_enabled():
            return super().forward(inputs, state)
        # a single step: the cell is faster
        outputs, after = inputs[0], []
        for hidden, weights in zip(state, self.all_weights, strict=True):
            outputs = torch.gru_cell(outputs, hidden, *weights)
            after.append(outputs)
        return outputs[None], after


class MinGRUCore(nn.Module):
    """Layers of minGRU: gates see the inputs only, so steps are computed together.

    Source: Feng et al., "Were RNNs all we needed?", https://arxiv.org/abs/2410.01201. The paper
    scans in log space, which wants positive states; `scan` needs neither logarithms nor divisions.
    """

    LONGEST = 64.0  # steps that the slowest units remember to begin with

    def __init__(self, num_inputs: int, size: int, num_layers: int = 1) -> None:
        super().__init__()
        widths = [num_inputs] + [size] * (num_layers - 1)
        self.layers = nn.ModuleList(nn.Linear(width, 2 * size) for width in widths)
        self.num_states = num_layers

    def forward(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See the module."""
        outputs, after = inputs, []
        for layer, before in zip(self.layers, state, strict=True):
            gates, candidates = layer(outputs).to(state.dtype).chunk(2, dim=-1)  # each [L, N, H]
            outputs = scan(torch.sigmoid(-gates), torch.sigmoid(gates) * candidates, before)
            after.append(outputs[-1])
        return outputs, torch.stack(after)

    def open_gates(self) -> None:
        """Begin with units that remember 1 to `LONGEST` steps (Tallec and Ollivier 2018)."""
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            size = layer.out_features // 2
            steps = self.LONGEST ** torch.linspace(0.0, 1.0, size, device=layer.bias.device)
            with torch.no_grad():
                layer.bias[:size] = -steps.log()


def scan(keep: Tensor, add: Tensor, first: Tensor) -> Tensor:
    """Return h_t = keep_t * h_(t-1) + add_t for all t, [L, N, H], in log2(L) rounds.

    After a round of distance d, every place sums up 2 d steps. Products of numbers in [0, 1] are
    all there is to rounding. Source: Hillis and Steele, "Data parallel algorithms", 1986.

    Args:
        keep: [L, N, H] in [0, 1].
        add: [L, N, H].
        first: [N, H], h before the first step.
    """
    values = torch.cat([add[:1] + keep[:1] * first, add[1:]])
    distance = 1
    while distance < len(values):
        later = values[distance:] + keep[distance:] * values[:-distance]
        values = torch.cat([values[:distance], later])
        keep = torch.cat([keep[:distance], keep[distance:] * keep[:-distance]])
        distance *= 2
    return values


class TanhCore(nn.Sequential):
    """Layers without memory, in a core's place."""

    num_states = 0

    def __init__(self, num_inputs: int, size: int, num_layers: int = 1) -> None:
        layers: list[nn.Module] = []
        for width in [num_inputs] + [size] * (num_layers - 1):
            layers += [nn.Linear(width, size), nn.Tanh()]
        super().__init__(*layers)

    def forward(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """See the module."""
        return super().forward(inputs), state


class PassThrough(nn.Module):
    """No core at all."""

    num_states = 0

    def forward(
        self, inputs: Tensor, state: Tensor, resets: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See the module."""
        return inputs, state


CORES: dict[str, type[nn.Module]] = {
    "clstm": LSTMCore,
    "lstm": LSTMCore,
    "gru": GRUCore,
    "mingru": MinGRUCore,
    "mlp": TanhCore,
}
