"""Small markets and environments that the trading tests share."""

from dataclasses import replace

import numpy as np
import torch

from envs.trading.config import TradingConfig
from envs.trading.environment import TradingVectorEnv
from envs.trading.market_data import Market, Span

NUM_DAYS, FIRST = 420, 60


def random_market(
    seed: int = 0, num_stocks: int = 4, num_days: int = NUM_DAYS, volatility: float = 0.02
) -> Market:
    """Bars without any pattern."""
    rng = np.random.default_rng(seed)
    close = 50 * np.exp(np.cumsum(rng.normal(0, volatility, (num_days, num_stocks)), axis=0))
    open_ = close * np.exp(rng.normal(0, volatility / 2, close.shape))
    spread = np.exp(np.abs(rng.normal(0, volatility / 2, close.shape)))
    return Market(
        name=f"test market {seed}",
        dates=np.datetime64("2020-01-01") + np.arange(num_days),
        tickers=tuple(f"T{i:02d}" for i in range(num_stocks)),
        open=open_,
        high=np.maximum(open_, close) * spread,
        low=np.minimum(open_, close) / spread,
        close=close,
        volume=rng.lognormal(12, 0.5, close.shape),
    )


def scaled(market: Market, day: int, factor: float) -> Market:
    """The market with all prices and volumes from a day on times a factor."""
    after = np.where(np.arange(len(market.dates)) >= day, factor, 1.0)[:, None]
    names = ("open", "high", "low", "close", "volume")
    return replace(market, **{name: getattr(market, name) * after for name in names})


def make_env(num_envs: int = 3, markets: list[Market] | None = None, **options) -> TradingVectorEnv:
    """A small training environment, already reset unless `seed` is None."""
    seed = options.pop("seed", list(range(100, 100 + num_envs)))
    evaluation = options.pop("evaluation", False)
    device = options.pop("device", "cpu")
    span = Span(FIRST, NUM_DAYS - 1)
    env = TradingVectorEnv(
        num_envs,
        markets=markets or [random_market()],
        span=span,
        train_span=span,
        config=TradingConfig(**{"episode_days": 20, "risk_aversion": 0.0, **options}),
        evaluation=evaluation,
        device=device,
    )
    if seed is not None:
        env.reset(seed=seed)
    return env


def day(env: TradingVectorEnv) -> torch.Tensor:
    """Return the index of the day just seen, [B]."""
    return env.row % env.num_days + FIRST


def account(env: TradingVectorEnv) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cash [B] in USD and shares held [B, n]."""
    state = env.get_state()
    return state["cash"].squeeze(1), state["shares"]


def random_actions(num_steps: int, env: TradingVectorEnv, seed: int = 0) -> torch.Tensor:
    """Actions [num_steps, B, n], some of them outside of [-1, 1]."""
    generator = torch.Generator().manual_seed(seed)
    return 1.2 * (
        2 * torch.rand(num_steps, env.num_envs, len(env.tickers), generator=generator) - 1
    )


def whole_pass(env: TradingVectorEnv, actions: torch.Tensor) -> list[tuple]:
    return [env.step(action) for action in actions]


def same(left, right) -> bool:
    """Bit for bit, through tuples and dictionaries."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, tuple):
        return all(same(a, b) for a, b in zip(left, right, strict=True))
    return torch.equal(left, right)
