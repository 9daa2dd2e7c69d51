"""The trading environment: indicators, orders, fills, rewards and episodes."""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from env_steps import same
from operators import counted_operators, counted_reads

from envs.trading.config import TradingConfig
from envs.trading.environment import OFFER_SCALE, TradingVectorEnv, fill_orders
from envs.trading.features import (
    GRID,
    feature_blocks,
    first_tradable_day,
    to_grid,
    turbulence,
)
from envs.trading.market_data import Market, Span

NUM_DAYS, FIRST = 420, 60
BARS = ("open", "high", "low", "close", "volume")
PAPER = {"observation": "paper", "order_unit": "shares", "max_order": 100}


def random_market(seed=0, num_stocks=4, num_days=NUM_DAYS):
    """Return a market of random bars without any pattern."""
    rng = np.random.default_rng(seed)
    close = 50 * np.exp(np.cumsum(rng.normal(0, 0.02, (num_days, num_stocks)), axis=0))
    open_ = close * np.exp(rng.normal(0, 0.01, close.shape))
    spread = np.exp(np.abs(rng.normal(0, 0.01, close.shape)))
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
    """Return the market with prices and volumes multiplied by `factor` from `day` on."""
    after = np.where(np.arange(len(market.dates)) >= day, factor, 1.0)[:, None]
    return replace(market, **{name: getattr(market, name) * after for name in BARS})


MARKETS = [random_market(1), random_market(2)]


def make_env(num_envs=3, markets=MARKETS[:1], seeds=(), evaluation=False, first=FIRST, **options):
    """Return a small trading environment that has been reset."""
    env = TradingVectorEnv(
        num_envs,
        markets=markets,
        span=Span(first, NUM_DAYS - 1),
        config=TradingConfig(**{"episode_days": 20, "risk_aversion": 0.0, **options}),
        evaluation=evaluation,
    )
    env.reset(seed=seeds or range(100, 100 + num_envs))
    return env


def random_actions(num_steps, env):
    """Return random actions [num_steps, B, n], some of them outside [-1, 1]."""
    shape = num_steps, env.num_envs, len(env.tickers)
    return 2.4 * torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 1.2


def take_all(env, actions):
    """Take all actions; return (obs, rewards, terminated, truncated, *info) per step."""
    results = [env.step(action) for action in actions]
    return [(*columns, *info.values()) for *columns, info in results]


# ---- indicators


# name: (index of the feature block, first day with a value)
INDICATORS = {"macd": (2, 25), "rsi": (3, 30), "cci": (4, 29), "adx": (5, 59)}


def indicator(name, bars):
    if name == "turbulence":
        return turbulence(bars.close, days=100)[:, None]
    return feature_blocks(bars, "paper")[INDICATORS[name][0]]


@pytest.mark.parametrize(
    "name, warm_day",
    [*((name, day) for name, (_, day) in INDICATORS.items()), ("turbulence", 101)],
)
def test_indicators_are_nan_during_warm_up_and_do_not_depend_on_later_bars(name, warm_day):
    bars = random_market(num_days=300)
    before = indicator(name, bars)
    assert np.isnan(before[:warm_day]).all() and np.isfinite(before[warm_day:]).all()
    for today in (warm_day, 150, 298):
        after = indicator(name, scaled(bars, today + 1, 3.0))
        np.testing.assert_array_equal(after[: today + 1], before[: today + 1])
        assert not np.array_equal(after[today + 1 :], before[today + 1 :])


def straight_lines():
    """Return bars of two stocks: from 100 up to 219 USD, and back down."""
    up = np.arange(100.0, 220.0)
    lines = np.stack([up, up[::-1]], axis=1)
    return replace(random_market(), close=lines, high=lines + 0.5, low=lines - 0.5)


def test_indicators_of_straight_lines_have_known_values():
    bars = straight_lines()
    # On a straight line, a d-day exponential mean is (d - 1) / 2 days late; macd: 12.5 - 5.5 = 7.
    for name, expected in {"macd": [7, -7], "rsi": [100, 0], "adx": [100, 100]}.items():
        values = indicator(name, bars)[59:]
        np.testing.assert_allclose(values, np.tile(expected, (len(values), 1)), atol=1e-9)


