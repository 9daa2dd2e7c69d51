"""Cores with a common interface: LSTM, GRU, minGRU, and memoryless tanh layers.

Every core computes matrix products in the type of its weights, to which it casts its inputs. The
state of LSTM and GRU also has this type between the steps of a call.

A core is a module with the constructor arguments (num_inputs, hidden_size, num_layers). Its
`num_states` is the number S of vectors [H] in its state. It takes inputs [L, N, F] and the state
[S, N, H] that precedes the first step; it returns outputs [L, N, H] and the state after the last
step. The module itself stores no state. LSTM and GRU may return the state as a list of S vectors
[N, H], so that the caller can stack the states of all cores in one operation. A core that
`accepts_resets` also takes resets [L, N, 1]: 1 at a step whose state and output must be zero, else
0. A core with gates has a method `open_gates`, which is called after all weights are set. A user's
core needs only `num_states` and `forward`.
"""

from typing import Any

import torch
from torch import Tensor, nn

State = Tensor | list[Tensor]
SHUT = -1e4  # adding this to the input of a gate makes the gate and its gradient exactly 0


class RememberingCore(nn.RNNBase):
    """An LSTM or GRU. The second block of its biases belongs to the forget or update gate."""

    @property
    def num_states(self) -> int:
        """Number of vectors in the state: h of every layer, and for an LSTM also c."""
        return self.num_layers * (2 if self.mode == "LSTM" else 1)

    @property
    def accepts_resets(self) -> bool:
        """Return True for an LSTM of one layer; the extra input of resets reaches only layer 1."""
        return self.mode == "LSTM" and self.num_layers == 1

    def open_gates(self) -> None:
        """Set the biases of forget or update gates to 1 (Jozefowicz et al. 2015)."""
        for _, _, bias, _ in self.all_weights:
            nn.init.ones_(bias[self.hidden_size : 2 * self.hidden_size])


class LSTMCore(nn.LSTM, RememberingCore):
    """LSTM layers; the state contains h of every layer, then c of every layer."""

    def forward(  # type: ignore[override]
        self, inputs: Tensor, state: Tensor, resets: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Run the core; the module docstring describes inputs and outputs."""
        layers: Any = self.all_weights  # of each layer, 2 weights and 2 biases
        inputs = inputs.to(layers[0][0].dtype)
        before = state.to(inputs.dtype).chunk(2)  # h and c of every layer
        if resets is None and len(inputs) == 1 and not torch.is_grad_enabled():
            # for a single step, torch.lstm_cell is faster
            outputs = inputs[0]
            hidden = []
            cells = []
            for h, c, layer in zip(*before, layers, strict=True):
                outputs, cell = torch.lstm_cell(outputs, (h, c), *layer)
                hidden.append(outputs)
                cells.append(cell)
            return outputs[None], hidden + cells
        weights: list[Tensor] = sum(layers, [])
        if resets is not None:
            # pass resets as an extra input whose weights shut the input, forget and output gates
            shut = weights[0].new_full((4, self.hidden_size), SHUT)
            shut[2] = 0.0  # resets do not affect the candidate values
            weights[0] = torch.cat([weights[0], shut.view(-1, 1)], 1)
            inputs = torch.cat([inputs, resets.to(inputs.dtype)], -1)
        # other arguments: biases, no dropout, one direction, time as the first axis
        outputs, after_h, after_c = torch.lstm(
            inputs, before, weights, True, self.num_layers, 0.0, self.training, False, False
        )
        return outputs, [*after_h, *after_c]


class GRUCore(nn.GRU, RememberingCore):
    """GRU layers; the state contains h of every layer."""

    def forward(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, State]:  # type: ignore[override]
        """Run the core; the module docstring describes inputs and outputs."""
        layers: Any = self.all_weights  # of each layer, 2 weights and 2 biases
        inputs = inputs.to(layers[0][0].dtype)
        state = state.to(inputs.dtype)
        if len(inputs) > 1 or torch.is_grad_enabled():
            weights: list[Tensor] = sum(layers, [])
            return torch.gru(  # the other arguments are as in `LSTMCore`
                inputs, state, weights, True, self.num_layers, 0.0, self.training, False, False
            )
        # for a single step, torch.gru_cell is faster
        outputs = inputs[0]
        after = []
        for hidden, layer in zip(state, layers, strict=True):
            outputs = torch.gru_cell(outputs, hidden, *layer)
            after.append(outputs)
        return outputs[None], after


class MinGRUCore(nn.Module):
    """minGRU layers: gates depend only on the inputs, so all steps run in parallel.

    Source: Feng et al., "Were RNNs all we needed?", https://arxiv.org/abs/2410.01201. The paper
    runs its scan on logarithms, which requires positive states; `scan` needs neither logarithms nor
    divisions. The scan computes in the type of the state.
    """

    LONGEST = 64.0  # number of steps that the slowest units of a new core remember

    def __init__(self, num_inputs: int, size: int, num_layers: int) -> None:
        super().__init__()
        widths = [num_inputs] + [size] * (num_layers - 1)
        self.layers: Any = nn.ModuleList(nn.Linear(width, 2 * size) for width in widths)
        self.num_states = num_layers

    def forward(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Run the core; the module docstring describes inputs and outputs."""
        outputs = inputs
        after = []
        for layer, before in zip(self.layers, state, strict=True):
            products = layer(outputs.to(layer.weight.dtype)).to(state.dtype)
            gates, candidates = products.chunk(2, dim=-1)  # each [L, N, H]
            outputs = scan(torch.sigmoid(-gates), torch.sigmoid(gates) * candidates, before)
            after.append(outputs[-1])
        return outputs, torch.stack(after)

    def open_gates(self) -> None:
        """Set gate biases so that the units of a layer remember 1 to `LONGEST` steps.

        Source: Tallec and Ollivier, "Can recurrent neural networks warp time?" (2018).
        """
        for layer in self.layers:
            size = layer.out_features // 2
            steps = self.LONGEST ** torch.linspace(0.0, 1.0, size, device=layer.bias.device)
            with torch.no_grad():
                layer.bias[:size] = -steps.log()


def scan(keep: Tensor, add: Tensor, first: Tensor) -> Tensor:
    """Return h_t = keep_t * h_(t-1) + add_t for all t, [L, N, H], in log2(L) passes.

    After the pass with distance d, every element combines up to 2 * d steps. All factors lie in
    [0, 1], so no product overflows. Source: Hillis and Steele, "Data parallel algorithms", 1986.

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
    """Tanh layers without memory."""

    num_states = 0

    def __init__(self, num_inputs: int, size: int, num_layers: int) -> None:
        widths = [num_inputs, *[size] * num_layers]
        pairs = zip(widths, widths[1:], strict=False)
        super().__init__(*(part for pair in pairs for part in (nn.Linear(*pair), nn.Tanh())))

    def forward(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Run the core; the module docstring describes inputs and outputs."""
        layer: Any = self[0]
        return super().forward(inputs.to(layer.weight.dtype)), state


class NoCore(nn.Module):
    """Takes the place of a core that a policy does not have: returns its inputs."""

    num_states = 0
    accepts_resets = True

    def forward(self, inputs: Tensor, state: Tensor, *resets: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and state."""
        return inputs, state


CORES: dict[str, type[nn.Module]] = {
    "clstm": LSTMCore,
    "lstm": LSTMCore,
    "gru": GRUCore,
    "mingru": MinGRUCore,
    "mlp": TanhCore,
}
