"""Flags of the trading task, outside its package, which is slow to import."""

from __future__ import annotations

import contextlib
from datetime import date
from itertools import pairwise
from typing import Literal

from rl_dist.flags import Text, configuration, recorded, setting

SPAN_DATES = ("train_start", "train_end", "valid_start", "valid_end", "test_start", "test_end")


@configuration
class DataConfig:
    """Which market data to use, and its training, validation and test spans."""

    data: Text = setting("simulated", "path", main=True)
    """simulated, or a CSV or CSV.gz file of daily bars
    (date,tic,open,high,low,close,adj_close,volume)."""
    data_missing: Literal["error", "drop"] = setting("error")
    """Days on which a ticker has no bar or a blank one: refuse the file, or drop the day for all
    tickers (5 percent of the days at most)."""
    train_start: Text = setting(
        "", "YYYY-MM-DD", derived="first day on which all indicators are warm"
    )
    """First training day; a day without trading moves inward."""
    train_end: Text = setting(
        "", "YYYY-MM-DD", derived="up to validation, or 60 percent of the days"
    )
    """Last training day; a day without trading moves inward."""
    valid_start: Text = setting("", "YYYY-MM-DD", derived="right after training")
    """First validation day; a day without trading moves inward."""
    valid_end: Text = setting("", "YYYY-MM-DD", derived="up to the test, or 15 percent of the days")
    """Last validation day; a day without trading moves inward."""
    test_start: Text = setting("", "YYYY-MM-DD", derived="right after validation")
    """First test day; a day without trading moves inward."""
    test_end: Text = setting("", "YYYY-MM-DD", derived="last day of the data")
    """Last test day; a day without trading moves inward."""

    data_digest: Text = recorded("")  # of the file as the run began

    def __post_init__(self) -> None:
        given = [(name, self._checked_date(name)) for name in SPAN_DATES if getattr(self, name)]
        for (earlier, first), (later, second) in pairwise(given):
            same_span = earlier.split("_")[0] == later.split("_")[0]
            if first > second or (first == second and not same_span):
                raise ValueError(
                    f"{later} must be {'no earlier than' if same_span else 'after'} {earlier}, "
                    f"got {second} and {first}: the spans are train, valid, test in this order "
                    "and may not overlap"
                )

    def _checked_date(self, name: str) -> date:
        text = getattr(self, name)
        with contextlib.suppress(ValueError):
            if date.fromisoformat(text).isoformat() == text:
                return date.fromisoformat(text)
        raise ValueError(
            f"{name} must be a date YYYY-MM-DD, got {text!r}: write it like 2016-01-04"
        )


@configuration
class SimulatedMarketConfig:
    """Size, strength and seed of the simulated markets."""

    num_stocks: int = setting(5, "stocks", within=(2, 50))
    """Stocks in each simulated market."""
    market_edge: float = setting(120.0, "basis points", within=(0, 500))
    """Planted drift on days that move, up or down; 0: none."""
    market_seed: int = setting(1, within=(0, 10**9))
    """Seed of all simulated markets."""
    num_worlds: int = setting(128, "markets", within=(1, 100_000), presets={"--quick": 16})
    """Simulated markets to train on."""


MAX_INITIAL_CASH_USD = 1e8  # leaves room for an 80-fold gain within exact money, see accounting
Observation = Literal["relative", "paper"]


@configuration
class TradingConfig:
    """Rules of the trading task."""

    observation: Observation = setting("relative", presets={"--preset paper": "paper"})
    """relative: features without a scale; paper: cash, closes, shares held and raw indicators."""
    order_unit: Literal["value", "shares"] = setting("value", presets={"--preset paper": "shares"})
    """An action of 1 buys max_order of the portfolio's value, or max_order shares."""
    max_order: float = setting(
        0.05,
        "share of the portfolio's value, or shares",
        within=(1e-6, 10**6),
        presets={"--preset paper": 100.0},
    )
    """Largest order per stock and day, in order_unit."""
    fee_bps: float = setting(10.0, "basis points", within=(0, 1000))
    """Fee of every purchase and every sale."""
    episode_days: int = setting(252, "trading days", within=(1, 10**5))
    """Length of a training episode."""
    initial_cash_usd: float = setting(1e6, "USD", within=(1000, MAX_INITIAL_CASH_USD))
    """Cash at the start of an episode."""
    execution: Literal["next_open", "close"] = setting(
        "next_open", presets={"--preset paper": "close"}
    )
    """Fill orders at the next day's open, or at the close just seen, as in the literature."""
    turbulence_quantile: float = setting(0.0, "quantile", within=(0, 1))
    """Sell all and buy nothing on days above this quantile of the training span's turbulence; 0:
    off."""
    reward: Literal["attributed", "excess", "plain"] = setting(
        "attributed", presets={"--preset paper": "plain"}
    )
    """Rewards of training (reported ones are always plain); attributed: each trade is credited at
    once with its discounted later profit; excess: the return less that of equal weight; plain:
    the day's change of value. The best policy is the same, the noise is not."""
    risk_aversion: float = setting(20.0, within=(0, 1000), presets={"--preset paper": 0.0})
    """Training rewards are charged half of this times the variance of the portfolio's return: 0
    learns the largest return, more a better Sharpe ratio."""

    def __post_init__(self) -> None:
        in_shares = self.order_unit == "shares"
        least, largest = (1, 10**6) if in_shares else (1e-6, 1)
        if not least <= self.max_order <= largest:
            what = "number of shares" if in_shares else "share of the portfolio's value"
            raise ValueError(
                f"max_order must be {least}..{largest}, a {what}, with order_unit "
                f"{self.order_unit}, got {self.max_order}"
            )
