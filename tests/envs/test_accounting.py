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
    """One portfolio: all sells, then buys from the largest priority until one does not fit."""
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
    """One portfolio whose orders often exceed its cash, with ties, zeros and exact fits."""
    fill = torch.from_numpy(
        rng.choice([0.37, 1.0, 25.0, 99.99, 411.7], n) * rng.choice([1.0, 1.013], n)
    )
    sell, buy = accounting.net_prices(accounting.to_grid(fill), float(rng.choice([0, 10, 123])))
    shares = torch.from_numpy(rng.integers(0, 30, n) * rng.integers(0, 2, n)).double()
    orders = torch.from_numpy(rng.integers(-20, 25, n)).double()
    priority = torch.from_numpy(rng.choice([0, 0.25, 0.5, 1], n)) if rng.random() < 0.5 else orders
    usd = float(rng.choice([0, 1, 50, 900, 20_000]) * rng.random())
    cash = accounting.to_grid(torch.tensor(usd, dtype=torch.float64))
    if rng.random() < 0.5:  # money for exactly some of the orders, or one grid step less
        some = torch.from_numpy(rng.integers(0, 2, n))
        proceeds = (torch.minimum((-orders).clamp_min(0), shares) * sell).sum()
        exact = (
            (orders.clamp_min(0) * buy * some).sum()
            - proceeds
            - rng.integers(0, 2) / accounting.GRID
        )
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
    # Fee 100 bps. Sell 5 of 10 at 20: 5 * 19.8 = 99. With 1 in cash: 100. First buy (priority 0.9)
    # 1 at 50.5 leaves 49.5; the second wants 9 at 10.1, 4 fit (40.4); no later one is filled.
    sell, buy = accounting.net_prices(row(20, 10, 50, 1), 100)
    cash, trades = accounting.fill_orders(
        column(1), row(10, 0, 0, 0), row(-5, 9, 1, 3), row(-1, 0.5, 0.9, 0.1), sell, buy
    )
    assert trades.tolist() == [[-5, 4, 1, 0]]
    assert cash.item() == pytest.approx(9.1, abs=1e-5)
