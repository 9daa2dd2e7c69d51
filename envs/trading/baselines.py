"""Rules without learning: equal weight, a reference, and a memoryless rule.

Each rule is called as rule(env, obs, episode_start) with a TradingVectorEnv in evaluation mode. It
reads only the environment and returns actions [B, n].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

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

LEVEL_DAYS = 20  # the usual log volume is the median of this many earlier days
SURPRISE_NOISE = 0.30  # sd of (log volume - usual log volume) on days without an event
BLUNDER = 1e-4  # added to densities, so that one unlikely volume rules out no state
VOLATILITY_MEMORY = 0.94  # decay of the exponentially weighted variance (RiskMetrics)
FIRST_VARIANCE = 3e-4  # variance of daily returns until the first return is known
DIRECTIONS = np.array([[-1.0], [0.0], [1.0]])  # drought, no event, surge; or down, no drift, up
WARM_UP_DAYS = 60  # a few announcements: enough to make the filter's start state irrelevant
BAND = 0.01  # smaller differences from the target weights are not traded
OUTLOOK_DAYS = 4  # look ahead so far, because with orders of 5 % a target takes days
HURDLE = 0.30  # the reference holds stocks whose expected move, in edges, is above this
WEAK_EDGE = 15.0  # bps; at or below this, holding earns more than avoiding expected falls


# The event of a day (1: surge, -1: drought, 0: none), and the announcements of one stock that still
# matter, newest first, as pairs (age in days, kind): 1 for a surge, -1 for a drought, 0 if denied.
State = tuple[int, tuple[tuple[int, int], ...]]


def _followers(state: State) -> dict[State, float]:
    """Return the possible states of the next day with their probabilities."""
    newest, *others = [(age + 1, kind) for age, kind in state[1]]
    older = [item for item in others if item[0] < DELAY_DAYS + MOVE_DAYS]  # the drift is not over
    quiet: State = (0, (newest, *older))  # nothing happens today
    age, kind = newest
    if age == DENIAL_DAYS:
        denied: State = (-kind, ((age, 0), *older))
        return {denied: DENIAL_CHANCE, quiet: 1.0 - DENIAL_CHANCE}
    if age < GAP_DAYS[0]:
        return {quiet: 1.0}
    # probability that the next announcement comes today; gaps are uniformly distributed
    due = 1.0 / (GAP_DAYS[1] - age + 1)
    followers: dict[State, float] = {(new, ((0, new), *quiet[1])): due / 2.0 for new in (1, -1)}
    if due < 1.0:
        followers[quiet] = 1.0 - due
    return followers


def _expected_move(state: State, ahead: int) -> float:
    """Return the expected move, in edges, `ahead` days after the day of a state."""
    return sum(
        kind * (1.0 - DENIAL_CHANCE if age < DENIAL_DAYS else 1.0)
        for age, kind in state[1]
        if DELAY_DAYS < age + ahead <= DELAY_DAYS + MOVE_DAYS
    )


def news_model() -> tuple[np.ndarray, ...]:
    """Return the simulator's news as a hidden Markov model of one stock, S states.

    Returns:
        Transition [S, S]: probability of the next day's state (column) given today's state (row).
        Event [S] and move [S]: event and move, -1, 0 or 1, on the day that ends in a state.
        Outlook [S, OUTLOOK_DAYS]: expected moves on the next days, in edges.
    """
    states: list[State] = [(1, ((0, 1),))]
    for state in states:  # the list grows during the loop
        states += [follower for follower in _followers(state) if follower not in states]
    rows = [_followers(state) for state in states]
    transition = np.array([[row.get(state, 0.0) for state in states] for row in rows])
    event = np.array([state[0] for state in states])
    days = range(OUTLOOK_DAYS + 1)
    expected = np.array([[_expected_move(state, day) for day in days] for state in states])
    return transition, event, np.rint(expected[:, 0]).astype(int), expected[:, 1:]


def volume_surprise(volume: np.ndarray) -> np.ndarray:
    """Return log volume [D, k] minus its median over the LEVEL_DAYS days before."""
    log_volume = pd.DataFrame(np.log(np.maximum(volume, 1.0)))
    usual = log_volume.rolling(LEVEL_DAYS).median().shift()
    return (log_volume - usual).fillna(0.0).to_numpy()  # 0 on the first days


def _return_likelihood(close: np.ndarray, edge: float) -> np.ndarray:
    """Return the likelihood of each day's return for each move, [D, 3, k]."""
    returns = pd.DataFrame(close).pct_change()
    squares = (returns**2).fillna(FIRST_VARIANCE)
    smoothed = squares.ewm(alpha=1.0 - VOLATILITY_MEMORY, adjust=False).mean()
    variance = smoothed.shift(fill_value=FIRST_VARIANCE).to_numpy()  # known before the day
    surprise = returns.fillna(0.0).to_numpy()[:, None] - edge * DIRECTIONS
    # density of Student's t distribution with the trailing variance, up to a constant factor
    unit = surprise**2 / (variance[:, None] * (TAIL_DEGREES - 2.0))
    return (1.0 + unit) ** (-0.5 * (TAIL_DEGREES + 1.0))


