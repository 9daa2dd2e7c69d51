"""Fills, fees and portfolio value, against a plain loop and numbers worked out by hand."""

import numpy as np
import pytest
import torch

from envs.trading import accounting


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def fill_one_by_one(cash, shares, orders, priority, sell_price, buy_price):
    """One portfolio, plain Python: all sells, then buys from the largest priority until one does not fit."""
    trades = [0.0] * len(shares)
    for i, order in enumerate(orders):
        if order < 0:
            trades[i] = -min(-order, shares[i])
            cash += -trades[i] * sell_price[i]
    for i in sorted(range(len(orders)), key=lambda i: (-priority[i], i)):
        if orders[i] <= 0:
            continue
        if orders[i] * buy_price[i] <= cash:
            trades[i] = orders[i]
            cash -= orders[i] * buy_price[i]
            continue
        while (trades[i] + 1) * buy_price[i] <= cash:
            trades[i] += 1
        cash -= trades[i] * buy_price[i]
        break
    return cash, trades


def random_case(rng: np.random.Generator, n: int):
    """One portfolio whose orders often exceed its cash, with ties, zeros, exact fits and penniless cases."""
    fill = torch.from_numpy(rng.choice([0.37, 1.0, 25.0, 99.99, 411.7], n) * rng.choice([1.0, 1.013], n))
    sell, buy = accounting.net_prices(accounting.to_grid(fill), float(rng.choice([0, 10, 123])))
    shares = torch.from_numpy(rng.integers(0, 30, n) * rng.integers(0, 2, n)).double()
    orders = torch.from_numpy(rng.integers(-20, 25, n)).double()
    priority = torch.from_numpy(rng.choice([0, 0.25, 0.5, 1], n)) if rng.random() < 0.5 else orders
    usd = float(rng.choice([0, 1, 50, 900, 20_000]) * rng.random())
    cash = accounting.to_grid(torch.tensor(usd, dtype=torch.float64))
    if rng.random() < 0.5:  # money for exactly some of the orders, or one grid step less
        some = torch.from_numpy(rng.integers(0, 2, n))
        proceeds = (torch.minimum((-orders).clamp_min(0), shares) * sell).sum()
        exact = (orders.clamp_min(0) * buy * some).sum() - proceeds - rng.integers(0, 2) / accounting.GRID
        cash = exact.clamp_min(0.0)
    return cash, shares, orders, priority, sell, buy


@pytest.mark.parametrize("n", [1, 2, 5, 30])
def test_closed_form_of_the_buys_equals_a_greedy_loop_to_the_last_bit(n):
    rng = np.random.default_rng(n)
    cases = [random_case(rng, n) for _ in range(1000)]
    cash, *rest = (torch.stack(part) for part in zip(*cases, strict=True))
    cash_after, trades = accounting.fill_orders(cash.unsqueeze(1), *rest)
    for i, case in enumerate(cases):
        expected_cash, expected_trades = fill_one_by_one(*(part.tolist() for part in case))
        assert trades[i].tolist() == expected_trades
        assert cash_after[i].item() == expected_cash
    assert (cash_after >= 0).all() and (rest[0] + trades >= 0).all()
    wanted = rest[1].clamp_min(0)
    assert (trades.clamp_min(0) < wanted).any(dim=1).sum() > 100, "too few cases run out of cash"


def test_fills_and_fees_worked_out_by_hand():
    # Fee 100 bps. Sell 5 of 10 at 20: 5 * 19.8 = 99. With 1 in cash: 100. First buy (priority 0.9) 1 at
    # 50.5 leaves 49.5; the second wants 9 at 10.1, 4 fit (40.4); the third is cheap, but the day is over.
    sell, buy = accounting.net_prices(row(20, 10, 50, 1), 100)
    cash, trades = accounting.fill_orders(
        column(1), row(10, 0, 0, 0), row(-5, 9, 1, 3), row(-1, 0.5, 0.9, 0.1), sell, buy
    )
    assert trades.tolist() == [[-5, 4, 1, 0]]
    assert cash.item() == pytest.approx(9.1, abs=1e-5)


def test_ties_go_by_ticker_order():
    price = row(10, 10, 10)
    orders, priority = row(1, 1, 1), row(0.5, 0.5, 0.5)
    _, trades = accounting.fill_orders(column(15), row(0, 0, 0), orders, priority, price, price)
    assert trades.tolist() == [[1, 0, 0]]


def test_an_order_that_uses_the_last_cent_fills_whole():
    price = row(0.1, 0.7)
    _, price = accounting.net_prices(accounting.to_grid(price), 10)
    cash, trades = accounting.fill_orders(
        (3 * price[:, :1] + 7 * price[:, 1:]), row(0, 0), row(3, 7), row(2, 1), price, price
    )
    assert trades.tolist() == [[3, 7]] and cash.item() == 0


def test_sells_are_limited_to_the_shares_held():
    cash, trades = accounting.fill_orders(column(0), row(3), row(-100), row(-1), row(9.9), row(10.1))
    assert trades.item() == -3 and cash.item() == pytest.approx(29.7)


def test_orders_by_value_are_whole_shares_truncated_toward_zero():
    orders = accounting.orders_by_value(row(1, -1, 0.5, 0.001), column(1000), row(300, 300, 300, 300))
    assert orders.tolist() == [[3, -3, 1, 0]]


def test_orders_by_shares_are_whole_shares_truncated_toward_zero():
    assert accounting.orders_by_shares(row(1, -0.559, 0.005), 100).tolist() == [[100, -55, 0]]


def test_portfolio_value_is_cash_plus_positions():
    assert accounting.portfolio_value(column(7), row(30, 5)).tolist() == [[42]]


def test_sums_of_grid_money_do_not_depend_on_their_order():
    rng = np.random.default_rng(0)
    prices = accounting.to_grid(torch.from_numpy(rng.lognormal(3, 1, 1000)))
    amounts = prices * torch.from_numpy(rng.integers(0, 10_000, 1000)).double()
    forward, backward = amounts.cumsum(0)[-1], amounts.flip(0).cumsum(0)[-1]
    assert forward.item() == backward.item() == amounts.sum().item()
