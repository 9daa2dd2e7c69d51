"""Daily stock trading in batches of portfolios, in torch, for CPU and CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor

from envs.trading import accounting, features
from envs.trading.market_data import Market, Span
from envs.trading.rewards import REWARD_SCALE, TrainingRewards
from envs.trading_config import TradingConfig
from envs.vector.counter_hash import random_int63, seed_keys
from envs.vector.layout import Layout, TorchEnv

STATE = ("keys", "cash", "value", "shares", "risk")  # with the place, all of a snapshot
RUIN_SHARE = 0.1  # of the initial cash: below it an episode terminates
AHEAD = 32  # episodes of each environment whose starts are drawn at once


class TradingVectorEnv(gymnasium.vector.VectorEnv, TorchEnv):
    """B portfolios of n stocks, one trading day per step, on one or several markets.

    At day d the agent has seen the close of d. Its actions, Box(-1, 1, (n,)), become orders of
    whole shares (see accounting.fill_orders) that fill at the open of d + 1, or at the close of d
    (`execution`). The reward is the change of portfolio value from close to close, times 1e-4;
    training rewards may be less noisy forms of it, then `info["raw_rewards"]` holds the plain ones.
    `features.feature_names` lists the numbers of an observation.

    Training: an episode lasts `episode_days` steps on a market and from a day that are functions of
    the environment's seed and of the number of its episode; the first one after a seed starts at a
    random age, that is, it is cut short. A value below 10 % of the initial cash terminates.
    Evaluation (`evaluation=True`, one environment per market): every episode is one pass from
    span.first to span.last.

    Everything is a tensor on `device`; a step neither waits for a GPU nor loops over environments.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}
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
        num_days = span.last - span.first + 1
        if not evaluation and config.episode_days >= num_days:
            raise ValueError(
                f"episode_days must be below the {num_days} days of the span, got "
                f"{config.episode_days}: lower --episode_days or give more training days"
            )
        self.num_envs = num_envs
        self.config = config
        self.evaluation = evaluation
        self.span = span
        self.device = torch.device(device)
        # To skip a step's resets where no episode ended saves the CPU a seventh of a step; a GPU
        # would have to be waited for.
        self._skips_resets = self.device.type == "cpu"
        self.markets = markets
        self.tickers = markets[0].tickers
        self.num_days = num_days
        self.episode_days = self.num_days - 1 if evaluation else config.episode_days
        self.initial_cash_usd = round(config.initial_cash_usd * accounting.GRID) / accounting.GRID
        self._ruin_usd = RUIN_SHARE * self.initial_cash_usd
        num_stocks = len(self.tickers)
        self._gap = features.gap_columns(config.observation, num_stocks)
        tables = features.market_tables(markets, span, config, train_span, discount)
        self._features = tables.features.to(self.device)  # [rows, F]
        self._prices = tables.prices.to(self.device)  # [rows, 6, n]
        self._rewards = TrainingRewards(
            tables, config, self.initial_cash_usd, self.num_days, discount, self.device
        )
        self._turbulent = None if tables.turbulent is None else tables.turbulent.to(self.device)
        self._fresh_money = self._prices.new_zeros(3 + num_stocks)  # cash, value, risk, shares
        self._fresh_money[:2] = self.initial_cash_usd
        self._one_day = torch.tensor([[1], [0], [0], [0]], device=self.device)  # of `_place`
        self._keys: Tensor | None = None
        width = self._features.shape[1]
        self.layout = Layout.vector(width)
        self.single_observation_space = Box(-np.inf, np.inf, (width,), np.float32)
        self.single_action_space = Box(-1.0, 1.0, (num_stocks,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    @property
    def day(self) -> Tensor:
        """Index into Market.dates of the close just seen, [B] int64."""
        return self._row % self.num_days + self.span.first

    @property
    def market_index(self) -> Tensor:
        """Index into `markets`, [B] int64."""
        return self._place[2].clone()

    @property
    def cash(self) -> Tensor:
        """Cash in USD, [B] float64."""
        return self._cash.squeeze(1).clone()

    @property
    def shares(self) -> Tensor:
        """Whole shares held, [B, n] float64."""
        return self._shares.clone()

    @property
    def closes(self) -> Tensor:
        """Prices in USD at the close just seen, [B, n] float64."""
        return self._prices[:, 0].index_select(0, self._row)

    @property
    def portfolio_value(self) -> Tensor:
        """Cash and stocks in USD at the close just seen, [B] float64."""
        return self._value.squeeze(1).clone()

    @property
    def weights(self) -> Tensor:
        """Share of the value held in each stock at the close just seen, [B, n]."""
        return self._shares * self.closes / self._value

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Start an episode everywhere.

        `seed` is one integer per environment, or s for s, s + 1, ...; None goes on with each
        environment's next episode. options={"random_age": False} starts with full episodes.
        """
        if seed is not None or self._keys is None:
            self._keys = seed_keys(seed, self.num_envs).to(self.device)
            episode = torch.zeros_like(self._keys)  # [B]
        else:
            episode = self._episode + 1
        self._draw_starts(episode)
        self._place = self._starts(torch.zeros_like(episode))
        if not self.evaluation and (options or {}).get("random_age", True):
            age = random_int63(self._keys, ~episode) % self.episode_days
            self._place[1] = self._row + 1 + age
        self._shares = self._prices.new_zeros(self.num_envs, len(self.tickers))
        self._risk = self._prices.new_zeros(self.num_envs)
        self._cash = self._value = self._prices.new_full((self.num_envs, 1), self.initial_cash_usd)
        return self._features.index_select(0, self._row), {}

    @property
    def _row(self) -> Tensor:
        """Row of the tables, [B]."""
        return self._place[0]

    @property
    def _end_row(self) -> Tensor:
        """Row on which the episode ends, [B]."""
        return self._place[1]

    @property
    def _episode(self) -> Tensor:
        """Number of each environment's episode, [B]."""
        return self._first_episode + self._place[3]

    def _draw_starts(self, episode: Tensor) -> None:
        """Draw where the episodes after these [B] start: a table costs as much as one row of it."""
        self._first_episode = episode
        self._restarts_left = AHEAD
        later = torch.arange(1, AHEAD + 1, device=self.device)[:, None]
        self._next_starts = self._starts(later.expand(AHEAD, self.num_envs))  # [AHEAD, 4, B]

    def _starts(self, later: Tensor) -> Tensor:
        """Places where episodes start that come `later` [..., B] than `_first_episode`.

        A place [..., 4, B] is the row of the tables, the one on which the episode ends, the market,
        and `later`: a step changes all of them at once.
        """
        if self.evaluation:
            market = torch.arange(self.num_envs, device=self.device).expand(later.shape)
            row = market * self.num_days
        else:
            assert self._keys is not None
            num_starts = self.num_days - self.episode_days
            draws = random_int63(self._keys, self._first_episode + later)
            draws = draws % (num_starts * len(self.markets))  # one for market and day
            market = draws // num_starts
            row = draws + market * self.episode_days
        return torch.stack([row, row + self.episode_days, market, later], dim=-2)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Trade one day everywhere; a new episode follows an ended one at once.

        Returns: obs [B, F] float32, rewards [B] float64, terminated [B], truncated [B], info. Info
            holds "final_obs" [B, F], the last observation of an ended episode, elsewhere equal to
            obs. In training also "raw_rewards" [B], plain; in evaluation, where rewards are plain,
            float64 [B]: after the step "portfolio_value" and "exposure", of the step "traded_usd",
            "fees_usd" and "num_trades"; and [B, n]: "weights" after the step, as shares of the
            portfolio's value, and "trades_usd" of the step, negative where sold.
        """
        assert self._keys is not None, "reset the environment before its first step"
        # Trade, and account for it
        cash, shares, position_usd, value, solvent, lost_usd, info = self._trade_one_day(actions)
        rewards = (value - self._value).squeeze(1).mul_(REWARD_SCALE)
        if self.evaluation:
            info = {name: amount.clone() for name, amount in info.items()}  # now ordinary tensors
        else:
            info["raw_rewards"] = raw_rewards = rewards
            rewards = self._rewards.shape(raw_rewards, lost_usd, self._row)
            if self.config.risk_aversion:
                before = self._risk
                self._risk = self._rewards.risk(self._place[2], position_usd, value)
                # there is no risk after ruin; a factor of 0 or 1 makes no rounding
                rewards += torch.addcmul(before, self._risk, solvent.squeeze(1), value=-1.0)
        # The market's features with the portfolio written into their gaps
        self._place = self._place + self._one_day
        info["final_obs"] = final_obs = self._features.index_select(0, self._row)
        cash_column = final_obs.narrow(1, 0, 1)
        gap = final_obs.narrow(1, self._gap.start, len(self.tickers))
        if self.config.observation == "relative":
            torch.div(cash, value, out=cash_column)
            torch.div(position_usd, value, out=gap)
        else:
            cash_column.copy_(cash)
            gap.copy_(shares)
        # Keep the portfolio, or start an episode where one ended
        terminated = ~solvent.squeeze(1)
        truncated = self._row == self._end_row
        ended = terminated | truncated
        self._cash = cash
        self._value = value
        self._shares = shares
        none_ended = self._skips_resets and not ended.any()
        obs = final_obs.clone() if none_ended else self._restart(ended, final_obs)
        return obs, rewards, terminated, truncated, info

    # takes autograd's bookkeeping off the many small operations, an eighth of a step
    @torch.inference_mode()
    def _trade_one_day(
        self, actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Fill the orders and move on to the next close.

        Returns cash [B, 1], shares [B, n], positions [B, n] and value [B, 1] in USD, whether that
        is above ruin [B, 1], the fall of potential [B] in USD, and what evaluation reports.
        """
        prices = self._prices.index_select(0, self._row)
        close, sell, buy, next_close, gains, next_gains = prices.unbind(1)  # each [B, n]
        actions = actions.clamp(-1.0, 1.0).to(torch.float32)
        # Whole shares wanted, truncated toward zero
        if self.config.order_unit == "value":
            limit_usd = self._value * self.config.max_order
            orders = (actions * limit_usd).div_(close, rounding_mode="trunc")
        else:
            orders = (actions.to(torch.float64) * self.config.max_order).trunc_()
        if self._turbulent is not None:
            sell_all = self._turbulent.index_select(0, self._row).unsqueeze(1)
            orders = torch.where(sell_all, -self._shares, orders)
        cash, trades = accounting.fill_orders(self._cash, self._shares, orders, actions, sell, buy)
        shares = self._shares + trades
        position_usd = shares * next_close
        value = cash + position_usd.sum(1, keepdim=True)
        info = {}
        if self.evaluation:
            # the fill price is midway between the two
            trades_usd = trades * (sell + buy) / 2
            info = {
                "portfolio_value": value.squeeze(1),
                "traded_usd": trades_usd.abs().sum(1),
                "fees_usd": (trades.abs() * (buy - sell)).sum(1) / 2,
                "num_trades": (trades != 0).sum(1).to(torch.float64),
                "exposure": (1.0 - cash / value).squeeze(1),
                "weights": position_usd / value,
                "trades_usd": trades_usd,
            }
        solvent = value >= self._ruin_usd
        # nothing is gained after ruin
        lost_usd = torch.addcmul(self._shares * gains, shares * next_gains, solvent, value=-1.0)
        return cash, shares, position_usd, value, solvent, lost_usd.sum(1), info

    def _restart(self, ended: Tensor, final_obs: Tensor) -> Tensor:
        """Start the next episode where `ended` [B]; returns observations [B, F]."""
        if not self._restarts_left:
            self._draw_starts(self._episode)
            self._place[3] = 0
        self._restarts_left -= 1
        later = self._place[3].expand(1, 4, -1)
        start = self._next_starts.gather(0, later)[0]  # [4, B]
        self._place = torch.where(ended, start, self._place)
        ended = ended.unsqueeze(1)
        money = torch.cat([self._cash, self._value, self._risk.unsqueeze(1), self._shares], 1)
        money = torch.where(ended, self._fresh_money, money)
        self._cash, self._value, risk, self._shares = money.split((1, 1, 1, len(self.tickers)), 1)
        self._risk = risk.squeeze(1)
        return torch.where(ended, self._features.index_select(0, start[0]), final_obs)

    def get_state(self) -> dict[str, Tensor]:
        """Return a snapshot of every environment: tensors with leading dimension B."""
        assert self._keys is not None, "reset the environment before taking its state"
        place = {"episode": self._episode, "row": self._row, "end_row": self._end_row}
        own = {name: getattr(self, f"_{name}") for name in STATE}
        return {name: value.clone() for name, value in (own | place).items()}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on exactly where `get_state` was called (same markets, span, config)."""
        own = {name: value.to(self.device, copy=True) for name, value in state.items()}
        for name in STATE:
            setattr(self, f"_{name}", own[name])
        self._draw_starts(own["episode"])
        row = own["row"]
        later = torch.zeros_like(row)
        self._place = torch.stack([row, own["end_row"], row // self.num_days, later])
