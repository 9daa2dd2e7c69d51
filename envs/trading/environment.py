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
STATE = ("keys", "episode", "row", "end_row", "cash", "value", "shares")
RUIN_SHARE = 0.1  # an episode terminates if the value is below this fraction of the initial cash
# One call draws the starts of this many later episodes. It takes as long as drawing one start.
AHEAD = 32
# An offer is minus an action times this number. If its order is at least one share, an offer is
# larger than all prices in USD. Multiplying by a power of two is exact.
OFFER_SCALE = 2.0**60


def fill_orders(
    cash: Tensor,  # [B, 1] USD
    sales: Tensor,  # [B, n] whole shares to sell, at most those held; negative to buy
    offers: Tensor,  # [B, n] float32, positive to sell, negative to buy, see OFFER_SCALE
    minus_sell: Tensor,  # [B, n] minus the USD received per share, without the fee
    minus_buy: Tensor,  # [B, n] minus the USD paid per share, with the fee
    earlier: Tensor,  # [n, n] 1 above the diagonal, else 0
) -> tuple[Tensor, Tensor]:
    """Sell shares, then fill buys as long as the cash lasts.

    Buys are filled from the largest offer to the smallest; buys of equal offers are filled in the
    order of the stocks. The first buy that costs more than the remaining cash is cut to the
    affordable number of whole shares, and all later buys are skipped. If prices are multiples of
    1 / GRID, sums below 2**33 USD are exact, whatever their order: cash never becomes negative, and
    a loop over the stocks would give exactly the same result. Above 2**33 USD, a rounding error can
    make cash negative; such cash buys nothing.

    Returns:
        Cash after the fills [B, 1], and shares sold [B, n], negative if bought.
    """
    # Rank the sales, then the buys from the largest to the smallest. Floats have the same order as
    # the integers with the same bits, except that negative floats (buys) have the reverse order.
    # Sorting integers is 20 % faster.
    ranking = torch.sort(offers.view(torch.int32), dim=1, descending=True, stable=True).indices
    # What selling a share costs: minus its price. Offers lie beyond both prices, so the clamp
    # chooses one of them; on a CPU this takes a third of the time of torch.where.
    cost = torch.clamp(offers, min=minus_buy, max=minus_sell)  # [B, n]
    spent = sales * cost  # [B, n] USD, negative for a sale
    # cash that remains after all orders that rank before an order
    cash_left = torch.addmm(cash, spent.gather(1, ranking), earlier, alpha=-1.0)
    cash_left = spent.scatter_(1, ranking, cash_left)  # in the order of the stocks
    # The sale that uses up this cash is a buy, hence negative. If the cash is negative because an
    # earlier buy was cut, nothing is bought.
    affordable = cash_left.div_(cost, rounding_mode="trunc").clamp_max_(0.0)
    sold = torch.maximum(sales, affordable)  # sales are positive, so this changes only buys
    cash = torch.baddbmm(cash.unsqueeze(2), sold.unsqueeze(1), cost.unsqueeze(2), alpha=-1.0)
    return cash.squeeze(2), sold


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

    The state of the environments is a clock [B, 4] (row of the current day in the tables, days
    left, index of the next start, market) and a book [B, n + 4] (shares, cash and their worth at
    the last close). Worth [B, 3] means the value and two prospects: at the end of a day, and at the
    start of the next one. A prospect is value plus potential minus later penalties for risk. The
    training reward of a day is the prospect at its end minus the prospect at its start.

    All data are tensors on `device`. A step never waits for a GPU or loops over environments. On a
    GPU it takes as long as launching its operators, so it has few of them.
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
        self.markets = markets
        self.tickers = markets[0].tickers
        self._episode_days = self.num_days - 1 if evaluation else config.episode_days
        num_stocks = len(self.tickers)
        features, prices, turbulent = market_tables(
            markets, span, config, train_span or span, discount
        )
        self._portfolio = portfolio_columns(config.observation, num_stocks)
        self._reward = "plain" if evaluation else config.reward
        self._initial_usd = round(config.initial_cash_usd * GRID) / GRID
        close, sell, buy, next_close, gains, next_gains = prices.unbind(1)  # each [rows, n]
        returns = next_close / close - 1.0  # from close to close
        # tables that `step` reads
        self._features = features.to(self.device)  # [rows, F]
        # worth of a share at the next close
        worth = [next_close] * 3
        if self._reward == "attributed":
            worth = [next_close, next_close + next_gains, next_close + gains.roll(-1, 0)]
        # [rows, 6, n]
        self._prices = torch.stack([close, -sell, -buy, *worth], 1).to(self.device)
        self._turbulent = None if turbulent is None else turbulent.to(self.device)
        # reward that an equal-weight portfolio earns on each day, [rows]
        self._baseline = (REWARD_SCALE * self._initial_usd * returns.mean(1)).to(self.device)
        # book at the start of an episode, change of the clock in a day, matrix for `fill_orders`
        first_book = [0.0] * num_stocks + [self._initial_usd] * 4
        self._first_book = self._prices.new_tensor(first_book)
        self._day = torch.tensor([1, -1, 0, 0], device=self.device)
        self._earlier = self._prices.new_ones(num_stocks, num_stocks).triu(1)
        self._has_risk = bool(config.risk_aversion) and not evaluation
        if self._has_risk:
            if discount >= 1.0:
                raise ValueError(
                    f"gamma {discount:g} is too large for risk_aversion: use a --gamma below 1"
                )
            by_market = returns.unflatten(0, (-1, self.num_days))[:, :-1]  # [M, days - 1, n]
            centred = by_market - by_market.mean(1, keepdim=True)
            covariance = centred.transpose(1, 2) @ centred / max(centred.shape[1] - 1, 1)
            # times value: the discounted sum of the penalties for a constant risk, in USD
            covariance *= 0.5 * config.risk_aversion / (1.0 - discount)
            self._covariance = covariance.to(self.device)  # [M, n, n]
        self.layout = Layout.vector(self._features.shape[1])
        self.single_action_space = Box(-1.0, 1.0, (num_stocks,), np.float32)

    @property
    def shares(self) -> Tensor:
        """Whole shares held, [B, n]."""
        return self._book[:, :-4]

    @property
    def cash(self) -> Tensor:
        """USD, [B, 1]."""
        return self._book[:, -4:-3]

    @property
    def value(self) -> Tensor:
        """Value of cash and shares at the last close in USD, [B, 1]."""
        return self._book[:, -3:-2]

    @property
    def row(self) -> Tensor:
        """Row of the current day in the tables, [B]: market * num_days + day - span.first."""
        return self._clock[:, 0]

    @property
    def end_row(self) -> Tensor:
        """Row of the last day of the episode, [B]."""
        return self.row + self._clock[:, 1]

    @property
    def episode(self) -> Tensor:
        """Number of the current episode, [B]."""
        return self._drawn_from + self._clock[:, 2] // self.num_envs - 1

    @property
    def weights(self) -> Tensor:
        """Fraction of the portfolio's value in each stock at the last close, [B, n]."""
        closes = self._prices[:, 0].index_select(0, self.row)
        return self.shares * closes / self.value

    def reset(self, *, seed: Sequence[int]) -> tuple[Tensor, dict]:
        """Start the first episode of every environment; `seed` holds one seed for each."""
        self.keys = seed_keys(seed).to(self.device)  # [B]
        episode = torch.zeros_like(self.keys)
        self._clock = self._draw_starts(episode).clone()
        if not self.evaluation:
            self._clock[:, 1] = 1 + random_int63(self.keys, ~episode) % self._episode_days
        self._book = self._first_book.repeat(self.num_envs, 1)
        return self._features.index_select(0, self.row), {}

    def _draw_starts(self, episode: Tensor) -> Tensor:
        """Determine the starts of `episode` [B] and of the AHEAD episodes after it.

        Returns:
            The clocks at the start of `episode`, [B, 4].
        """
        self._drawn_from = episode
        self._starts_left = AHEAD
        num_starts = self.num_days - self._episode_days
        later = torch.arange(AHEAD + 1, device=self.device)[:, None]
        # A draw is the number of a possible start: market * num_starts + day. The row of this start
        # in the tables is market * num_days + day, which is larger by market * _episode_days.
        draws = random_int63(self.keys, episode + later) % (num_starts * len(self.markets))
        if self.evaluation:  # environment i always starts on the first day of market i
            draws[:] = torch.arange(self.num_envs, device=self.device)
        market = draws // num_starts
        days = torch.full_like(draws, self._episode_days)
        index = torch.arange(draws.numel(), device=self.device).view_as(draws)
        columns = [draws + market * self._episode_days, days, index + self.num_envs, market]
        self._starts = torch.stack(columns, 2).flatten(0, 1)  # [(AHEAD + 1) * B, 4]
        return self._starts[: self.num_envs]

    def step(self, actions: Tensor) -> StepResult:
        """Trade one day in every environment; where an episode ended, start the next one.

        Returns:
            obs [B, F] float32, rewards [B] float64, terminated [B], truncated [B] and info.
            info["final_obs"] [B, F] holds the last observation of each episode that ended; its
            other rows equal obs. In training, rewards are of the kind that `config.reward` names,
            and info["raw_rewards"] [B] holds the plain rewards. In evaluation, rewards are plain,
            and info also holds the result of `_report`.
        """
        row, days_left, next_start, market = self._clock.unbind(1)
        with torch.inference_mode():  # autograd's bookkeeping would take 1/8 of a step's time
            prices = self._prices.index_select(0, row)
            close, minus_sell, minus_buy = prices[:, :3].unbind(1)  # each [B, n]
            held = self.shares
            # Turn actions into offers, and offers into orders of whole shares, truncated toward
            # zero. Nobody sells more than the shares held.
            offers = actions.clamp(-1.0, 1.0).to(torch.float32) * -OFFER_SCALE
            if self._turbulent is not None:
                sell_all = self._turbulent.index_select(0, row).unsqueeze(1)
                offers = offers.masked_fill_(sell_all, torch.inf)
            max_order = self.config.max_order / OFFER_SCALE
            if self.config.order_unit == "value":
                sales = (offers * (self.value * max_order)).div_(close, rounding_mode="trunc")
            else:
                sales = (offers.to(torch.float64) * max_order).trunc_()
            sales = torch.minimum(sales, held)
            # fill the orders and value the portfolio at the next close
            cash, sold = fill_orders(self.cash, sales, offers, minus_sell, minus_buy, self._earlier)
            shares = held - sold
            position_usd, value, worth = self._appraise(shares, cash, prices, market)
            # Ruin ends the episode, and nothing counts but the value then.
            ruined = value < RUIN_SHARE * self._initial_usd  # [B, 1]
            earned_usd = torch.where(ruined, value, worth[:, :2]) - self._book[:, -3::2]
            # look up the market's features and fill in the portfolio columns
            clock = self._clock + self._day
            final_obs = self._features.index_select(0, clock[:, 0])
            if self.config.observation == "relative":
                torch.div(cash, value, out=final_obs[:, :1])
                torch.div(position_usd, value, out=final_obs[:, self._portfolio])
            else:
                final_obs[:, :1] = cash
                final_obs[:, self._portfolio] = shares
            # start the next episode in environments whose episode ended
            terminated = ruined.squeeze(1)
            truncated = days_left == 1
            ended = (terminated | truncated).unsqueeze(1)
            start = self._starts.index_select(0, next_start)  # [B, 4]
            first_obs = self._features.index_select(0, start[:, 0])
            self._clock = torch.where(ended, start, clock)
            book = torch.cat([shares, cash, worth], 1)
            self._book = torch.where(ended, self._first_book, book)
            self._starts_left -= 1
            if not self._starts_left:
                self._clock[:, 2] = self._draw_starts(self.episode)[:, 2]
        obs = torch.where(ended, first_obs, final_obs)
        raw_rewards, rewards = (earned_usd * REWARD_SCALE).unbind(1)
        if self._reward == "excess":
            rewards = rewards - self._baseline.index_select(0, row)
        info = {"raw_rewards": raw_rewards}
        if self.evaluation:
            info = self._report(cash, sold, position_usd, value, prices)
        info["final_obs"] = final_obs
        return obs, rewards, terminated, truncated, info

    def _appraise(
        self, shares: Tensor, cash: Tensor, prices: Tensor, market: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return positions in USD [B, n], value [B, 1] and worth [B, 3] at the next close.

        The risk of a day is risk_aversion / 2 * value * variance. The variance of the portfolio's
        return follows from the covariance of the stocks' returns over the span. If the risk stayed
        the same on all later days, its discounted sum would be risk / (1 - discount).
        """
        position_usd = shares * prices[:, 3]
        worth = torch.baddbmm(cash.unsqueeze(2), prices[:, 3:], shares.unsqueeze(2)).squeeze(2)
        value = worth[:, :1]
        if self._has_risk:
            position = position_usd.unsqueeze(1)  # [B, 1, n]
            if len(self._covariance) == 1:
                covariance = position @ self._covariance[0]
            else:
                covariance = torch.bmm(position, self._covariance.index_select(0, market))
            variance = torch.bmm(covariance, position_usd.unsqueeze(2)).squeeze(2)  # [B, 1]
            worth[:, 1:].addcdiv_(variance, value, value=-1.0)
        return position_usd, value, worth

    def _report(
        self, cash: Tensor, sold: Tensor, position_usd: Tensor, value: Tensor, prices: Tensor
    ) -> dict[str, Tensor]:
        """Return one day's results as float64: [B], or [B, n] per stock.

        "weights" are fractions of the portfolio's value; "trades_usd" are negative for sales.
        """
        _, minus_sell, minus_buy = prices[:, :3].unbind(1)
        # the mean of both prices is the price without fees
        trades_usd = sold * (minus_sell + minus_buy) / 2
        return {
            "portfolio_value": value.squeeze(1),
            "traded_usd": trades_usd.abs().sum(1),
            "fees_usd": (sold.abs() * (minus_sell - minus_buy)).sum(1) / 2,
            "num_trades": (sold != 0).sum(1).to(torch.float64),
            "exposure": (1.0 - cash / value).squeeze(1),
            "weights": position_usd / value,
            "trades_usd": trades_usd,
        }

    def get_state(self) -> dict[str, Tensor]:
        """Return a complete snapshot: tensors with one row per environment."""
        return {name: getattr(self, name).clone() for name in STATE}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a snapshot; the markets must be the same as when it was taken."""
        copies = (state[name].to(self.device, copy=True) for name in STATE)
        # The value follows from the rest, because yesterday's prices include today's close.
        self.keys, episode, row, end_row, cash, _, shares = copies
        market = row // self.num_days
        next_start = self._draw_starts(episode)[:, 2]
        self._clock = torch.stack([row, end_row - row, next_start, market], 1)
        yesterday = self._prices.index_select(0, (row - 1) % len(self._prices))
        *_, worth = self._appraise(shares, cash, yesterday, market)
        self._book = torch.cat([shares, cash, worth], 1)
