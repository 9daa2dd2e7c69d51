"""Fills, fees and portfolio value: pure functions for a batch of portfolios.

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
    return (actions * limit_usd).div_(price, rounding_mode="trunc")


def orders_by_shares(actions: Tensor, max_shares: float) -> Tensor:
    """Whole shares wanted, negative to sell, truncated toward zero: [B, n]."""
    return (actions * max_shares).trunc_()


def fill_orders(
    cash: Tensor,  # [B, 1] USD, not negative
    shares: Tensor,  # [B, n] whole shares held, not negative
    orders: Tensor,  # [B, n] whole shares wanted, negative to sell
    priority: Tensor,  # [B, n] not negative for buys, which are served from the largest down, ties by ticker order
    sell_price: Tensor,  # [B, n] USD received per share, fee taken off
    buy_price: Tensor,  # [B, n] USD paid per share, fee included
) -> tuple[Tensor, Tensor]:
    """Fill sells (as far as shares are held), then buys while cash lasts.

    The first buy that does not fit whole is cut to the whole shares that fit, and no later one is filled.

    Returns (cash [B, 1], trades [B, n]): cash after the fills and shares traded, negative where sold.
    """
    orders = torch.maximum(orders, -shares)
    sold = orders.clamp_max(0.0)
    funds = cash - (sold * sell_price).sum(1, keepdim=True)
    # A buy can spend the funds less the full cost of all buys before it. If that pays for it, it fills whole;
    # behind the first one that does not fit, it is negative. So the cut need not be searched for.
    spendable = funds - cost_before((orders - sold).mul_(buy_price), priority)
    fitting = spendable.div_(buy_price, rounding_mode="trunc")
    trades = torch.clamp(fitting, min=sold, max=orders)  # of a sell, both bounds are what is sold
    spent = trades.clamp_min(0.0).mul_(buy_price).sum(1, keepdim=True)
    # The clamp does nothing below 2**33 USD; above, it forgives one rounding error.
    return funds.sub_(spent).clamp_min_(0.0), trades


def cost_before(cost: Tensor, priority: Tensor) -> Tensor:
    """Sum of the costs of larger priority than each one's, [B, n].

    Equal priorities go by position. A negative priority (float32 or float64) must have a cost of zero.
    """
    # The bits of floats that are not negative are in the order of the floats, and sort a fifth faster.
    bits = priority.view(torch.int32 if priority.dtype == torch.float32 else torch.int64)
    ranking = torch.sort(bits, dim=1, descending=True, stable=True).indices
    ranked = cost.gather(1, ranking)
    before = ranked.cumsum(1).sub_(ranked)  # exact, see the module's docstring
    return ranked.scatter_(1, ranking, before)
