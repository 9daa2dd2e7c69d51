"""Steps that run out of memory, and what two ranks find with them.

Spawned processes must be able to import it.
"""

import errno
from types import SimpleNamespace
from unittest import mock

import torch

from rl_dist.process_group.world import close_world, open_world
from rl_dist.strategies import batch_size
from rl_dist.strategies.batch_size import fastest_batch_size, largest_batch_size

EXHAUSTED = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"
    ),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("could not create a primitive"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]


def limited(cap, error=EXHAUSTED[0]):
    """A step that runs out of memory beyond `cap` samples, and the sizes it was tried with."""
    tried = []

    def step(size):
        tried.append(size)
        if size > cap:
            raise error

    return step, tried


def search(folder):
    """Rank 1 has less memory, rank 0 is slower."""
    world = open_world("cpu", timeout_s=30)
    step, tried = limited(10**9 if world.is_main_process else 300)
    largest = largest_batch_size(step, range(1, 4097), world)

    now = [0.0]

    def timed(size):
        step(size)
        now[0] += 0.02 if world.is_main_process else 0.001

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    with mock.patch.object(batch_size, "time", clock):
        choice = fastest_batch_size(timed, [16, 64, 256, 512], world)
    paces = [point.samples_per_s for point in choice.points]
    torch.save(
        {"largest": largest, "size": choice.size, "paces": paces, "tried": tried},
        f"{folder}/{world.rank}.pt",
    )
    close_world(world)
