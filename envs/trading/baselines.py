"""Rules that trade without learning: equal weight, a reference, a rule.

Each is called as rule(env) with a TradingVectorEnv in evaluation mode and returns actions [B, n];
it looks at nothing else, though the evaluation shows it what a policy sees.
Equal weight is bought in one step: its environment has max_order 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from envs.trading.config import SimulatedMarketConfig
from envs.trading.environment import TradingVectorEnv
from envs.trading.market_data import Market, Span
from envs.trading.simulated_market import (
    DELAY_DAYS,
    DENIAL_CHANCE,
    DENIAL_DAYS,
    EVENT_SIZE,
    GAP_DAYS,
    MOVE_DAYS,
    TAIL_DEGREES,
)

LEVEL_DAYS = 20  # the usual volume is the median of this many earlier days
SURPRISE_NOISE = 0.30  # sd of log volume against that median on an ordinary day
BLUNDER = 1e-4  # density that keeps one strange volume from ruling anything out
VOLATILITY_MEMORY = 0.94  # decay of the exponentially weighted variance (RiskMetrics)
WARM_UP_DAYS = 60  # the filter has forgotten how it was started after a few announcements
BAND = 0.01  # share of the value: differences below it are not worth an order
OUTLOOK_DAYS = 4  # the reference buys ahead: at 5 % a day the order limit needs days to follow
HURDLE = 0.30  # hold stocks that are expected to move by more than this share of the edge
WEAK_EDGE = 15.0  # bps: below it the market's own drift is worth more than dodging falls


# The announcements that still matter, newest first, as (age in days, value). Value: +-1 surge or
# drought, +-2 just denied, 0 void.
State = tuple[tuple[int, int], ...]


class NewsModel(NamedTuple):
    """The generator as a hidden Markov model of one stock, S states a day."""

    start: np.ndarray  # [S] how often each state occurs
    event: np.ndarray  # [S] -1, 0, +1: the event of the day that ends in this state
    move: np.ndarray  # [S] -1, 0, +1: the drift of that day
    outlook: np.ndarray  # [S, OUTLOOK_DAYS] expected move of each of the next days, in edges
    transition: np.ndarray  # [S, S] chance of each state (column) a day after each other (row)


def _followers(state: State) -> dict[State, float]:
    """Return the states of the next day with their probabilities."""
    aged = [(age + 1, value if abs(value) < 2 else 0) for age, value in state]
    aged = [item for i, item in enumerate(aged) if i == 0 or item[0] < DELAY_DAYS + MOVE_DAYS]
    age, value = aged[0]
    if age == DENIAL_DAYS:
        denied = ((age, -2 * value), *aged[1:])
        return {denied: DENIAL_CHANCE, tuple(aged): 1.0 - DENIAL_CHANCE}
    if age < GAP_DAYS[0]:
        return {tuple(aged): 1.0}
    # uniform gaps: the chance that the next announcement comes today
    due = 1.0 / (GAP_DAYS[1] - age + 1)
    news: dict[State, float] = {((0, kind), *aged): due / 2.0 for kind in (1, -1)}
    return news | ({} if due == 1.0 else {tuple(aged): 1.0 - due})


def _expected_move(state: State, ahead: int) -> float:
    """Return the expected move, in edges, this many days after the close of a state."""
    return sum(
        value * (1.0 - DENIAL_CHANCE if age < DENIAL_DAYS else 1.0)
        for age, value in state
        if abs(value) == 1 and DELAY_DAYS < age + ahead <= DELAY_DAYS + MOVE_DAYS
    )


def _event_of(state: State) -> int:
    """Return the event of the day that ends in this state; a denial has the sign of its value."""
    age, value = state[0]
    return value if age == 0 else value // 2 * (abs(value) == 2)


def news_model() -> NewsModel:
    """Build the hidden Markov model by following the generator's rules."""
    states: list[State] = [((0, 1),)]
    for state in states:  # grows while it is walked
        states += [following for following in _followers(state) if following not in states]
    chances = [_followers(state) for state in states]
    transition = np.array([[row.get(state, 0.0) for state in states] for row in chances])
    start = np.full(len(states), 1.0 / len(states))
    for _ in range(500):  # gaps of several lengths mix: any start ends at the same frequencies
        start = start @ transition
    days = range(1, OUTLOOK_DAYS + 1)
    return NewsModel(
        start=start,
        transition=transition,
        event=np.array([_event_of(state) for state in states]),
        move=np.array([round(_expected_move(state, 0)) for state in states]),
        outlook=np.array([[_expected_move(state, day) for day in days] for state in states]),
    )


def volume_surprise(volume: np.ndarray) -> np.ndarray:
    """Return log volume [D, k] against its median of LEVEL_DAYS before; 0 until warm."""
    log_volume = np.log(np.maximum(volume, 1.0))
    windows = np.lib.stride_tricks.sliding_window_view(log_volume[:-1], LEVEL_DAYS, axis=0)
    surprise = np.zeros_like(log_volume)
    surprise[LEVEL_DAYS:] = log_volume[LEVEL_DAYS:] - np.median(windows, axis=2)
    return surprise


def _volume_likelihood(surprise: np.ndarray) -> np.ndarray:
    """Return how likely a volume surprise is on a drought, an ordinary day, a surge: [D, k, 3]."""
    distance = (surprise[..., None] - EVENT_SIZE * np.array([-1.0, 0.0, 1.0])) / SURPRISE_NOISE
    return np.exp(-0.5 * distance**2) + BLUNDER


