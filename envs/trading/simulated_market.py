"""Simulated daily stock markets with a planted edge that only memory can use.

SIMULATED: a test bed for memory, not a promise of profit; docs/data.md says what it resembles.

The edge is old news. Every GAP_DAYS[0] to GAP_DAYS[1] days a stock has a day of unusual volume, a
surge or a drought by a fair coin: an announcement. Only DELAY_DAYS later, when newer ones have been
seen, the stock drifts for MOVE_DAYS days by +market_edge a day after a surge and by -market_edge
after a drought. One announcement in four is denied DENIAL_DAYS later by an event of the other kind,
and then nothing happens.

A world depends on its seed and the config alone. Every market_edge uses the same noise, so that
edges compare pair by pair.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envs.trading.config import SimulatedMarketConfig
from envs.trading.market_data import Market

NUM_DAYS = 2520  # ten years of business days, the same for every world
FIRST_DATE = "2010-01-04"
PURPOSES = ("train", "valid", "test")
MAX_WORLDS = 10**8  # world numbers of one purpose: 0 .. MAX_WORLDS - 1

# The events and what they do. Chosen by measurement, see docs/LOG.md, and frozen since.
GAP_DAYS = (5, 7)  # from one announcement to the next, uniform
DENIAL_DAYS = 2  # from an announcement to its denial
DENIAL_CHANCE = 0.25
DELAY_DAYS = 8  # days after an announcement before the move; longer than the longest gap
MOVE_DAYS = 4  # the move is at work on days DELAY_DAYS + 1 .. DELAY_DAYS + MOVE_DAYS
EVENT_SIZE = 1.4  # in log volume: a surge is 4 times the usual volume, a drought a quarter
VOLUME_NOISE = 0.25  # sd of log volume from day to day
VOLUME_WAVE = (0.99, 0.15)  # AR(1) coefficient and stationary sd of the usual log volume
VOLUME_ON_MOVE = 0.10  # log volume per unit of a stock's own standardised absolute move

# Prices. Volatility is the product of a slow wave common to all stocks and one of each stock.
MARKET_DRIFT = 0.0006  # per day: equal weight earns a Sharpe ratio of roughly 0.8
ANNUAL_VOLATILITY = 0.25  # per stock, without the planted drift
MARKET_SHARE = 0.62  # part of that variance; the planted moves lower the correlation
COMMON_WAVE = (0.985, 0.50)  # AR(1) coefficient and stationary sd of the log volatility
OWN_WAVE = (0.95, 0.30)
TAIL_DEGREES = 5.0  # degrees of freedom of the Student t innovations
OVERNIGHT_SHARE = 1.0 / 3.0  # part of a day's variance that falls between close and open


def world_seeds(config: SimulatedMarketConfig, purpose: str, count: int) -> list[int]:
    """Return the seeds of worlds number 0, 1, ... of one purpose.

    In decimal a seed reads (market_seed, purpose 1..3, eight digits of world number): all differ.
    """
    base = (config.market_seed * 10 + PURPOSES.index(purpose) + 1) * MAX_WORLDS
    return list(range(base, base + count))


def simulate_markets(config: SimulatedMarketConfig, seeds: Sequence[int]) -> list[Market]:
    """Simulate one market per seed, all with the same dates."""
    draws = [_draw_world(seed, config.num_stocks) for seed in seeds]
    noise = {name: np.stack([draw[name] for draw in draws]) for name in draws[0]}
    prices = _prices(noise, noise["moves"] * (config.market_edge * 1e-4))
    # weekdays; the simulated market has no holidays
    dates = np.busday_offset(np.datetime64(FIRST_DATE, "D"), np.arange(NUM_DAYS))
    tickers = tuple(f"SIM{i + 1:02d}" for i in range(config.num_stocks))
    return [
        Market(f"SIMULATED world {seed}", dates, tickers, *bars)
        for seed, *bars in zip(seeds, *prices, _volumes(noise), strict=True)
    ]


def _draw_world(seed: int, num_stocks: int) -> dict[str, np.ndarray]:
    """Draw all randomness of one world, from its own generators."""
    children = np.random.SeedSequence(seed).spawn(3)
    prices, volumes, hidden = (np.random.default_rng(child) for child in children)
    size = (NUM_DAYS, num_stocks)
    events, moves = draw_news(hidden, num_stocks)
    return {
        "events": events,
        "moves": moves,
        "common_wave": prices.standard_normal((NUM_DAYS, 1)),
        "own_wave": prices.standard_normal(size),
        "market": prices.standard_t(TAIL_DEGREES, (NUM_DAYS, 1)),
        "own": prices.standard_t(TAIL_DEGREES, size),
        "overnight": prices.standard_normal(size),
        "up": prices.standard_exponential(size),
        "down": prices.standard_exponential(size),
        "first_price": np.exp(prices.uniform(np.log(20.0), np.log(200.0), (1, num_stocks))),
        "volume": volumes.standard_normal(size),
        "volume_wave": volumes.standard_normal(size),
        "first_volume": np.exp(volumes.uniform(np.log(1e6), np.log(2e7), (1, num_stocks))),
    }


def draw_news(rng: np.random.Generator, num_stocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw events and moves [D, n] int8 of one world: a renewal process per stock.

    Events are +1 for a surge, -1 for a drought. Moves are the signs of the drift in a day's return.
    """
    # days of run-up, so that day 0 is a day like any other
    before = DELAY_DAYS + MOVE_DAYS + GAP_DAYS[1]
    size = ((NUM_DAYS + before) // GAP_DAYS[0] + 1, num_stocks)
    day = np.cumsum(rng.integers(GAP_DAYS[0], GAP_DAYS[1] + 1, size), axis=0) - before
    day -= rng.integers(0, GAP_DAYS[1], (1, num_stocks))
    kind = 2 * rng.integers(0, 2, size) - 1
    denied = rng.random(size) < DENIAL_CHANCE
    events = _scatter(day, kind) + _scatter(day + DENIAL_DAYS, -kind * denied)
    waits = range(DELAY_DAYS + 1, DELAY_DAYS + MOVE_DAYS + 1)
    moves = sum(_scatter(day + wait, kind * ~denied) for wait in waits)
    return events, np.asarray(moves)


def _scatter(day: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return a calendar [D, n] int8 with value [K, n] at each day [K, n] inside, else zero."""
    calendar = np.zeros((NUM_DAYS, day.shape[1]), dtype=np.int8)
    inside = (day >= 0) & (day < NUM_DAYS)
    stock = np.broadcast_to(np.arange(day.shape[1]), day.shape)
    calendar[day[inside], stock[inside]] = value[inside]
    return calendar


def _wave(shocks: np.ndarray, coefficient: float, deviation: float) -> np.ndarray:
    """Return a stationary AR(1) along axis 1 of shocks [M, D, n], of this standard deviation."""
    wave = shocks * deviation
    fresh = np.sqrt(1.0 - coefficient**2)
    for day in range(1, wave.shape[1]):
        wave[:, day] = coefficient * wave[:, day - 1] + fresh * wave[:, day]
    return wave


def _prices(noise: dict[str, np.ndarray], drift: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return open, high, low, close [M, D, n]; drift is the planted simple return per day."""
    # Daily volatility of the market part [M, D, 1] and of each stock's own part [M, D, n]. The
    # mean square of a lognormal exp(w) is exp(2 * var(w)); it is divided out.
    common = _wave(noise["common_wave"], *COMMON_WAVE)
    stock = _wave(noise["own_wave"], *OWN_WAVE)
    planned = ANNUAL_VOLATILITY**2 / 252.0
    market_vol = np.sqrt(planned * MARKET_SHARE) * np.exp(common - COMMON_WAVE[1] ** 2)
    stock_vol = np.sqrt(planned * (1.0 - MARKET_SHARE)) * np.exp(
        common + stock - COMMON_WAVE[1] ** 2 - OWN_WAVE[1] ** 2
    )
    # Log returns from close to close
    unit = np.sqrt((TAIL_DEGREES - 2.0) / TAIL_DEGREES)  # Student t to variance 1
    shock = unit * (market_vol * noise["market"] + stock_vol * noise["own"])
    variance = market_vol**2 + stock_vol**2
    move = np.log1p(MARKET_DRIFT + drift) - 0.5 * variance + shock
    close = noise["first_price"] * np.exp(np.cumsum(move, axis=1))
    spread = np.sqrt(variance * OVERNIGHT_SHARE * (1.0 - OVERNIGHT_SHARE))
    overnight = OVERNIGHT_SHARE * move + spread * noise["overnight"]
    intraday = move - overnight
    # Extremes of a Brownian path that ends where the day ends; at or beyond both ends by
    # construction.
    path_variance = 2.0 * variance * (1.0 - OVERNIGHT_SHARE)
    highest = 0.5 * (intraday + np.sqrt(intraday**2 + path_variance * noise["up"]))
    lowest = 0.5 * (intraday - np.sqrt(intraday**2 + path_variance * noise["down"]))
    open_ = close * np.exp(-intraday)
    high = np.maximum(open_ * np.exp(highest), np.maximum(open_, close))  # against rounding
    low = np.minimum(open_ * np.exp(lowest), np.minimum(open_, close))
    return open_, high, low, close


def _volumes(noise: dict[str, np.ndarray]) -> np.ndarray:
    """Return whole shares traded [M, D, n]: a slow level, noise, large moves, and the events."""
    level = _wave(noise["volume_wave"], *VOLUME_WAVE)
    surprise = np.minimum(np.abs(noise["own"]), 4.0)  # fat tails must not look like surges
    log_volume = level + VOLUME_NOISE * noise["volume"] + VOLUME_ON_MOVE * surprise
    log_volume += EVENT_SIZE * noise["events"]
    return np.rint(noise["first_volume"] * np.exp(log_volume))
