"""Counter-based random numbers: action noise, and the order of sequences.

A number is a function of its purpose, such as (seed, global environment, lifetime step): it does
not depend on how environments are grouped onto ranks, there is no state to save, and integer
operations compute it on CPU and GPU, for all environments in one call. Source: Philox 4x32-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from agents.network.seeds import NOISE_STREAM, SHUFFLE_STREAM

MASK = 2**32 - 1
FACTORS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
# counters in one call: their numbers fit into a core's cache, or take little memory of a GPU
CELLS = {"cpu": 2**15, "cuda": 2**22}


def philox(counter: Sequence[Tensor], key: Sequence[int]) -> tuple[Tensor, ...]:
    """Return four random 32-bit words, as int64, for the four words of a counter."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(10):
        # The low 64 bits of a product are right, though it wraps around. A mask clears the sign
        # that a shift copies, and the bits of c1 and c3 above 32.
        first, second = c0 * FACTORS[0], c2 * FACTORS[1]
        c0 = (second >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(MASK)
        c2 = (first >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(MASK)
        c1, c3 = second, first
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1 & MASK, c2, c3 & MASK


def stream_key(seed: int, stream: int) -> list[int]:
    """Return the two words of the key of a stream's numbers."""
    words: list[int] = np.random.SeedSequence([seed, stream]).generate_state(2, np.uint32).tolist()
    return words


def action_noise(
    space: spaces.Space,
    seed: int,
    env_offset: int,  # global index of the first environment
    num_envs: int,
    first_step: int,  # step in the lifetime of the environments
    num_steps: int,
    device: torch.device | str = "cpu",
    color: float = 0.0,
) -> Tensor:
    """Return noise [num_steps, num_envs, A] for a rollout, float64.

    Standard normal for Box actions (Box-Muller), `colored` over time; standard Gumbel for choices:
    an action is the argmax of logits + noise, which samples the softmax exactly.
    """
    # counters [T, B, C]: steps of environments share none; each counter gives two pairs of words
    device = torch.device(device)
    is_box = isinstance(space, spaces.Box)
    num_actions = spaces.utils.flatdim(space)  # numbers of a Box, choices of all others
    num_words = (num_actions + 1) // 2 if is_box else num_actions
    numbers = torch.arange((num_words + 1) // 2, device=device)
    envs = torch.arange(env_offset, env_offset + num_envs, device=device)[:, None]
    steps = torch.arange(first_step, first_step + num_steps, device=device)[:, None, None]

    # part by part, so that intermediate results stay in the cache
    key = stream_key(seed, NOISE_STREAM)
    draw = normal if is_box else gumbel
    size = max(1, CELLS[device.type] // (num_envs * len(numbers)))
    parts = []
    for part in steps.split(size):
        words = philox((numbers, envs, part & MASK, part >> 32), key)
        pairs = (words[:2], words[2:])
        high, low = (torch.stack(pair, -1).flatten(-2)[..., :num_words] for pair in pairs)
        parts.append(draw(high, low)[..., :num_actions])
    noise = torch.cat(parts)
    return colored(noise, color) if is_box else noise


def gumbel(high: Tensor, low: Tensor) -> Tensor:
    """Return standard Gumbel numbers, each from an exact uniform in (0, 1)."""
    bits = high << 20 | low >> 12  # 52 of them
    return bits.double().add_(0.5).mul_(2.0**-52).log_().neg_().log_().neg_()


def normal(high: Tensor, low: Tensor) -> Tensor:
    """Return standard normal numbers by Box and Muller: two for each pair of words."""
    radius = torch.sqrt(-2.0 * torch.log((high.double() + 0.5) * 2.0**-32))
    angle = low.double() * (2.0 * math.pi * 2.0**-32)
    return torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], -1).flatten(-2)


def colored(white: Tensor, exponent: float) -> Tensor:
    """Give white normal noise [T, B, A] the spectrum 1 / frequency**exponent.

    Neighbouring steps of an environment push the same way, so that exploration gets somewhere. Each
    number alone stays standard normal, and the log-probabilities of single actions stay right. 0 is
    white noise, 1 pink, 2 Brownian; every rollout is coloured for itself. Source: Hollenstein,
    Martius and Piater, "Colored noise in PPO" (AAAI 2024), https://arxiv.org/abs/2312.11091.
    """
    num_steps = len(white)
    if not exponent or num_steps == 1:
        return white
    frequencies = torch.fft.rfftfreq(num_steps, dtype=white.dtype, device=white.device)
    frequencies[0] = frequencies[1]  # the mean is as strong as the slowest wave
    gain = frequencies ** (-exponent / 2)
    weight = torch.full_like(gain, 2.0)  # a wave stands for two terms of the full transform
    weight[0] = 1.0  # the mean stands for one
    if num_steps % 2 == 0:
        weight[-1] = 1.0  # the fastest wave appears once as well
    gain /= ((weight * gain.square()).sum() / num_steps).sqrt()
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
    """Return this rank's sequences (k * B + b), [epochs, minibatches, sequences].

    Random keys sort the sequences within strata of neighbouring global environments. Every stratum
    gives each minibatch equally many, so the global minibatch does not depend on the number of
    ranks.
    """
    size = num_minibatches // math.gcd(num_minibatches, sequences_per_env)  # stratum size
    assert num_envs % size == 0 and env_offset % size == 0
    seed, iteration = key
    epochs = torch.arange(num_epochs)[:, None, None]
    envs = torch.arange(env_offset, env_offset + num_envs)[:, None]  # [B, 1]
    counter = (torch.arange(sequences_per_env), envs, torch.tensor(iteration), epochs)
    high, low, *_ = philox(counter, stream_key(seed, SHUFFLE_STREAM))  # [epochs, B, K]
    keys = (high << 31 | low >> 1).numpy().reshape(num_epochs, num_envs // size, -1)
    order = keys.argsort(axis=-1, kind="stable")  # number b * K + k within its stratum
    env, k = np.divmod(order, sequences_per_env)
    columns = k * num_envs + env + np.arange(0, num_envs, size)[:, None]
    by_minibatch = columns.reshape(*columns.shape[:2], num_minibatches, -1)
    return by_minibatch.swapaxes(1, 2).reshape(num_epochs, num_minibatches, -1)
