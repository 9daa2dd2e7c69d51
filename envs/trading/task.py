"""Prepare the markets and spans of a run, and make its trading environments."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from envs.trading.config import DataConfig, SimulatedMarketConfig, TradingConfig
from envs.trading.environment import TradingVectorEnv
from envs.trading.features import first_tradable_day
from envs.trading.market_data import Market, Span, Spans, load_market, price_notes, split_spans
from envs.trading.simulated_market import simulate_markets, world_seeds
from rl_dist.errors import printable

NUM_VALID_WORLDS = 20
NUM_TEST_WORLDS = 50


@dataclass(frozen=True)
class TradingTask:
    """The markets and spans of one run.

    Training, validation and test use different simulated markets.
    """

    data: DataConfig
    simulated: SimulatedMarketConfig
    trading: TradingConfig
    discount: float = 0.8  # value of the flag gamma

    @cached_property
    def real(self) -> Market | None:
        """The market in the data file, with real prices; None if markets are simulated."""
        if self.data.data == "simulated":
            return None
        return load_market(self.data.data, missing=self.data.data_missing)

    @cached_property
    def sample(self) -> Market:
        """The real market, or the first simulated market for training."""
        return self.real or self.markets("train", 1)[0]

    @cached_property
    def spans(self) -> Spans:
        """The training, validation and test spans, which are the same in all markets."""
        first_tradable = first_tradable_day(self.sample, self.trading)
        return split_spans(self.sample.dates, self.data, first_tradable=first_tradable)

    def markets(self, purpose: str, count: int | None = None) -> Sequence[Market]:
        """Return the real market, or `count` simulated markets for one purpose."""
        if self.real is not None:
            return [self.real]
        counts = {
            "train": self.simulated.num_worlds,
            "valid": NUM_VALID_WORLDS,
            "test": NUM_TEST_WORLDS,
        }
        seeds = world_seeds(self.simulated, purpose, count or counts[purpose])
        return simulate_markets(self.simulated, seeds)

    def training_env(
        self, num_envs: int, env_offset: int = 0, device: str | torch.device = "cpu"
    ) -> TradingVectorEnv:
        """Make a batch of training environments; their seeds determine the episodes."""
        return TradingVectorEnv(
            num_envs,
            markets=self.markets("train"),
            span=self.spans.train,
            config=self.trading,
            discount=self.discount,
            device=device,
        )

    def evaluation_env(
        self,
        markets: Sequence[Market],
        span: Span,
        *,
        held: bool = False,
        device: str | torch.device = "cpu",
    ) -> TradingVectorEnv:
        """Make one environment per market; an episode covers the whole span.

        With `held`, neither the order limit nor the turbulence rule applies. This is meant for a
        strategy that buys on the first day and then holds.
        """
        config = self.trading
        if held:
            config = replace(config, max_order=1.0, order_unit="value", turbulence_quantile=0.0)
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
        """Return one line each about the data, the spans and whatever is unusual in real prices."""
        market = self.sample
        notes = ""
        data = f"{len(market.tickers)} stocks, {len(market.dates)} days of "
        if self.real:
            data += printable(self.data.data)
            notes = "".join(f"\nnote: {printable(n)}" for n in price_notes(market, self.trading))
        else:
            data += (
                f"a SIMULATED market (edge {self.simulated.market_edge:g} bps/day, market seed "
                f"{self.simulated.market_seed}): a test bed for memory, not a promise of profit"
            )
        spans = (
            f"{name} {market.dates[span.first]} to {market.dates[span.last]}"
            for name, span in vars(self.spans).items()
            if span
        )
        return f"data: {data}\ndays: {'; '.join(spans)}{notes}"
