"""Rules that trade without learning: equal weight, a reference, no memory.

Each is called as rule(env, ...) with a TradingVectorEnv in evaluation mode and returns actions
[B, n]; it looks at nothing else, though the evaluation shows it what a policy sees. Equal weight is
bought in one step: its environment has max_order 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from envs.trading.environment import TradingVectorEnv
from envs.trading.features import side_by_side
from envs.trading.market_data import Market
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
FIRST_VARIANCE = 3e-4  # of daily returns, before the first one is known
DIRECTIONS = np.array([[-1.0], [0.0], [1.0]])  # of an event or a move
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
    log_volume = pd.DataFrame(np.log(np.maximum(volume, 1.0)))
    usual = log_volume.rolling(LEVEL_DAYS).median().shift()
    return (log_volume - usual).fillna(0.0).to_numpy()


def _return_likelihood(close: np.ndarray, edge: float) -> np.ndarray:
    """Return how likely a day's return is under a move down, none, up: [D, 3, k]."""
    returns = np.zeros_like(close)
    returns[1:] = close[1:] / close[:-1] - 1.0
    squares = pd.DataFrame(returns**2)
    squares.iloc[0] = FIRST_VARIANCE
    decay = squares.ewm(alpha=1.0 - VOLATILITY_MEMORY, adjust=False)
    variance = decay.mean().shift(fill_value=FIRST_VARIANCE).to_numpy()  # before each day's return
    surprise = returns[:, None] - edge * DIRECTIONS
    # Student t with the trailing variance
    unit = surprise**2 / (variance[:, None] * (TAIL_DEGREES - 2.0))
    return (1.0 + unit) ** (-0.5 * (TAIL_DEGREES + 1.0))


def planted_outlook(bars: Market, first: int, market_edge: float) -> np.ndarray:
    """Return expected moves of the next days by a Bayes filter of news_model().

    Day d uses closes and volumes up to day d only. The filter is exact up to the densities: normal
    noise of the log volume, Student t returns around the trailing volatility, stocks one by one.

    Args:
        bars: of k stocks.
        first: the first day of the result; some days before it warm the filter up.

    Returns:
        [days, k, OUTLOOK_DAYS] in units of the edge (-1 to 1).
    """
    model = news_model()
    start = max(0, first - WARM_UP_DAYS)
    close = bars.close[start:]
    # how likely is a volume on a drought, an ordinary day, a surge, and a return under each move
    surprise = volume_surprise(bars.volume)[start:, None]
    distance = (surprise - EVENT_SIZE * DIRECTIONS) / SURPRISE_NOISE
    by_event = np.exp(-0.5 * distance**2) + BLUNDER  # [days, 3, k]
    by_move = _return_likelihood(close, market_edge * 1e-4)
    posterior = np.repeat(model.start[:, None], close.shape[1], axis=1)  # [S, k]
    outlook = np.empty((*close.shape, OUTLOOK_DAYS))
    for day in range(len(close)):
        posterior = model.transition.T @ posterior
        posterior *= by_event[day][model.event + 1] * by_move[day][model.move + 1]
        posterior /= posterior.sum(0)
        outlook[day] = posterior.T @ model.outlook
    return outlook[first - start :]


# ---- rules


def buy_equal_weight(env: TradingVectorEnv, *_: Tensor) -> Tensor:
    """Return actions [B, n] that buy 1/n of every stock on the first day."""
    num_stocks = len(env.tickers)
    begins = (env.row % env.num_days == 0).to(torch.float64).unsqueeze(1)
    return begins.expand(-1, num_stocks) / num_stocks


def follow(choose: Callable[[Market, int], np.ndarray]) -> Callable[..., Tensor]:
    """Return the rule that holds 1/n of the value in each chosen stock.

    Args:
        choose: returns for bars of k stocks, from a first day on, 1 to hold a stock, 0 to sell it,
            NaN to leave it: [days, k].
    """

    @cache
    def targets(env: TradingVectorEnv) -> Tensor:
        chosen = choose(side_by_side(env.markets, env.span.last + 1), env.span.first)
        shape = env.num_days, len(env.markets), len(env.tickers)
        weights = torch.from_numpy(chosen / len(env.tickers)).reshape(shape)
        return weights.transpose(0, 1).flatten(0, 1).to(env.device)  # [rows, n]

    def rule(env: TradingVectorEnv, *_: Tensor) -> Tensor:
        gap = (targets(env).index_select(0, env.row) - env.weights).nan_to_num(0.0)
        return (gap * (gap.abs() > BAND) / env.config.max_order).clamp(-1.0, 1.0)

    return rule


def reference(bars: Market, first: int, market_edge: float) -> np.ndarray:
    """Choose what the filter, which knows the generator, expects to rise, [days, k].

    That is a move of more than HURDLE edges over the next OUTLOOK_DAYS. At a small edge, where the
    drift of the market is worth more, it only leaves stocks that are expected to fall, and at edge
    0 it holds all.
    """
    outlook = planted_outlook(bars, first, market_edge).mean(2)
    hurdle = HURDLE if market_edge > WEAK_EDGE else -HURDLE
    return (outlook > hurdle) | (market_edge <= 0)


def memoryless(bars: Market, first: int) -> np.ndarray:
    """Choose by today's event alone, [days, k]: the best such rule found.

    It buys one order's worth on every surge and sells one on every drought, so that its holdings
    are a slow count of past events: the best a holding can do as a memory, and about a quarter of
    what memory gains. It is the best of 42 such rules by Sharpe ratio after costs, on 16 training
    worlds at market_edge 120.
    """
    surprise = volume_surprise(bars.volume)[first:]
    return np.where(np.abs(surprise) > 0.5 * EVENT_SIZE, surprise > 0, np.nan)
