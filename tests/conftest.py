"""For every test."""

import torch

# The tests' tensors are tiny: a second thread only waits, many times longer on a machine that is busy.
torch.set_num_threads(1)
