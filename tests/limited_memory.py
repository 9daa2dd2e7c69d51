"""Search for the largest batch under a real limit of this process's address space.

The limit is counted from what the process takes once everything is imported.
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
    """Print the free bytes and the largest batch of an LSTM that fits; it must run."""
    torch.set_num_threads(1)
    model = nn.LSTM(64, 256)

    def step(size):
        model.zero_grad()
        model(torch.zeros(16, size, 64))[0].square().mean().backward()

    step(1)
    limit_memory(128)
    # the limit is of this process
    print(free_memory_bytes(torch.device("cpu"), sharers=2), end=" ")
    measure.HEADROOM = 0.7  # allocator and oneDNN keep some for themselves
    clock = itertools.count()  # every step takes as long: the largest batch is the fastest
    measure.time = SimpleNamespace(perf_counter=lambda: next(clock))
    largest = measure.fastest_batch_size(step, range(8, 100_000, 8))
    step(largest)
    try:
        step(4 * largest)  # sizes are doubled, with memory to spare
    except RuntimeError as error:
        print(type(error).__name__, end=" ")
    step(largest)
    print(largest)


if __name__ == "__main__":
    search()
