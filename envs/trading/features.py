"""Market tables: what the agent sees and what orders fill at, row by day."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from envs.trading import accounting, indicators
from envs.trading.market_data import Market, Span
from envs.trading_config import TradingConfig


class Bars(NamedTuple):
    """Daily bars of all stocks of all markets side by side, each [D, M*n]."""

    high: np.ndarray
    low: np.ndarray
    close: np.ndarray
    volume: np.ndarray


def _log_return(bars: Bars) -> np.ndarray:
    return np.diff(np.log(bars.close), axis=0, prepend=np.nan)


def _price_to_mean(bars: Bars) -> np.ndarray:
    return np.log(bars.close / indicators.trailing_mean(bars.close))


def _log_volume_to_mean(bars: Bars) -> np.ndarray:
    log_volume = np.log1p(bars.volume)
    return np.clip(log_volume - indicators.trailing_mean(log_volume), -3.0, 3.0)


# The features of each stock in the order of the observation; None is a gap for the portfolio's.
Blocks = dict[str, Callable[[Bars], np.ndarray] | None]
PAPER: Blocks = {
    "close": lambda bars: bars.close,
    "shares": None,
    "macd": lambda bars: indicators.macd(bars.close),
    "rsi": lambda bars: indicators.rsi(bars.close),
    "cci": lambda bars: indicators.cci(bars.high, bars.low, bars.close),
    "adx": lambda bars: indicators.adx(bars.high, bars.low, bars.close),
}
RELATIVE: Blocks = {
    "log_return": _log_return,
    "price_to_mean": _price_to_mean,
    "weight": None,
    "macd": lambda bars: 20.0 * indicators.macd(bars.close) / bars.close,
    "rsi": lambda bars: (indicators.rsi(bars.close) - 50.0) / 50.0,
    "cci": lambda bars: indicators.cci(bars.high, bars.low, bars.close) / 200.0,
    "adx": lambda bars: indicators.adx(bars.high, bars.low, bars.close) / 100.0,
    "log_volume_to_mean": _log_volume_to_mean,
}


def _blocks(observation: str) -> Blocks:
    return RELATIVE if observation == "relative" else PAPER


def feature_names(observation: str, tickers: Sequence[str]) -> list[str]:
    """Return the name of every number of an observation, in order."""
    first = "cash_share" if observation == "relative" else "cash"
    return [first] + [f"{name}:{ticker}" for name in _blocks(observation) for ticker in tickers]


def gap_columns(observation: str, num_stocks: int) -> slice:
    """Return the columns of weights (`relative`) or shares (`paper`)."""
    first = 1 + num_stocks * list(_blocks(observation).values()).index(None)
    return slice(first, first + num_stocks)


def feature_table(markets: Sequence[Market], observation: str, span: Span) -> np.ndarray:
    """Market features [M, days, F] float32 of a span, with gaps for the portfolio.

    Indicators see the days before the span, never later ones; NaN where one is not warm yet.
    """
    num_stocks = len(markets[0].tickers)
    num_days = span.last - span.first + 1
    last = span.last + 1
    names = Bars._fields
    bars = Bars(*(np.concatenate([getattr(m, n)[:last] for m in markets], axis=1) for n in names))
    blocks = _blocks(observation)
    table = np.zeros((len(markets), num_days, 1 + len(blocks) * num_stocks), dtype=np.float32)
    for position, feature in enumerate(blocks.values()):
        if feature is not None:
            values = feature(bars)[span.first :].reshape(num_days, len(markets), num_stocks)
            first = 1 + position * num_stocks
            table[:, :, first : first + num_stocks] = values.swapaxes(0, 1)
    return table


def first_tradable_day(market: Market, config: TradingConfig) -> int:
    """Return the index of the first day from which on every feature in use is warm."""
    whole = Span(first=0, last=len(market.dates) - 1)
    known = np.isfinite(feature_table([market], config.observation, whole)[0]).all(axis=1)
    if config.turbulence_quantile > 0:
        known &= np.isfinite(indicators.turbulence(market.close))
    first = int(np.append(-1, np.flatnonzero(~known))[-1]) + 1
    if first > whole.last:
        raise ValueError(
            f"no day is left after the indicators' warm-up, got {len(known)} days: "
            "use a longer history"
        )
    return first


@dataclass(frozen=True, kw_only=True)
class MarketTables:
    """Everything a step looks up, one row per market and day.

    Row = market * days of the span + day - span.first.
    """

    features: Tensor  # [rows, F] float32, an observation of the day by a portfolio that is all cash
    # [rows, 6, n] float64 USD: close, received and paid per share, tomorrow's close, and what a
    # share gains later, discounted: after today's close, and after tomorrow's as seen from today
    prices: Tensor
    mean_returns: Tensor  # [rows] float64, of all stocks, from today's close to tomorrow's
    turbulent: Tensor | None  # [rows] bool, None without the rule


def market_tables(
    markets: Sequence[Market],
    span: Span,
    config: TradingConfig,
    train_span: Span | None,
    discount: float,
) -> MarketTables:
    """Tabulate the days of a span; ValueError when a feature is not warm on one."""
    days = slice(span.first, span.last + 1)
    close = torch.from_numpy(np.stack([market.close[days] for market in markets]))  # [M, days, n]
    fill = close
    if config.execution == "next_open":
        fill = _tomorrow(torch.from_numpy(np.stack([market.open[days] for market in markets])))
    close = accounting.to_grid(close)
    sell, buy = accounting.net_prices(accounting.to_grid(fill), config.fee_bps)
    # Discounted sum of the price changes after each day, up to the last one
    changes = _tomorrow(close) - close
    gains = torch.zeros_like(close)
    for day in range(close.shape[1] - 2, -1, -1):
        gains[:, day] = changes[:, day] + discount * gains[:, day + 1]
    prices = [close, sell, buy, _tomorrow(close), gains, discount * _tomorrow(gains)]
    # Features, which must be known on every day
    table = feature_table(markets, config.observation, span)
    cold = np.argwhere(~np.isfinite(table))
    if len(cold):
        market, day, column = cold[0]
        name = feature_names(config.observation, markets[0].tickers)[column]
        raise ValueError(
            f"{name} of {markets[market].name} is not known on "
            f"{markets[market].dates[span.first + day]}: start the span at first_tradable_day"
        )
    table[:, :, 0] = 1.0 if config.observation == "relative" else config.initial_cash_usd
    turbulent = None
    if config.turbulence_quantile > 0:
        assert train_span is not None
        rows = [_turbulent_days(m, config.turbulence_quantile, train_span, span) for m in markets]
        turbulent = torch.from_numpy(np.concatenate(rows))
    return MarketTables(
        features=torch.from_numpy(table).flatten(0, 1),
        prices=torch.stack(prices, 2).flatten(0, 1),
        mean_returns=(_tomorrow(close) / close - 1.0).mean(2).flatten(),
        turbulent=turbulent,
    )


def _tomorrow(values: Tensor) -> Tensor:
    """Return the next day's values [M, days, n]; the last day, where no step starts, its own."""
    return torch.cat([values[:, 1:], values[:, -1:]], dim=1)


def _turbulent_days(market: Market, quantile: float, train_span: Span, span: Span) -> np.ndarray:
    """Return which days of a span exceed a quantile of the training span's turbulence, bool."""
    turbulence = indicators.turbulence(market.close)
    known = turbulence[train_span.first : train_span.last + 1]
    known = known[np.isfinite(known)]
    if not len(known):
        raise ValueError(
            f"{market.name} has no turbulence on the training span, which warms up over 252 days: "
            "start the span later or set turbulence_quantile to 0"
        )
    return turbulence[span.first : span.last + 1] > np.quantile(known, quantile)
