"""Fills and fees: pure functions for a batch of portfolios.

Money lies on a grid of 2**-20 USD. Sums and products of grid prices and whole shares are then exact
in float64 as long as a portfolio stays below 2**33 USD (8.6 billion): cash never goes negative
through rounding, and the closed form below equals a loop over the stocks to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

GRID = 2.0**20  # steps per USD; of float64's 53 bits 33 are left for dollars


def to_grid(usd: Tensor) -> Tensor:
    """Round amounts in USD to the money grid."""
    return torch.round(usd * GRID) / GRID


def net_prices(fill: Tensor, fee_bps: float) -> tuple[Tensor, Tensor]:
    """Return USD received per share sold and paid per share bought, fees included."""
    fee = to_grid(fill * (fee_bps * 1e-4))
    return fill - fee, fill + fee


def fill_orders(
    cash: Tensor,  # [B, 1] USD, not negative
    shares: Tensor,  # [B, n] whole shares held, not negative
    orders: Tensor,  # [B, n] whole shares wanted, negative to sell
    priority: Tensor,  # [B, n] of buys, float32 or float64, not negative
    sell_price: Tensor,  # [B, n] USD received per share, fee taken off
    buy_price: Tensor,  # [B, n] USD paid per share, fee included
) -> tuple[Tensor, Tensor]:
    """Fill sells (as far as shares are held), then buys while cash lasts.

    Buys are served from the largest priority down, ties by ticker order. The first one that does
    not fit whole is cut to the whole shares that fit, and no later one is filled.

    Returns (cash [B, 1], trades [B, n]): cash after the fills and shares traded, negative if sold.
    """
    orders = torch.maximum(orders, -shares)
    sold = orders.clamp_max(0.0)
    funds = cash - (sold * sell_price).sum(1, keepdim=True)
    # Buys from the largest priority down. The bits of floats that are not negative are in the order
    # of the floats, and sort a fifth faster; a sell, whose priority is negative, costs nothing.
    bits = priority.view(torch.int32 if priority.dtype == torch.float32 else torch.int64)
    ranking = torch.sort(bits, dim=1, descending=True, stable=True).indices
    flow = (sold - orders).mul_(buy_price)  # [B, n] USD, a buy's cost is negative
    flow_so_far = flow.gather(1, ranking).cumsum(1)  # a buy's own included
    # A buy can spend the funds less the cost before it. If that pays for it, it fills whole; behind
    # the first one that does not fit, it is negative. So the cut need not be searched for.
    spendable = (funds - flow).scatter_add_(1, ranking, flow_so_far)
    fitting = spendable.div_(buy_price, rounding_mode="trunc")
    trades = torch.clamp(fitting, min=sold, max=orders)  # of a sell, both bounds are what is sold
    spent = trades.clamp_min(0.0).mul_(buy_price).sum(1, keepdim=True)
    # The clamp does nothing below 2**33 USD; above, it forgives one rounding error.
    return funds.sub_(spent).clamp_min_(0.0), trades
