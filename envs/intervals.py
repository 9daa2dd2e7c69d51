"""Confidence intervals by the bootstrap."""

import numpy as np

RESAMPLES = 2000  # number of bootstrap samples
ENDS = (0.025, 0.975)  # quantiles at the ends of a 95 % interval
Interval = dict[str, float]  # keys: mean, and low and high, the ends of its 95 % interval


def mean_interval(samples: np.ndarray | list[float]) -> Interval:
    """Return the mean of R independent samples and its bootstrap interval.

    Source: Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice",
    NeurIPS 2021, https://arxiv.org/abs/2108.13264.
    """
    draws = np.random.default_rng(0).choice(samples, (RESAMPLES, len(samples)))
    return interval(np.mean(samples), draws.mean(axis=1))


def interval(mean: float | np.floating, draws: np.ndarray) -> Interval:
    """Return a mean with the 95 % interval of its bootstrap draws."""
    low, high = np.quantile(draws, ENDS).tolist()
    return {"mean": float(mean), "low": low, "high": high}