def test_relative_observations_of_straight_lines_have_known_values():
    log_volume = np.ones((120, 2))
    log_volume[-1] = 2, 9
    bars = replace(straight_lines(), volume=np.expm1(log_volume))
    cci = 14.5 / (0.015 * 7.5)  # distance to the mean of 30 days, over 0.015 mean deviations
    expected = [
        [np.log(219 / 218), np.log(100 / 101)],
        [np.log(219 / 209.5), np.log(100 / 109.5)],
        [0.0, 0.0],
        [20.0 * 7 / 219, 20.0 * -7 / 100],
        [1.0, -1.0],
        [cci / 200, -cci / 200],
        [1.0, 1.0],
        [2.0 - 21.0 / 20, 3.0],  # 9 - 28 / 20 is cut to 3
    ]
    last_day = [block[-1] for block in feature_blocks(bars, "relative")]
    np.testing.assert_allclose(last_day, expected, atol=1e-9)


def test_turbulence_equals_a_slow_reference_and_ignores_constant_prices():
    close = random_market(num_stocks=6).close
    twin, constant = 2.0 * close[:, :1], np.full((NUM_DAYS, 1), 7.0)
    values = [turbulence(np.concatenate([close, *more], 1)) for more in ([], [twin], [constant])]
    for day in (253, 317, 419):
        history = np.array([close[t] / close[t - 1] - 1 for t in range(day - 252, day)])
        apart = close[day] / close[day - 1] - 1 - history.mean(axis=0)
        expected = apart @ np.linalg.inv(np.cov(history, rowvar=False)) @ apart
        assert [column[day] for column in values] == pytest.approx([expected] * 3, rel=1e-6)


# ---- fills


def fill_one_by_one(cash, shares, orders, priority, sell_price, buy_price):
    """Fill the orders of a portfolio: first sells, then buys by priority.

    Buys end when the cash does not cover the next share.
    """
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


@pytest.mark.parametrize("n", [1, 5, 30])
def test_fills_equal_a_greedy_loop_to_the_last_bit(n):
    """Some priorities are equal; the cash is often just enough or just too little."""
    rng, size = np.random.default_rng(n), (500, n)

    def draw(values):
        return torch.from_numpy(rng.choice(values, size))

    fill, fee = to_grid(draw([0.37, 1.013, 25.0, 99.99, 411.7])), to_grid(draw([0.0, 0.01, 0.1]))
    sell, buy = fill - fee, fill + fee
    shares = draw(30) * draw([0.0, 1.0])
    orders = draw(45) - 20.0
    proceeds = torch.minimum(-orders, shares).clamp_min(0) * sell
    cost = orders.clamp_min(0) * buy * draw(2)
    cash = (cost - proceeds).sum(1) - draw(3)[:, 0] / GRID
    case = cash.clamp_min(0.0), shares, orders, draw([0.25, 0.5, 1]), sell, buy
    sales = torch.minimum(-orders, shares)
    offers = (torch.where(orders < 0, 1.0, -case[3]) * OFFER_SCALE).float()
    earlier = torch.ones(n, n, dtype=torch.float64).triu(1)
    cash_after, sold = fill_orders(case[0][:, None], sales, offers, -sell, -buy, earlier)
    trades = -sold
    expected = [
        fill_one_by_one(*row) for row in zip(*(part.tolist() for part in case), strict=True)
    ]
    assert list(zip(cash_after[:, 0].tolist(), trades.tolist(), strict=True)) == expected
    cut = trades.clamp_min(0) < orders.clamp_min(0)
    assert cut.any(dim=1).sum() > 50, "more cases must run out of cash"


# ---- one trading day


