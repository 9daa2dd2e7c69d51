"""The rules of a trading day: observations, orders, fills and rewards."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from trading_markets import (
    FIRST,
    NUM_DAYS,
    account,
    day,
    make_env,
    random_actions,
    random_market,
    same,
    scaled,
    whole_pass,
)

from envs.trading.config import TradingConfig
from envs.trading.environment import TradingVectorEnv, fill_orders
from envs.trading.features import GRID, first_tradable_day, net_prices, to_grid
from envs.trading.market_data import Span

# ---- fills


def fill_one_by_one(cash, shares, orders, priority, sell_price, buy_price):
    """Fill one portfolio: all sells, then buys by priority until the cash runs out."""
    trades = [0.0] * len(shares)
    for i, order in enumerate(orders):
        if order < 0:
            trades[i] = -min(-order, shares[i])
            cash += -trades[i] * sell_price[i]
    for i in sorted(range(len(orders)), key=lambda i: (-priority[i], i)):
        if orders[i] > 0:
            while trades[i] < orders[i] and buy_price[i] <= cash:
                trades[i] += 1
                cash -= buy_price[i]
            if trades[i] < orders[i]:
                break
    return cash, trades


def random_case(rng, n):
    """Return a portfolio with tied priorities, zeros, and cash for some orders."""
    fill = rng.choice([0.37, 1.0, 25.0, 99.99, 411.7], n) * rng.choice([1.0, 1.013], n)
    sell, buy = net_prices(to_grid(torch.from_numpy(fill)), float(rng.choice([0, 10, 123])))
    shares = torch.from_numpy(rng.integers(0, 30, n) * rng.integers(0, 2, n)).double()
    orders = torch.from_numpy(rng.integers(-20, 25, n)).double()
    priority = torch.from_numpy(rng.choice([0, 0.25, 0.5, 1], n)) if rng.random() < 0.5 else orders
    some = torch.from_numpy(rng.integers(0, 2, n))
    proceeds = (torch.minimum((-orders).clamp_min(0), shares) * sell).sum()
    cost = (orders.clamp_min(0) * buy * some).sum()
    cash = (cost - proceeds - rng.integers(0, 3) / GRID).clamp_min(0.0)
    return cash, shares, orders, priority.float(), sell, buy


@pytest.mark.parametrize("n", [1, 5, 30])
def test_fills_equal_a_greedy_loop_to_the_last_bit(n):
    rng = np.random.default_rng(n)
    cases = [random_case(rng, n) for _ in range(500)]
    cash, *rest = (torch.stack(part) for part in zip(*cases, strict=True))
    cash_after, trades = fill_orders(cash.unsqueeze(1), *rest)
    expected = [fill_one_by_one(*(part.tolist() for part in case)) for case in cases]
    assert list(zip(cash_after.squeeze(1).tolist(), trades.tolist(), strict=True)) == expected
    wanted = rest[1].clamp_min(0)
    assert (trades.clamp_min(0) < wanted).any(dim=1).sum() > 50, "too few cases run out of cash"


# ---- one trading day


@pytest.mark.parametrize(("execution", "fill"), [("next_open", 110.0), ("close", 100.0)])
def test_a_trading_day_worked_out_by_hand(execution, fill):
    market, quiet = random_market(num_stocks=2), NUM_DAYS - 2
    opens = np.array([[100.0, 50.0]] * (quiet + 1) + [[110.0, 40.0]])
    closes = np.array([[100.0, 50.0]] * (quiet + 1) + [[120.0, 45.0]])
    wiggle = 1 + 0.001 * np.sin(np.arange(NUM_DAYS))[:, None]  # keeps the indicators finite
    extremes = {"high": np.maximum(opens, closes) * 1.01 * wiggle, "low": opens * 0.9}
    market = replace(market, open=opens, close=closes, **extremes)
    options = {"max_order": 0.5, "initial_cash_usd": 1e4, "fee_bps": 100, "execution": execution}
    env = make_env(1, [market], evaluation=True, **options)
    whole_pass(env, torch.zeros(NUM_DAYS - 2 - FIRST, 1, 2))
    _, rewards, terminated, truncated, info = env.step(torch.tensor([[0.91, -1.0]]))
    # 45.5 % of 10,000 USD buys 45 whole shares at a close of 100 USD
    cash = 1e4 - 45 * fill * 1.01
    value = cash + 45 * 120
    expected = {
        "portfolio_value": value,
        "traded_usd": 45 * fill,
        "fees_usd": 45 * fill * 0.01,
        "exposure": 45 * 120 / value,
        "num_trades": 1,
    }
    assert {name: info[name].item() for name in expected} == pytest.approx(expected, abs=1e-4)
    assert rewards.item() == pytest.approx((value - 1e4) * 1e-4, abs=1e-8)
    assert truncated.item() and not terminated.item()
    logs = np.log([1.2, 0.9, 120 / 101, 45 / 49.75])
    seen = [cash / value, *logs, 45 * 120 / value, 0.0]
    assert info["final_obs"][0, :7].tolist() == pytest.approx(seen, abs=1e-6)


def test_bars_after_the_fill_day_do_not_change_a_step_and_tomorrow_only_fills():
    """With next_open, tomorrow's open only prices orders that today's close set."""
    market, today = random_market(), FIRST + 10
    other_open = market.open.copy()
    other_open[today + 1] *= 1.01
    variants = [market, scaled(market, today + 2, 1.7), replace(market, open=other_open)]
    envs = [make_env(1, [variant], evaluation=True, max_order=0.02) for variant in variants]
    actions = random_actions(11, envs[0]).abs().clamp(0.2, 0.9)
    actions[5] *= -1
    passes = [whole_pass(env, actions) for env in envs]
    assert same(passes[0], passes[1]) and same(passes[0][:10], passes[2][:10])
    assert not torch.equal(passes[0][10][1], passes[2][10][1])
    assert torch.equal(account(envs[0])[1], account(envs[2])[1]), "orders depend on tomorrow"


# ---- rewards


def test_training_rewards_differ_from_the_change_of_value_as_promised():
    forms = {"excess": {}, "attributed": {}, "plain": {"risk_aversion": 10.0}}
    envs = {name: make_env(4, reward=name, **options) for name, options in forms.items()}
    close, gamma, last = random_market().close, 0.8, NUM_DAYS - 1
    changes = np.diff(close, axis=0)
    covariance = np.cov((changes / close[:-1])[FIRST:].T)
    later = np.zeros_like(close)  # discounted future profit of one share, for each day
    for d in range(last - 1, -1, -1):
        later[d] = changes[d] + gamma * later[d + 1]

    def look(env):
        value, weights, days = env.portfolio_value.numpy(), env.weights.numpy(), day(env)
        profit = (account(env)[1].numpy() * later[days]).sum(1)
        risk = 0.5 * 10 * value * np.einsum("bi,ij,bj->b", weights, covariance, weights)
        return value, profit, risk, (changes[days] / close[days]).mean(1)

    for actions in random_actions(19, envs["plain"]):
        value, profit, risk, mean_return = look(envs["plain"])
        steps = {name: env.step(actions) for name, env in envs.items()}
        value_after, profit_after, risk_after, _ = look(envs["plain"])
        promised = {
            "excess": -1e6 * mean_return,
            "attributed": gamma * profit_after - profit,
            "plain": (risk - risk_after) / (1 - gamma),
        }
        for name, (_, rewards, terminated, truncated, info) in steps.items():
            going_on = ~(terminated | truncated)
            raw = info["raw_rewards"]
            assert raw[going_on].numpy() == pytest.approx(1e-4 * (value_after - value)[going_on])
            added = (rewards - raw)[going_on].numpy()
            assert added == pytest.approx(1e-4 * promised[name][going_on], abs=1e-5)


def test_turbulence_sells_everything_and_buys_nothing():
    # after the training span, more than 1 % of the days have extreme returns
    market, jumps = random_market(num_days=600), range(500, 516, 2)
    for number in jumps:
        market = scaled(market, number, 1.5 if number % 4 else 1 / 1.5)
    config = TradingConfig(turbulence_quantile=0.99)
    spans = {"span": Span(490, 599), "train_span": Span(first_tradable_day(market, config), 480)}
    env = TradingVectorEnv(1, markets=[market], **spans, config=config, evaluation=True)
    env.reset(seed=[0])
    calm = 0
    for number in range(490, 520):
        env.step(torch.ones(1, 4) * 0.5)
        cash, shares = account(env)
        if number in jumps:
            assert (shares == 0).all() and cash == env.portfolio_value
        calm += bool((shares > 0).all())
    assert calm >= 15


# ---- observations and refusals


def test_paper_observation_of_30_stocks_has_181_numbers():
    market = random_market(num_stocks=30)
    env = make_env(2, [market], observation="paper", order_unit="shares", max_order=100)
    obs = env.step(torch.full((2, 30), 0.5))[0]
    assert obs.shape == (2, 181) and obs.dtype == torch.float32
    cash, close, shares = obs[0, [0, 1 + 7, 1 + 30 + 7]]  # columns of stock 7
    assert cash == account(env)[0][0].float() and shares == 50
    assert close == np.float32(market.close[day(env)[0], 7])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episode_days": 360}, "--episode_days"),
        ({"max_order": 1.5}, "max_order 1.5 does not fit order_unit value"),
        ({"order_unit": "shares", "max_order": 0.05}, "max_order 0.05 does not fit order_unit"),
        ({"observation": "pixels"}, "relative. or .paper"),
        ({"fee_bps": -1}, "fee_bps must be"),
    ],
)
def test_rules_that_cannot_work_are_refused_with_the_fix(options, message):
    with pytest.raises(ValueError, match=message):
        make_env(**options)
