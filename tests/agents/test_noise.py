"""Test counter-based random numbers, their seeds, and running statistics."""

import ctypes

import numpy as np
import pytest
import torch
from gymnasium import spaces

from agents.learner.network import noise
from agents.learner.network.inputs import Normalizer, RunningMoments
from agents.learner.network.noise import MASK, action_noise, philox, sequence_orders
from agents.learner.network.seeds import (
    ENVIRONMENT_STREAM,
    EVALUATION_STREAM,
    VALIDATION_STREAM,
    stream_seeds,
)
from agents.learner.rollout import policy_input


def box(num_actions):
    return spaces.Box(-1.0, 1.0, (num_actions,), np.float32)


KINDS = {  # name: (action space, noise colour)
    "nine numbers": (box(9), 0.0),
    "pink": (box(3), 1.0),
    "seven choices": (spaces.Discrete(7), 1.0),
}


def test_random_words_equal_the_known_answers():
    """Compare with the known answers for `philox4x32 10` in Random123's kat_vectors."""
    pi = "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0"
    known = {
        "00000000 " * 6: "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        "ffffffff " * 6: "408f276d 41c83b0e a20bc7c6 6d5451fd",
        pi: "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for given, wanted in known.items():
        *counter, k0, k1 = (int(word, 16) for word in given.split())
        words = philox(tuple(torch.tensor([word]) for word in counter), (k0, k1))
        assert " ".join(f"{int(word):08x}" for word in words) == wanted


def test_no_random_number_occurs_twice():
    # The step numbers exceed 2**32.
    numbers = action_noise(spaces.Discrete(5), 7, 0, 64, 2**32 - 50, 100)
    assert len(numbers.unique()) == numbers.numel() == 64 * 100 * 5


@pytest.mark.parametrize("kind", KINDS)
def test_noise_does_not_depend_on_how_environments_and_steps_are_grouped(kind):
    space, color = KINDS[kind]
    together = action_noise(space, 3, 0, 8, 32, 16, color=color)
    parts = [action_noise(space, 3, i, 2, 32, 16, color=color) for i in range(0, 8, 2)]
    assert torch.equal(torch.cat(parts, dim=1), together)
    white = action_noise(space, 3, 0, 8, 32, 16)
    parts = [action_noise(space, 3, 0, 8, t, length) for t, length in ((32, 13), (45, 3))]
    assert torch.equal(torch.cat(parts), white)
    assert torch.equal(together, white) == (kind != "pink")  # discrete choices ignore the colour


@pytest.mark.parametrize("exponent", [0.0, 0.5, 2.0])
def test_noise_of_boxes_is_standard_normal_with_the_requested_spectrum(exponent):
    pairs = action_noise(box(2), 7, 0, 2000, 0, 64, color=exponent).numpy()  # shape [64, 2000, 2]
    numbers = pairs.reshape(64, -1)
    # The variance of 4000 numbers has a standard error of 0.022.
    assert abs(numbers.var(axis=1) - 1.0).max() < 0.12
    assert abs(numbers.mean()) < 0.03 and abs((numbers**4).mean() - 3.0) < 0.3
    power = (abs(np.fft.rfft(numbers, axis=0)) ** 2).mean(axis=1)[1:-1]  # mean power per frequency
    slope = np.polyfit(np.log(np.arange(1, 32)), np.log(power), 1)[0]
    assert slope == pytest.approx(-exponent, abs=0.05)


@pytest.mark.parametrize("space", [box(2), spaces.Discrete(3)], ids=str)
def test_noise_is_finite_for_every_random_word(monkeypatch, space):
    extremes = torch.tensor([0, MASK]).expand(2, 2, 2)
    monkeypatch.setattr(noise, "philox", lambda *_: 4 * [extremes])
    assert torch.isfinite(action_noise(space, 1, 0, 2, 0, 2)).all()


ENV_STREAMS = ENVIRONMENT_STREAM, VALIDATION_STREAM, EVALUATION_STREAM


def test_runs_streams_environments_and_resumes_share_no_seed():
    seeds = []
    for seed in range(20):
        for stream in ENV_STREAMS:
            seeds += stream_seeds(seed, stream, 0, 50)
        seeds += stream_seeds(seed, ENVIRONMENT_STREAM, 0, 50, resumed_at=3)
    assert len(set(seeds)) == len(seeds) == 20 * 4 * 50


def test_a_million_environments_of_one_run_share_no_seed():
    seeds = [
        stream_seeds(1, stream, first, 2**18) for stream in ENV_STREAMS for first in (0, 2**28)
    ]
    # 1.6 million random numbers of 31 bits would have about 570 pairs of equal numbers.
    assert len(np.unique(seeds)) == 6 * 2**18


def test_old_generators_and_c_integers_accept_the_seeds_of_any_environment():
    seeds = stream_seeds(1, ENVIRONMENT_STREAM, 0, 50) + stream_seeds(2, 6, 2**31 - 50, 50, 7)
    for seed in seeds:
        np.random.RandomState(seed)
        assert ctypes.c_int(seed).value == seed


def test_sequences_are_shuffled_differently_by_seed_iteration_epoch_and_stratum():
    orders = [
        epoch.tobytes()
        for key in ((1, 1), (2, 1), (1, 2))
        for first in (0, 4)
        for epoch in sequence_orders(key, 3, first, 4, 8, 2)
    ]
    assert len(set(orders)) == len(orders)


# ---- running statistics


def test_statistics_of_all_ranks_and_rollouts_equal_one_pass():
    normal = np.random.default_rng(0).standard_normal((96, 24, 3))
    samples = torch.from_numpy(normal * [50.0, 0.1, 300.0] + [3.0, 1e6, 3e4]).float()
    warm_up, *rollouts = samples.split(32)
    moments = RunningMoments(3)
    # The warm-up samples are merged twice: the first pass only finds their mean; the second pass
    # starts at count 0 and sums the deviations from this mean.
    for part in (warm_up, warm_up, *rollouts):
        if part is warm_up:
            moments.count.zero_()
        moments.merge(sum(map(moments.sums, part.chunk(3, dim=1))))
    wide = samples.double().flatten(0, 1).numpy()
    assert float(moments.count) == len(wide)
    np.testing.assert_allclose(moments.mean, wide.mean(0), rtol=1e-11)
    np.testing.assert_allclose(moments.variance, wide.var(0), rtol=1e-9)


@pytest.mark.parametrize(
    "seen, center, given, expected",
    [
        ([2.0, 6.0], False, [0.0, 3.0], [0.0, 1.5]),  # rewards are divided by 2, but not centred
        ([-1.0, 1.0], True, [1e6, -1e6], [10.0, -10.0]),  # outliers are clipped
        # Rounding must not make the variance of constant values negative.
        ([1e6 / 3] * 100, True, [1e6 / 3 + 1000.0], [10.0]),
    ],
)
def test_values_are_shifted_scaled_and_clipped(seen, center, given, expected):
    normalizer = Normalizer(1, center=center)
    normalizer.moments.merge(normalizer.moments.sums(torch.tensor(seen)[:, None]))
    assert float(normalizer.moments.variance) >= 0
    assert normalizer(torch.tensor(given)[:, None]).flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("window", [0, 2])
def test_observations_are_centred_before_they_become_float32(window):
    normalizer = Normalizer(1)
    normalizer.moments.mean[:] = 1.7e9
    obs = torch.tensor([[1.7e9 - 2], [1.7e9 + 2]], dtype=torch.float64)
    seen = policy_input(normalizer, torch.zeros(2, window, 1), obs)
    assert seen.dtype == torch.float32 and seen[:, -1].tolist() == [-2.0, 2.0]