@pytest.mark.parametrize("execution, fill", [("next_open", 110.0), ("close", 100.0)])
def test_a_trading_day_worked_out_by_hand(execution, fill):
    opens = np.array([[100.0, 50.0]] * (NUM_DAYS - 1) + [[110.0, 40.0]])
    closes = np.array([[100.0, 50.0]] * (NUM_DAYS - 1) + [[120.0, 45.0]])
    # With constant prices, some indicators would not be finite.
    wiggle = 1 + 0.001 * np.sin(np.arange(NUM_DAYS))[:, None]
    extremes = {"high": np.maximum(opens, closes) * 1.01 * wiggle, "low": opens * 0.9}
    market = replace(random_market(num_stocks=2), open=opens, close=closes, **extremes)
    options = {"max_order": 0.5, "initial_cash_usd": 1e4, "fee_bps": 100, "execution": execution}
    env = make_env(1, [market], evaluation=True, **options)
    take_all(env, torch.zeros(NUM_DAYS - 2 - FIRST, 1, 2))
    _, rewards, terminated, truncated, info = env.step(torch.tensor([[0.91, -1.0]]))
    # The order is 45.5 % of 10,000 USD: at a close of 100 USD these are 45 whole shares.
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


def test_a_step_depends_on_no_bar_after_the_fill_day():
    """Today's close determines the orders; tomorrow's open only sets the fill price."""
    market, today = random_market(), FIRST + 10
    other_open = market.open.copy()
    other_open[today + 1] *= 1.01
    variants = [market, scaled(market, today + 2, 1.7), replace(market, open=other_open)]
    envs = [make_env(1, [variant], evaluation=True, max_order=0.02) for variant in variants]
    actions = random_actions(11, envs[0]).abs().clamp(0.2, 0.9)
    actions[5] *= -1
    passes = [take_all(env, actions) for env in envs]
    for other, days in ((passes[1], 11), (passes[2], 10)):
        assert same(sum(passes[0][:days], ()), sum(other[:days], ()))
    assert not torch.equal(passes[0][10][1], passes[2][10][1])
    assert torch.equal(envs[0].shares, envs[2].shares), "orders must not depend on tomorrow's open"


def test_training_rewards_differ_from_changes_of_value_by_the_documented_terms():
    forms = {"excess": {}, "attributed": {}, "plain": {"risk_aversion": 10.0}}
    envs = {name: make_env(4, reward=name, **options) for name, options in forms.items()}
    close, gamma, last = MARKETS[0].close, 0.8, NUM_DAYS - 1
    changes = np.diff(close, axis=0)
    covariance = np.cov((changes / close[:-1])[FIRST:].T)
    later = np.zeros_like(close)  # discounted future profit of one share, by day
    for day in range(last - 1, -1, -1):
        later[day] = changes[day] + gamma * later[day + 1]

    def look(env):
        value, weights, days = env.value[:, 0].numpy(), env.weights.numpy(), env.row + FIRST
        profit = (env.shares.numpy() * later[days]).sum(1)
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
            running = ~(terminated | truncated)
            raw = info["raw_rewards"]
            assert raw[running].numpy() == pytest.approx(1e-4 * (value_after - value)[running])
            added = (rewards - raw)[running].numpy()
            assert added == pytest.approx(1e-4 * promised[name][running], abs=1e-5)


def test_turbulence_sells_everything_and_buys_nothing():
    # More than 1 % of the days have extreme returns, but none of them is in the training span.
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
        assert number not in jumps or (env.shares == 0).all()
        calm += bool((env.shares > 0).all())
    assert calm >= 15


def test_paper_observation_of_30_stocks_has_181_numbers():
    market = random_market(num_stocks=30)
    env = make_env(2, [market], **PAPER)
    obs = env.step(torch.full((2, 30), 0.5))[0]
    assert obs.shape == (2, 181) and obs.dtype == torch.float32
    cash, close, shares = obs[0, [0, 1 + 7, 1 + 30 + 7]]  # cash and the columns of stock 7
    assert cash == env.cash[0].float() and shares == 50
    assert close == np.float32(market.close[env.row[0] + FIRST, 7])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"episode_days": 360}, "--episode_days"),
        ({"order_unit": "shares"}, "max_order 0.05"),
        ({"max_order": 5.0}, "max_order 5.0"),
    ],
)
def test_trading_settings_that_cannot_work_are_refused_with_a_fix(options, message):
    with pytest.raises(ValueError, match=message):
        make_env(**options)


