"""Small markets and environments that the trading tests share."""

from dataclasses import replace

import numpy as np
import torch

from envs.trading.config import TradingConfig
from envs.trading.environment import TradingVectorEnv
from envs.trading.market_data import Market, Span

NUM_DAYS, FIRST = 420, 60
BARS = ("open", "high", "low", "close", "volume")


def random_market(seed=0, num_stocks=4, num_days=NUM_DAYS, volatility=0.02):
    """Return a market of random bars without any pattern."""
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


def scaled(market, day, factor):
    """Return the market with prices and volumes multiplied by a factor from a day on."""
    after = np.where(np.arange(len(market.dates)) >= day, factor, 1.0)[:, None]
    return replace(market, **{name: getattr(market, name) * after for name in BARS})


def make_env(num_envs=3, markets=None, seed=100, evaluation=False, device="cpu", **options):
    """Return a small trading environment; reset it with `seed` unless that is None."""
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


def day(env):
    """Return the index of the last observed day, [B]."""
    return env.row % env.num_days + FIRST


def account(env):
    """Return cash [B] in USD and the number of shares held [B, n]."""
    state = env.get_state()
    return state["cash"].squeeze(1), state["shares"]


def random_actions(num_steps, env):
    """Return random actions [num_steps, B, n], some of them outside [-1, 1]."""
    shape = num_steps, env.num_envs, len(env.tickers)
    return 2.4 * torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 1.2


def whole_pass(env, actions):
    return [env.step(action) for action in actions]


def same(left, right):
    """Return whether nested lists, tuples and dictionaries hold equal tensors."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list | tuple):
        return all(same(a, b) for a, b in zip(left, right, strict=True))
    return torch.equal(left, right)