def planted_outlook(bars: Market, first: int, market_edge: float) -> np.ndarray:
    """Return expected moves of the next days, from a Bayes filter of news_model().

    The result for day d uses only closes and volumes up to day d. Stocks are filtered separately.
    Only the densities are approximations: normal noise of log volumes, and Student's t distribution
    of returns with the trailing volatility.

    Args:
        bars: daily bars of k stocks.
        first: first day of the result; the filter warms up on up to WARM_UP_DAYS earlier days.

    Returns:
        Expected moves [days, k, OUTLOOK_DAYS] in edges, from -1 to 1.
    """
    transition, event, move, outlook_of = news_model()
    start = max(0, first - WARM_UP_DAYS)
    close = bars.close[start:]
    # likelihood of each day's volume for each event, and of its return for each move
    surprise = volume_surprise(bars.volume)[start:, None]
    distance = (surprise - EVENT_SIZE * DIRECTIONS) / SURPRISE_NOISE
    by_event = np.exp(-0.5 * distance**2) + BLUNDER  # [days, 3, k]
    by_move = _return_likelihood(close, market_edge * 1e-4)
    posterior = np.ones((len(transition), close.shape[1]))  # [S, k]
    outlook = np.empty((*close.shape, OUTLOOK_DAYS))
    for day in range(len(close)):
        posterior = transition.T @ posterior
        posterior *= by_event[day][event + 1] * by_move[day][move + 1]
        posterior /= posterior.sum(0)
        outlook[day] = posterior.T @ outlook_of
    return outlook[first - start :]


# ---- rules


def buy_equal_weight(env: TradingVectorEnv, *_: Tensor) -> Tensor:
    """Return actions [B, n] that buy 1/n of every stock on the first day."""
    num_stocks = len(env.tickers)
    begins = (env.row % env.num_days == 0).to(torch.float64).unsqueeze(1)
    return begins.expand(-1, num_stocks) / num_stocks


def follow(choose: Callable[[Market, int], np.ndarray]) -> Callable[..., Tensor]:
    """Return a rule that holds 1/n of the value in each chosen stock.

    Args:
        choose: called with the bars of k stocks and a first day. Returns [days, k] for the days
            from the first day on: 1 to hold a stock, 0 to sell it, NaN not to trade it.
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
    """Choose the stocks that the Bayes filter expects to rise, [days, k].

    A stock is chosen if its mean expected move over the next OUTLOOK_DAYS is above HURDLE edges. At
    an edge of at most WEAK_EDGE, the market's own drift matters more. Then all stocks are chosen
    whose mean is above -HURDLE. At edge 0 all stocks are chosen.
    """
    outlook = planted_outlook(bars, first, market_edge).mean(2)
    hurdle = HURDLE if market_edge > WEAK_EDGE else -HURDLE
    return (outlook > hurdle) | (market_edge <= 0)


def memoryless(bars: Market, first: int) -> np.ndarray:
    """Choose stocks by today's event only, [days, k].

    Every surge triggers one buy order and every drought one sell order. The holdings thereby count
    past events slowly and act as a memory, which gains about a quarter of what real memory gains.
    42 rules that use today's event and the holdings were compared on 16 training worlds at
    market_edge 120; this rule had the best Sharpe ratio after costs.
    """
    surprise = volume_surprise(bars.volume)[first:]
    return np.where(np.abs(surprise) > 0.5 * EVENT_SIZE, surprise > 0, np.nan)