OPERATORS = {  # most operators of a step
    "default": ({}, 40),
    "excess": ({"reward": "excess"}, 42),
    "no risk": ({"risk_aversion": 0.0}, 36),
    "turbulence": ({"turbulence_quantile": 0.9}, 42),
    "paper": (PAPER, 40),
}


@pytest.mark.parametrize("options, most", OPERATORS.values(), ids=OPERATORS)
def test_a_step_launches_few_operators(options, most):
    """On a GPU, a step takes as long as launching its operators."""
    options = {"risk_aversion": 20.0, **options}
    env, actions = make_env(markets=MARKETS, first=254, **options), torch.ones(3, 4)
    with counted_operators() as counts:
        env.step(actions)
    assert counts.total() <= most, +counts


def test_a_step_reads_nothing_from_the_device():
    env = make_env()
    with counted_reads() as reads:
        env.step(torch.ones(3, 4))
    assert not +reads


# ---- episodes


@pytest.fixture(scope="module")
def days():
    """Trade for 45 days; return the environments before and after each day, and its results."""
    env, days = make_env(32, MARKETS), []
    for actions in random_actions(45, env):
        before = copy(env)
        obs, _, terminated, truncated, info = env.step(actions)
        days.append((before, obs, terminated | truncated, info["final_obs"], copy(env)))
    return days


def test_only_the_end_of_an_episode_has_another_final_observation(days):
    for _, obs, ended, final_obs, _ in days:
        assert torch.equal(final_obs[~ended], obs[~ended])
        assert (final_obs[ended] != obs[ended]).any(1).all()


def test_a_new_episode_begins_with_cash_alone(days):
    for _, obs, ended, _, env in days:
        assert (obs[ended, 0] == 1).all() and (env.shares[ended] == 0).all()
        assert (env.cash[ended] == 1e6).all() and (env.value[ended] == 1e6).all()


def test_within_an_episode_a_step_is_one_day(days):
    for before, _, ended, _, env in days:
        assert torch.equal(env.row[~ended], before.row[~ended] + 1)


def test_environments_have_several_episodes_in_both_markets(days):
    *_, env = days[-1]
    assert sum(int(ended.sum()) for _, _, ended, _, _ in days) >= 2 * 32
    assert (env.row // env.num_days).unique().tolist() == [0, 1]


@pytest.fixture(scope="module")
def seeded():
    """Return batches of 64 environments with the same seeds, the same, others, and huge ones."""
    seeds = 7, 7, 8, 2**63 - 70_000
    return [make_env(64, seeds=[seed + 1000 * i for i in range(64)]) for seed in seeds]


def test_equal_seeds_begin_equally_and_others_differently(seeded):
    first, equal, *others = seeded
    assert same([first.row, first.end_row], [equal.row, equal.end_row])
    assert all((env.row != first.row).sum() > 48 for env in others)
    assert len(set(first.row.tolist())) > 40


def test_first_episodes_are_shorter_and_later_ones_have_full_length(seeded):
    env, *_ = seeded
    lengths = set((env.end_row - env.row).tolist())
    assert lengths <= set(range(1, 21)) and len(lengths) > 12
    truncated = torch.stack([env.step(torch.zeros(64, 4))[3] for _ in range(61)])
    assert {int(n) for column in truncated.T for n in column.nonzero().flatten().diff()} == {20}


def test_evaluation_trades_each_day_of_the_span_once():
    env = make_env(2, MARKETS, evaluation=True)
    for step, actions in enumerate(random_actions(NUM_DAYS - 1 - FIRST, env)):
        assert env.row.tolist() == [step, env.num_days + step]
        _, _, terminated, truncated, info = env.step(actions)
        assert truncated.tolist() == [step == NUM_DAYS - 2 - FIRST] * 2 and not terminated.any()
    assert (info["portfolio_value"] != 1e6).all() and env.row.tolist() == [0, env.num_days]


def test_ruin_terminates():
    market = scaled(random_market(num_stocks=2), FIRST + 5, 0.05)
    env = make_env(1, [market], evaluation=True, max_order=1.0)
    ends = [env.step(torch.tensor([[0.5, 0.49]]))[2].item() for _ in range(5)]
    assert ends == [False, False, False, False, True]
    assert env.row.item() == 0 and env.value.item() == 1e6
