"""Stateless random numbers: each is a hash of a key and a counter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

GOLDEN_STEP = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's increment, as int64


def seed_keys(seed: int | Sequence[int] | None, num_envs: int) -> Tensor:
    """Hash the seeds of `reset` into one int64 key per environment, [B]."""
    if seed is None:
        seed = np.random.SeedSequence().generate_state(num_envs, np.uint64).tolist()
    seeds = range(seed, seed + num_envs) if isinstance(seed, int) else seed
    return _mix(torch.from_numpy(np.array(seeds, np.uint64).view(np.int64)))


def random_int63(keys: Tensor, counter: Tensor) -> Tensor:
    """Return a uniform int64 number >= 0 for each pair of key and counter."""
    return _mix(keys + counter * GOLDEN_STEP) & (2**63 - 1)


def _mix(bits: Tensor) -> Tensor:
    """Mix bits as splitmix64 does (https://prng.di.unimi.it/splitmix64.c)."""
    for shift, factor in (
        (30, 0xBF58476D1CE4E5B9 - 2**64),
        (27, 0x94D049BB133111EB - 2**64),
        (31, 1),
    ):
        # torch's shift repeats the sign bit; the mask turns it into a logical shift.
        bits = (bits ^ ((bits >> shift) & (2 ** (64 - shift) - 1))) * factor
    return bits
