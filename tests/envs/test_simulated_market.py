"""The simulated market: its worlds, its planted edge, and rules that trade without learning."""

import numpy as np
import pytest
import torch
from trading_markets import scaled

from envs.trading.baselines import (
    MemorylessRule,
    ReferencePolicy,
    buy_equal_weight,
    news_model,
    planted_outlook,
)
from envs.trading.config import SimulatedMarketConfig, TradingConfig
from envs.trading.environment import TradingVectorEnv
from envs.trading.market_data import Span
from envs.trading.simulated_market import (
    DELAY_DAYS,
    DENIAL_DAYS,
    GAP_DAYS,
    MOVE_DAYS,
    PURPOSES,
    simulate_markets,
    world_seeds,
)

CONFIG = SimulatedMarketConfig()
TEST_SPAN = Span(first=1890, last=2519)


@pytest.fixture(scope="module")
def worlds():
    return simulate_markets(CONFIG, world_seeds(CONFIG, "train", 24))


def test_chances_of_the_states_of_the_news_stay_chances():
    model = news_model()
    np.testing.assert_allclose(model.transition.sum(1), 1.0)
    # its own frequencies repeat themselves, and all announcements are as often up as down
    np.testing.assert_allclose(model.start @ model.transition, model.start, atol=1e-12)
    assert model.start @ model.event == pytest.approx(0.0, abs=1e-12)


def announcements(events):
    """(day, kind, denied) of every announcement of one stock [D], read off the events alone."""
    found = []
    for day in np.flatnonzero(events):
        if found and day - found[-1][0] <= DENIAL_DAYS:
            assert day - found[-1][0] == DENIAL_DAYS and events[day] == -found[-1][1]
            found[-1] = (found[-1][0], found[-1][1], True)
        else:
            found.append((day, events[day], False))
    return found


def sharpe_of(markets, rule, span=TEST_SPAN, **options):
    """Sharpe ratio [M], weights [days, M, n] of a rule over the span."""
    config = TradingConfig(**options)
    env = TradingVectorEnv(len(markets), markets=markets, span=span, config=config, evaluation=True)
    env.reset(seed=[0] * len(markets))
    values, weights = [env.portfolio_value], []
    for _ in range(span.last - span.first):
        _, _, terminated, truncated, info = env.step(rule(env))
        values.append(info["portfolio_value"])
        if not (terminated | truncated).any():
            weights.append(env.weights)
    paths = torch.stack(values, dim=1).numpy()
    returns = paths[:, 1:] / paths[:, :-1] - 1.0
    return returns.mean(1) / returns.std(1) * np.sqrt(252), torch.stack(weights).numpy()


def test_a_world_is_the_same_whichever_worlds_are_drawn_with_it():
    seeds = world_seeds(CONFIG, "valid", 4)
    (alone,) = simulate_markets(CONFIG, seeds[2:3])
    together = simulate_markets(CONFIG, seeds[::-1])
    for name in ("open", "high", "low", "close", "volume", "events", "moves"):
        assert np.array_equal(getattr(alone, name), getattr(together[1], name)), name


def test_no_seed_serves_two_purposes_numbers_or_market_seeds():
    seeds = []
    for market_seed in (0, 1, 2, 10, 11, 12, 21):
        config = SimulatedMarketConfig(market_seed=market_seed)
        for purpose in PURPOSES:
            seeds += world_seeds(config, purpose, 400)
    assert len(set(seeds)) == len(seeds) == 7 * 3 * 400


def test_figures_resemble_the_dow(worlds):
    """30 stocks, 2008-06 to 2024-03: volatility 0.28, correlation 0.47."""
    log_returns = np.diff(np.log([world.close for world in worlds]), axis=1)  # [M, D-1, n]
    assert 0.24 < log_returns.std(1).mean() * np.sqrt(252) < 0.32
    correlations = [np.corrcoef(market.T)[0, 1:].mean() for market in log_returns]
    assert 0.36 < np.mean(correlations) < 0.52
    assert -0.20 < np.expm1(log_returns.min(1).mean()) < -0.08


def test_only_news_that_was_not_denied_moves_the_price_and_only_after_the_delay(worlds):
    denials = count = 0
    for events, moves in zip(worlds[0].events.T, worlds[0].moves.T, strict=True):
        news = announcements(events)
        days = [day for day, _, _ in news]
        assert set(np.diff(days)[1:]) == set(range(GAP_DAYS[0], GAP_DAYS[1] + 1))
        expected = np.zeros_like(moves)
        # what stands at the very start may be a denial without its news
        for day, kind, denied in news[1:]:
            if not denied:
                expected[day + DELAY_DAYS + 1 : day + DELAY_DAYS + MOVE_DAYS + 1] = kind
        settled = slice(days[1] + DELAY_DAYS + MOVE_DAYS, None)
        known = len(moves) - DELAY_DAYS - 1
        assert np.array_equal(moves[settled][:known], expected[settled][:known])
        denials, count = denials + sum(denied for _, _, denied in news), count + len(news)
    assert 0.20 < denials / count < 0.30


def test_prices_drift_by_the_edge_where_the_truth_says_so(worlds):
    (still,) = simulate_markets(
        SimulatedMarketConfig(market_edge=0.0), world_seeds(CONFIG, "train", 1)
    )
    world = worlds[0]
    assert np.array_equal(still.volume, world.volume) and np.array_equal(still.moves, world.moves)
    returns = world.close[1:] / world.close[:-1]
    planted = returns / (still.close[1:] / still.close[:-1]) - 1.0
    np.testing.assert_allclose(planted, world.moves[1:] * CONFIG.market_edge * 1e-4, atol=1e-4)


def test_filter_uses_no_future_bars():
    market = simulate_markets(CONFIG, world_seeds(CONFIG, "valid", 1))[0]
    changed = scaled(market, 1951, 3.0)
    span = Span(first=1890, last=2000)
    before, after = (planted_outlook([m], span, CONFIG.market_edge)[0] for m in (market, changed))
    assert np.array_equal(before[: 1950 - 1890 + 1], after[: 1950 - 1890 + 1])
    assert not np.array_equal(before, after)


def test_without_edge_the_filter_predicts_nothing_and_the_reference_is_equal_weight():
    config = SimulatedMarketConfig(market_edge=0.0)
    markets = simulate_markets(config, world_seeds(config, "valid", 6))
    outlook = planted_outlook(markets, TEST_SPAN, 0.0)[:, :-1, :, 0]
    returns = np.stack([m.close[1891:2520] / m.close[1890:2519] - 1.0 for m in markets])
    product = (outlook * (returns - returns.mean(2, keepdims=True))).mean((1, 2))  # one per world
    assert abs(product.mean()) < 3.5 * product.std(ddof=1) / np.sqrt(6)
    equal, _ = sharpe_of(markets, buy_equal_weight, max_order=1.0)
    reference, weights = sharpe_of(markets, ReferencePolicy(config))
    assert abs((reference - equal).mean()) < 0.15
    np.testing.assert_allclose(weights[10:], 0.2, atol=0.03)


def test_memory_earns_what_a_rule_on_event_and_holdings_cannot(worlds):
    markets = simulate_markets(CONFIG, world_seeds(CONFIG, "valid", 6))
    equal, _ = sharpe_of(markets, buy_equal_weight, max_order=1.0)
    reference, _ = sharpe_of(markets, ReferencePolicy(CONFIG))
    memoryless, _ = sharpe_of(markets, MemorylessRule())
    gap = reference.mean() - equal.mean()
    assert 6.0 < reference.mean() < 9.0
    assert equal.mean() < memoryless.mean() < equal.mean() + 0.4 * gap
