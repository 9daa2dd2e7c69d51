"""Windows of market days with targets from later days, for pre-training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from envs.trading.config import TradingConfig
from envs.trading.features import gap_columns, market_tables
from envs.trading.market_data import Market, Span

VOLATILITY_DAYS = 5  # to come, of which the volatility is to be predicted
SMALLEST_MOVE = 1e-4  # of a day's log return: keeps the logarithm of a volatility finite


class MarketWindows(Dataset):
    """Observations of consecutive days, with targets from the days after each.

    Inputs [N, days, F] are observations as the trading environment gives them, with a random
    portfolio held throughout: what is learned must not depend on it. Targets [N, days, 2, n], for
    each of n stocks: 1 if the next day's return is positive, else 0; and the log volatility of the
    next VOLATILITY_DAYS days, standardised. No window and no target leaves the span.

    Args:
        days: length of a window.
        stride: days from the start of one window to that of the next.
        volatility_scale: mean and deviation that standardise; None: this data's own.
    """

    def __init__(
        self,
        markets: Sequence[Market],
        span: Span,
        config: TradingConfig,
        *,
        days: int,
        stride: int,
        seed: int,
        volatility_scale: tuple[float, float] | None = None,
    ) -> None:
        num_days, self.days = span.last - span.first + 1, days
        if num_days < days + VOLATILITY_DAYS:
            raise ValueError(
                f"window {days} and the {VOLATILITY_DAYS} days after it need more than a span of "
                f"{num_days} days: make --window smaller or the span longer"
            )
        tables = market_tables(markets, span, config, None, 0.0)
        close = tables.prices[:, 0].unflatten(0, (len(markets), num_days))  # [M, D, n]
        self.features = tables.features.unflatten(0, (len(markets), num_days))  # [M, D, F]
        self.targets = _targets(close)  # [M, D - VOLATILITY_DAYS, 2, n]
        volatility = self.targets[:, :, 1]
        own_scale = (float(volatility.mean()), float(volatility.std()))
        self.volatility_scale = volatility_scale or own_scale
        volatility.sub_(self.volatility_scale[0]).div_(self.volatility_scale[1])
        starts = torch.arange(0, num_days - days - VOLATILITY_DAYS + 1, stride)
        self.places = torch.cartesian_prod(torch.arange(len(markets)), starts)  # [N, 2] market, day
        self.gap = gap_columns(config.observation, close.shape[2])
        first_close = close[self.places[:, 0], self.places[:, 1]]
        self.cash, self.held = _portfolios(first_close, config, seed)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def num_obs(self) -> int:
        """Numbers in an observation."""
        return self.features.shape[2]

    @property
    def num_stocks(self) -> int:
        """Stocks in a market."""
        return self.targets.shape[3]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A whole batch at once: inputs [N, days, F] and targets [N, days, 2, n]."""
        numbers = torch.as_tensor(list(indices))
        market, first = self.places[numbers].unsqueeze(2).unbind(1)  # each [N, 1]
        rows = first + torch.arange(self.days)
        inputs = self.features[market, rows]
        inputs[:, :, 0] = self.cash[numbers]
        inputs[:, :, self.gap] = self.held[numbers].unsqueeze(1)
        return inputs, self.targets[market, rows]


def _targets(close: Tensor) -> Tensor:
    """Targets of each day but the last ones: [M, D - VOLATILITY_DAYS, 2, n] float32."""
    log_returns = close.log().diff(dim=1)  # [M, D-1, n], of the day after each day
    days = log_returns.unfold(1, VOLATILITY_DAYS, 1)  # [M, D-VOLATILITY_DAYS, n, VOLATILITY_DAYS]
    volatility = (days.square().mean(-1).sqrt() + SMALLEST_MOVE).log()
    return torch.stack([(days[..., 0] > 0).to(volatility.dtype), volatility], dim=2).float()


def _portfolios(close: Tensor, config: TradingConfig, seed: int) -> tuple[Tensor, Tensor]:
    """Random portfolios in the unit of observations: cash [N, 1] and held [N, n]."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.empty(len(close), close.shape[1] + 1).exponential_(generator=generator)
    parts /= parts.sum(1, keepdim=True)  # uniform over all splits
    if config.observation == "relative":
        return parts[:, :1], parts[:, 1:]
    usd = parts * config.initial_cash_usd
    return usd[:, :1], (usd[:, 1:] / close).floor().float()
