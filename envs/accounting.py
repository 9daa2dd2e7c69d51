"""Fills, fees and portfolio value: pure functions for a whole batch of portfolios.

Money lies on a grid of 2**-20 USD (about a millionth of a dollar). Sums and products of grid prices and
whole shares are then exact in float64 as long as a portfolio stays below 2**33 USD (8.6 billion), whatever
the order of summation: cash never goes negative through rounding, and the closed form below equals a loop
over the stocks to the last bit, on the CPU and on a GPU. Shapes: B portfolios, n stocks; one amount each is
[B, 1].
"""

from __future__ import annotations

import torch
from torch import Tensor

GRID = 2.0**20  # steps per USD; of float64's 53 bits 33 are left for dollars


def to_grid(usd: Tensor) -> Tensor:
    """Round amounts in USD to the money grid."""
    return torch.round(usd * GRID) / GRID


def net_prices(fill: Tensor, fee_bps: float) -> tuple[Tensor, Tensor]:
    """Price received per share sold and paid per share bought, fee included.

    Returns (sell_price, buy_price), both on the money grid and in the shape of `fill` (USD, on the grid).
    """
    fee = to_grid(fill * (fee_bps * 1e-4))
    return fill - fee, fill + fee


def portfolio_value(
    cash: Tensor,  # [B, 1] USD
    position_usd: Tensor,  # [B, n] shares times price
) -> Tensor:
    """Value of cash and positions in USD, [B, 1]."""
    return cash + position_usd.sum(1, keepdim=True)


def orders_by_value(
    actions: Tensor,  # [B, n] in [-1, 1]
    limit_usd: Tensor,  # [B, 1] largest order
    price: Tensor,  # [B, n] the price the order is sized with
) -> Tensor:
    """Whole shares wanted, negative to sell, truncated toward zero: [B, n]."""
    return (actions * limit_usd).div_(price).trunc_()


def orders_by_shares(actions: Tensor, max_shares: float) -> Tensor:
    """Whole shares wanted, negative to sell, truncated toward zero: [B, n]."""
    return (actions * max_shares).trunc_()


def fill_orders(
    cash: Tensor,  # [B, 1] USD, not negative
    shares: Tensor,  # [B, n] whole shares held, not negative
    orders: Tensor,  # [B, n] whole shares wanted, negative to sell
    priority: Tensor,  # [B, n] buys are served from the largest priority down; ties go by ticker order
    sell_price: Tensor,  # [B, n] USD received per share, fee taken off
    buy_price: Tensor,  # [B, n] USD paid per share, fee included
) -> tuple[Tensor, Tensor]:
    """Fill sells (as far as shares are held), then buys while cash lasts.

    The first buy that does not fit whole is cut to the whole shares that fit, and no later one is filled.

    Returns (cash [B, 1], trades [B, n]): cash after the fills and shares traded, negative where sold.
    """
    trades = torch.maximum(orders, -shares)
    sold = trades.clamp_max(0.0)
    wanted = trades.sub_(sold)  # buys only; no order is both
    funds = cash - (sold * sell_price).sum(1, keepdim=True)
    bought = affordable(funds, wanted, priority, buy_price)
    # The clamp does nothing below 2**33 USD; above, it forgives one rounding error.
    cash = (funds - (bought * buy_price).sum(1, keepdim=True)).clamp_min_(0.0)
    return cash, sold.add_(bought)


def affordable(
    funds: Tensor,  # [B, 1] USD
    wanted: Tensor,  # [B, n] whole shares, not negative
    priority: Tensor,  # [B, n]
    buy_price: Tensor,  # [B, n] USD paid per share, fee included
) -> Tensor:
    """Whole shares of each buy order that the funds pay for, [B, n].

    An order can spend the funds less the full cost of all orders before it. If that pays for it, it fills
    whole; behind the first order that does not fit the difference is negative: no search for the cut.
    """
    cost = wanted * buy_price
    ranking = torch.sort(priority, dim=1, descending=True, stable=True).indices
    spent = cost.gather(1, ranking).cumsum(1)  # exact, see the module's docstring
    spent_through = torch.empty_like(cost).scatter_(1, ranking, spent)
    left = cost.sub_(spent_through).add_(funds)
    return torch.minimum(left.div_(buy_price).floor_().clamp_min_(0.0), wanted)
