"""The simulated market: its worlds, the built-in edge, and fixed trading rules."""

from functools import partial

import numpy as np
import pytest
from test_trading import scaled

from envs.trading.config import SimulatedMarketConfig, TradingConfig
from envs.trading.environment import TradingVectorEnv
from envs.trading.evaluation import performance, run_markets
from envs.trading.features import side_by_side
from envs.trading.market_data import Span
from envs.trading.simulated_market import (
    DELAY_DAYS,
    DENIAL_DAYS,
    GAP_DAYS,
    MOVE_DAYS,
    PURPOSES,
    buy_equal_weight,
    draw_news,
    follow,
    memoryless,
    planted_outlook,
    reference,
    simulate_markets,
    world_seeds,
)

CONFIG = SimulatedMarketConfig()
STILL = SimulatedMarketConfig(market_edge=0.0)


def figures_of(config, rule, **options):
    """Trade in 6 worlds by `rule`; return the mean of each performance figure."""
    markets = simulate_markets(config, world_seeds(config, "valid", 6))
    span, trading = Span(first=1890, last=2519), TradingConfig(**options)
    env = TradingVectorEnv(6, markets=markets, span=span, config=trading, evaluation=True)
    record = run_markets(env, rule, lambda: None)
    figures = performance({name: np.array(values) for name, values in record.items()})
    return {name: values.mean() for name, values in figures.items()}


def figures_of_reference(config):
    rule = follow(partial(reference, market_edge=config.market_edge))
    return figures_of(config, rule)


def test_a_world_is_the_same_whichever_worlds_are_drawn_with_it():
    seeds = world_seeds(CONFIG, "valid", 4)
    (alone,) = simulate_markets(CONFIG, seeds[2:3])
    together = vars(simulate_markets(CONFIG, seeds[::-1])[1])
    assert all(np.array_equal(value, together[name]) for name, value in vars(alone).items())


def test_world_seeds_differ_between_purposes_numbers_and_market_seeds():
    seeds = []
    for market_seed in (0, 1, 2, 10, 11, 12, 21):
        config = SimulatedMarketConfig(market_seed=market_seed)
        for purpose in PURPOSES:
            seeds += world_seeds(config, purpose, 400)
    assert len(set(seeds)) == len(seeds) == 7 * 3 * 400


def news_of(seed, num_stocks=5):
    """Return a world's hidden events and price moves, each [D, n]."""
    hidden = np.random.SeedSequence(seed).spawn(3)[2]
    return draw_news(np.random.default_rng(hidden), num_stocks)


def test_only_news_that_was_not_denied_moves_the_price_and_only_after_the_delay():
    gaps, num_denied, count = set(), 0, 0
    for events, moves in zip(*(part.T for part in news_of(1)), strict=True):
        days = np.flatnonzero(events)
        denials = days[1:][np.diff(days) == DENIAL_DAYS]
        # The first event is left out, because it may be a denial of news from before day 0.
        news = np.setdiff1d(days, denials)[1:]
        assert (events[denials] == -events[denials - DENIAL_DAYS]).all()
        gaps |= set(np.diff(news))
        denied = np.isin(news + DENIAL_DAYS, denials)
        expected = np.zeros(len(moves) + 2 * DELAY_DAYS)
        for wait in range(DELAY_DAYS + 1, DELAY_DAYS + MOVE_DAYS + 1):
            expected[news + wait] = events[news] * ~denied
        settled = slice(news[0] + DELAY_DAYS + MOVE_DAYS, len(moves) - DELAY_DAYS - 1)
        assert np.array_equal(moves[settled], expected[settled])
        num_denied, count = num_denied + denied.sum(), count + len(news)
    assert gaps == set(range(GAP_DAYS[0], GAP_DAYS[1] + 1))
    assert 0.20 < num_denied / count < 0.30


def test_prices_drift_by_the_edge_on_the_days_of_hidden_moves():
    seeds = world_seeds(CONFIG, "train", 1)
    world, still = (simulate_markets(config, seeds)[0] for config in (CONFIG, STILL))
    assert np.array_equal(still.volume, world.volume)
    returns = world.close[1:] / world.close[:-1]
    planted = returns / (still.close[1:] / still.close[:-1]) - 1.0
    moves = news_of(seeds[0])[1]
    np.testing.assert_allclose(planted, moves[1:] * CONFIG.market_edge * 1e-4, atol=1e-4)


def test_the_filter_uses_no_future_bars():
    (world,) = simulate_markets(CONFIG, world_seeds(CONFIG, "train", 1))
    before, after = (
        planted_outlook(side_by_side([market], 2001), 1890, CONFIG.market_edge)
        for market in (world, scaled(world, 1951, 3.0))
    )
    assert np.array_equal(before[: 1950 - 1890 + 1], after[: 1950 - 1890 + 1])
    assert not np.array_equal(before, after)


def test_without_edge_the_reference_is_equal_weight():
    equal = figures_of(STILL, buy_equal_weight, max_order=1.0)
    held = figures_of_reference(STILL)
    for name, tolerance in {"sharpe": 0.15, "exposure": 0.02, "annual_return": 0.02}.items():
        assert held[name] == pytest.approx(equal[name], abs=tolerance)


def test_a_rule_with_memory_earns_more_than_one_on_event_and_holdings():
    equal = figures_of(CONFIG, buy_equal_weight, max_order=1.0)["sharpe"]
    best = figures_of_reference(CONFIG)["sharpe"]
    rule = figures_of(CONFIG, follow(memoryless))["sharpe"]
    assert 6.0 < best < 9.0
    assert equal < rule < equal + 0.4 * (best - equal)
