"""Vector environment that trades stocks daily, in torch on CPU or CUDA."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from envs.trading.config import TradingConfig
from envs.trading.features import GRID, market_tables, portfolio_columns
from envs.trading.market_data import Market, Span
from envs.vector.layout import Layout, StepResult, TorchEnv
from envs.vector.tensors import random_int63, seed_keys

REWARD_SCALE = 1e-4  # reward per USD
# names of the attributes that make up a snapshot
STATE = ("keys", "episode", "row", "end_row", "cash", "value", "shares", "risk")
RUIN_SHARE = 0.1  # an episode terminates if the value is below this fraction of the initial cash
# One call draws the starts of this many later episodes. It takes as long as drawing one start.
AHEAD = 32


def fill_orders(
    cash: Tensor,  # [B, 1] USD, not negative
    shares: Tensor,  # [B, n] whole shares held, not negative
    orders: Tensor,  # [B, n] whole shares wanted, negative to sell
    priority: Tensor,  # [B, n] float32, at least 0 for buys
    sell_price: Tensor,  # [B, n] USD received per share, without the fee
    buy_price: Tensor,  # [B, n] USD paid per share, with the fee
) -> tuple[Tensor, Tensor]:
    """Sell at most the shares held, then fill buys as long as the cash lasts.

    Buys are filled from the highest priority to the lowest; buys of equal priority are filled in
    the order of the stocks. The first buy that costs more than the remaining cash is cut to the
    affordable number of whole shares, and all later buys are skipped. If prices are multiples of
    1 / GRID, all sums are exact: rounding never makes cash negative, and a loop over the stocks
    would give exactly the same result.

    Returns:
        Cash after the fills [B, 1], and shares traded [B, n], negative if sold.
    """
    orders = torch.maximum(orders, -shares)
    sold = orders.clamp_max(0.0)
    funds = cash - (sold * sell_price).sum(1, keepdim=True)
    # Sort buys from the highest priority to the lowest. Floats >= 0 have the same order as the
    # integers with the same bits, and sorting integers is 20 % faster. Sells need no cash, so their
    # place in the order does not matter.
    ranking = torch.sort(priority.view(torch.int32), dim=1, descending=True, stable=True).indices
    flow = (sold - orders).mul_(buy_price)  # [B, n] USD: minus the cost of a buy; 0 for a sell
    flow_so_far = flow.gather(1, ranking).cumsum(1)  # running sums in order of priority
    # A buy can spend the funds minus the full cost of all buys ranked before it. If one of them had
    # to be cut, this amount is negative, so the clamp below sets the buy to 0.
    spendable = (funds - flow).scatter_add_(1, ranking, flow_so_far)
    affordable = spendable.div_(buy_price, rounding_mode="trunc")
    trades = torch.clamp(affordable, min=sold, max=orders)  # for a sell, both bounds are equal
    spent = trades.clamp_min(0.0).mul_(buy_price).sum(1, keepdim=True)
    # Amounts below 2**33 USD are exact, so the clamp does not change them. For larger amounts, it
    # prevents rounding errors from making cash negative.
    return funds.sub_(spent).clamp_min_(0.0), trades


class TradingVectorEnv(TorchEnv):
    """B portfolios of n stocks, one trading day per step, on one or several markets.

    A step on day d: the agent sees the close of day d. Its actions, Box(-1, 1, (n,)), become orders
    of whole shares (see `fill_orders`). The orders are filled at the open of day d + 1 or at the
    close of day d (`execution`). The plain reward is the change of the portfolio's value from close
    to close, times REWARD_SCALE. An observation starts with the fraction of the value that is cash
    (or the amount of cash), followed by the blocks of `features.feature_blocks`.

    Training: an episode lasts `episode_days` steps. Its market and first day depend only on the
    environment's seed and the number of the episode. The first episode after seeding is shortened
    to a random length, so that not all episodes end together. An episode terminates if the value
    falls below RUIN_SHARE of the initial cash. `info["raw_rewards"]` holds the plain rewards. The
    returned rewards can be changed in two ways that reduce noise but leave the best policy the same
    (Ng, Harada and Russell 1999, "Policy invariance under reward transformations"):
    - "attributed" adds discount * potential(next) - potential(now). The potential is the discounted
      later profit of the shares held, so the profit of a trade is rewarded when the trade is made.
    - "excess" subtracts what the initial cash, invested equally in all stocks, earns on that day.
    The total that either change adds to an episode's rewards does not depend on the actions.

    Evaluation (`evaluation=True`, one environment per market): every episode is one pass from
    span.first to span.last.

    All data are tensors on `device`. A step never waits for a GPU or loops over environments.
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
        self.num_days = span.last - span.first + 1
        if not evaluation and config.episode_days >= self.num_days:
            raise ValueError(
                f"episode_days must be below the {self.num_days} days of the span, got "
                f"{config.episode_days}: lower --episode_days or use a longer training span"
            )
        self.num_envs = num_envs
        self.config = config
        self.evaluation = evaluation
        self.span = span
        self.device = torch.device(device)
        # Reading a value from a GPU would make the CPU wait, so `step` does it only on a CPU.
        self.reads_steps = self.device.type == "cpu"
        self.markets = markets
        self.tickers = markets[0].tickers
        self._episode_days = self.num_days - 1 if evaluation else config.episode_days
        # tables that `step` reads
        num_stocks = len(self.tickers)
        features, prices, turbulent = market_tables(
            markets, span, config, train_span or span, discount
        )
        self._portfolio = portfolio_columns(config.observation, num_stocks)
        self._features = features.to(self.device)  # [rows, F]
        self._prices = prices.to(self.device)  # [rows, 6, n]
        self._turbulent = None if turbulent is None else turbulent.to(self.device)
        self._initial_usd = round(config.initial_cash_usd * GRID) / GRID
        returns = prices[:, 3] / prices[:, 0] - 1.0  # from close to close, [rows, n]
        # reward that an equal-weight portfolio earns on each day, [rows]
        self._baseline = (REWARD_SCALE * self._initial_usd * returns.mean(1)).to(self.device)
        if config.risk_aversion and not evaluation:
            if discount >= 1.0:
                raise ValueError(
                    f"gamma {discount:g} is too large for risk_aversion: use a --gamma below 1"
                )
            # multiplied by value * variance: the discounted sum of a constant risk, in rewards
            self._risk_scale = 0.5 * config.risk_aversion * REWARD_SCALE / (1.0 - discount)
            by_market = returns.unflatten(0, (-1, self.num_days))[:, :-1]  # [M, days - 1, n]
            centred = by_market - by_market.mean(1, keepdim=True)
            covariance = centred.transpose(1, 2) @ centred / max(centred.shape[1] - 1, 1)
            self._covariance = covariance.to(self.device)  # [M, n, n]
        self.layout = Layout.vector(self._features.shape[1])
        self.single_action_space = Box(-1.0, 1.0, (num_stocks,), np.float32)

    @property
    def weights(self) -> Tensor:
        """Fraction of the portfolio's value in each stock at the last close, [B, n]."""
        closes = self._prices[:, 0].index_select(0, self.row)
        return self.shares * closes / self.value

    def reset(self, *, seed: Sequence[int]) -> tuple[Tensor, dict]:
        """Start the first episode of every environment; `seed` holds one seed for each."""
        self.keys = seed_keys(seed).to(self.device)  # [B]
        self.episode = torch.zeros_like(self.keys)
        self._draw_starts()
        # row of the current day in the market tables: market * num_days + day - span.first
        self.row = self._starts[0]
        self.end_row = self.row + self._episode_days
        if not self.evaluation:
            age = random_int63(self.keys, ~self.episode) % self._episode_days
            self.end_row = self.row + 1 + age
        self.risk = self._prices.new_zeros(self.num_envs)
        # USD at the last close, [B, 1]
        self.cash = self.value = self.risk[:, None] + self._initial_usd
        self.shares = self._prices.new_zeros(self.num_envs, len(self.tickers))
        return self._features.index_select(0, self.row), {}

    def _draw_starts(self) -> None:
        """Determine the start rows of the current and the next AHEAD episodes."""
        self._drawn_from = self.episode
        self._restarts_left = AHEAD
        num_starts = self.num_days - self._episode_days
        later = torch.arange(AHEAD + 1, device=self.device)[:, None]
        # A draw is the number of a possible start: market * num_starts + day. The row of this start
        # in the tables is market * num_days + day, which is larger by market * _episode_days.
        draws = random_int63(self.keys, self.episode + later) % (num_starts * len(self.markets))
        if self.evaluation:  # environment i always starts on the first day of market i
            draws[:] = torch.arange(self.num_envs, device=self.device)
        market = draws // num_starts
        self._starts = draws + market * self._episode_days  # [AHEAD + 1, B]

    def step(self, actions: Tensor) -> StepResult:
        """Trade one day in every environment; where an episode ended, start the next one.

        Returns:
            obs [B, F] float32, rewards [B] float64, terminated [B], truncated [B] and info.
            info["final_obs"] [B, F] holds the last observation of each episode that ended; its
            other rows equal obs. In training, rewards are of the kind that `config.reward` names,
            and info["raw_rewards"] [B] holds the plain rewards. In evaluation, rewards are plain,
            and info also holds the result of `_report`.
        """
        with torch.inference_mode():  # autograd's bookkeeping would take 1/8 of a step's time
            prices = self._prices.index_select(0, self.row)
            close, sell, buy, next_close, gains, next_gains = prices.unbind(1)  # each [B, n]
            # turn actions into orders of whole shares, truncated toward zero
            actions = actions.clamp(-1.0, 1.0).to(torch.float32)
            if self.config.order_unit == "value":
                limit_usd = self.value * self.config.max_order
                orders = (actions * limit_usd).div_(close, rounding_mode="trunc")
            else:
                orders = (actions.to(torch.float64) * self.config.max_order).trunc_()
            if self._turbulent is not None:
                sell_all = self._turbulent.index_select(0, self.row).unsqueeze(1)
                orders = torch.where(sell_all, -self.shares, orders)
            # fill the orders and value the portfolio at the next close
            self.cash, trades = fill_orders(self.cash, self.shares, orders, actions, sell, buy)
            # Loss of potential: today's potential; the next potential is subtracted below.
            lost_usd = self.shares * gains
            self.shares = self.shares + trades
            position_usd = self.shares * next_close  # [B, n]
            value_before = self.value
            self.value = self.cash + position_usd.sum(1, keepdim=True)
            # Ruin ends the episode, so the next potential is 0 then.
            solvent = self.value >= RUIN_SHARE * self._initial_usd  # [B, 1]
            lost_usd.addcmul_(self.shares * next_gains, solvent, value=-1.0)
            lost_usd = lost_usd.sum(1)
        rewards = (self.value - value_before).squeeze(1).mul_(REWARD_SCALE)
        if self.evaluation:
            info = self._report(trades, sell, buy, position_usd)
        else:
            info = {"raw_rewards": rewards}
            rewards = self._training_rewards(rewards, lost_usd, position_usd, solvent)
        # look up the market's features and fill in the portfolio columns
        self.row = self.row + 1
        info["final_obs"] = final_obs = self._features.index_select(0, self.row)
        relative = self.config.observation == "relative"
        final_obs[:, :1] = self.cash / self.value if relative else self.cash
        final_obs[:, self._portfolio] = position_usd / self.value if relative else self.shares
        # start the next episode in environments whose episode ended
        terminated = ~solvent.squeeze(1)
        truncated = self.row == self.end_row
        ended = terminated | truncated
        # On a CPU, skipping _restart when no episode ended saves 1/7 of a step's time.
        if self.reads_steps and not ended.any():
            obs = final_obs.clone()
        else:
            obs = self._restart(ended, final_obs)
        return obs, rewards, terminated, truncated, info

    def _report(
        self, trades: Tensor, sell: Tensor, buy: Tensor, position_usd: Tensor
    ) -> dict[str, Tensor]:
        """Return one day's results as float64: [B], or [B, n] per stock.

        "weights" are fractions of the portfolio's value; "trades_usd" are negative for sales.
        """
        trades_usd = trades * (sell + buy) / 2  # the mean of both prices is the price without fees
        return {
            "portfolio_value": self.value.squeeze(1),
            "traded_usd": trades_usd.abs().sum(1),
            "fees_usd": (trades.abs() * (buy - sell)).sum(1) / 2,
            "num_trades": (trades != 0).sum(1).to(torch.float64),
            "exposure": (1.0 - self.cash / self.value).squeeze(1),
            "weights": position_usd / self.value,
            "trades_usd": trades_usd,
        }

    def _training_rewards(
        self, plain: Tensor, lost_usd: Tensor, position_usd: Tensor, solvent: Tensor
    ) -> Tensor:
        """Return the training rewards [B], computed from the plain rewards.

        With `risk_aversion`, the risk of a day is risk_aversion / 2 * value * variance. The
        variance of the portfolio's return follows from the covariance of the stocks' returns over
        the span. If the risk stayed the same on all later days, its discounted sum would be
        risk / (1 - discount). Each day's reward is reduced by the increase of this sum since the
        day before.
        """
        if self.config.reward == "attributed":
            rewards = torch.sub(plain, lost_usd, alpha=REWARD_SCALE)
        elif self.config.reward == "excess":
            rewards = plain - self._baseline.index_select(0, self.row)
        else:
            rewards = plain.clone()
        if self.config.risk_aversion:
            if len(self._covariance) == 1:
                covariance_usd = position_usd @ self._covariance[0]
            else:
                market = self.row // self.num_days
                covariance = self._covariance.index_select(0, market)  # [B, n, n]
                covariance_usd = torch.bmm(position_usd.unsqueeze(1), covariance).squeeze(1)
            risk_before = self.risk
            variance_usd = (covariance_usd * position_usd).sum(1) / self.value.squeeze(1)
            self.risk = variance_usd * self._risk_scale
            # After ruin no risk remains: `solvent` is 0 then, otherwise 1, so the product is exact.
            rewards += torch.addcmul(risk_before, self.risk, solvent.squeeze(1), value=-1.0)
        return rewards

    def _restart(self, ended: Tensor, final_obs: Tensor) -> Tensor:
        """Start the next episode where `ended` [B] is True; return observations [B, F]."""
        if not self._restarts_left:
            self._draw_starts()
        self._restarts_left -= 1
        self.episode = self.episode + ended
        start = self._starts.gather(0, (self.episode - self._drawn_from)[None])[0]  # [B]
        self.row = torch.where(ended, start, self.row)
        self.end_row = torch.where(ended, start + self._episode_days, self.end_row)
        self.risk = self.risk.masked_fill(ended, 0.0)
        ended = ended.unsqueeze(1)
        self.cash = self.cash.masked_fill(ended, self._initial_usd)
        self.value = self.value.masked_fill(ended, self._initial_usd)
        self.shares = self.shares.masked_fill(ended, 0.0)
        return torch.where(ended, self._features.index_select(0, start), final_obs)

    def get_state(self) -> dict[str, Tensor]:
        """Return a complete snapshot: tensors with one row per environment."""
        return {name: getattr(self, name).clone() for name in STATE}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a snapshot; the markets must be the same as when it was taken."""
        for name in STATE:
            setattr(self, name, state[name].to(self.device, copy=True))
        self._draw_starts()