def _return_likelihood(close: np.ndarray, edge: float) -> np.ndarray:
    """Return how likely a day's return is under a move down, none, up: [D, k, 3]."""
    returns = np.zeros_like(close)
    returns[1:] = close[1:] / close[:-1] - 1.0
    variance = np.full(close.shape[1], 3e-4)
    likelihood = np.ones((*close.shape, 3))
    for day in range(1, len(close)):
        surprise = returns[day][:, None] - edge * np.array([-1.0, 0.0, 1.0])
        # Student t with the trailing variance
        unit = surprise**2 / (variance[:, None] * (TAIL_DEGREES - 2.0))
        likelihood[day] = (1.0 + unit) ** (-0.5 * (TAIL_DEGREES + 1.0))
        variance = VOLATILITY_MEMORY * variance + (1.0 - VOLATILITY_MEMORY) * returns[day] ** 2
    return likelihood


def planted_outlook(markets: Sequence[Market], span: Span, market_edge: float) -> np.ndarray:
    """Return expected moves of the next days by a Bayes filter of news_model().

    Day d uses closes and volumes up to day d only. The filter is exact up to the densities: normal
    noise of the log volume, Student t returns around the trailing volatility, stocks one by one.
    Returns [M, days, n, OUTLOOK_DAYS] for the days of the span, in units of the edge (-1 to 1).
    """
    model = news_model()
    first = max(0, span.first - WARM_UP_DAYS)
    surprise = volume_surprise(np.concatenate([m.volume[: span.last + 1] for m in markets], axis=1))
    close = np.concatenate([m.close[first : span.last + 1] for m in markets], axis=1)
    by_event = _volume_likelihood(surprise[first:]).swapaxes(1, 2)  # [days, 3, M*n]
    by_move = _return_likelihood(close, market_edge * 1e-4).swapaxes(1, 2)
    posterior = np.repeat(model.start[:, None], close.shape[1], axis=1)  # [S, M*n]
    outlook = np.empty((*close.shape, OUTLOOK_DAYS))
    for day in range(len(close)):
        posterior = model.transition.T @ posterior
        posterior *= by_event[day][model.event + 1] * by_move[day][model.move + 1]
        posterior /= posterior.sum(0)
        outlook[day] = posterior.T @ model.outlook
    outlook = outlook[span.first - first :]
    return outlook.reshape(len(outlook), len(markets), -1, OUTLOOK_DAYS).swapaxes(0, 1)


def buy_equal_weight(env: TradingVectorEnv, *_: Tensor) -> Tensor:
    """Return actions [B, n] that buy 1/n of every stock on the first day."""
    num_stocks = len(env.tickers)
    begins = (env.row % env.num_days == 0).to(torch.float64).unsqueeze(1)
    return begins.expand(-1, num_stocks) / (num_stocks * env.config.max_order)


class TableRule:
    """Trades toward weights in a table; NaN keeps the weight held."""

    _env: TradingVectorEnv | None = None

    def __call__(self, env: TradingVectorEnv, *_: Tensor) -> Tensor:
        """Return actions [B, n] in order_unit value; leaves small differences."""
        if self._env is not env:
            self._env = env
            self._table = torch.from_numpy(self.table(env)).flatten(0, 1).to(env.device)
        gap = (self._table.index_select(0, env.row) - env.weights).nan_to_num(0.0)
        return (gap * (gap.abs() > BAND) / env.config.max_order).clamp(-1.0, 1.0)

    def table(self, env: TradingVectorEnv) -> np.ndarray:
        """Return the target weights [M, days, n]."""
        raise NotImplementedError


class ReferencePolicy(TableRule):
    """Knows the generator: holds what its Bayes filter expects to rise.

    Target: 1/n of the value in every stock that is expected to move by more than HURDLE edges over
    the next OUTLOOK_DAYS, cash for the rest. At a small edge, where the drift of the market is
    worth more, it only leaves stocks that are expected to fall, and at edge 0 it holds all.
    """

    def __init__(self, config: SimulatedMarketConfig) -> None:
        self.market_edge = config.market_edge

    def table(self, env: TradingVectorEnv) -> np.ndarray:
        """Return the target weights [M, days, n]."""
        outlook = planted_outlook(env.markets, env.span, self.market_edge).mean(3)
        hurdle = HURDLE if self.market_edge > WEAK_EDGE else -HURDLE
        return ((outlook > hurdle) | (self.market_edge <= 0)) / len(env.tickers)


class MemorylessRule(TableRule):
    """The best rule found that sees today's event and its holdings, nothing else.

    It buys one order's worth on every surge and sells one on every drought, so that its holdings
    are a slow count of past events: the best a holding can do as a memory, and about a quarter of
    what memory gains. It is the best of 42 such rules by Sharpe ratio after costs, on 16 training
    worlds at market_edge 120.
    """

    def table(self, env: TradingVectorEnv) -> np.ndarray:
        """Return 1/n after a surge, 0 after a drought, else NaN, [M, days, n]."""
        surprise = np.stack([volume_surprise(market.volume) for market in env.markets])
        surprise = surprise[:, env.span.first : env.span.last + 1]
        target = np.where(surprise > 0, 1.0 / len(env.tickers), 0.0)
        return np.where(np.abs(surprise) > 0.5 * EVENT_SIZE, target, np.nan)
