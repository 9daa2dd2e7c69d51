"""Indicators use no future bars and give the known values of simple series."""

from dataclasses import replace

import numpy as np
import pytest
from trading_markets import random_market, scaled

from envs.trading import features

INDICATORS = {  # name: (function, first day with a value)
    "macd": (features.macd, 25),
    "rsi": (features.rsi, 30),
    "cci": (features.cci, 29),
    "adx": (features.adx, 59),
    "trailing_mean": (lambda bars: features.trailing_mean(bars.close), 19),
    "turbulence": (lambda bars: features.turbulence(bars.close, days=100), 101),
}


@pytest.mark.parametrize("name", INDICATORS)
def test_values_are_nan_until_warm_and_never_change_with_later_bars(name):
    indicator, warm_day = INDICATORS[name]
    bars = random_market(num_days=300)
    before = indicator(bars)
    assert np.isnan(before[:warm_day]).all() and np.isfinite(before[warm_day:]).all()
    for today in (warm_day, 150, 298):
        after = indicator(scaled(bars, today + 1, 3.0))
        np.testing.assert_array_equal(after[: today + 1], before[: today + 1])
        assert not np.array_equal(after[today + 1 :], before[today + 1 :], equal_nan=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # a d-day exponential mean lags a straight line by (d - 1) / 2 days: 12.5 - 5.5 = 7
        ("macd", [7.0, -7.0]),
        ("rsi", [100.0, 0.0]),  # rising line, falling line
        ("adx", [100.0, 100.0]),  # both are pure trends
    ],
)
def test_straight_lines_have_known_values(name, expected):
    indicator, warm_day = INDICATORS[name]
    up = np.arange(100.0, 220.0)
    lines = np.stack([up, up[::-1]], axis=1)
    bars = replace(random_market(), close=lines, high=lines + 0.5, low=lines - 0.5)
    values = indicator(bars)[warm_day:]
    np.testing.assert_allclose(values, np.tile(expected, (len(values), 1)), atol=1e-9)


def test_turbulence_equals_a_slow_reference_on_single_days():
    close = random_market(num_stocks=6).close
    values = features.turbulence(close)
    for day in (253, 317, 419):
        history = np.array([close[t] / close[t - 1] - 1 for t in range(day - 252, day)])
        apart = close[day] / close[day - 1] - 1 - history.mean(axis=0)
        expected = apart @ np.linalg.inv(np.cov(history, rowvar=False)) @ apart
        assert values[day] == pytest.approx(expected, rel=1e-6)


def test_turbulence_survives_a_twin_and_a_stock_that_never_moves():
    close = random_market(num_days=300).close
    expected = features.turbulence(close)
    for other, rtol in ((np.full((300, 1), 7.0), 1e-6), (2.0 * close[:, :1], 1e-4)):
        values = features.turbulence(np.concatenate([close, other], axis=1))
        np.testing.assert_allclose(values, expected, rtol=rtol)
