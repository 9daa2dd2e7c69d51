"""Counter-based action noise keyed by (seed, global environment, lifetime step).

The noise of a step is a function of its key: it does not depend on how environments are grouped
onto ranks, and there is no state to save. Source: numpy's Philox 4x64 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from agents.network.heads import num_outputs
from rl_dist.seeding import NOISE_STREAM

WORDS_PER_COUNTER = 4  # Philox 4x64 makes four 64-bit words for every value of its counter


@lru_cache(maxsize=4096)
def _philox_key(seed: int, global_env: int) -> tuple[int, int]:
    sequence = np.random.SeedSequence([seed, NOISE_STREAM, global_env])
    low, high = sequence.generate_state(2, np.uint64).tolist()
    return low, high


def random_words(
    seed: int, env_offset: int, num_envs: int, first_step: int, num_steps: int, num_words: int
) -> np.ndarray:
    """Random 64-bit words [num_steps, num_envs, num_words] for lifetime steps."""
    counters = -(-num_words // WORDS_PER_COUNTER)  # each step owns whole counter values
    words = np.empty((num_envs, num_steps, counters * WORDS_PER_COUNTER), dtype=np.uint64)
    for index in range(num_envs):
        low, high = _philox_key(seed, env_offset + index)
        generator = np.random.Philox(key=[low, high], counter=[first_step * counters, 0, 0, 0])
        words[index] = generator.random_raw(words[index].size).reshape(words[index].shape)
    return words[:, :, :num_words].swapaxes(0, 1)


def action_noise(
    space: spaces.Space,
    seed: int,
    env_offset: int,
    num_envs: int,
    first_step: int,
    num_steps: int,
    color: float = 0.0,
) -> Tensor:
    """Noise [num_steps, num_envs, A] for a rollout, float64 on CPU.

    Standard normal for Box actions (Box-Muller), `colored` over time; standard Gumbel for every
    choice of others: an action is the argmax of logits + noise, which samples the softmax exactly.
    """
    # Gumbel, from uniforms in (0, 1) that are exact
    num_actions = num_outputs(space)
    if not isinstance(space, spaces.Box):
        words = random_words(seed, env_offset, num_envs, first_step, num_steps, num_actions)
        uniforms = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        return torch.from_numpy(-np.log(-np.log(uniforms)))

    # normal, two by two, from a radius and an angle
    words = random_words(seed, env_offset, num_envs, first_step, num_steps, -(-num_actions // 2))
    radius_bits = words >> np.uint64(32)
    angle_bits = words & np.uint64(0xFFFFFFFF)
    radius = np.sqrt(-2.0 * np.log((radius_bits.astype(np.float64) + 0.5) * 2.0**-32))
    angle = angle_bits.astype(np.float64) * (2.0 * np.pi * 2.0**-32)
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    white = pairs.reshape(num_steps, num_envs, -1)[:, :, :num_actions].copy()
    return torch.from_numpy(colored(white, color))


def colored(white: np.ndarray, exponent: float) -> np.ndarray:
    """Give white normal noise [T, B, A] the spectrum 1 / frequency**exponent.

    Neighbouring steps of an environment push the same way, so that exploration gets somewhere; each
    number alone stays standard normal, and so do the log-probabilities of single actions. 0 is
    white noise, 1 pink, 2 Brownian. Source: Hollenstein, Martius and Piater, "Colored noise in PPO"
    (AAAI 2024), https://arxiv.org/abs/2312.11091; a rollout is one stretch of noise.
    """
    num_steps = len(white)
    if not exponent or num_steps == 1:
        return white
    frequencies = np.fft.rfftfreq(num_steps)  # cycles per step
    frequencies[0] = frequencies[1]  # as strong as the slowest wave
    gain = frequencies ** (-exponent / 2)
    weight = np.full(len(gain), 2.0)  # a wave stands for two terms of the full transform,
    weight[0] = 1.0
    if num_steps % 2 == 0:
        weight[-1] = 1.0  # but for the mean and the fastest one
    gain /= np.sqrt((weight * gain**2).sum() / num_steps)
    waves = np.fft.rfft(white, axis=0) * gain[:, None, None]
    return np.fft.irfft(waves, num_steps, axis=0)
