"""Market tables: what the agent sees and what orders fill at, row by day.

Indicators and features are causal, and NaN while they warm up. Arrays are [D, n], one column per
stock, so that several markets lie side by side as [D, M*n].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import talib
import torch
from torch import Tensor

from envs.trading.config import TradingConfig
from envs.trading.market_data import Market, Span

# Money lies on a grid of 2**-20 USD. Sums and products of grid prices and whole shares are then
# exact in float64 as long as a portfolio stays below 2**33 USD (8.6 billion).
GRID = 2.0**20  # steps per USD; of float64's 53 bits 33 are left for dollars
INDICATOR_DAYS = 30
CORRELATION_RIDGE = 1e-9  # keeps the correlation matrix of tickers that move as one solvable
MIN_STD = 1e-12  # daily returns with a smaller deviation are rounding noise around a constant


# ---- indicators


def by_column(function: Callable[..., np.ndarray], days: int, *arrays: np.ndarray) -> np.ndarray:
    """Run a TA-Lib function of 1-D arrays over the columns of [D, n] arrays."""
    rows = [np.ascontiguousarray(array.T, dtype=np.float64) for array in arrays]  # each [n, D]
    columns = [function(*row, days) for row in zip(*rows, strict=True)]
    return np.ascontiguousarray(np.transpose(columns))


def macd(bars: Market) -> np.ndarray:
    """Return the 12-day minus the 26-day exponential mean, warm from day 25 on."""
    return by_column(talib.EMA, 12, bars.close) - by_column(talib.EMA, 26, bars.close)


def rsi(bars: Market) -> np.ndarray:
    """Return the 30-day relative strength index, 0..100, warm from day 30 on."""
    return by_column(talib.RSI, INDICATOR_DAYS, bars.close)


def cci(bars: Market) -> np.ndarray:
    """Return the 30-day commodity channel index, scale-free, warm from day 29 on."""
    return by_column(talib.CCI, INDICATOR_DAYS, bars.high, bars.low, bars.close)


def adx(bars: Market) -> np.ndarray:
    """Return the 30-day average directional index, 0..100, warm from day 59 on."""
    return by_column(talib.ADX, INDICATOR_DAYS, bars.high, bars.low, bars.close)


def trailing_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean of the last 20 values, warm from day 19 on."""
    return by_column(talib.SMA, 20, values)


def turbulence(close: np.ndarray, days: int = 252) -> np.ndarray:
    """Return the squared Mahalanobis distance of today's returns from the past.

    Mean and covariance come from the `days` daily returns before today; today is not among them. A
    stock that did not move at all in the window is left out on that day, its scale being unknown.

    Returns: [D], about n in ordinary times (n stocks), warm from day `days + 1` on.
    Raises: ValueError: more stocks than a covariance over `days` returns can have.
    Source: Kritzman and Li, "Skulls, Financial Turbulence, and Risk Management" (2010), not
        divided by n.
    """
    num_days, num_stocks = close.shape
    if days <= num_stocks:
        raise ValueError(f"turbulence needs fewer stocks than its {days} days, got {num_stocks}")
    values = np.full(num_days, np.nan)
    returns = close[1:] / close[:-1] - 1.0  # [D-1, n]; returns[i] belongs to day i + 1
    for day in range(days + 1, num_days):
        values[day] = _squared_distance(returns[day - 1], returns[day - 1 - days : day - 1])
    return values


def _squared_distance(today: np.ndarray, past: np.ndarray) -> float:
    """Return the squared Mahalanobis distance of today [n] from the past [days, n]."""
    mean, std = past.mean(axis=0), past.std(axis=0, ddof=1)
    known = std > MIN_STD
    units = ((past - mean) / np.maximum(std, MIN_STD))[:, known]  # [days, stocks that moved]
    # Correlations, not covariances: the ridge then means the same for calm and for wild stocks.
    correlation = units.T @ units / (len(past) - 1) + CORRELATION_RIDGE * np.eye(units.shape[1])
    z = ((today - mean) / np.maximum(std, MIN_STD))[known]
    return z @ np.linalg.solve(correlation, z)


# ---- observations


def _log_return(bars: Market) -> np.ndarray:
    return np.diff(np.log(bars.close), axis=0, prepend=np.nan)


def _price_to_mean(bars: Market) -> np.ndarray:
    return np.log(bars.close / trailing_mean(bars.close))


def _log_volume_to_mean(bars: Market) -> np.ndarray:
    log_volume = np.log1p(bars.volume)
    return np.clip(log_volume - trailing_mean(log_volume), -3.0, 3.0)


# the features of each stock in the order of an observation; None is a gap for the portfolio's
Blocks = dict[str, Callable[[Market], np.ndarray] | None]
_BLOCKS: dict[str, Blocks] = {
    "paper": {
        "close": lambda bars: bars.close,
        "shares": None,
        "macd": macd,
        "rsi": rsi,
        "cci": cci,
        "adx": adx,
    },
    "relative": {
        "log_return": _log_return,
        "price_to_mean": _price_to_mean,
        "weight": None,
        "macd": lambda bars: 20.0 * macd(bars) / bars.close,
        "rsi": lambda bars: (rsi(bars) - 50.0) / 50.0,
        "cci": lambda bars: cci(bars) / 200.0,
        "adx": lambda bars: adx(bars) / 100.0,
        "log_volume_to_mean": _log_volume_to_mean,
    },
}


