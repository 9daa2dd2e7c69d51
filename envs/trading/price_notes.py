"""Describe what is unusual about real prices: one line for each kind."""

from __future__ import annotations

import numpy as np

from envs.trading.config import TradingConfig
from envs.trading.market_data import TRADING_DAYS, Market, days_per_year

MAX_MOVE = 1.8  # larger changes from one open or close to the next may be errors or splits


def price_notes(market: Market, config: TradingConfig) -> list[str]:
    """Return one line for each unusual property of a market that can distort results."""
    names = np.array(market.tickers)
    notes = []
    year = days_per_year(market.dates)
    if year != TRADING_DAYS:
        notes.append(f"annual figures use the {year} days per year of this file")
    # one share must fit into a single order and into equal weight's part of the cash
    part = min(1.0 / len(names), config.max_order if config.order_unit == "value" else 1.0)
    limit_usd = config.initial_cash_usd * part
    dear = (market.close > limit_usd).mean(0) > 0.5
    if dear.any():
        notes.append(
            f"on most days one share costs more than {limit_usd:g} USD, the largest order or equal "
            f"weight's part of the cash, so it is hardly ever bought: {', '.join(names[dear])}; "
            "raise --initial_cash_usd or --max_order"
        )
    path = np.stack([market.open, market.close], 1).reshape(-1, len(names))  # [2 D, n]
    factors = np.exp(np.diff(np.log(path), axis=0))
    moves = np.argwhere(np.abs(np.log(factors)) > np.log(MAX_MOVE))
    if len(moves):
        step, stock = moves[0]
        notes.append(
            f"{len(moves)} jumps of a price by more than a factor of {MAX_MOVE}, the first on "
            f"{market.dates[(step + 1) // 2]}: {names[stock]} times {factors[step, stock]:.3g}; "
            "correct wrong bars, and let adj_close contain every split"
        )
    return notes
