"""Prepare the markets and spans of a run, and make its trading environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import torch

from envs.trading.config import DataConfig, SimulatedMarketConfig, TradingConfig
from envs.trading.environment import TradingVectorEnv
from envs.trading.features import first_tradable_day
from envs.trading.market_data import Market, Span, Spans, load_market, split_spans
from envs.trading.simulated_market import simulate_markets, world_seeds
from rl_dist.errors import printable
from rl_dist.flags import changed

NUM_VALID_WORLDS = 20
NUM_TEST_WORLDS = 50


@dataclass(frozen=True, kw_only=True)
class TradingTask:
    """Markets and spans of one run; training and evaluation use different worlds."""

    data: DataConfig
    simulated: SimulatedMarketConfig
    trading: TradingConfig
    spans: Spans
    real: Market | None  # None: simulated markets
    discount: float  # the learner's gamma

    def markets(self, purpose: str, count: int | None = None) -> Sequence[Market]:
        """Return the real market, or simulated markets for train, valid or test."""
        if self.real is not None:
            return [self.real]
        counts = {"train": self.simulated.num_worlds, "valid": NUM_VALID_WORLDS}
        count = count or counts.get(purpose, NUM_TEST_WORLDS)
        return simulate_markets(self.simulated, world_seeds(self.simulated, purpose, count))

    def env(
        self, num_envs: int, markets: Sequence[Market], span: Span, device: Any, **options: Any
    ) -> TradingVectorEnv:
        """Make a batch of environments on the given markets and span."""
        options = {"config": self.trading, "discount": self.discount, **options}
        train_span = self.spans.train
        return TradingVectorEnv(
            num_envs, markets=markets, span=span, train_span=train_span, device=device, **options
        )

    def training_env(
        self, num_envs: int, env_offset: int = 0, device: str | torch.device = "cpu"
    ) -> TradingVectorEnv:
        """Make a batch of training environments; their seeds decide the episodes."""
        return self.env(num_envs, self.markets("train"), self.spans.train, device)

    def evaluation_env(
        self,
        markets: Sequence[Market],
        span: Span,
        *,
        held: bool = False,
        device: str | torch.device = "cpu",
    ) -> TradingVectorEnv:
        """Make one environment per market; an episode runs through the whole span.

        `held` removes the limit of orders, for a rule that buys on the first day and then holds.
        """
        config = self.trading
        if held:
            config = replace(config, max_order=1.0, order_unit="value", turbulence_quantile=0.0)
        return self.env(len(markets), markets, span, device, evaluation=True, config=config)

    def describe(self) -> str:
        """Return one line about the data and one line about the days of each span."""
        market = self.real or self.markets("train", 1)[0]
        config = self.simulated
        if self.real:
            stocks, days = len(market.tickers), len(market.dates)
            data = f"{printable(self.data.data)}, {stocks} stocks, {days} days"
        else:
            data = (
                f"SIMULATED market ({config.num_stocks} stocks, edge {config.market_edge:g} "
                f"bps/day, market seed {config.market_seed}; a test bed for memory, not a promise "
                f"of profit): {config.num_worlds} worlds train, {NUM_VALID_WORLDS} others "
                f"validate, {NUM_TEST_WORLDS} others test"
            )
        spans = "; ".join(
            f"{name} {market.dates[span.first]} to {market.dates[span.last]}"
            for name, span in vars(self.spans).items()
            if span
        )
        warm = market.dates[first_tradable_day(market, self.trading)]
        return f"data: {data}\ndays: {spans} (all indicators are known from {warm} on)"


def prepare_task(
    data: DataConfig,
    simulated: SimulatedMarketConfig,
    trading: TradingConfig,
    discount: float = 0.8,
) -> TradingTask:
    """Load the prices or simulate a market, and split its days into spans."""
    real = None if data.data == "simulated" else load_market(data.data, missing=data.data_missing)
    sample = real or simulate_markets(simulated, world_seeds(simulated, "train", 1))[0]
    spans = split_spans(sample.dates, data, first_tradable=first_tradable_day(sample, trading))
    return TradingTask(
        data=data, simulated=simulated, trading=trading, spans=spans, real=real, discount=discount
    )


def make_trading_vector_env(
    num_envs: int,
    *,
    split: str = "train",
    device: str | torch.device = "cpu",
    **options: Any,
) -> TradingVectorEnv:
    """Make a trading environment from keyword arguments, for `gymnasium.make_vec`.

    Args:
        split: train, valid or test.
        options: fields of DataConfig, SimulatedMarketConfig and TradingConfig. The defaults differ
            from training in two fields: reward is "plain" and risk_aversion is 0.
    """
    sections = {
        "data": DataConfig(),
        "simulated": SimulatedMarketConfig(),
        "trading": TradingConfig(reward="plain", risk_aversion=0.0),
    }
    if unknown := options.keys() - {name for part in sections.values() for name in vars(part)}:
        raise ValueError(f"unknown option {', '.join(unknown)}: see --help_all for the names")
    task = prepare_task(**changed(sections, options))
    span = vars(task.spans).get(split)
    if span is None:
        raise ValueError(f"split must be train, valid or test and have days, got {split!r}")
    return task.env(num_envs, task.markets(split, task.simulated.num_worlds), span, device)


class StockTradingEnv(gymnasium.Env):
    """One portfolio with numpy observations and actions, for `gymnasium.make`.

    It accepts the arguments of `make_trading_vector_env`. All episodes have full length.
    """

    metadata = {"render_modes": []}

    def __init__(self, **kwargs: Any) -> None:
        self.batch = make_trading_vector_env(1, **kwargs)
        self.observation_space = self.batch.single_observation_space
        self.action_space = self.batch.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode; a seed determines this episode and all later episodes."""
        super().reset(seed=seed)
        episode_seed = int(self.np_random.integers(2**63))
        obs, _ = self.batch.reset(seed=[episode_seed], options={"random_age": False})
        return obs[0].numpy(force=True), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Trade one day; return observation [F], reward, terminated, truncated, {}."""
        actions = torch.as_tensor(np.asarray(action)[None], device=self.batch.device)
        _, reward, terminated, truncated, info = self.batch.step(actions)
        # final_obs is the last observation of an episode that ended; the batch starts the next one
        obs = info["final_obs"][0].numpy(force=True)
        return obs, reward.item(), bool(terminated), bool(truncated), {}
