"""The trading task of a run: markets and days to train, validate and test on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from envs.trading.config import TradingConfig
from envs.trading.environment import TradingVectorEnv, first_tradable_day
from envs.trading.market_data import DataConfig, Market, Span, Spans, load_market, split_spans
from envs.trading.simulated_market import SimulatedMarketConfig, simulate_markets, world_seeds

NUM_VALID_WORLDS = 20
NUM_TEST_WORLDS = 50


@dataclass(frozen=True, kw_only=True)
class TradingTask:
    """Markets and spans of one run; simulated worlds that judge are never trained on."""

    data: DataConfig
    simulated: SimulatedMarketConfig
    trading: TradingConfig
    spans: Spans
    real: Market | None  # None: simulated
    discount: float  # the learner's gamma, for attributed rewards

    def markets(self, purpose: str, count: int | None = None, first: int = 0) -> list[Market]:
        """Markets of a purpose (train, valid, test): the real one, or `count` worlds."""
        if self.real is not None:
            return [self.real]
        counts = {"train": self.simulated.num_worlds, "valid": NUM_VALID_WORLDS, "test": NUM_TEST_WORLDS}
        number = counts[purpose] if count is None else count
        return simulate_markets(self.simulated, world_seeds(self.simulated, purpose, number, first))

    def training_env(
        self, num_envs: int, first_global_index: int = 0, device: str | torch.device = "cpu"
    ) -> TradingVectorEnv:
        """A batch of training environments; their reset seeds alone decide what they do."""
        return TradingVectorEnv(
            num_envs,
            markets=self.markets("train"),
            span=self.spans.train,
            config=self.trading,
            train_span=self.spans.train,
            discount=self.discount,
            device=device,
        )

    def judging_env(
        self,
        markets: Sequence[Market],
        span: Span,
        *,
        max_order: float | None = None,
        held: bool = False,
        device: str | torch.device = "cpu",
    ) -> TradingVectorEnv:
        """One pass over each market; `max_order` lifts the limit, to buy all at once."""
        config = self.trading
        if max_order is not None:
            config = replace(config, max_order=max_order, order_unit="value")
        if held:  # buy-and-hold is not sold out by the turbulence rule
            config = replace(config, turbulence_quantile=0.0)
        return TradingVectorEnv(
            len(markets),
            markets=markets,
            span=span,
            config=config,
            evaluation=True,
            train_span=self.spans.train,
            device=device,
        )

    def describe(self) -> str:
        """Which data the run uses and which days train, validate and test."""
        market = self.real or self.markets("train", 1)[0]
        what = f"data: {self.data.data}, {len(market.tickers)} stocks, {len(market.dates)} days"
        if self.real is None:
            config = self.simulated
            what = (
                f"data: SIMULATED market ({config.num_stocks} stocks, edge {config.market_edge:g} bps/day, market "
                f"seed {config.market_seed}; a test bed for memory, not a promise of profit): {config.num_worlds} "
                f"worlds train, {NUM_VALID_WORLDS} others validate, {NUM_TEST_WORLDS} others test"
            )
        spans = {"train": self.spans.train, "valid": self.spans.valid, "test": self.spans.test}
        days = "; ".join(
            f"{name} {market.dates[span.first]} to {market.dates[span.last]}" if span else f"{name} none"
            for name, span in spans.items()
        )
        first = market.dates[first_tradable_day(market, self.trading)]
        return f"{what}\ndays: {days} (indicators are warm from {first} on)"


def prepare_task(
    data: DataConfig, simulated: SimulatedMarketConfig, trading: TradingConfig, discount: float = 0.8
) -> TradingTask:
    """Load or simulate what a run needs to know its spans.

    Raises ValueError (MarketDataError for the file) with one line that names what is wrong.
    """
    real = None if data.data == "simulated" else load_market(data.data, missing=data.data_missing)
    sample = real or simulate_markets(simulated, world_seeds(simulated, "train", 1))[0]
    spans = split_spans(sample.dates, data, first_tradable=first_tradable_day(sample, trading))
    return TradingTask(
        data=data, simulated=simulated, trading=trading, spans=spans, real=real, discount=discount
    )
