import math

import numpy as np
import pytest

from agents.evaluate.statistics import (
    Record,
    bootstrap_interval,
    mean_interval,
    performance,
)


def record(*values, traded=0.0, fees=0.0, trades=0.0, exposure=0.0):
    """A record of the given value paths, with the same account every day."""
    paths = np.array(values, dtype=np.float64)
    shape = (paths.shape[0], paths.shape[1] - 1)
    return Record(
        values=paths,
        traded_usd=np.full(shape, traded),
        fees_usd=np.full(shape, fees),
        num_trades=np.full(shape, trades),
        exposure=np.full(shape, exposure),
    )


def figures(*values, **account):
    return {name: value.tolist() for name, value in performance(record(*values, **account)).items()}


def test_cumulative_and_annual_return_are_those_of_the_whole_path():
    assert figures([100.0, 90.0, 121.0])["cumulative_return"] == pytest.approx([0.21])
    doubling = np.geomspace(100.0, 400.0, 2 * 252 + 1)  # fourfold in two years
    assert figures(doubling)["annual_return"] == pytest.approx([1.0])


@pytest.mark.parametrize(("repeats", "period"), [(1, 3), (19, 57), (20, 252)])
def test_figures_are_those_of_a_year_or_of_a_span_below_60_days(repeats, period):
    """Daily returns 10 %, -10 %, 6 %: mean 2 %, downside deviation sqrt(0.01 / 3)."""
    returns = np.tile([0.1, -0.1, 0.06], repeats)
    path = 100.0 * np.cumprod(np.append(1.0, 1.0 + returns))
    found = figures(path, traded=1.0)
    deviation = returns.std(ddof=1)
    assert found["sharpe"] == pytest.approx([0.02 / deviation * math.sqrt(period)])
    assert found["annual_volatility"] == pytest.approx([deviation * math.sqrt(period)])
    assert found["sortino"] == pytest.approx([0.02 * period / math.sqrt(0.01 / 3 * period)])
    growth = (path[-1] / path[0]) ** (period / len(returns)) - 1
    assert found["annual_return"] == pytest.approx([growth])
    assert found["turnover"] == pytest.approx([period / path.mean()])


def test_the_drawdown_is_the_deepest_fall_from_an_earlier_peak():
    assert figures([100.0, 120.0, 90.0, 150.0, 120.0])["max_drawdown"] == pytest.approx([0.25])
    assert figures([100.0, 101.0, 102.0])["max_drawdown"] == [0.0]
    assert figures([100.0, 60.0, 80.0])["max_drawdown"] == pytest.approx([0.4])


def test_accounts_are_summed_and_turnover_is_per_year_of_the_mean_value():
    half_year = figures([100.0] * 127, traded=2.0, fees=0.5, trades=3.0, exposure=0.8)
    assert half_year["turnover"] == pytest.approx([126 * 2.0 / 100.0 * 2])
    assert half_year["fees_usd"] == pytest.approx([63.0])
    assert half_year["num_trades"] == pytest.approx([378.0])
    assert half_year["exposure"] == pytest.approx([0.8])


def test_the_interval_of_a_mean_is_1_96_standard_errors_wide_on_either_side():
    mean, low, high = mean_interval(np.array([1.0, 2.0, 3.0, 4.0]))
    half = 1.96 * math.sqrt(5 / 3) / 2
    assert (mean, low, high) == pytest.approx((2.5, 2.5 - half, 2.5 + half))


def paths(seed, days=500, gain=0.0):
    rng = np.random.default_rng(seed)
    baseline = 0.01 * rng.standard_normal(days)
    return baseline + gain + 0.002 * rng.standard_normal(days), baseline


def test_the_bootstrap_interval_holds_the_estimate_and_repeats():
    policy, baseline = paths(1, gain=0.001)
    found = bootstrap_interval(policy, baseline)
    assert found == bootstrap_interval(policy, baseline)
    for estimate, low, high in found.values():
        assert low < estimate < high
    compound = [math.prod(1 + x) ** (252 / len(x)) - 1 for x in (policy, baseline)]
    assert found["annual_return"][0] == pytest.approx(compound[0] - compound[1])
    sharpe = [math.sqrt(252) * x.mean() / x.std(ddof=1) for x in (policy, baseline)]
    assert found["sharpe"][0] == pytest.approx(sharpe[0] - sharpe[1])
