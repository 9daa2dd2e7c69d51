"""A recurrent core with an untrained memory: oscillators store recent inputs.

Each channel drives `hidden_size` oscillators with different fixed frequencies. The oscillators form
a linear recurrent unit (Orvieto et al., ICML 2023) whose eigenvalues are fixed. All oscillators
together store the last 2 * hidden_size inputs. Only the layers that write to this memory and read
from it are trained. All steps of a sequence are computed in parallel. This command trains a policy
with the core:

python train_distributed.py --env popgym:popgym-RepeatPreviousMedium-v0 --preset memory \
    --policy own --core examples.phase_core:PhaseCore --bptt_steps 128 --gamma 0
"""

import math

import torch
from torch import nn

CHANNELS = 4


class PhaseCore(nn.Module):
    """A core with `CHANNELS` channels of complex states and a layer that reads these states."""

    num_states = 2 * CHANNELS  # a real part and an imaginary part for each channel

    def __init__(self, num_inputs, hidden_size, num_layers):
        super().__init__()
        if num_layers != 1:
            raise ValueError(f"num_layers must be 1, got {num_layers}")
        self.window = 2 * hidden_size  # number of steps after which a state has decayed to 1/e
        self.write = nn.Linear(num_inputs, CHANNELS)
        self.read = nn.Linear(num_inputs + self.num_states * hidden_size, hidden_size)

    def powers(self, length, like):
        """Return the powers 1 to `length` of the eigenvalues, [length, 1, 1, H] complex.

        The result has the device and the precision of `like`.
        """
        times = torch.arange(1, length + 1).to(like)[:, None, None, None]
        speeds = torch.arange(self.window // 2).to(like) + 0.5
        angles = times * speeds * (2 * math.pi / self.window)
        return torch.polar(torch.exp(-times / self.window).expand_as(angles), angles)

    def forward(self, inputs, state):
        """Return outputs [L, N, H] and the new state, for inputs [L, N, F].

        The state is [2 * CHANNELS, N, H]. The recurrence h_t = a h_(t-1) + u_t is computed as
        h_t = a^t (h_0 + the sum of u_s / a^s over s <= t).
        """
        powers = self.powers(len(inputs), state)  # [L, 1, 1, H]
        written = self.write(inputs)[..., None] / math.sqrt(self.window)  # [L, N, CHANNELS, 1]
        start = torch.complex(*state.transpose(0, 1).chunk(2, dim=1))  # [N, CHANNELS, H]
        states = powers * (start + (written / powers).cumsum(0))  # [L, N, CHANNELS, H]
        memory = torch.cat([states.real, states.imag], dim=2)  # [L, N, 2 * CHANNELS, H]
        outputs = torch.tanh(self.read(torch.cat([inputs, memory.flatten(2)], dim=2)))
        return outputs, memory[-1].transpose(0, 1)
