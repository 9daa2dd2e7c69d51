"""The rules of the trading task, and checks of what they are combined with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from envs.trading.market_data import Market, Span

MAX_INITIAL_CASH_USD = 1e8  # leaves room for an 80-fold gain within exact money, see accounting


@dataclass(frozen=True, kw_only=True)
class TradingConfig:
    """Rules of the trading task."""

    observation: str = field(
        default="relative",
        metadata={
            "help": "relative: scale-free features; paper: cash, closes, shares held and raw indicators",
            "unit": "name",
            "choices": ("relative", "paper"),
        },
    )
    order_unit: str = field(
        default="value",
        metadata={
            "help": "an action of 1 buys max_order of the portfolio's value, or max_order shares",
            "unit": "name",
            "choices": ("value", "shares"),
        },
    )
    max_order: float = field(
        default=0.05,
        metadata={
            "help": "largest order per stock and day; the literature's 100 goes with order_unit shares",
            "unit": "share of portfolio value, or shares",
        },
    )
    fee_bps: float = field(
        default=10.0, metadata={"help": "fee of every purchase and every sale", "unit": "basis points"}
    )
    episode_days: int = field(default=252, metadata={"help": "length of a training episode", "unit": "trading days"})
    initial_cash_usd: float = field(default=1e6, metadata={"help": "cash at the start of an episode", "unit": "USD"})
    execution: str = field(
        default="next_open",
        metadata={
            "help": "fill orders at the next day's open, or at the close just seen (the literature's rule)",
            "unit": "name",
            "choices": ("next_open", "close"),
        },
    )
    turbulence_quantile: float = field(
        default=0.0,
        metadata={
            "help": "sell all and buy nothing on days above this quantile of the training span's turbulence; 0: off",
            "unit": "quantile",
        },
    )
    reward: str = field(
        default="attributed",
        metadata={
            "help": "what training rewards are (reported ones are always plain): attributed credits each trade at "
            "once with its discounted later profit; excess subtracts equal weight's return; plain is the day's "
            "change of value. The best policy is the same, the noise is not",
            "unit": "name",
            "choices": ("attributed", "excess", "plain"),
        },
    )

    risk_aversion: float = field(
        default=20.0,
        metadata={
            "help": "training rewards are charged half of this times the variance of the portfolio's return: 0 learns "
            "the largest return, more a better Sharpe ratio",
            "unit": "relative risk aversion",
        },
    )

    def __post_init__(self) -> None:
        _check_choice("observation", self.observation, ("relative", "paper"))
        _check_choice("order_unit", self.order_unit, ("value", "shares"))
        _check_choice("execution", self.execution, ("next_open", "close"))
        _check_choice("reward", self.reward, ("attributed", "excess", "plain"))
        if self.order_unit == "value":
            _check_range("max_order", self.max_order, 1e-6, 1.0, "a share of the value with order_unit value")
        else:
            _check_range("max_order", self.max_order, 1, 1e6, "a number of shares with order_unit shares")
        _check_range("fee_bps", self.fee_bps, 0, 1000, "basis points")
        _check_range("episode_days", self.episode_days, 1, 10**5, "days")
        _check_range("initial_cash_usd", self.initial_cash_usd, 1e3, MAX_INITIAL_CASH_USD, "USD")
        _check_range("risk_aversion", self.risk_aversion, 0, 1000, "0 is risk neutral")
        _check_range("turbulence_quantile", self.turbulence_quantile, 0, 1, "0 switches the rule off")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(choices)}, got {value!r}: choose one of them")


def _check_range(name: str, value: float, low: float, high: float, what: str) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be {low:,g} to {high:,g} ({what}), got {value}: choose a value inside")


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
    if num_envs < 1:
        raise ValueError(f"num_envs must be 1 or more, got {num_envs}")
    if not markets:
        raise ValueError("markets must hold at least one market, got none")
    if evaluation and num_envs != len(markets):
        raise ValueError(f"evaluation needs one environment per market, got {num_envs} for {len(markets)} markets")
    for market in markets:
        if market.tickers != markets[0].tickers or not np.array_equal(market.dates, markets[0].dates):
            raise ValueError(f"all markets need the same dates and tickers: {market.name} and {markets[0].name} differ")
    num_days = span.last - span.first + 1
    if not 0 <= span.first < span.last < len(markets[0].dates):
        raise ValueError(
            f"the span must be at least two of the market's days 0..{len(markets[0].dates) - 1}, "
            f"got {span.first}..{span.last}"
        )
    if not evaluation and config.episode_days >= num_days:
        raise ValueError(
            f"episode_days must be below the {num_days} days of the span, got {config.episode_days}: "
            "lower --episode_days or give more training days"
        )
    if config.turbulence_quantile > 0 and train_span is None:
        raise ValueError("turbulence_quantile above 0 needs train_span, whose turbulence sets the threshold")