def feature_names(observation: str, tickers: Sequence[str]) -> list[str]:
    """Return the name of every number of an observation, in order."""
    first = "cash_share" if observation == "relative" else "cash"
    return [first] + [f"{name}:{ticker}" for name in _BLOCKS[observation] for ticker in tickers]


def gap_columns(observation: str, num_stocks: int) -> slice:
    """Return the columns of weights (`relative`) or shares (`paper`)."""
    first = 1 + num_stocks * list(_BLOCKS[observation].values()).index(None)
    return slice(first, first + num_stocks)


def side_by_side(markets: Sequence[Market], num_days: int) -> Market:
    """Return the first days of M markets as one with columns [D, M*n]."""
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(market, name)[:num_days] for market in markets], axis=1)
        for name in ("high", "low", "close", "volume")
    }
    return replace(markets[0], **joined)


def feature_table(markets: Sequence[Market], observation: str, span: Span) -> np.ndarray:
    """Market features [M, days, F] float32 of a span, with gaps for the portfolio.

    Indicators see the days before the span, never later ones; NaN where one is not warm yet.
    """
    shape = span.last - span.first + 1, len(markets), len(markets[0].tickers)
    bars = side_by_side(markets, span.last + 1)
    gap = np.zeros(shape)
    columns = [
        gap if feature is None else feature(bars)[span.first :].reshape(shape)
        for feature in _BLOCKS[observation].values()
    ]
    table = np.concatenate([gap[:, :, :1], *columns], axis=2).swapaxes(0, 1)
    return np.ascontiguousarray(table, dtype=np.float32)


def first_tradable_day(market: Market, config: TradingConfig) -> int:
    """Return the index of the first day from which on every feature in use is warm."""
    num_days = len(market.dates)
    table = feature_table([market], config.observation, Span(0, num_days - 1))
    known = np.isfinite(table[0]).all(axis=1)
    if config.turbulence_quantile > 0:
        known &= np.isfinite(turbulence(market.close))
    first = num_days - int(known[::-1].argmin())  # the day after the last that is not known
    if first == num_days:
        raise ValueError(
            f"no day is left after the indicators' warm-up, got {num_days} days: "
            "use a longer history"
        )
    return first


# ---- tables


def to_grid(usd: Tensor) -> Tensor:
    """Round amounts in USD to the money grid."""
    return torch.round(usd * GRID) / GRID


def net_prices(fill: Tensor, fee_bps: float) -> tuple[Tensor, Tensor]:
    """Return USD received per share sold and paid per share bought, fees included."""
    fee = to_grid(fill * (fee_bps * 1e-4))
    return fill - fee, fill + fee


@dataclass(frozen=True, kw_only=True)
class MarketTables:
    """Everything a step looks up, one row per market and day.

    Row = market * days of the span + day - span.first.
    """

    features: Tensor  # [rows, F] float32, an observation of the day by a portfolio that is all cash
    # [rows, 6, n] float64 USD: close, received and paid per share, tomorrow's close, and what a
    # share gains later, discounted: after today's close, and after tomorrow's as seen from today
    prices: Tensor
    turbulent: Tensor | None  # [rows] bool, None without the rule


def market_tables(
    markets: Sequence[Market],
    span: Span,
    config: TradingConfig,
    train_span: Span | None,
    discount: float,
) -> MarketTables:
    """Tabulate the days of a span, on which every indicator must be warm."""
    days = slice(span.first, span.last + 1)
    close = torch.from_numpy(np.stack([market.close[days] for market in markets]))  # [M, days, n]
    fill = close
    if config.execution == "next_open":
        fill = _tomorrow(torch.from_numpy(np.stack([market.open[days] for market in markets])))
    close = to_grid(close)
    sell, buy = net_prices(to_grid(fill), config.fee_bps)
    # the discounted sum of the price changes after each day, up to the last one
    changes = _tomorrow(close) - close
    gains = torch.zeros_like(close)
    for day in range(close.shape[1] - 2, -1, -1):
        gains[:, day] = changes[:, day] + discount * gains[:, day + 1]
    prices = [close, sell, buy, _tomorrow(close), gains, discount * _tomorrow(gains)]
    table = feature_table(markets, config.observation, span)
    assert np.isfinite(table).all(), "the span starts before every indicator is warm"
    table[:, :, 0] = 1.0 if config.observation == "relative" else config.initial_cash_usd
    turbulent = None
    if config.turbulence_quantile > 0:
        assert train_span is not None
        rows = [_turbulent_days(m, config.turbulence_quantile, train_span)[days] for m in markets]
        turbulent = torch.from_numpy(np.concatenate(rows))
    return MarketTables(
        features=torch.from_numpy(table).flatten(0, 1),
        prices=torch.stack(prices, 2).flatten(0, 1),
        turbulent=turbulent,
    )


def _tomorrow(values: Tensor) -> Tensor:
    """Return the next day's values [M, days, n]; the last day, where no step starts, its own."""
    return torch.cat([values[:, 1:], values[:, -1:]], dim=1)


def _turbulent_days(market: Market, quantile: float, train_span: Span) -> np.ndarray:
    """Return which days exceed a quantile of the training span's turbulence, [D] bool."""
    values = turbulence(market.close)
    return values > np.quantile(values[train_span.first : train_span.last + 1], quantile)
