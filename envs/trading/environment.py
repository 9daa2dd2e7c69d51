"""Daily stock trading, "StockTrading-v0": batched, in torch, for CPU and CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from envs.trading import accounting, features
from envs.trading.config import TradingConfig, check_setup
from envs.trading.market_data import DataConfig, Market, Span, load_market, split_spans
from envs.trading.rewards import REWARD_SCALE, TrainingRewards
from envs.trading.simulated_market import SimulatedMarketConfig, simulate_markets, world_seeds
from envs.vector.counter_hash import random_int63, seed_keys

PLAN = 64  # episode starts drawn at a time
STATE = ("keys", "row", "end_row", "cash", "value", "shares", "risk")
RUIN_SHARE = 0.1  # of the initial cash: below it an episode terminates


def first_tradable_day(market: Market, config: TradingConfig) -> int:
    """Index of the first day from which on every feature in use is warm.

    Raises ValueError when the market is too short for its indicators.
    """
    with_turbulence = config.turbulence_quantile > 0
    return features.first_tradable_day(market, config.observation, with_turbulence=with_turbulence)


class TradingVectorEnv(gymnasium.vector.VectorEnv):
    """B portfolios of n stocks, one trading day per step, on one or several markets.

    At day d the agent has seen the close of d. Its actions, Box(-1, 1, (n,)), become orders of whole shares:
    sells fill first, then buys from the largest action down while cash lasts (see accounting.fill_orders).
    They fill at the open of d + 1, or at the close of d (`execution`). The reward is the change of portfolio
    value from close to close, times 1e-4; training rewards may be less noisy forms of it (`reward`), then
    `info["raw_rewards"]` holds the plain ones.

    Observation `relative`, 1 + 8n numbers: cash share of the value, then for each of n stocks log return, log
    price against its 20-day mean, weight held, 20 x MACD / close, (RSI - 50) / 50, CCI / 200, ADX / 100, log
    volume against its 20-day mean (clipped to +-3). Observation `paper`, 1 + 6n numbers on their raw scales:
    cash, then closes, shares held, MACD, RSI, CCI, ADX. `feature_names()` lists them.

    Training: an episode lasts `episode_days` steps on a market and from a day that are functions of the
    environment's seed and of the number of its episode; the first one after a seed starts at a random age,
    that is, it is cut short. A value below 10 % of the initial cash terminates. Evaluation
    (`evaluation=True`, one environment per market): every episode is one pass from span.first to span.last.

    Everything is a tensor on `device`; a step neither waits for the device nor loops over environments.
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
        check_setup(num_envs, markets, span, config, evaluation=evaluation, train_span=train_span)
        self.num_envs, self.config, self.evaluation = num_envs, config, evaluation
        self.span, self.device = span, torch.device(device)
        # Looking whether any episode ended saves the CPU a seventh of a step; a GPU would have to be waited for.
        self._may_look = self.device.type == "cpu"
        self.markets, self.tickers = markets, markets[0].tickers
        self.num_markets, self.num_days = len(markets), span.last - span.first + 1
        self.episode_days = self.num_days - 1 if evaluation else config.episode_days
        self.initial_cash_usd = round(config.initial_cash_usd * accounting.GRID) / accounting.GRID
        self._ruin_usd = RUIN_SHARE * self.initial_cash_usd
        self._gap = features.gap_columns(config.observation, len(self.tickers))
        tables = features.market_tables(markets, span, config, train_span, discount)
        self._features = tables.features.to(self.device)  # [rows, F]
        self._prices = tables.prices.to(self.device)  # [rows, 6, n]
        self._rewards = TrainingRewards(tables, config, self.initial_cash_usd, self.num_days, discount, self.device)
        self._turbulent = None if tables.turbulent is None else tables.turbulent.to(self.device)
        self._set_spaces()
        self._keys: Tensor | None = None

    def _set_spaces(self) -> None:
        num_features, num_stocks = self._features.shape[1], len(self.tickers)
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (num_features,), np.float32)
        self.single_action_space = gymnasium.spaces.Box(-1.0, 1.0, (num_stocks,), np.float32)
        batch = gymnasium.vector.utils.batch_space
        self.observation_space = batch(self.single_observation_space, self.num_envs)
        self.action_space = batch(self.single_action_space, self.num_envs)

    def feature_names(self) -> list[str]:
        """Names of the numbers of an observation, in order, such as "log_return:AAPL"."""
        return features.feature_names(self.config.observation, self.tickers)

    @property
    def day(self) -> Tensor:
        """Index into Market.dates of the close just seen, [B] int64."""
        return self._row % self.num_days + self.span.first

    @property
    def market_index(self) -> Tensor:
        """Index into `markets`, [B] int64."""
        return self._row // self.num_days

    @property
    def cash(self) -> Tensor:
        """Cash in USD, [B] float64."""
        return self._cash.squeeze(1).clone()

    @property
    def shares(self) -> Tensor:
        """Whole shares held, [B, n] float64."""
        return self._shares.clone()

    @property
    def portfolio_value(self) -> Tensor:
        """Cash and stocks in USD at the close just seen, [B] float64."""
        return self._value.squeeze(1).clone()

    @property
    def weights(self) -> Tensor:
        """Share of the value held in each stock at the close just seen, [B, n]."""
        close = self._prices[:, 0].index_select(0, self._row)
        return self._shares * close / self._value

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Start an episode everywhere.

        `seed` is one integer per environment, or s for s, s + 1, ...; None goes on with each environment's
        next episode (the first time: fresh seeds). options={"random_age": False} starts with full episodes.

        Returns: observations [B, F] float32 and an empty info.
        """
        if seed is not None or self._keys is None:
            self._keys = seed_keys(seed, self.num_envs).to(self.device)
            episode = torch.zeros_like(self._keys)
        else:
            episode = self._episode() + 1
        self._plan_starts(episode)
        self._row = self._plan.index_select(0, self._cursor)
        self._plan_starts(episode + 1)
        self._end_row = self._row + self.episode_days
        if not self.evaluation and (options or {}).get("random_age", True):
            self._end_row = self._row + 1 + random_int63(self._keys, ~episode) % self.episode_days
        self._shares = self._prices.new_zeros(self.num_envs, len(self.tickers))
        self._risk = self._prices.new_zeros(self.num_envs)
        self._cash = self._value = self._prices.new_full((self.num_envs, 1), self.initial_cash_usd)
        return self._features.index_select(0, self._row), {}

    def _plan_starts(self, next_episode: Tensor) -> None:
        """Draw the start rows of each environment's next PLAN episodes.

        No environment ends more than one episode a step, so a plan lasts PLAN steps, which are counted
        without asking the device, and the hash is computed once for many steps.
        """
        assert self._keys is not None
        numbers = torch.arange(self.num_envs, device=self.device)
        if self.evaluation:
            plan = (numbers * self.num_days).unsqueeze(1).expand(-1, PLAN)
        else:
            episodes = next_episode.unsqueeze(1) + torch.arange(PLAN, device=self.device)
            num_starts = self.num_days - self.episode_days
            draws = random_int63(self._keys.unsqueeze(1), episodes) % (num_starts * self.num_markets)
            plan = draws + draws // num_starts * self.episode_days  # one draw for market and day
        self._plan = plan.flatten()  # [B * PLAN] table rows
        self._planned_episode = next_episode
        self._plan_first = self._cursor = numbers * PLAN
        self._steps_until_plan = PLAN

    def _episode(self) -> Tensor:
        """Number of the current episode of each environment since its seed, [B] int64."""
        return self._planned_episode - 1 + self._cursor - self._plan_first

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Trade one day everywhere; a new episode follows an ended one at once.

        Returns: obs [B, F] float32, rewards [B] float64, terminated [B], truncated [B], info. Info holds
            "final_obs" [B, F], the last observation of an ended episode, elsewhere equal to obs. In training
            also "raw_rewards" [B], plain; in evaluation, where rewards are plain, float64 [B]: after the step
            "portfolio_value" and "exposure", of the step "traded_usd", "fees_usd" and "num_trades".
        """
        assert self._keys is not None, "reset the environment before its first step"
        if self._steps_until_plan == 0:
            self._plan_starts(self._episode() + 1)
        self._steps_until_plan -= 1
        cash, shares, position_usd, value, credit, info = self._trade_one_day(actions)
        rewards = (value - self._value).squeeze(1).mul_(REWARD_SCALE)
        if self.evaluation:
            info = {name: amount.clone() for name, amount in info.items()}  # now ordinary tensors
        else:
            info["raw_rewards"] = raw_rewards = rewards
            rewards = self._rewards.shape(raw_rewards, credit, self._row)
            if self.config.risk_aversion:
                before, self._risk = self._risk, self._rewards.risk(self._row, position_usd, value, self._ruin_usd)
                rewards += before - self._risk
        row = self._row + 1
        info["final_obs"] = final_obs = self._observe(row, cash, value, shares, position_usd)
        terminated, truncated = value.squeeze(1) < self._ruin_usd, row == self._end_row
        obs = self._move_on(terminated | truncated, row, cash, value, shares, final_obs)
        return obs, rewards, terminated, truncated, info

    @torch.inference_mode()  # takes autograd's bookkeeping off the many small operations, an eighth of a step
    def _trade_one_day(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Fill the orders and move on: cash, shares, positions, value, change of potential, evaluation's info."""
        prices = self._prices.index_select(0, self._row)
        close, sell, buy, next_close, gains, next_gains = prices.unbind(1)  # each [B, n]
        orders, priority = self._orders(actions, close)
        cash, trades = accounting.fill_orders(self._cash, self._shares, orders, priority, sell, buy)
        shares = self._shares + trades
        position_usd = shares * next_close
        value = accounting.portfolio_value(cash, position_usd)
        info = _account_of_step(value, cash, trades, sell, buy) if self.evaluation else {}
        next_gains = next_gains * (value >= self._ruin_usd)  # nothing is gained after ruin
        credit = (shares * next_gains).sub_(self._shares * gains).sum(1)  # USD
        return cash, shares, position_usd, value, credit, info

    def _orders(self, actions: Tensor, close: Tensor) -> tuple[Tensor, Tensor]:
        """Whole shares wanted [B, n] float64 and the priority of buys [B, n] float32."""
        config = self.config
        actions = actions.clamp(-1.0, 1.0)
        if actions.dtype != torch.float32:
            actions = actions.to(torch.float32)
        if config.order_unit == "value":
            orders = accounting.orders_by_value(actions, self._value * config.max_order, close)
        else:
            orders = accounting.orders_by_shares(actions.to(torch.float64), config.max_order)
        if self._turbulent is not None:
            sell_all = self._turbulent.index_select(0, self._row).unsqueeze(1)
            orders = torch.where(sell_all, -self._shares, orders)
        return orders, actions

    def _observe(self, row: Tensor, cash: Tensor, value: Tensor, shares: Tensor, position_usd: Tensor) -> Tensor:
        """The market's features with the portfolio written into their gaps, [B, F] float32."""
        obs = self._features.index_select(0, row)
        cash_column, gap = obs.narrow(1, 0, 1), obs.narrow(1, self._gap.start, len(self.tickers))
        if self.config.observation == "relative":
            torch.div(cash, value, out=cash_column)
            torch.div(position_usd, value, out=gap)
        else:
            cash_column.copy_(cash)
            gap.copy_(shares)
        return obs

    def _move_on(
        self, ended: Tensor, row: Tensor, cash: Tensor, value: Tensor, shares: Tensor, final_obs: Tensor
    ) -> Tensor:
        """Keep the portfolios, or begin anew where an episode ended; returns obs [B, F]."""
        self._row, self._cash, self._value, self._shares = row, cash, value, shares
        if self._may_look and not ended.any():
            return final_obs.clone()
        start = self._plan.index_select(0, self._cursor)
        self._cursor = self._cursor + ended
        self._row = torch.where(ended, start, row)
        self._end_row = torch.where(ended, start + self.episode_days, self._end_row)
        ended = ended.unsqueeze(1)
        self._cash = cash.masked_fill(ended, self.initial_cash_usd)
        self._value = value.masked_fill(ended, self.initial_cash_usd)
        self._shares = shares.masked_fill(ended, 0.0)
        self._risk = self._risk.masked_fill(ended.squeeze(1), 0.0)
        return torch.where(ended, self._features.index_select(0, start), final_obs)

    def get_state(self) -> dict[str, Tensor]:
        """Snapshot of every environment: tensors with leading dimension B."""
        assert self._keys is not None, "reset the environment before taking its state"
        state = {name: getattr(self, f"_{name}").clone() for name in STATE}
        return {**state, "episode": self._episode()}

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Go on exactly where `get_state` was called (same markets, span, config)."""
        for name in STATE:
            setattr(self, f"_{name}", state[name].to(self.device, copy=True))
        self._plan_starts(state["episode"].to(self.device) + 1)


def _account_of_step(value: Tensor, cash: Tensor, trades: Tensor, sell: Tensor, buy: Tensor) -> dict[str, Any]:
    """What evaluation reports of a step, each [B] float64."""
    traded = trades.abs()
    return {
        "portfolio_value": value.squeeze(1),
        "traded_usd": (traded * (sell + buy)).sum(1) / 2,  # the fill price is midway between the two
        "fees_usd": (traded * (buy - sell)).sum(1) / 2,
        "num_trades": (traded > 0).sum(1).to(torch.float64),
        "exposure": (1.0 - cash / value).squeeze(1),
    }


def make_trading_vector_env(
    num_envs: int,
    *,
    markets: Sequence[Market] | None = None,
    span: Span | None = None,
    train_span: Span | None = None,
    split: str = "train",
    evaluation: bool = False,
    device: str | torch.device = "cpu",
    **options: Any,
) -> TradingVectorEnv:
    """Batched environment from keyword arguments, for `gymnasium.make_vec`.

    `options` are fields of TradingConfig and, unless `markets` and `span` are given, of DataConfig ("data": a
    file of daily bars, or "simulated") and SimulatedMarketConfig; `split` then is train, valid or test.
    Rewards are plain here unless `reward` or `risk_aversion` ask for another form.

    Raises: ValueError for unknown options, or for values that do not fit.
    """
    options = {"reward": "plain", "risk_aversion": 0.0} | options
    if markets is not None:
        if span is None:
            raise ValueError("markets needs span beside it: the first and last day to trade")
        (config,) = _configs(options, TradingConfig)
    else:
        data, simulated, config = _configs(options, DataConfig, SimulatedMarketConfig, TradingConfig)
        if data.data == "simulated":
            count = num_envs if evaluation else simulated.num_worlds
            markets = simulate_markets(simulated, world_seeds(simulated, split, count))
        else:
            markets = [load_market(data.data, missing=data.data_missing)]
        first = first_tradable_day(markets[0], config)
        spans = split_spans(markets[0].dates, data, first_tradable=first)
        span, train_span = span or getattr(spans, split, None), train_span or spans.train
    if span is None:
        raise ValueError(f"split must be train, valid or test and have days, got {split!r}")
    return TradingVectorEnv(
        num_envs,
        markets=markets,
        span=span,
        train_span=train_span,
        config=config,
        evaluation=evaluation,
        device=device,
    )


def _configs(options: dict[str, Any], *kinds: type) -> list[Any]:
    """Share keyword arguments out over config dataclasses by the names of their fields."""
    names = [{item.name for item in fields(kind)} for kind in kinds]
    unknown = set(options).difference(*names)
    if unknown:
        known = ", ".join(sorted(set().union(*names)))
        raise ValueError(f"unknown option {', '.join(sorted(unknown))}: choose among {known}")
    return [
        kind(**{name: value for name, value in options.items() if name in own})
        for kind, own in zip(kinds, names, strict=True)
    ]


class StockTradingEnv(gymnasium.Env):
    """One portfolio, numpy in and out: a face of TradingVectorEnv.

    Takes the keyword arguments of `make_trading_vector_env`, such as data="prices.csv.gz",
    observation="paper". Episodes are always of full length; `info` holds plain numbers.
    """

    metadata = {"render_modes": []}

    def __init__(self, **kwargs: Any) -> None:
        self.batch = make_trading_vector_env(1, **kwargs)
        self.observation_space = self.batch.single_observation_space
        self.action_space = self.batch.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode; a seed decides this and all later ones."""
        super().reset(seed=seed)
        episode_seed = int(self.np_random.integers(2**63))
        obs, _ = self.batch.reset(seed=[episode_seed], options={"random_age": False})
        return obs[0].numpy(force=True), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Trade one day.  Returns: observation [F], reward, terminated, truncated, info."""
        actions = torch.as_tensor(np.asarray(action), device=self.batch.device).unsqueeze(0)
        _, rewards, terminated, truncated, batch_info = self.batch.step(actions)
        obs = batch_info.pop("final_obs")[0].numpy(force=True)  # the successor, also where an episode ends
        info = {name: value.item() for name, value in batch_info.items()}
        return obs, rewards.item(), bool(terminated), bool(truncated), info
