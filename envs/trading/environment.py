"""Daily stock trading in batches of portfolios, in torch, for CPU and CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from envs.trading.config import TradingConfig
from envs.trading.features import GRID, market_tables, portfolio_columns
from envs.trading.market_data import Market, Span
from envs.vector.counter_hash import random_int63, seed_keys
from envs.vector.layout import Layout
from envs.vector.tensors import TensorVectorEnv

REWARD_SCALE = 1e-4  # reward per USD
# all that the future of an environment depends on
STATE = ("keys", "episode", "row", "end_row", "cash", "value", "shares", "risk")
RUIN_SHARE = 0.1  # part of the initial cash: below it an episode terminates
AHEAD = 32  # episodes of each environment that are drawn together: it costs as much as one


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
    not fit whole is cut to the whole shares that fit, and no later one is filled. With prices on
    the money grid all sums are exact: cash never goes negative through rounding, and this closed
    form equals a loop over the stocks to the last bit.

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
    flow_so_far = flow.gather(1, ranking).cumsum(1)  # up to and including each buy
    # A buy can spend the funds less the cost before it. If that pays for it, it fills whole; behind
    # the first one that does not fit, it is negative. So the cut need not be searched for.
    spendable = (funds - flow).scatter_add_(1, ranking, flow_so_far)
    fitting = spendable.div_(buy_price, rounding_mode="trunc")
    trades = torch.clamp(fitting, min=sold, max=orders)  # a sell's bounds are equal
    spent = trades.clamp_min(0.0).mul_(buy_price).sum(1, keepdim=True)
    # The clamp does nothing below 2**33 USD; above, it forgives one rounding error.
    return funds.sub_(spent).clamp_min_(0.0), trades


class TradingVectorEnv(TensorVectorEnv):
    """B portfolios of n stocks, one trading day per step, on one or several markets.

    At day d the agent has seen the close of d. Its actions, Box(-1, 1, (n,)), become orders of
    whole shares (see `fill_orders`) that fill at the open of d + 1, or at the close of d
    (`execution`). The plain reward is the change of portfolio value from close to close, times
    1e-4. An observation is the share of cash (or the cash) and the blocks of
    `features.feature_blocks`.

    Training: an episode lasts `episode_days` steps on a market and from a day that are functions of
    the environment's seed and of the number of its episode; the first one after a seed starts at a
    random age, that is, it is cut short. A value below 10 % of the initial cash terminates.
    Rewards of training may be less noisy forms with the same best policy (Ng, Harada and Russell
    1999, "Policy invariance under reward transformations"); `info["raw_rewards"]` holds plain ones:
    "attributed" is potential-based shaping: plain + discount * potential(next) - potential(now),
    where the potential is the discounted later profit of the shares held: a trade's later profit
    counts when it is made. "excess" subtracts what the equal-weight mean of the stocks' returns
    earns on the initial cash. No action changes either sum.

    Evaluation (`evaluation=True`, one environment per market): every episode is one pass from
    span.first to span.last.

    Everything is a tensor on `device`; a step neither waits for a GPU nor loops over environments.
    """

    can_snapshot = True

    def __init__(
        self,
        num_envs: int,
        *,
        markets: Sequence[Market],
        span: Span,
        config: TradingConfig,
        evaluation: bool = False,
        train_span: Span | None = None,
        discount: float = 0.8,
        device: str | torch.device = "cpu",
    ) -> None:
        assert not evaluation or num_envs == len(markets), "one environment for each market"
        self.num_days = span.last - span.first + 1
        if not evaluation and config.episode_days >= self.num_days:
            raise ValueError(
                f"episode_days must be below the {self.num_days} days of the span, got "
                f"{config.episode_days}: lower --episode_days or give more training days"
            )
        self.num_envs = num_envs
        self.config = config
        self.evaluation = evaluation
        self.span = span
        self.device = torch.device(device)
        self.reads_steps = self.device.type == "cpu"  # a GPU would have to be waited for
        self.markets = markets
        self.tickers = markets[0].tickers
        self._episode_days = self.num_days - 1 if evaluation else config.episode_days
        # tables for the steps
        num_stocks = len(self.tickers)
        tables = market_tables(markets, span, config, train_span, discount)
        self._gap = portfolio_columns(config.observation, num_stocks).start
        self._features = tables.features.to(self.device)  # [rows, F]
        self._prices = tables.prices.to(self.device)  # [rows, 6, n]
        self._turbulent = None if tables.turbulent is None else tables.turbulent.to(self.device)
        self._initial_usd = round(config.initial_cash_usd * GRID) / GRID
        returns = tables.prices[:, 3] / tables.prices[:, 0] - 1.0  # from close to close, [rows, n]
        self._baseline = (REWARD_SCALE * self._initial_usd * returns.mean(1)).to(self.device)
        if config.risk_aversion and not evaluation:
            if discount >= 1.0:
                raise ValueError(
                    f"risk_aversion needs a discount below 1, got gamma {discount:g}: lower --gamma"
                )
            self._risk_scale = 0.5 * config.risk_aversion * REWARD_SCALE / (1.0 - discount)
            days = returns.unflatten(0, (-1, self.num_days))[:, :-1]  # [M, days - 1, n]
            centred = days - days.mean(1, keepdim=True)
            covariance = centred.transpose(1, 2) @ centred / max(centred.shape[1] - 1, 1)
            self._covariance = covariance.to(self.device)  # [M, n, n]
        self._keys: Tensor | None = None
        self._row = self._end_row = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._risk = self._prices.new_zeros(num_envs)
        self._cash = self._value = self._prices.new_zeros(num_envs, 1)  # USD
        self._shares = self._prices.new_zeros(num_envs, num_stocks)
        width = self._features.shape[1]
        self.set_spaces(Layout.vector(width), Box(-1.0, 1.0, (num_stocks,), np.float32))

    @property
    def row(self) -> Tensor:
        """Row of the market tables: market * num_days + day - span.first, [B] int64."""
        return self._row.clone()

    @property
    def portfolio_value(self) -> Tensor:
        """Cash and stocks in USD at the close just seen, [B] float64."""
        return self._value.squeeze(1).clone()

    @property
    def weights(self) -> Tensor:
        """Share of the value held in each stock at the close just seen, [B, n]."""
        closes = self._prices[:, 0].index_select(0, self._row)
        return self._shares * closes / self._value

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Start an episode everywhere.

        `seed` is one integer per environment, or s for s, s + 1, ...; None continues with each
        environment's next episode. options={"random_age": False} starts with full episodes.
        """
        if seed is not None or self._keys is None:
            self._keys = seed_keys(seed, self.num_envs).to(self.device)
            self._episode = torch.full_like(self._keys, -1)  # [B]
            self._restarts_left = 0
        everywhere = torch.ones_like(self._keys, dtype=torch.bool)
        obs = self._restart(everywhere, self._features[:1])
        if not self.evaluation and (options or {}).get("random_age", True):
            age = random_int63(self._keys, ~self._episode) % self._episode_days
            self._end_row = self._row + 1 + age
        return obs, {}

    def _draw_starts(self) -> None:
        """Draw the first rows of the current episodes and of the next AHEAD."""
        assert self._keys is not None
        self._drawn_from = self._episode
        self._restarts_left = AHEAD
        if self.evaluation:
            rows = torch.arange(self.num_envs, device=self.device) * self.num_days
            self._starts = rows.expand(AHEAD + 1, -1)
            return
        later = torch.arange(AHEAD + 1, device=self.device)[:, None]
        num_starts = self.num_days - self._episode_days
        # one number draws both market and day
        draws = random_int63(self._keys, self._episode + later) % (num_starts * len(self.markets))
        self._starts = draws + draws // num_starts * self._episode_days  # [AHEAD + 1, B]

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Trade one day everywhere; a new episode follows an ended one in the same step.

        Returns: obs [B, F] float32, rewards [B] float64, terminated [B], truncated [B], info. Info
            holds "final_obs" [B, F], the last observation of an ended episode, elsewhere equal to
            obs. In training also "raw_rewards" [B], plain; in evaluation, where rewards are plain,
            float64 [B]: after the step "portfolio_value" and "exposure", of the step "traded_usd",
            "fees_usd" and "num_trades"; and [B, n]: "weights" after the step, as shares of the
            portfolio's value, and "trades_usd" of the step, negative where sold.
        """
        assert self._keys is not None, "reset the environment before its first step"
        # trade, and account for it
        value_before = self._value
        position_usd, solvent, lost_usd, info = self._trade_one_day(actions)
        rewards = (self._value - value_before).squeeze(1).mul_(REWARD_SCALE)
        if self.evaluation:
            info = {name: amount.clone() for name, amount in info.items()}  # now ordinary tensors
        else:
            info["raw_rewards"] = rewards
            rewards = self._training_rewards(rewards, lost_usd, position_usd, solvent)
        # the market's features with the portfolio written into their gaps
        self._row = self._row + 1
        info["final_obs"] = final_obs = self._features.index_select(0, self._row)
        cash_column = final_obs.narrow(1, 0, 1)
        gap = final_obs.narrow(1, self._gap, len(self.tickers))
        if self.config.observation == "relative":
            torch.div(self._cash, self._value, out=cash_column)
            torch.div(position_usd, self._value, out=gap)
        else:
            cash_column.copy_(self._cash)
            gap.copy_(self._shares)
        # start an episode where one ended
        terminated = ~solvent.squeeze(1)
        truncated = self._row == self._end_row
        ended = terminated | truncated
        # skipping the restarts if no episode ended saves a seventh of a step
        if self.reads_steps and not ended.any():
            obs = final_obs.clone()
        else:
            obs = self._restart(ended, final_obs)
        return obs, rewards, terminated, truncated, info

    # takes autograd's bookkeeping off the many small operations, an eighth of a step
    @torch.inference_mode()
    def _trade_one_day(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Fill the orders and value the portfolio at the next close.

        Returns the positions [B, n] in USD, whether their value and the cash are above ruin [B, 1],
        the fall of potential [B] in USD, and what evaluation reports.
        """
        prices = self._prices.index_select(0, self._row)
        close, sell, buy, next_close, gains, next_gains = prices.unbind(1)  # each [B, n]
        actions = actions.clamp(-1.0, 1.0).to(torch.float32)
        # whole shares wanted, truncated toward zero
        if self.config.order_unit == "value":
            limit_usd = self._value * self.config.max_order
            orders = (actions * limit_usd).div_(close, rounding_mode="trunc")
        else:
            orders = (actions.to(torch.float64) * self.config.max_order).trunc_()
        if self._turbulent is not None:
            sell_all = self._turbulent.index_select(0, self._row).unsqueeze(1)
            orders = torch.where(sell_all, -self._shares, orders)
        self._cash, trades = fill_orders(self._cash, self._shares, orders, actions, sell, buy)
        lost_usd = self._shares * gains
        self._shares = self._shares + trades
        position_usd = self._shares * next_close
        self._value = value = self._cash + position_usd.sum(1, keepdim=True)
        # nothing is gained after ruin
        solvent = value >= RUIN_SHARE * self._initial_usd
        lost_usd.addcmul_(self._shares * next_gains, solvent, value=-1.0)
        info = {}
        if self.evaluation:
            # the fill price is midway between the two
            trades_usd = trades * (sell + buy) / 2
            info = {
                "portfolio_value": value.squeeze(1),
                "traded_usd": trades_usd.abs().sum(1),
                "fees_usd": (trades.abs() * (buy - sell)).sum(1) / 2,
                "num_trades": (trades != 0).sum(1).to(torch.float64),
                "exposure": (1.0 - self._cash / value).squeeze(1),
                "weights": position_usd / value,
                "trades_usd": trades_usd,
            }
        return position_usd, solvent, lost_usd.sum(1), info

    def _training_rewards(
        self, plain: Tensor, lost_usd: Tensor, position_usd: Tensor, solvent: Tensor
    ) -> Tensor:
        """Return the rewards [B] to learn from, given those to report.

        With `risk_aversion` the change of the price of risk is charged. A day's risk is
        risk_aversion / 2 * value * variance of the portfolio's return, by the covariance of the
        span; its price is that of all days to come, 1 / (1 - discount) of it.
        """
        if self.config.reward == "attributed":
            rewards = torch.sub(plain, lost_usd, alpha=REWARD_SCALE)
        elif self.config.reward == "excess":
            rewards = plain - self._baseline.index_select(0, self._row)
        else:
            rewards = plain.clone()
        if self.config.risk_aversion:
            if len(self._covariance) == 1:
                spread = position_usd @ self._covariance[0]
            else:
                market = self._row // self.num_days
                covariance = self._covariance.index_select(0, market)  # [B, n, n]
                spread = torch.bmm(position_usd.unsqueeze(1), covariance).squeeze(1)
            before = self._risk
            variance_usd = (spread * position_usd).sum(1) / self._value.squeeze(1)
            self._risk = variance_usd * self._risk_scale
            # there is no risk after ruin; a factor of 0 or 1 makes no rounding
            rewards += torch.addcmul(before, self._risk, solvent.squeeze(1), value=-1.0)
        return rewards

    def _restart(self, ended: Tensor, final_obs: Tensor) -> Tensor:
        """Start the next episode where `ended` [B]; returns observations [B, F]."""
        if not self._restarts_left:
            self._draw_starts()
        self._restarts_left -= 1
        self._episode = self._episode + ended
        start = self._starts.gather(0, (self._episode - self._drawn_from)[None])[0]  # [B]
        self._row = torch.where(ended, start, self._row)
        self._end_row = torch.where(ended, start + self._episode_days, self._end_row)
        self._risk = self._risk.masked_fill(ended, 0.0)
        ended = ended.unsqueeze(1)
        self._cash = self._cash.masked_fill(ended, self._initial_usd)
        self._value = self._value.masked_fill(ended, self._initial_usd)
        self._shares = self._shares.masked_fill(ended, 0.0)
        return torch.where(ended, self._features.index_select(0, start), final_obs)

    def get_state(self) -> dict[str, Tensor]:
        """Return a snapshot of every environment: tensors with leading dimension B."""
        return {name: getattr(self, f"_{name}").clone() for name in STATE}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly where `get_state` was called (same markets, span, config)."""
        for name in STATE:
            setattr(self, f"_{name}", state[name].to(self.device, copy=True))
        self._draw_starts()
