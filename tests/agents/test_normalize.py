import numpy as np
import pytest
import torch

from agents.network.inputs import Normalizer, RunningMoments


def samples(count, num_features=3, seed=0, offset=0.0, scale=1.0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((count, num_features)) * scale + offset).float()


def moments_of(*merges):
    """Moments after merges, each a list of the ranks' samples."""
    moments = RunningMoments(merges[0][0].shape[-1])
    for ranks in merges:
        moments.merge(torch.stack([moments.sums(part) for part in ranks]).sum(0))
    return moments


def assert_moments(moments, everything, rtol=1e-9):
    wide = everything.double().numpy().reshape(-1, everything.shape[-1])
    assert float(moments.count) == len(wide)
    np.testing.assert_allclose(moments.mean.numpy(), wide.mean(0), rtol=rtol, atol=1e-12)
    np.testing.assert_allclose(moments.variance.numpy(), wide.var(0), rtol=rtol)


def test_statistics_merged_over_ranks_and_rollouts_equal_one_pass_over_everything():
    everything = samples(240, offset=3.0, scale=torch.tensor([0.1, 1.0, 50.0]).numpy())
    merges = [
        [everything[0:20], everything[20:40]],
        [everything[40:90], everything[90:140]],
        [everything[140:]],
    ]
    assert_moments(moments_of(*merges), everything)


@pytest.mark.parametrize("offset", [1e3, 1e5, 1e6])
def test_large_offsets_do_not_cost_the_variance(offset):
    everything = samples(6000, offset=offset, scale=2.0)
    assert_moments(moments_of(*[[part] for part in everything.chunk(6)]), everything, rtol=2e-4)


def test_a_constant_feature_has_no_negative_variance_and_stays_finite():
    constant = torch.full((100, 1), 1e6 / 3)
    normalizer = Normalizer(1)
    normalizer.moments.merge(normalizer.moments.sums(constant))
    assert float(normalizer.moments.variance) >= 0
    assert torch.isfinite(normalizer(constant)).all()
    assert normalizer(constant + 1000.0).abs().max() <= 10.0


def test_rewards_are_scaled_and_not_shifted():
    """Shifting rewards would change what is best; a reward of 0 must stay 0."""
    normalizer = Normalizer(1, center=False)
    normalizer.moments.merge(normalizer.moments.sums(torch.tensor([[2.0], [6.0]])))  # variance 4
    torch.testing.assert_close(
        normalizer(torch.tensor([[0.0], [3.0]])), torch.tensor([[0.0], [1.5]])
    )


def test_outliers_are_clipped():
    normalizer = Normalizer(1)
    normalizer.moments.merge(normalizer.moments.sums(torch.tensor([[-1.0], [1.0]])))
    assert normalizer(torch.tensor([[1e6], [-1e6]])).flatten().tolist() == [10.0, -10.0]


@pytest.mark.parametrize(("offset", "deviation"), [(1e6, 0.1), (1e6, 1.0), (3e4, 300.0)])
def test_statistics_gathered_again_around_their_own_mean_are_the_same_for_any_grouping(
    offset, deviation
):
    """As the warm-up does: around zero, a large offset costs digits, others for other ranks."""
    generator = torch.Generator().manual_seed(1)
    samples = (offset + deviation * torch.randn(64, 24, 1, generator=generator)).float()

    def normalized(num_ranks):
        normalizer = Normalizer(1)
        for _ in range(2):
            normalizer.moments.restart()
            parts = samples.chunk(num_ranks, dim=1)
            normalizer.moments.merge(sum(map(normalizer.moments.sums, parts)))
        assert float(normalizer.moments.count) == samples.numel()
        return normalizer(samples.double())

    alone = normalized(1)
    assert float(alone.std()) == pytest.approx(1.0, rel=1e-3)
    for num_ranks in (2, 3, 4, 8):
        torch.testing.assert_close(normalized(num_ranks), alone, rtol=0, atol=1e-9)
