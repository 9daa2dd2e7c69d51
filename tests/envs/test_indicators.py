"""Indicators: causal, and right on series with known answers."""

import numpy as np
import pytest

from envs.trading import indicators

ALL = {
    "macd": lambda bars: indicators.macd(bars["close"]),
    "rsi": lambda bars: indicators.rsi(bars["close"]),
    "cci": lambda bars: indicators.cci(bars["high"], bars["low"], bars["close"]),
    "adx": lambda bars: indicators.adx(bars["high"], bars["low"], bars["close"]),
    "trailing_mean": lambda bars: indicators.trailing_mean(bars["close"]),
    "turbulence": lambda bars: indicators.turbulence(bars["close"], days=100),
}
WARM_DAY = {"macd": 25, "rsi": 30, "cci": 29, "adx": 59, "trailing_mean": 19, "turbulence": 101}


def random_bars(num_days: int, n: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    common = rng.standard_t(4, size=(num_days, 1)) * 0.006
    close = 50.0 * np.exp(np.cumsum(common + rng.standard_t(4, size=(num_days, n)) * 0.008, axis=0))
    spread = close * rng.uniform(0.001, 0.02, size=(2, num_days, n))
    return {"close": close, "high": close + spread[0], "low": close - spread[1]}


@pytest.mark.parametrize("name", ALL)
def test_changing_future_bars_never_changes_past_values(name):
    bars = random_bars(300, 3)
    before = ALL[name](bars)
    for today in (WARM_DAY[name], 150, 298):
        changed = {key: np.array(values) for key, values in bars.items()}
        for values in changed.values():
            values[today + 1 :] *= np.linspace(3.0, 0.2, 299 - today)[:, None]
        after = ALL[name](changed)
        np.testing.assert_array_equal(after[: today + 1], before[: today + 1])
        assert not np.array_equal(after[today + 1 :], before[today + 1 :], equal_nan=True)


@pytest.mark.parametrize("name", ALL)
def test_values_are_nan_exactly_until_the_indicator_is_warm(name):
    values = ALL[name](random_bars(300, 3))
    assert np.isnan(values[: WARM_DAY[name]]).all()
    assert np.isfinite(values[WARM_DAY[name] :]).all()


def test_macd_of_a_straight_line_is_seven_times_its_slope():
    # an exponential mean of d days lags a straight line by (d - 1) / 2 days: 12.5 - 5.5 = 7
    values = indicators.macd(100.0 + 0.5 * np.arange(400.0)[:, None])
    np.testing.assert_allclose(values[25:], 3.5, rtol=1e-9)


def test_rsi_is_100_on_the_way_up_and_0_on_the_way_down():
    line = np.arange(1.0, 101.0)
    values = indicators.rsi(np.stack([line, line[::-1]], axis=1))
    np.testing.assert_allclose(values[30:], np.tile([100.0, 0.0], (70, 1)), atol=1e-9)


def test_adx_is_100_in_a_pure_trend_of_either_direction():
    line = np.stack([np.arange(100.0, 220.0), np.arange(220.0, 100.0, -1.0)], axis=1)
    values = indicators.adx(line + 0.5, line - 0.5, line)
    np.testing.assert_allclose(values[59:], 100.0, rtol=1e-9)


def test_turbulence_equals_a_slow_reference_on_single_days():
    close = random_bars(420, 6)["close"]
    values = indicators.turbulence(close)
    for day in (253, 317, 318, 419):  # the first one, both sides of a batch, the last one
        history = np.array([close[t] / close[t - 1] - 1 for t in range(day - 252, day)])
        apart = close[day] / close[day - 1] - 1 - history.mean(axis=0)
        expected = apart @ np.linalg.inv(np.cov(history, rowvar=False)) @ apart
        assert values[day] == pytest.approx(expected, rel=1e-6)


def test_turbulence_survives_a_twin_and_a_stock_that_never_moves():
    close = random_bars(300, 3)["close"]
    expected = indicators.turbulence(close)
    still = indicators.turbulence(np.concatenate([close, np.full((300, 1), 7.0)], axis=1))
    np.testing.assert_allclose(still, expected, rtol=1e-6)
    twin = indicators.turbulence(np.concatenate([close, 2.0 * close[:, :1]], axis=1))
    np.testing.assert_allclose(twin, expected, rtol=1e-4)


def test_turbulence_refuses_a_window_too_short_for_its_stocks():
    with pytest.raises(ValueError, match="fewer stocks than its 30 days"):
        indicators.turbulence(random_bars(100, 30)["close"], days=30)
