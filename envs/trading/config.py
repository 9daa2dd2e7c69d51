"""The rules of the trading task, and checks of what they are combined with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envs.trading.market_data import Market, Span
from envs.trading_config import TradingConfig


def check_setup(
    num_envs: int,
    markets: Sequence[Market],
    span: Span,
    config: TradingConfig,
    *,
    evaluation: bool,
    train_span: Span | None,
) -> None:
    """Raise ValueError when markets, span and rules do not fit together."""
    if not markets:
        raise ValueError("markets must hold at least one market, got none")
    if evaluation and num_envs != len(markets):
        raise ValueError(
            "evaluation needs one environment per market, "
            f"got {num_envs} for {len(markets)} markets"
        )
    first = markets[0]
    for market in markets:
        if market.tickers != first.tickers or not np.array_equal(market.dates, first.dates):
            raise ValueError(
                "all markets need the same dates and tickers: "
                f"{market.name} and {first.name} differ"
            )
    num_days = span.last - span.first + 1
    if not 0 <= span.first < span.last < len(first.dates):
        raise ValueError(
            f"the span must be at least two of the market's days 0..{len(first.dates) - 1}, "
            f"got {span.first}..{span.last}"
        )
    if not evaluation and config.episode_days >= num_days:
        raise ValueError(
            f"episode_days must be below the {num_days} days of the span, got "
            f"{config.episode_days}: lower --episode_days or give more training days"
        )
    if config.turbulence_quantile > 0 and train_span is None:
        raise ValueError(
            "turbulence_quantile above 0 needs train_span, whose turbulence sets the threshold"
        )
