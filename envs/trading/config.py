"""The flags of the trading task."""

import hashlib
from contextlib import suppress
from datetime import date
from typing import Annotated, Literal

from rl_dist.files import read_plain
from rl_dist.flags import Field, Text, absolute_path, configuration

SPAN_DATES = ("train_start", "train_end", "valid_start", "valid_end", "test_start", "test_end")


@configuration
class DataConfig:
    """The market data and the training, validation and test spans."""

    data: Annotated[Text, absolute_path("simulated")] = "simulated"
    """simulated: use simulated markets; else the path of a CSV or CSV.gz file of daily bars, with
    the columns date,tic,open,high,low,close,adj_close,volume."""
    data_missing: Literal["error", "drop"] = "error"
    """Handling of days on which a ticker has no bar. error: refuse the file; drop: omit these days
    for all tickers, but refuse the file if they are more than 5 percent of its days."""
    train_start: Text = ""
    """First training day, YYYY-MM-DD. If this is not a trading day, training starts on the next
    trading day. Default: the first day on which all indicators have enough history."""
    train_end: Text = ""
    """Last training day. Default: the day before valid_start; if valid_start is not set either,
    training gets 60 percent of the days."""
    valid_start: Text = ""
    """First validation day. Default: the day after train_end."""
    valid_end: Text = ""
    """Last validation day. Default: the day before test_start; if test_start is not set either,
    validation gets 15 percent of the days."""
    test_start: Text = ""
    """First test day. Default: the day after valid_end."""
    test_end: Text = ""
    """Last test day. Default: the last day of the data."""

    data_digest: Text = ""  # hash of the data file at the start of the run

    def __post_init__(self) -> None:
        for name in SPAN_DATES:
            day = getattr(self, name)
            with suppress(ValueError):
                if not day or date.fromisoformat(day).isoformat() == day:
                    continue
            raise ValueError(f"{name} must be a date YYYY-MM-DD, got {day!r}")


@configuration
class SimulatedMarketConfig:
    """Size, strength and seed of the simulated markets."""

    num_stocks: int = Field(5, ge=2, le=50)
    """Number of stocks in each simulated market."""
    market_edge: float = Field(120.0, ge=0, le=500)
    """Drift of a price, up or down, that follows an announcement, in basis points per day; 0: no
    drift."""
    market_seed: int = Field(1, ge=0, le=10**9)
    """Seed of the random numbers for all simulated markets."""
    num_worlds: int = Field(128, ge=1, le=100_000)
    """Number of simulated markets to train on."""


MAX_INITIAL_CASH_USD = 1e8  # amounts up to 80 times as large are exact, see features.GRID
Observation = Literal["relative", "paper"]


@configuration
class TradingConfig:
    """Rules of the trading task."""

    observation: Observation = "relative"
    """What an observation contains. relative: features without units; paper: cash, closes, shares
    held and raw indicators."""
    order_unit: Literal["value", "shares"] = "value"
    """Unit of max_order. value: fraction of the portfolio's value; shares: number of shares."""
    max_order: float = Field(0.05, ge=1e-6, le=10**6)
    """Largest order per stock and day, in order_unit; an action of 1 orders this much."""
    fee_bps: float = Field(10.0, ge=0, le=1000)
    """Fee for every purchase and every sale, in basis points of the amount traded."""
    episode_days: int = Field(252, ge=1, le=10**5)
    """Length of a training episode, in trading days."""
    initial_cash_usd: float = Field(1e6, ge=1000, le=MAX_INITIAL_CASH_USD)
    """Cash at the start of an episode, in USD."""
    execution: Literal["next_open", "close"] = "next_open"
    """Price at which orders are filled. next_open: the next day's open; close: the close that the
    agent has just seen, as in the literature."""
    turbulence_quantile: float = Field(0.0, ge=0, le=1)
    """Sell all shares and buy none on days on which turbulence exceeds this quantile of its values
    in the training span; 0: off."""
    reward: Literal["attributed", "excess", "plain"] = "attributed"
    """Kind of training rewards (reported rewards are always plain). attributed: each trade earns
    its discounted later profit when it is made; excess: the day's change of value minus that of an
    equal-weight portfolio; plain: the day's change of value. The best policy is the same for all
    three; only the noise differs."""
    risk_aversion: float = Field(20.0, ge=0, le=1000)
    """Penalty for risk: training rewards are reduced by half of this value times the variance of
    the portfolio's return. 0 aims at the largest return, larger values at a better Sharpe ratio."""

    def __post_init__(self) -> None:
        in_shares = self.order_unit == "shares"
        if self.max_order < 1 if in_shares else self.max_order > 1:
            raise ValueError(
                f"max_order {self.max_order} does not fit order_unit {self.order_unit}: use at "
                "least 1 with shares, at most 1 with value"
            )


def data_digest(config: DataConfig) -> str:
    """Return a digest that changes with the price file; "" for simulated prices."""
    if config.data == "simulated":
        return ""
    content = read_plain(config.data, most=None)
    return hashlib.sha256(content).hexdigest()[:16]
