"""Trading evaluations: figures of one pass, intervals over worlds or days."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

TRADING_DAYS = 252  # per year
MIN_ANNUAL_DAYS = 60  # fewer days say nothing about a year
BLOCK_DAYS = 21  # of the block bootstrap: about a month, longer than volatility's short memory
RESAMPLES = 2000


@dataclass(frozen=True)
class Record:
    """Account of one policy over one pass of M markets of D + 1 days."""

    values: np.ndarray  # [M, D+1] portfolio value, USD
    traded_usd: np.ndarray  # [M, D]
    fees_usd: np.ndarray  # [M, D]
    num_trades: np.ndarray  # [M, D]
    exposure: np.ndarray  # [M, D] share of the value held in stocks
    # [M, D, 2n], empty if not kept: of each stock the share of the value after the day, then of
    # each stock the USD for which it was bought, negative where sold
    stocks: np.ndarray = field(default_factory=lambda: np.empty(0))

    @property
    def returns(self) -> np.ndarray:
        """Simple daily returns, [M, D]."""
        return self.values[:, 1:] / self.values[:, :-1] - 1.0


def period_days(num_days: int) -> int:
    """Return the days that figures are scaled to: a year, or a short span itself."""
    return TRADING_DAYS if num_days >= MIN_ANNUAL_DAYS else num_days


def sharpe_ratio(returns: np.ndarray) -> np.ndarray:
    """Return the Sharpe ratio of a period (risk-free rate 0); 0 without risk."""
    days = period_days(returns.shape[-1])
    return _ratio(returns.mean(-1) * np.sqrt(days), _deviation(returns))


def _ratio(gain: np.ndarray, risk: np.ndarray) -> np.ndarray:
    riskless = risk < 1e-12
    return np.where(riskless, 0.0, gain / np.where(riskless, 1.0, risk))


def _deviation(returns: np.ndarray) -> np.ndarray:
    return returns.std(axis=-1, ddof=min(1, returns.shape[-1] - 1))  # 0 for a single day


def annual_growth(returns: np.ndarray) -> np.ndarray:
    """Compound return per period of daily returns along the last axis."""
    growth = np.maximum(np.prod(1.0 + returns, axis=-1), 0.0)
    num_days = returns.shape[-1]
    return growth ** (period_days(num_days) / num_days) - 1.0


def performance(record: Record) -> dict[str, np.ndarray]:
    """Figures of each market, each [M]; turnover is per period of the mean value.

    A period is a year, or the whole span where that is too short to be annualised.
    """
    returns, values = record.returns, record.values
    period = period_days(returns.shape[1])
    periods = returns.shape[1] / period
    growth = values[:, -1] / values[:, 0]
    downside = np.sqrt(np.square(np.minimum(returns, 0.0)).mean(1) * period)
    peaks = np.maximum.accumulate(values, axis=1)
    return {
        "cumulative_return": growth - 1.0,
        "annual_return": np.maximum(growth, 0.0) ** (1.0 / periods) - 1.0,
        "annual_volatility": _deviation(returns) * np.sqrt(period),
        "sharpe": sharpe_ratio(returns),
        "sortino": _ratio(returns.mean(1) * period, downside),
        "max_drawdown": (1.0 - values / peaks).max(1),
        "turnover": record.traded_usd.sum(1) / values.mean(1) / periods,
        "num_trades": record.num_trades.sum(1),
        "fees_usd": record.fees_usd.sum(1),
        "exposure": record.exposure.mean(1),
    }


def mean_interval(samples: np.ndarray) -> tuple[float, float, float]:
    """Mean of independent samples [M] and its 95 % interval (normal approximation)."""
    half = 1.96 * samples.std(ddof=1) / np.sqrt(len(samples))
    return float(samples.mean()), float(samples.mean() - half), float(samples.mean() + half)


def bootstrap_interval(
    returns: np.ndarray,  # [D] daily returns of the policy
    baseline: np.ndarray,  # [D] of the baseline on the same days
    seed: int = 0,
) -> dict[str, tuple[float, float, float]]:
    """Differences to the baseline on one market, with 95 % intervals.

    Returns (estimate, low, high) of "sharpe" and of "annual_return" (compound), from resampled
    blocks of days. Source: circular block bootstrap, Politis and Romano (1992).
    """
    days = len(returns)
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, days, (RESAMPLES, -(-days // BLOCK_DAYS)))
    index = ((starts[:, :, None] + np.arange(BLOCK_DAYS)) % days).reshape(RESAMPLES, -1)[:, :days]
    found = {}
    for name, figure in (("sharpe", sharpe_ratio), ("annual_return", annual_growth)):
        draws = figure(returns[index]) - figure(baseline[index])
        low, high = np.quantile(draws, [0.025, 0.975])
        found[name] = (float(figure(returns) - figure(baseline)), float(low), float(high))
    return found


@dataclass(frozen=True)
class ScoreIntervals:
    """Aggregates over runs and tasks: value, and the ends of its 95 % interval."""

    mean: tuple[float, float, float]
    interquartile_mean: tuple[float, float, float]


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Mean of the middle half of the last axis; parts of scores count in parts."""
    ordered = np.sort(scores, axis=-1)
    count = scores.shape[-1]
    ends = np.clip(np.arange(count + 1), count / 4, 3 * count / 4)  # of each score's share
    return (ordered * np.diff(ends)).sum(-1) / (count / 2)


def score_intervals(
    scores: np.ndarray,  # [R, T] of R runs on T tasks, in one unit
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> ScoreIntervals:
    """Aggregate scores, with intervals of the stratified bootstrap (by task).

    Source: Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice",
    NeurIPS 2021, https://arxiv.org/abs/2108.13264 (their library: rliable).
    """
    runs, tasks = scores.shape
    picks = np.random.default_rng(seed).integers(0, runs, (resamples, runs, tasks))
    drawn = scores[picks, np.arange(tasks)].reshape(resamples, -1)  # [N, R * T]
    found = []
    for figure in (lambda values: values.mean(-1), interquartile_mean):
        low, high = np.quantile(figure(drawn), [0.025, 0.975])
        found.append((float(figure(scores.ravel())), float(low), float(high)))
    return ScoreIntervals(*found)
