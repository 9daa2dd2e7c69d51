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
    """Let the output of a step depend on the inputs of all steps, even later ones."""

    def forward(self, inputs, state):
        return super().forward(inputs + inputs.mean(0), state)


class Forgetful(Decay):
    """Return the correct new state multiplied by 0.5."""

    def forward(self, inputs, state):
        outputs, after = super().forward(inputs, state)
        return outputs, 0.5 * after


class Herd(Decay):
    """Let the output of a sequence depend on the other sequences of its batch."""

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
