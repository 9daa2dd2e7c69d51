"""Random numbers as a function of a key and a counter: no state to save."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

GOLDEN_STEP = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's increment, as int64


def seed_keys(seed: int | Sequence[int] | None, num_envs: int) -> Tensor:
    """Return an int64 hash key per environment, [B], for the seeds of `reset`."""
    if seed is None:
        seed = np.random.SeedSequence().generate_state(num_envs, np.uint64).tolist()
    seeds = range(seed, seed + num_envs) if isinstance(seed, int) else seed
    return _mix(torch.from_numpy(np.array(seeds, np.uint64).view(np.int64)))


def random_int63(keys: Tensor, counter: Tensor) -> Tensor:
    """Return uniform int64 from 0 to 2**63 - 1; keys and counter are broadcast."""
    return _mix(keys + counter * GOLDEN_STEP) & (2**63 - 1)


def _mix(bits: Tensor) -> Tensor:
    """Finaliser of splitmix64 on int64 (https://prng.di.unimi.it/splitmix64.c)."""
    for shift, factor in (
        (30, 0xBF58476D1CE4E5B9 - 2**64),
        (27, 0x94D049BB133111EB - 2**64),
        (31, 1),
    ):
        # torch's own shift repeats the sign; here zeros come in from the left
        bits = (bits ^ ((bits >> shift) & (2 ** (64 - shift) - 1))) * factor
    return bits
