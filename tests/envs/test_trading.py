"""The rules of a trading day: what is seen, ordered, filled and rewarded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from trading_markets import (
    FIRST,
    NUM_DAYS,
    make_env,
    random_actions,
    random_market,
    same,
    scaled,
    whole_pass,
)

from envs.trading.environment import TradingVectorEnv
from envs.trading.features import feature_names, first_tradable_day
from envs.trading.market_data import Market, Span
from envs.trading.task import make_trading_vector_env
from envs.trading_config import TradingConfig


def flat_bars(open_: list[list[float]], close: list[list[float]]) -> Market:
    """NUM_DAYS bars at the first given price, then the given ones."""
    quiet = NUM_DAYS - len(close)
    market = random_market(num_stocks=len(close[0]))
    bars = {
        "open": np.array([open_[0]] * quiet + open_),
        "close": np.array([close[0]] * quiet + close),
    }
    wiggle = 1 + 0.001 * np.sin(np.arange(NUM_DAYS))[:, None]  # keeps the indicators finite
    high = np.maximum(*bars.values()) * 1.01 * wiggle
    low = np.minimum(*bars.values()) * 0.99
    return replace(market, **bars, high=high, low=low)


@pytest.mark.parametrize("execution", ["next_open", "close"])
def test_a_trading_day_worked_out_by_hand(execution):
    open_ = [[100.0, 50.0], [110.0, 40.0]]
    close = [[100.0, 50.0], [120.0, 45.0]]
    options = {"max_order": 0.5, "initial_cash_usd": 1e4, "fee_bps": 100, "execution": execution}
    env = make_env(1, [flat_bars(open_, close)], evaluation=True, **options)
    for _ in range(NUM_DAYS - 2 - FIRST):
        env.step(torch.zeros(1, 2))
    _, rewards, terminated, truncated, info = env.step(torch.tensor([[0.91, -1.0]]))
    # 45.5 % of 10,000 USD at a close of 100 is an order of 45 whole shares.
    fill = 110.0 if execution == "next_open" else 100.0
    cash = 1e4 - 45 * fill * 1.01
    value = cash + 45 * 120
    assert info["portfolio_value"].item() == pytest.approx(value, abs=1e-4)
    assert rewards.item() == pytest.approx((value - 1e4) * 1e-4, abs=1e-8)
    assert info["traded_usd"].item() == pytest.approx(45 * fill, abs=1e-4)
    assert info["fees_usd"].item() == pytest.approx(45 * fill * 0.01, abs=1e-4)
    assert info["exposure"].item() == pytest.approx(45 * 120 / value, abs=1e-8)
    assert info["num_trades"].item() == 1
    assert truncated.item() and not terminated.item()
    logs = np.log([1.2, 0.9, 120 / 101, 45 / 49.75])
    expected = [cash / value, *logs, 45 * 120 / value, 0.0]
    assert info["final_obs"][0, :7].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("options", [
    {}, {"order_unit": "shares", "max_order": 3000}, {"max_order": 1.0, "execution": "close"},
    {"observation": "paper", "fee_bps": 300},
])  # fmt: skip
def test_cash_never_goes_negative_and_shares_are_whole_and_not_short(options):
    env = make_env(16, [random_market(1), random_market(2, volatility=0.1)], **options)
    for actions in random_actions(150, env):
        env.step((actions * 3).clamp(-1, 1) if len(options) else actions)
        assert (env.cash >= 0).all() and (env.shares >= 0).all()
        assert torch.equal(env.shares, env.shares.round())
    assert (env.shares > 0).any()


def test_bars_after_the_fill_day_do_not_change_a_step_and_tomorrow_only_fills():
    """Next open: today's orders come from today's close, tomorrow's open only prices them."""
    market, day = random_market(), FIRST + 10
    other_open = market.open.copy()
    other_open[day + 1] *= 1.01
    variants = [market, scaled(market, day + 2, 1.7), replace(market, open=other_open)]
    envs = [make_env(1, [variant], evaluation=True, max_order=0.02) for variant in variants]
    actions = random_actions(11, envs[0]).abs().clamp(0.2, 0.9)
    actions[5] *= -1
    passes = [whole_pass(env, actions) for env in envs]
    assert same(tuple(passes[0]), tuple(passes[1]))
    assert same(tuple(passes[0][:10]), tuple(passes[2][:10]))
    before, after = passes[0][10], passes[2][10]
    assert not torch.equal(before[1], after[1])
    assert torch.equal(envs[0].shares, envs[2].shares), "orders must not depend on tomorrow"


def test_raw_rewards_of_an_episode_add_up_to_its_change_of_value():
    env = make_env(1, seed=None)
    env.reset(seed=[3], options={"random_age": False})
    total = 0.0
    for actions in random_actions(19, env):
        *_, info = env.step(actions)
        total += info["raw_rewards"].item()
    assert total == pytest.approx((env.portfolio_value.item() - 1e6) * 1e-4, abs=1e-9)
    assert abs(total) > 0.01


def test_excess_rewards_subtract_what_equal_weight_earns():
    env = make_env(8, reward="excess")
    close = random_market().close
    for actions in random_actions(20, env):
        days = env.day.tolist()
        _, rewards, _, _, info = env.step(actions)
        expected = [1e6 * 1e-4 * (close[d + 1] / close[d] - 1).mean() for d in days]
        assert (info["raw_rewards"] - rewards).tolist() == pytest.approx(expected, abs=1e-5)


