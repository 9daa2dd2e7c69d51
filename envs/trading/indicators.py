"""Indicators of daily bars: MACD, RSI, CCI, ADX, trailing mean, turbulence.

All are causal and NaN while they warm up. Inputs and results are [D, n], one column per stock, so
that several markets can be laid side by side as [D, M*n].
"""

from collections.abc import Callable

import numpy as np
import talib

INDICATOR_DAYS = 30
# Windows copied at once: 64 x 252 x 30 float64 are 4 MB, about the size of a cache
TURBULENCE_BATCH_DAYS = 64
CORRELATION_RIDGE = 1e-9  # keeps the correlation matrix of tickers that move as one solvable
MIN_STD = 1e-12  # daily returns with a smaller deviation are rounding noise around a constant


def macd(close: np.ndarray) -> np.ndarray:
    """Return the 12-day minus the 26-day exponential mean, warm from day 25 on."""
    return _by_column(talib.EMA, 12, close) - _by_column(talib.EMA, 26, close)


def rsi(close: np.ndarray) -> np.ndarray:
    """Return the 30-day relative strength index, 0..100, warm from day 30 on."""
    return _by_column(talib.RSI, INDICATOR_DAYS, close)


def cci(high: np.ndarray, low: np.ndarray, close: np.ndarray) -> np.ndarray:
    """Return the 30-day commodity channel index, scale-free, warm from day 29 on."""
    return _by_column(talib.CCI, INDICATOR_DAYS, high, low, close)


def adx(high: np.ndarray, low: np.ndarray, close: np.ndarray) -> np.ndarray:
    """Return the 30-day average directional index, 0..100, warm from day 59 on."""
    return _by_column(talib.ADX, INDICATOR_DAYS, high, low, close)


def trailing_mean(values: np.ndarray, days: int = 20) -> np.ndarray:
    """Return the mean of the last `days` values, warm from day `days - 1` on."""
    return _by_column(talib.SMA, days, values)


def turbulence(close: np.ndarray, days: int = 252) -> np.ndarray:
    """Return the squared Mahalanobis distance of today's returns from the past.

    Mean and covariance come from the `days` daily returns before today; today is not among them. A
    stock that did not move at all in the window is left out on that day, its scale being unknown.

    Returns: [D], about n in ordinary times (n stocks), warm from day `days + 1` on.
    Raises: ValueError: more stocks than a covariance over `days` returns can have.
    Source: Kritzman and Li, "Skulls, Financial Turbulence, and Risk Management" (2010), not
        divided by n.
    """
    num_days, n = close.shape
    if days <= n:
        raise ValueError(f"turbulence needs fewer stocks than its {days} days, got {n}")
    values = np.full(num_days, np.nan)
    if num_days < days + 2:
        return values
    returns = close[1:] / close[:-1] - 1.0  # [D-1, n]; returns[i] belongs to day i + 1
    # [D-1-days, n, days]
    windows = np.lib.stride_tricks.sliding_window_view(returns[:-1], days, axis=0)
    today = returns[days:]  # [D-1-days, n]
    for start in range(0, len(today), TURBULENCE_BATCH_DAYS):
        batch = slice(start, start + TURBULENCE_BATCH_DAYS)
        values[days + 1 :][batch] = _squared_distance(today[batch], windows[batch])
    return values


def _squared_distance(today: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Return the squared Mahalanobis distance [b] of today [b, n] from windows [b, n, days]."""
    mean = windows.mean(axis=2)  # [b, n]
    centred = windows - mean[:, :, None]
    std = np.sqrt((centred**2).sum(axis=2) / (windows.shape[2] - 1))
    # 0 leaves a constant stock out
    scale = np.where(std > MIN_STD, 1.0 / np.maximum(std, MIN_STD), 0.0)
    centred *= scale[:, :, None]
    # Correlations, not covariances: the ridge then means the same for calm and for wild stocks.
    correlation = centred @ centred.transpose(0, 2, 1) / (windows.shape[2] - 1)
    diagonal = np.arange(today.shape[1])
    correlation[:, diagonal, diagonal] = 1.0 + CORRELATION_RIDGE
    z = (today - mean) * scale
    return (z * np.linalg.solve(correlation, z[:, :, None])[:, :, 0]).sum(axis=1)


def _by_column(function: Callable[..., np.ndarray], days: int, *arrays: np.ndarray) -> np.ndarray:
    """Run a TA-Lib function of 1-D arrays over the columns of [D, n] arrays."""
    # TA-Lib would quietly give wrong values around a NaN
    assert all(np.isfinite(array).all() for array in arrays), "prices must be finite"
    rows = [np.ascontiguousarray(array.T, dtype=np.float64) for array in arrays]  # each [n, D]
    columns = [function(*row, days) for row in zip(*rows, strict=True)]
    return np.ascontiguousarray(np.transpose(columns))
