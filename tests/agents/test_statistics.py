"""Figures and intervals of trading by hand."""

import math

import numpy as np
import pytest

from agents.evaluate.statistics import Record, bootstrap_interval, mean_interval, performance

YEARS = np.geomspace(100.0, 400.0, 2 * 252 + 1)  # fourfold in two years


def figures(values, traded=0.0, fees=0.0, trades=0.0, exposure=0.0):
    """Return the figures of a path of values with the same account every day."""
    path = np.array([values], np.float64)
    account = (np.full((1, path.shape[1] - 1), each) for each in (traded, fees, trades, exposure))
    return {name: value.item() for name, value in performance(Record(path, *account)).items()}


@pytest.mark.parametrize(
    ("values", "account", "expected"),
    [
        ([100, 90, 121], {}, {"cumulative_return": 0.21}),
        (YEARS, {}, {"annual_return": 1.0, "cumulative_return": 3.0}),
        ([100, 120, 90, 150, 120], {}, {"max_drawdown": 0.25}),
        ([100, 101, 102], {}, {"max_drawdown": 0.0}),
        ([100, 60, 80], {}, {"max_drawdown": 0.4}),
        (
            [100.0] * 127,  # half a year
            {"traded": 2.0, "fees": 0.5, "trades": 3.0, "exposure": 0.8},
            {"turnover": 252 * 0.02, "fees_usd": 63.0, "num_trades": 378.0, "exposure": 0.8}
            | {"sharpe": 0.0, "sortino": 0.0},
        ),
    ],
)
def test_figures_of_a_path(values, account, expected):
    found = figures(values, **account)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("repeats", "period"), [(1, 3), (19, 57), (20, 252)])
def test_figures_are_those_of_a_year_or_of_a_span_below_60_days(repeats, period):
    """Daily returns 10 %, -10 %, 6 %: mean 2 %, downside deviation sqrt(0.01 / 3)."""
    returns = np.tile([0.1, -0.1, 0.06], repeats)
    path = 100.0 * np.cumprod(np.append(1.0, 1.0 + returns))
    deviation = returns.std(ddof=1)
    expected = {
        "sharpe": 0.02 / deviation * math.sqrt(period),
        "annual_volatility": deviation * math.sqrt(period),
        "sortino": 0.02 * period / math.sqrt(0.01 / 3 * period),
        "annual_return": (path[-1] / path[0]) ** (period / len(returns)) - 1,
        "turnover": period / path.mean(),
    }
    found = figures(path, traded=1.0)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_the_interval_of_a_mean_is_1_96_standard_errors_wide_on_either_side():
    half = 1.96 * math.sqrt(5 / 3) / 2
    found = mean_interval(np.array([1.0, 2.0, 3.0, 4.0]))
    assert found == pytest.approx((2.5, 2.5 - half, 2.5 + half))


def test_the_bootstrap_interval_holds_the_estimate_and_repeats():
    rng = np.random.default_rng(1)
    baseline = 0.01 * rng.standard_normal(500)
    policy = baseline + 0.001 + 0.002 * rng.standard_normal(500)
    found = bootstrap_interval(policy, baseline)
    assert found == bootstrap_interval(policy, baseline)
    figures_of = {
        "annual_return": lambda x: math.prod(1 + x) ** (252 / len(x)) - 1,
        "sharpe": lambda x: math.sqrt(252) * x.mean() / x.std(ddof=1),
    }
    for name, (estimate, low, high) in found.items():
        assert low < estimate < high
        figure = figures_of[name]
        assert estimate == pytest.approx(figure(policy) - figure(baseline))
