"""Market tables: what the agent sees and what orders fill at, row by day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from envs.trading import accounting, indicators
from envs.trading.config import TradingConfig
from envs.trading.market_data import Market, Span

INDICATOR_DAYS = 30
MEAN_DAYS = 20
# In order of their place in the observation; None marks the gap for what the portfolio holds.
RELATIVE_BLOCKS = ("log_return", "price_to_mean", None, "macd", "rsi", "cci", "adx", "log_volume_to_mean")
PAPER_BLOCKS = ("close", None, "macd", "rsi", "cci", "adx")


def feature_names(observation: str, tickers: Sequence[str]) -> list[str]:
    """Name of every number of an observation, in order."""
    blocks, gap = (RELATIVE_BLOCKS, "weight") if observation == "relative" else (PAPER_BLOCKS, "shares")
    first = "cash_share" if observation == "relative" else "cash"
    return [first] + [f"{block or gap}:{ticker}" for block in blocks for ticker in tickers]


def gap_columns(observation: str, num_stocks: int) -> slice:
    """Columns of an observation that hold weights (`relative`) or shares (`paper`)."""
    first = 1 + num_stocks * (RELATIVE_BLOCKS if observation == "relative" else PAPER_BLOCKS).index(None)
    return slice(first, first + num_stocks)


def _log_returns(close: np.ndarray) -> np.ndarray:
    log_returns = np.full_like(close, np.nan)
    log_returns[1:] = np.diff(np.log(close), axis=0)
    return log_returns


def _block(name: str, bars: dict[str, np.ndarray], *, scale_free: bool) -> np.ndarray:
    """One feature of all stocks of all markets, [D, M*n]; NaN while it warms up."""
    high, low, close = bars["high"], bars["low"], bars["close"]
    if name == "close":
        return close
    if name == "log_return":
        return _log_returns(close)
    if name == "price_to_mean":
        return np.log(close / indicators.trailing_mean(close, days=MEAN_DAYS))
    if name == "log_volume_to_mean":
        log_volume = np.log1p(bars["volume"])
        return np.clip(log_volume - indicators.trailing_mean(log_volume, days=MEAN_DAYS), -3.0, 3.0)
    if name == "macd":
        macd = indicators.macd(close)
        return 20.0 * macd / close if scale_free else macd
    if name == "rsi":
        rsi = indicators.rsi(close, days=INDICATOR_DAYS)
        return (rsi - 50.0) / 50.0 if scale_free else rsi
    if name == "cci":
        cci = indicators.cci(high, low, close, days=INDICATOR_DAYS)
        return cci / 200.0 if scale_free else cci
    adx = indicators.adx(high, low, close, days=INDICATOR_DAYS)
    return adx / 100.0 if scale_free else adx


def feature_table(markets: Sequence[Market], observation: str, span: Span) -> np.ndarray:
    """Market features of the days of a span, with gaps for the portfolio.

    Indicators see the days before the span as well, never those after the day of their row.

    Returns [M, days, F] float32, NaN where a feature is not warm yet.
    """
    num_markets, num_stocks = len(markets), markets[0].close.shape[1]
    fields = ("high", "low", "close", "volume")
    days = slice(0, span.last + 1)
    bars = {name: np.concatenate([getattr(m, name)[days] for m in markets], axis=1) for name in fields}
    blocks = RELATIVE_BLOCKS if observation == "relative" else PAPER_BLOCKS
    num_days = span.last - span.first + 1
    table = np.zeros((num_markets, num_days, 1 + len(blocks) * num_stocks), dtype=np.float32)
    for position, name in enumerate(blocks):
        if name is None:
            continue
        block = _block(name, bars, scale_free=observation == "relative")[span.first :]
        columns = slice(1 + position * num_stocks, 1 + (position + 1) * num_stocks)
        table[:, :, columns] = block.reshape(num_days, num_markets, num_stocks).swapaxes(0, 1)
    return table


def turbulent_days(market: Market, quantile: float, train_span: Span, span: Span) -> np.ndarray:
    """Days of a span above a quantile of the training span's turbulence, bool."""
    turbulence = indicators.turbulence(market.close)
    known = turbulence[train_span.first : train_span.last + 1]
    known = known[np.isfinite(known)]
    if not len(known):
        raise ValueError(
            f"turbulence_quantile needs turbulence on the training span, and {market.name} has none there: "
            "it warms up over 252 days; start the training span later or set turbulence_quantile to 0"
        )
    return turbulence[span.first : span.last + 1] > np.quantile(known, quantile)