def test_attributed_rewards_keep_the_discounted_return_of_an_episode():
    env = make_env(4, reward="attributed", episode_days=70)
    discount = 0.8
    env.reset(seed=[1, 2, 3, 4], options={"random_age": False})  # episodes longer than the test
    start = env.day
    plain = shaped = torch.zeros(4, dtype=torch.float64)
    close = torch.from_numpy(random_market().close)
    for step, actions in enumerate(random_actions(60, env)):
        shares_before = env.shares
        _, rewards, terminated, truncated, info = env.step(actions)
        plain = plain + discount**step * info["raw_rewards"]
        shaped = shaped + discount**step * rewards
        assert not (terminated | truncated).any()
        # what was held before the step does not matter to its reward, only what was traded
        if step == 30:
            assert (rewards - info["raw_rewards"]).abs().max() > 1e-6 and shares_before.sum() > 0
    last_day = env.span.last
    changes = close[1:] - close[:-1]
    weights = discount ** torch.arange(NUM_DAYS, dtype=torch.float64)
    later = torch.stack([weights[: last_day - d] @ changes[d:last_day] for d in env.day.tolist()])
    left = discount**60 * 1e-4 * (env.shares * later).sum(1)  # the potential of what is still held
    assert (env.day - start).tolist() == [60] * 4
    assert torch.allclose(shaped, plain + left, atol=1e-6, rtol=0)


def test_an_order_is_charged_for_the_variance_it_adds():
    neutral = make_env(4, reward="attributed")
    averse = make_env(4, reward="attributed", risk_aversion=10.0)
    closes = random_market().close[FIRST:]
    covariance = np.cov((closes[1:] / closes[:-1] - 1).T)

    def risk(env):
        weights = env.weights.numpy()
        value = env.portfolio_value.numpy()
        return 0.5 * 10 * value * np.einsum("bi,ij,bj->b", weights, covariance, weights)

    for actions in random_actions(15, neutral):
        before = risk(averse)
        (_, rewards, terminated, truncated, info) = neutral.step(actions)
        step = averse.step(actions)
        assert torch.equal(info["raw_rewards"], step[4]["raw_rewards"])
        going_on = ~(terminated | truncated).numpy()
        charged = (rewards - step[1]).numpy()[going_on]
        assert charged == pytest.approx(
            ((risk(averse) - before) * 1e-4 / (1 - 0.8))[going_on], rel=1e-6, abs=1e-9
        )


def test_turbulence_sells_everything_and_buys_nothing():
    # one return far out of the ordinary, on day 500
    market = scaled(random_market(num_days=600), 500, 1.5)
    config = TradingConfig(turbulence_quantile=0.99)
    first = first_tradable_day(market, config)
    assert first >= 252
    span = Span(490, 599)
    env = TradingVectorEnv(
        1, markets=[market], span=span, train_span=Span(first, 480), config=config, evaluation=True
    )
    env.reset(seed=[0])
    calm = 0
    for _ in range(20):
        turbulent = env.day.item() == 500
        env.step(torch.ones(1, 4) * 0.5)
        if turbulent:
            assert (env.shares == 0).all() and env.cash.item() == env.portfolio_value.item()
        calm += bool((env.shares > 0).all())
    assert calm >= 15


def test_paper_observation_of_30_stocks_has_181_numbers():
    market = random_market(num_stocks=30)
    env = make_env(2, [market], observation="paper", order_unit="shares", max_order=100)
    obs, _ = env.reset(seed=[1, 2])
    names = feature_names(env.config.observation, env.tickers)
    assert obs.shape == (2, 181) and len(names) == 181 and obs.dtype == torch.float32
    obs = env.step(torch.full((2, 30), 0.5))[0]
    assert obs[0, 0] == env.cash[0].float()
    assert obs[0, names.index("shares:T07")] == 50
    assert obs[0, names.index("close:T07")] == np.float32(market.close[env.day[0], 7])


@pytest.mark.parametrize("options, message", [
    ({"episode_days": 360}, "--episode_days"),
    ({"max_order": 1.5}, "max_order must be"),
    ({"order_unit": "shares", "max_order": 0.05}, "max_order must be"),
    ({"observation": "pixels"}, "relative. or .paper"),
    ({"fee_bps": -1}, "fee_bps must be"),
])  # fmt: skip
def test_rules_that_cannot_work_are_refused_with_the_fix(options, message):
    with pytest.raises(ValueError, match=message):
        make_env(**options)


def test_a_span_that_starts_before_the_indicators_are_warm_is_refused():
    market = random_market()
    first = first_tradable_day(market, TradingConfig())
    with pytest.raises(ValueError, match="not known on 2020-02-28"):
        TradingVectorEnv(
            1, markets=[market], span=Span(first - 1, 300), config=TradingConfig(episode_days=5)
        )
    TradingVectorEnv(
        1, markets=[market], span=Span(first, 300), config=TradingConfig(episode_days=5)
    )
    with pytest.raises(ValueError, match="unknown option num_stonks"):
        make_trading_vector_env(1, num_stonks=3)
