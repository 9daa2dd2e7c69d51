"""Indicators of daily bars: MACD, RSI, CCI, ADX, trailing mean, turbulence.

All are causal: the value of a day uses that day's bar and earlier ones only. While an indicator warms up its
value is NaN; nothing is back-filled. Columns do not see each other (except in turbulence), so that several
markets can be laid side by side as [D, M*n].
"""

from collections.abc import Callable

import numpy as np
import talib

TURBULENCE_BATCH_DAYS = (
    64  # windows copied at once: 64 x 252 x 30 float64 are 4 MB, about the size of a cache
)
CORRELATION_RIDGE = 1e-9  # keeps the correlation matrix of tickers that move as one solvable
MIN_STD = 1e-12  # daily returns with a smaller deviation are rounding noise around a constant


def macd(close: np.ndarray) -> np.ndarray:
    """MACD line: the 12-day minus the 26-day exponential mean of the close.

    Returns: [D, n] in the unit of the price, warm from day 25 on. It is the line, not the signal; each mean
        starts as the plain mean of its first days.
    Source: TA-Lib's EMA, https://ta-lib.org/functions/ema/
    """
    return _by_column(talib.EMA, close, days=12) - _by_column(talib.EMA, close, days=26)


def rsi(close: np.ndarray, days: int = 30) -> np.ndarray:
    """Relative strength index with Wilder's smoothing.

    Returns: [D, n] in 0..100, warm from day `days` on; 0 for a price that never moved (TA-Lib's convention).
    Source: https://ta-lib.org/functions/rsi/
    """
    return _by_column(talib.RSI, close, days=days)


def cci(high: np.ndarray, low: np.ndarray, close: np.ndarray, days: int = 30) -> np.ndarray:
    """Commodity channel index: typical price against its mean.

    Returns: [D, n] in 0.015 mean deviations, scale-free, warm from day `days - 1` on; 0 for a price that did not move.
    Source: https://ta-lib.org/functions/cci/
    """
    return _by_column(talib.CCI, high, low, close, days=days)


def adx(high: np.ndarray, low: np.ndarray, close: np.ndarray, days: int = 30) -> np.ndarray:
    """Average directional index: the strength of a trend, whichever its direction.

    Returns: [D, n] in 0..100, warm from day `2 * days - 1` on.
    Source: https://ta-lib.org/functions/adx/
    """
    return _by_column(talib.ADX, high, low, close, days=days)


def trailing_mean(close: np.ndarray, days: int = 20) -> np.ndarray:
    """Mean of the last `days` values, today included.

    Returns: [D, n] in the unit of the input, warm from day `days - 1` on.
    """
    return _by_column(talib.SMA, close, days=days)


def turbulence(close: np.ndarray, days: int = 252) -> np.ndarray:
    """Squared Mahalanobis distance of today's returns from the trailing window's.

    Mean and covariance come from the `days` daily returns before today; today is not among them. A stock that
    did not move at all in the window is left out on that day, as its scale is unknown.

    Returns: [D], about n in ordinary times (n stocks), warm from day `days + 1` on.
    Raises: ValueError for prices that are not positive, or a window too short for a covariance of full rank.
    Source: Kritzman and Li, "Skulls, Financial Turbulence, and Risk Management" (2010), not divided by n.
    """
    close = _checked("close", close)
    num_days, n = close.shape
    if days <= n:
        raise ValueError(
            f"turbulence: days must be more than the {n} stocks, got {days}: take a longer window"
        )
    if (close <= 0).any():
        raise ValueError("turbulence: close must be positive: check the data")
    values = np.full(num_days, np.nan)
    if num_days < days + 2:
        return values
    returns = close[1:] / close[:-1] - 1.0  # [D-1, n]; returns[i] belongs to day i + 1
    windows = np.lib.stride_tricks.sliding_window_view(returns[:-1], days, axis=0)  # [D-1-days, n, days]
    today = returns[days:]  # [D-1-days, n]
    for start in range(0, len(today), TURBULENCE_BATCH_DAYS):
        batch = slice(start, start + TURBULENCE_BATCH_DAYS)
        values[days + 1 :][batch] = _squared_distance(today[batch], windows[batch])
    return values


def first_warm_day(*arrays: np.ndarray) -> int:
    """First day from which on every value of every array is finite.

    Returns: an index into the first axis, which all arrays ([D] or [D, n]) share.
    Raises: ValueError when there is no such day.
    """
    assert arrays and len({len(array) for array in arrays}) == 1, "one or more arrays over the same days"
    num_days = len(arrays[0])
    cold = np.zeros(num_days, dtype=bool)
    for array in arrays:
        cold |= ~np.isfinite(array.reshape(num_days, -1)).all(axis=1)
    first = int(np.flatnonzero(cold)[-1]) + 1 if cold.any() else 0
    if first >= num_days:
        raise ValueError(
            f"no day is left after the indicators' warm-up, got {num_days} days: use a longer history"
        )
    return first


def _squared_distance(today: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Mahalanobis distance, squared, of today [b, n] from the sample windows [b, n, days]: [b]."""
    mean = windows.mean(axis=2)  # [b, n]
    centred = windows - mean[:, :, None]
    std = np.sqrt((centred**2).sum(axis=2) / (windows.shape[2] - 1))
    scale = np.where(std > MIN_STD, 1.0 / np.maximum(std, MIN_STD), 0.0)  # 0 leaves a constant stock out
    centred *= scale[:, :, None]
    # Correlations instead of covariances: the ridge then means the same for calm and for wild stocks.
    correlation = centred @ centred.transpose(0, 2, 1) / (windows.shape[2] - 1)
    diagonal = np.arange(today.shape[1])
    correlation[:, diagonal, diagonal] = 1.0 + CORRELATION_RIDGE
    z = (today - mean) * scale
    return (z * np.linalg.solve(correlation, z[:, :, None])[:, :, 0]).sum(axis=1)


def _by_column(function: Callable[..., np.ndarray], *arrays: np.ndarray, days: int) -> np.ndarray:
    """Run a TA-Lib function of 1-D arrays over the columns of [D, n] arrays."""
    if days < 2:
        raise ValueError(f"days must be 2 or more, got {days}: take a longer window")
    rows = [np.ascontiguousarray(_checked("prices", array).T) for array in arrays]  # each [n, D]
    assert len({row.shape for row in rows}) == 1, "high, low and close must have the same shape"
    out = np.full_like(rows[0], np.nan)
    if out.size > 0:
        for j in range(len(out)):
            out[j] = function(*(array[j] for array in rows), days)
    return np.ascontiguousarray(out.T)


def _checked(name: str, array: np.ndarray) -> np.ndarray:
    """The array as float64 [D, n]; TA-Lib would quietly give wrong values around a NaN."""
    array = np.asarray(array, dtype=np.float64)
    if array.ndim != 2:
        raise ValueError(f"{name} must have the shape [days, stocks], got {array.shape}: reshape it")
    if not np.isfinite(array).all():
        day, column = np.argwhere(~np.isfinite(array))[0]
        raise ValueError(
            f"{name} must be finite, got {array[day, column]} on day {day} in column {column}: clean the data"
        )
    return array