def first_tradable_day(market: Market, observation: str, *, with_turbulence: bool) -> int:
    """Index of the first day from which on every feature in use is known.

    Raises ValueError when the market is too short for its indicators.
    """
    table = feature_table([market], observation, Span(first=0, last=len(market.dates) - 1))[0]
    if not with_turbulence:
        return indicators.first_warm_day(table)
    return indicators.first_warm_day(table, indicators.turbulence(market.close))


@dataclass(frozen=True, kw_only=True)
class MarketTables:
    """Everything a step looks up, one row per market and day.

    Row = market * days of the span + day - span.first.
    """

    features: Tensor  # [rows, F] float32, an observation of the day by a portfolio that is all cash
    prices: Tensor  # [rows, 6, n] float64 USD: close, received and paid per share, tomorrow's close, and what a
    # share gains later, discounted: after today's close, and after tomorrow's as seen from today
    mean_returns: Tensor  # [rows] float64, of all stocks, from today's close to tomorrow's
    turbulent: Tensor | None  # [rows] bool, None without the rule


def market_tables(
    markets: Sequence[Market], span: Span, config: TradingConfig, train_span: Span | None, discount: float
) -> MarketTables:
    """Tabulate the days of a span.

    Raises ValueError when a feature is not warm on every day of the span.
    """
    days = slice(span.first, span.last + 1)
    close = torch.from_numpy(np.stack([market.close[days] for market in markets]))  # [M, days, n]
    fill = close
    if config.execution == "next_open":
        fill = _tomorrow(torch.from_numpy(np.stack([market.open[days] for market in markets])))
    close = accounting.to_grid(close)
    sell, buy = accounting.net_prices(accounting.to_grid(fill), config.fee_bps)
    gains = _later_gains(close, discount)
    turbulent = None
    if config.turbulence_quantile > 0:
        assert train_span is not None
        quantile = config.turbulence_quantile
        turbulent = np.concatenate([turbulent_days(m, quantile, train_span, span) for m in markets])
    return MarketTables(
        features=torch.from_numpy(_warm_table(markets, span, config)).flatten(0, 1),
        prices=torch.stack([close, sell, buy, _tomorrow(close), gains, discount * _tomorrow(gains)], 2).flatten(0, 1),
        mean_returns=(_tomorrow(close) / close - 1.0).mean(2).flatten(),
        turbulent=None if turbulent is None else torch.from_numpy(turbulent),
    )


def _later_gains(close: Tensor, discount: float) -> Tensor:
    """Discounted sum of the price changes after each day, up to the last one, [M, days, n] USD."""
    changes, gains = _tomorrow(close) - close, torch.zeros_like(close)
    for day in range(close.shape[1] - 2, -1, -1):
        gains[:, day] = changes[:, day] + discount * gains[:, day + 1]
    return gains


def _tomorrow(values: Tensor) -> Tensor:
    """The next day's values [M, days, n]; the last day, from which no step starts, repeats its own."""
    return torch.cat([values[:, 1:], values[:, -1:]], dim=1)


def _warm_table(markets: Sequence[Market], span: Span, config: TradingConfig) -> np.ndarray:
    table = feature_table(markets, config.observation, span)
    if not np.isfinite(table).all():
        market, day, column = np.argwhere(~np.isfinite(table))[0]
        name = feature_names(config.observation, markets[0].tickers)[column]
        raise ValueError(
            f"{name} of {markets[market].name} is not known on {markets[market].dates[span.first + day]}: "
            "start the span at first_tradable_day or later"
        )
    table[:, :, 0] = 1.0 if config.observation == "relative" else config.initial_cash_usd
    return table
