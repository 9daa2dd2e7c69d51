"""User-defined cores: Decay fulfils the contract of a core; the others break it."""

import torch
from torch import nn


class Decay(nn.Module):
    """Keep a leaky sum of the outputs of a linear layer."""

    num_states = 1

    def __init__(self, num_inputs, hidden_size, num_layers):
        super().__init__()
        self.layer = nn.Linear(num_inputs, hidden_size)

    def forward(self, inputs, state):
        outputs = []
        for step in self.layer(inputs):
            state = 0.9 * state + step
            outputs.append(torch.tanh(state[0]))
        return torch.stack(outputs), state


class Prophet(Decay):
    """Use the whole sequence in every step, including later steps."""

    def forward(self, inputs, state):
        return super().forward(inputs + inputs.mean(0), state)


class Forgetful(Decay):
    """Return only half of the correct new state."""

    def forward(self, inputs, state):
        outputs, after = super().forward(inputs, state)
        return outputs, 0.5 * after


class Herd(Decay):
    """Mix the sequences of a batch."""

    def forward(self, inputs, state):
        return super().forward(inputs - inputs.mean(1, keepdim=True), state)


class Thin(Decay):
    """Return fewer outputs than hidden_size."""

    def forward(self, inputs, state):
        outputs, state = super().forward(inputs, state)
        return outputs[..., 1:], state


class Broken(Decay):
    """Raise an error in the forward pass."""

    def forward(self, inputs, state):
        raise KeyError("no such shape")


class Stateless(nn.Linear):
    """Core without the attribute num_states."""

    def __init__(self, num_inputs, hidden_size, num_layers):
        super().__init__(num_inputs, hidden_size)
