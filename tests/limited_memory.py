"""Search for the largest batch while the address space of the process is limited.

The limit is set relative to the size of the process after all imports.
"""

import itertools
import resource
from types import SimpleNamespace

import psutil
import torch
from torch import nn

from rl_dist.machine import free_memory_bytes
from rl_dist.strategies import measure


def limit_memory(more_mib):
    limit = psutil.Process().memory_info().vms + more_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def search():
    """Print the free bytes and the largest LSTM batch that fits; check that it runs."""
    torch.set_num_threads(1)
    model = nn.LSTM(64, 256)

    def step(size):
        model.zero_grad()
        model(torch.zeros(16, size, 64))[0].square().mean().backward()

    step(1)
    limit_memory(128)
    # The limit applies only to this process, so its free memory is not divided by `sharers`.
    print(free_memory_bytes(torch.device("cpu"), sharers=2), end=" ")
    measure.USABLE_SHARE = 0.7  # leave memory for the allocator and oneDNN
    clock = itertools.count()  # every step seems to take 1 s, so the largest batch is fastest
    measure.time = SimpleNamespace(perf_counter=lambda: next(clock))
    largest = measure.fastest_batch_size(step, range(8, 100_000, 8))
    step(largest)
    try:
        # The search doubles the size and keeps some memory free. So a batch of twice the size found
        # may still fit, but a batch of 4 times that size cannot.
        step(4 * largest)
    except RuntimeError as error:
        print(type(error).__name__, end=" ")
    step(largest)
    print(largest)


if __name__ == "__main__":
    search()
