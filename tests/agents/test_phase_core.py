"""Test examples/phase_core.py: it is a valid core, and its state keeps inputs."""

import numpy as np
import torch

from agents.network.own_core import try_core
from examples.phase_core import CHANNELS, PhaseCore

NAME = "examples.phase_core:PhaseCore"


def test_it_keeps_the_contract_of_a_core():
    try_core(NAME, PhaseCore(5, 16, 1), 5, 16)


def test_every_input_of_the_window_can_be_read_from_the_state():
    torch.manual_seed(1)
    core = PhaseCore(1, 16, 1).double()
    torch.nn.init.ones_(core.write.weight)
    inputs = torch.randn(2 * 16, 400, 1, dtype=torch.float64)
    _, state = core(inputs, torch.zeros(core.num_states, 400, 16, dtype=torch.float64))
    state = state.reshape(2, CHANNELS, 400, 16)[:, 0].transpose(0, 1).flatten(1)  # of channel 0
    state = np.concatenate([state.detach().numpy(), np.ones((400, 1))], axis=1)
    answers = inputs[:, :, 0].T.numpy()  # [400, steps]
    read = np.linalg.lstsq(state[:300], answers[:300], rcond=None)[0]
    np.testing.assert_allclose(state[300:] @ read, answers[300:], atol=1e-6)
