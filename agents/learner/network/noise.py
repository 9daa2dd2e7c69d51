"""Counter-based random numbers for action noise and the order of sequences.

Each number is computed from its indices, such as the seed, the environment (counted over all ranks)
and the step (counted since the start of the run). So the numbers do not depend on the distribution
of environments over ranks, and there is no generator state to save. Integer operations compute the
random numbers for all environments in one call, on CPU and GPU. Source: Philox 4x32-10 (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from agents.learner.network.seeds import NOISE_STREAM, SHUFFLE_STREAM

MASK = 2**32 - 1
FACTORS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
# largest number of counters per call, chosen for the cache of a CPU core and for GPU memory
MOST_COUNTERS = {"cpu": 2**15, "cuda": 2**22}


def philox(counter: Sequence[Tensor], key: Sequence[int]) -> tuple[Tensor, ...]:
    """Map the 4 words of a counter to 4 random 32-bit words; all are stored as int64."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(10):
        # The products may overflow, but their low 64 bits are correct. The mask removes the upper
        # 32 bits of c1 and c3, and the copies of the sign bit that the right shift creates.
        first, second = c0 * FACTORS[0], c2 * FACTORS[1]
        c0 = (second >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(MASK)
        c2 = (first >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(MASK)
        c1, c3 = second, first
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1 & MASK, c2, c3 & MASK


def stream_key(seed: int, stream: int) -> list[int]:
    """Return the two words of the Philox key for a random stream."""
    return np.random.SeedSequence([seed, stream]).generate_state(2, np.uint32).tolist()


def action_noise(
    space: spaces.Space,
    seed: int,
    env_offset: int,  # global index of the first environment
    num_envs: int,
    first_step: int,  # index of the first step, counted from the start of the run
    num_steps: int,
    device: torch.device | str = "cpu",
    color: float = 0.0,
) -> Tensor:
    """Return float64 noise [num_steps, num_envs, A] for a rollout.

    Box actions get standard normal noise (Box-Muller), `colored` over time. Discrete choices get
    standard Gumbel noise, because the argmax of logits + noise is an exact sample of the softmax.
    """
    # Each step of each environment uses C counters, and each counter gives 2 pairs of words. The
    # counters of all steps have the shape [T, B, C].
    is_box = isinstance(space, spaces.Box)
    num_actions = spaces.utils.flatdim(space)  # dimensions of a Box, or number of choices
    # one pair of words gives two normal numbers, or one Gumbel number
    num_pairs = (num_actions + 1) // 2 if is_box else num_actions
    indices = torch.arange((num_pairs + 1) // 2, device=device)  # [C]
    envs = torch.arange(env_offset, env_offset + num_envs, device=device)[:, None]
    steps = torch.arange(first_step, first_step + num_steps, device=device)[:, None, None]

    # compute a few steps at a time, so that intermediate results fit into the cache
    key = stream_key(seed, NOISE_STREAM)
    draw = normal if is_box else gumbel
    size = max(1, MOST_COUNTERS[indices.device.type] // (num_envs * len(indices)))
    parts = []
    for part in steps.split(size):
        words = philox((indices, envs, part & MASK, part >> 32), key)
        halves = (words[:2], words[2:])
        high, low = (torch.stack(half, -1).flatten(-2)[..., :num_pairs] for half in halves)
        parts.append(draw(high, low)[..., :num_actions])
    noise = torch.cat(parts)
    return colored(noise, color) if is_box else noise


def gumbel(high: Tensor, low: Tensor) -> Tensor:
    """Return standard Gumbel numbers, each computed from 52 random bits."""
    bits = high << 20 | low >> 12  # the upper 52 of 64 bits
    return bits.double().add_(0.5).mul_(2.0**-52).log_().neg_().log_().neg_()


def normal(high: Tensor, low: Tensor) -> Tensor:
    """Return two standard normal numbers per pair of words (Box-Muller)."""
    radius = torch.sqrt(-2.0 * torch.log((high.double() + 0.5) * 2.0**-32))
    angle = low.double() * (2.0 * math.pi * 2.0**-32)
    return torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], -1).flatten(-2)


def colored(white: Tensor, exponent: float) -> Tensor:
    """Give white normal noise [T, B, A] the spectrum 1 / frequency**exponent.

    The noise of neighbouring steps becomes correlated, so that exploration reaches more distant
    states. Each single number is still standard normal, so the log probabilities of single actions
    are still correct. An exponent of 0 means white noise, 1 pink noise, 2 Brownian noise.
    Rollouts are coloured independently.
    Source: Hollenstein, Martius and Piater, "Colored noise in PPO" (AAAI 2024),
    https://arxiv.org/abs/2312.11091.
    """
    num_steps = len(white)
    if not exponent or num_steps == 1:
        return white
    frequencies = torch.fft.rfftfreq(num_steps, dtype=white.dtype, device=white.device)
    frequencies[0] = frequencies[1]  # give the mean the amplitude of the slowest wave
    gain = frequencies ** (-exponent / 2)
    weight = torch.full_like(gain, 2.0)  # each wave is 2 terms of the full Fourier transform
    weight[0] = 1.0  # the mean is only 1 term
    if num_steps % 2 == 0:
        weight[-1] = 1.0  # the fastest wave is only 1 term
    gain /= ((weight * gain.square()).sum() / num_steps).sqrt()  # the variance remains 1
    waves = torch.fft.rfft(white, dim=0) * gain[:, None, None]
    return torch.fft.irfft(waves, num_steps, dim=0)


def sequence_orders(
    key: tuple[int, int],  # (seed, iteration)
    num_epochs: int,
    env_offset: int,  # global index of this rank's first environment
    num_envs: int,
    sequences_per_env: int,
    num_minibatches: int,
) -> np.ndarray:
    """Shuffle this rank's sequences into minibatches, for every epoch.

    Returns indices [epochs, minibatches, sequences]; index k * B + b is sequence k of environment
    b. The environments are divided into strata, which are groups of neighbouring environments. The
    sequences of each stratum are sorted by random keys. Each stratum contributes the same number of
    sequences to every minibatch, so the global minibatch does not depend on the number of ranks.
    """
    # number of environments in a stratum
    size = num_minibatches // math.gcd(num_minibatches, sequences_per_env)
    seed, iteration = key
    epochs = torch.arange(num_epochs)[:, None, None]
    envs = torch.arange(env_offset, env_offset + num_envs)[:, None]  # [B, 1]
    counter = (torch.arange(sequences_per_env), envs, torch.tensor(iteration), epochs)
    high, low, *_ = philox(counter, stream_key(seed, SHUFFLE_STREAM))  # [epochs, B, K]
    keys = (high << 31 | low >> 1).numpy().reshape(num_epochs, num_envs // size, -1)
    # indices b * K + k, where b is the index of an environment in its stratum
    order = keys.argsort(axis=-1, kind="stable")
    env, k = np.divmod(order, sequences_per_env)
    columns = k * num_envs + env + np.arange(0, num_envs, size)[:, None]
    by_minibatch = columns.reshape(*columns.shape[:2], num_minibatches, -1)
    return by_minibatch.swapaxes(1, 2).reshape(num_epochs, num_minibatches, -1)
