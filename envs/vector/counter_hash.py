"""Random numbers as a function of a key and a counter: no state to save."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

GOLDEN_STEP = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's increment, as int64


def seed_keys(seed: int | Sequence[int] | None, num_envs: int) -> Tensor:
    """One int64 hash key per environment, [B], for the seeds that `reset` takes."""
    if seed is None:
        seeds = [int(word) for word in np.random.SeedSequence().generate_state(num_envs, np.uint64)]
    elif isinstance(seed, Sequence):
        seeds = [int(number) for number in seed]
    else:
        seeds = list(range(seed, seed + num_envs))
    if len(seeds) != num_envs:
        raise ValueError(f"seed must be one integer per environment ({num_envs}), got {len(seeds)}")
    signed = [(number + 2**63) % 2**64 - 2**63 for number in seeds]  # the same 64 bits as int64
    return _mix(torch.tensor(signed, dtype=torch.int64))


def random_int63(keys: Tensor, counter: Tensor) -> Tensor:
    """Uniform int64 in 0 .. 2**63 - 1, in the broadcast shape of keys and counter."""
    return _mix(keys + counter * GOLDEN_STEP) & (2**63 - 1)


def _mix(bits: Tensor) -> Tensor:
    """Finaliser of splitmix64 on int64 (https://prng.di.unimi.it/splitmix64.c)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        bits = (bits ^ _logical_shift(bits, shift)) * factor
    return bits ^ _logical_shift(bits, 31)


def _logical_shift(bits: Tensor, by: int) -> Tensor:
    """Shift to the right, filling with zeros; torch's own drags the sign along."""
    return (bits >> by) & (2 ** (64 - by) - 1)
