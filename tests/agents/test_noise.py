import numpy as np
import pytest
import torch
from gymnasium import spaces

import agents.network.noise
from agents.network.noise import MASK, action_noise, philox, random_words
from agents.network.seeds import ENVIRONMENT_STREAM, EVALUATION_STREAM, POLICY_STREAM, stream_seeds


def box(num_actions):
    return spaces.Box(-1.0, 1.0, (num_actions,), np.float32)


SPACES = [box(1), box(2), box(9), spaces.Discrete(2), spaces.Discrete(7)]


def test_words_are_those_of_the_known_answers():
    """Lines `philox4x32 10` of Random123's kat_vectors: counter, key, words."""
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


def test_every_bit_of_the_words_is_fair_and_no_word_comes_twice():
    words = torch.stack(random_words(7, 0, 64, 2**32 - 50, 100, 5))  # over the end of 32 bits
    whole = (words[0] << 32 | words[1]).flatten()
    assert len(whole.unique()) == whole.numel() == 64 * 100 * 5
    ones = (words[..., None] >> torch.arange(32) & 1).double().flatten(1, 3).mean(1)  # [2, 32]
    assert (ones - 0.5).abs().max() < 4.5 * 0.5 / whole.numel() ** 0.5


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_noise_does_not_depend_on_how_environments_are_grouped_into_ranks(space):
    together = action_noise(space, 3, 0, 8, 32, 16)
    for num_ranks in (2, 4, 8):
        size = 8 // num_ranks
        parts = [action_noise(space, 3, rank * size, size, 32, 16) for rank in range(num_ranks)]
        assert torch.equal(torch.cat(parts, dim=1), together)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_noise_does_not_depend_on_how_steps_are_cut_into_rollouts(space):
    at_once = action_noise(space, 3, 5, 2, 0, 256)
    for length in (128, 1, 3):
        starts = range(0, 256, length)
        parts = [action_noise(space, 3, 5, 2, start, min(length, 256 - start)) for start in starts]
        assert torch.equal(torch.cat(parts), at_once)


def test_noise_of_boxes_is_standard_normal():
    noise = action_noise(box(5), 11, 0, 40, 0, 1000).numpy()  # 200,000 numbers
    assert abs(noise.mean()) < 0.01
    assert abs(noise.var() - 1.0) < 0.02
    assert abs((noise**3).mean()) < 0.05
    assert abs((noise**4).mean() - 3.0) < 0.1
    for bound, share in ((1.0, 0.3173), (1.96, 0.0500), (3.0, 0.0027)):
        assert abs((np.abs(noise) > bound).mean() - share) < 0.004


def test_the_largest_logit_plus_noise_samples_the_softmax():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    noise = action_noise(spaces.Discrete(4), 5, 0, 50, 0, 2000).numpy()
    counts = np.bincount((noise + logits).argmax(-1).ravel(), minlength=4) / 100_000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.15, 0.05], atol=0.006)


@pytest.mark.parametrize("word", [0, 2**64 - 1, 2**32, 2**32 - 1, 2**63])
@pytest.mark.parametrize("space", [box(2), spaces.Discrete(3)], ids=str)
def test_noise_is_finite_for_every_random_word(monkeypatch, space, word):
    def words(seed, env_offset, num_envs, first_step, num_steps, num_words, device):
        shape = (num_steps, num_envs, num_words)
        return torch.full(shape, word >> 32), torch.full(shape, word & MASK)

    monkeypatch.setattr(agents.network.noise, "random_words", words)
    assert torch.isfinite(action_noise(space, 1, 0, 2, 0, 2)).all()


def test_runs_streams_environments_and_lives_share_no_seed():
    seeds = []
    for seed in range(20):
        for stream in (POLICY_STREAM, ENVIRONMENT_STREAM, EVALUATION_STREAM):
            seeds += stream_seeds(seed, stream, 0, 50)
        seeds += stream_seeds(seed, ENVIRONMENT_STREAM, 0, 50, resumed_at=3)
    assert len(set(seeds)) == len(seeds) == 20 * 4 * 50


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_colored_noise_is_standard_normal_at_every_step_with_the_spectrum_asked_for(exponent):
    noise = action_noise(box(2), 7, 0, 2000, 0, 64, color=exponent).numpy()  # [64, 2000, 2]
    variances = noise.reshape(64, -1).var(axis=1)
    assert abs(variances - 1.0).max() < 0.12  # 4000 numbers each: a deviation of 0.022
    assert abs((noise**4).mean() - 3.0) < 0.3
    power = (abs(np.fft.rfft(noise, axis=0)) ** 2).mean(axis=(1, 2))[1:-1]  # of frequencies
    slope = np.polyfit(np.log(np.arange(1, 32)), np.log(power), 1)[0]
    assert slope == pytest.approx(-exponent, abs=0.05)


def test_colored_noise_does_not_depend_on_how_environments_are_grouped_into_ranks():
    together = action_noise(box(3), 3, 0, 8, 32, 16, color=1.0)
    parts = [action_noise(box(3), 3, first, 2, 32, 16, color=1.0) for first in (0, 2, 4, 6)]
    assert torch.equal(torch.cat(parts, dim=1), together)


def test_no_color_and_rollouts_of_one_step_leave_the_noise_white():
    white = action_noise(box(3), 3, 0, 8, 32, 16)
    assert torch.equal(action_noise(box(3), 3, 0, 8, 32, 16, color=0.0), white)
    assert torch.equal(action_noise(box(3), 3, 0, 8, 32, 1, color=1.0), white[:1])


def test_choices_among_few_actions_keep_their_noise():
    space = spaces.Discrete(4)
    assert torch.equal(
        action_noise(space, 3, 0, 8, 32, 16, color=1.0), action_noise(space, 3, 0, 8, 32, 16)
    )
