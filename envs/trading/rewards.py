"""Training rewards: less noise with the same best policy; the price of risk."""

from __future__ import annotations

import torch
from torch import Tensor

from envs.trading.features import MarketTables
from envs.trading_config import TradingConfig

REWARD_SCALE = 1e-4  # reward per USD


class TrainingRewards:
    """Forms of the reward that training may use; everything reported stays plain.

    "attributed" is potential-based shaping: plain + discount * potential(next) - potential(now),
    where the potential is the discounted later profit of the shares held: a trade's later profit
    counts when it is made. "excess" subtracts what the equal-weight mean of the stocks' returns
    earns on the initial cash. No action changes either sum.

    Source: Ng, Harada and Russell (1999), "Policy invariance under reward transformations".
    """

    def __init__(
        self,
        tables: MarketTables,
        config: TradingConfig,
        initial_cash_usd: float,
        num_days: int,
        discount: float,
        device: torch.device,
    ) -> None:
        self.form = config.reward
        self._baseline = (REWARD_SCALE * initial_cash_usd * tables.mean_returns).to(device)
        if config.risk_aversion:
            if discount >= 1.0:
                raise ValueError(
                    f"risk_aversion needs a discount below 1, got gamma {discount:g}: lower --gamma"
                )
            self._risk_scale = 0.5 * config.risk_aversion * REWARD_SCALE / (1.0 - discount)
            days = tables.prices.unflatten(0, (-1, num_days))[:, :-1]  # [M, days - 1, 6, n]
            returns = days[:, :, 3] / days[:, :, 0] - 1.0  # from close to close
            centred = returns - returns.mean(1, keepdim=True)
            covariance = centred.transpose(1, 2) @ centred / max(centred.shape[1] - 1, 1)
            self._covariance = covariance.to(device)  # [M, n, n]

    def shape(self, plain: Tensor, lost_usd: Tensor, row: Tensor) -> Tensor:
        """Return rewards [B] from plain ones, the potential's fall in USD and rows."""
        if self.form == "plain":
            return plain.clone()
        if self.form == "excess":
            return plain - self._baseline.index_select(0, row)
        return torch.sub(plain, lost_usd, alpha=REWARD_SCALE)

    def risk(self, market: Tensor, position_usd: Tensor, value: Tensor) -> Tensor:
        """Return the price [B] of the risk held for ever; its change is charged.

        A day's risk is risk_aversion / 2 * value * variance of the portfolio's return, by the
        covariance of the span; for all days to come it is 1 / (1 - discount) of it. Takes positions
        [B, n] and values [B, 1] in USD after the step, and each one's market [B].
        """
        if len(self._covariance) == 1:
            spread = position_usd @ self._covariance[0]
        else:
            covariance = self._covariance.index_select(0, market)  # [B, n, n]
            spread = torch.bmm(position_usd.unsqueeze(1), covariance).squeeze(1)
        variance_usd = (spread * position_usd).sum(1) / value.squeeze(1)
        return variance_usd * self._risk_scale
