"""Compute tables of observations and fill prices for every day of a market.

The indicators of a day use only this day and earlier days. An indicator is NaN on days with too few
earlier days and valid (finite) on all later days. Arrays are [D, n] with one column per stock, so M
markets can be joined to [D, M*n].
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import talib
import torch
from torch import Tensor

from envs.trading.config import TradingConfig
from envs.trading.market_data import Market, Span

# Amounts of money are multiples of 2**-20 USD. Sums of such amounts, and their products with whole
# numbers of shares, are then exact in float64 as long as a portfolio is worth less than 2**33 USD
# (8.6 billion): 20 of float64's 53 bits hold the fraction of a dollar, 33 the whole dollars.
GRID = 2.0**20  # steps per USD
INDICATOR_DAYS = 30  # time period of RSI, CCI and ADX
MEAN_DAYS = 20  # closes and log volumes are compared with their mean over this many days
SMALLEST_VARIANCE = 1e-9  # a variance below this fraction of the largest is a rounding error


# ---- indicators


def by_column(function: Callable[..., np.ndarray], days: int, *arrays: np.ndarray) -> np.ndarray:
    """Apply a TA-Lib function for 1-D arrays to each column of [D, n] arrays."""
    columns = zip(*(np.ascontiguousarray(array.T) for array in arrays), strict=True)
    return np.stack([function(*series, days) for series in columns], axis=1)


def turbulence(close: np.ndarray, days: int = 252) -> np.ndarray:
    """Return each day's squared Mahalanobis distance of returns from past returns.

    The mean and the covariance are those of the returns on the `days` days before this day.
    Directions in which these returns do not vary are ignored. For example, a stock whose price was
    constant adds nothing.

    Returns: [D], valid from day `days + 1` on. On ordinary days the value is about n for n stocks.
    Source: Kritzman and Li, "Skulls, Financial Turbulence, and Risk Management" (2010), without
        their division by n.
    """
    values = np.full(len(close), np.nan)
    returns = close[1:] / close[:-1] - 1.0  # [D-1, n]; returns[i] belongs to day i + 1
    for day in range(days + 1, len(close)):
        past = returns[day - 1 - days : day - 1]
        mean = past.mean(axis=0)
        centred = past - mean
        deviation = returns[day - 1] - mean
        covariance = centred.T @ centred / (days - 1)
        values[day] = deviation @ np.linalg.lstsq(covariance, deviation, rcond=SMALLEST_VARIANCE)[0]
    return values


# ---- observations


PORTFOLIO_BLOCK = {"paper": 1, "relative": 2}  # index of the block that holds the portfolio


def feature_blocks(bars: Market, observation: str) -> list[np.ndarray]:
    """Return the blocks of an observation in order, each [D, n].

    MACD (EMA of 12 days minus EMA of 26 days) is valid from day 25 on. The other indicators have a
    time period of 30 days: CCI is valid from day 29 on, RSI from day 30, and ADX from day 59.
    """
    portfolio = np.zeros_like(bars.close)  # filled by the environment with weights or shares
    macd = by_column(talib.EMA, 12, bars.close) - by_column(talib.EMA, 26, bars.close)
    rsi = by_column(talib.RSI, INDICATOR_DAYS, bars.close)  # 0..100
    cci = by_column(talib.CCI, INDICATOR_DAYS, bars.high, bars.low, bars.close)  # scale-free
    adx = by_column(talib.ADX, INDICATOR_DAYS, bars.high, bars.low, bars.close)  # 0..100
    if observation == "paper":
        return [bars.close, portfolio, macd, rsi, cci, adx]
    log_volume = np.log1p(bars.volume)
    return [
        np.diff(np.log(bars.close), axis=0, prepend=np.nan),
        np.log(bars.close / by_column(talib.SMA, MEAN_DAYS, bars.close)),
        portfolio,
        20.0 * macd / bars.close,
        (rsi - 50.0) / 50.0,
        cci / 200.0,
        adx / 100.0,
        np.clip(log_volume - by_column(talib.SMA, MEAN_DAYS, log_volume), -3.0, 3.0),
    ]


def portfolio_columns(observation: str, num_stocks: int) -> slice:
    """Return the observation columns that hold the portfolio (weights or shares)."""
    first = 1 + num_stocks * PORTFOLIO_BLOCK[observation]
    return slice(first, first + num_stocks)


def side_by_side(markets: Sequence[Market], num_days: int) -> Market:
    """Join the first `num_days` days of M markets into one market with arrays [num_days, M*n].

    The joined market has the name, opens, dates and tickers of the first market.
    """
    joined: dict = {
        name: np.concatenate([getattr(market, name)[:num_days] for market in markets], axis=1)
        for name in ("high", "low", "close", "volume")
    }
    return replace(markets[0], **joined)


def feature_table(markets: Sequence[Market], observation: str, span: Span) -> np.ndarray:
    """Return a span's observations [M, days, F] float32 with an empty portfolio.

    The columns for cash and portfolio are 0. Indicators also use the days before the span.
    Indicators are NaN on days with too few earlier days.
    """
    bars = side_by_side(markets, span.last + 1)
    shape = span.last - span.first + 1, len(markets), len(markets[0].tickers)
    blocks = [block[span.first :].reshape(shape) for block in feature_blocks(bars, observation)]
    table = np.concatenate([np.zeros((*shape[:2], 1)), *blocks], axis=2)
    return np.ascontiguousarray(table.swapaxes(0, 1), dtype=np.float32)


def first_tradable_day(market: Market, config: TradingConfig) -> int:
    """Return the index of the first day from which all features in use are valid.

    If there is no such day, return the number of days; `split_spans` then refuses the training
    span.
    """
    num_days = len(market.dates)
    table = feature_table([market], config.observation, Span(0, num_days - 1))
    valid = np.isfinite(table[0]).all(axis=1)
    if config.turbulence_quantile > 0:
        valid &= np.isfinite(turbulence(market.close))
    # the day after the last day on which a feature is not valid
    return num_days - int(valid[::-1].argmin())


# ---- tables


def to_grid(usd: Tensor) -> Tensor:
    """Round amounts in USD to multiples of 1 / GRID."""
    return torch.round(usd * GRID) / GRID


def market_tables(
    markets: Sequence[Market],
    span: Span,
    config: TradingConfig,
    train_span: Span,
    discount: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the tables that an environment reads, with one row per market and day.

    The row of a day is market * (number of days in the span) + day - span.first. Every indicator
    must be valid on the first day of the span.

    Returns:
        Features [rows, F] float32: the observation of a portfolio that is all cash.
        Prices [rows, 6, n] float64, in USD per share: today's close, amount received in a sale,
        amount paid in a purchase, tomorrow's close, today's gain, and discount times tomorrow's
        gain. A day's gain is the discounted sum of all later price changes in the span.
        Turbulent days [rows] bool, or None if turbulence_quantile is 0.
    """
    days = slice(span.first, span.last + 1)

    def prices_of(name: str) -> Tensor:  # [M, days, n]
        return to_grid(torch.from_numpy(np.stack([getattr(m, name)[days] for m in markets])))

    close = prices_of("close")
    fill = _tomorrow(prices_of("open")) if config.execution == "next_open" else close
    fee = to_grid(fill * (config.fee_bps * 1e-4))
    # discounted sum of the price changes after each day, up to the end of the span
    changes = _tomorrow(close) - close
    gains = torch.zeros_like(close)
    for day in range(close.shape[1] - 2, -1, -1):
        gains[:, day] = changes[:, day] + discount * gains[:, day + 1]
    prices = [close, fill - fee, fill + fee, _tomorrow(close), gains, discount * _tomorrow(gains)]
    table = feature_table(markets, config.observation, span)
    assert np.isfinite(table).all(), "the span starts before all indicators are valid"
    table[:, :, 0] = 1.0 if config.observation == "relative" else config.initial_cash_usd
    turbulent = None
    if config.turbulence_quantile > 0:
        values = [turbulence(market.close) for market in markets]
        train_days = slice(train_span.first, train_span.last + 1)
        limits = [np.quantile(column[train_days], config.turbulence_quantile) for column in values]
        rows = [column[days] > limit for column, limit in zip(values, limits, strict=True)]
        turbulent = torch.from_numpy(np.concatenate(rows))
    return torch.from_numpy(table).flatten(0, 1), torch.stack(prices, 2).flatten(0, 1), turbulent


def _tomorrow(values: Tensor) -> Tensor:
    """Return the next day's values for every day, [M, days, n].

    The last day has no next day, so its values are repeated. No step starts on the last day.
    """
    return torch.cat([values[:, 1:], values[:, -1:]], dim=1)
