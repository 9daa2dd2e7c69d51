"""Load daily bars, check and adjust them, and split their days into spans."""

import logging
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy import ndarray

from envs.trading.config import SPAN_DATES, DataConfig, TradingConfig
from rl_dist.errors import one_line

_LOGGER = logging.getLogger(__name__)
PRICES = ["open", "high", "low", "close", "adj_close"]
NUMBERS = [*PRICES, "volume"]
COLUMNS = ["date", "tic", *NUMBERS]
ROUNDING = 1e-3  # tolerated relative error: data files round each price of a bar separately
MAX_DROPPED_SHARE = 0.05
# Prices below 1 USD are multiplied by a lot size, because amounts of money are rounded to about
# 1e-6 USD (see features.GRID). A lot costs at most this much, so that small portfolios can buy it.
MAX_LOT_USD = 1024.0
TRADING_DAYS = 252  # trading days per year of a stock exchange
COARSE_USD = 0.05  # below this price, fees of 10 bps are rounded by more than 1 %
# If a price rises or falls by more than this factor overnight or from open to close, the reason may
# be an error in the file or a split.
MAX_FACTOR = 1.8
MAX_GAP_DAYS = 11  # largest accepted gap in calendar days; exchanges are rarely closed for longer

MIN_SPAN_DAYS = 2  # a step needs 2 days: one to decide on orders, the next to value the result
SPLIT_FRACTIONS = (0.60, 0.15, 0.25)  # fractions of days for training, validation and test


@dataclass(frozen=True)
class Market:
    """Aligned daily bars of n tickers over D days, adjusted for splits and dividends.

    Prices are those of one lot, and a "share" is one lot everywhere in this package.
    """

    name: str  # name of the data file, or a name such as "SIMULATED world 7"
    dates: ndarray  # [D] datetime64[D], ascending
    tickers: tuple[str, ...]  # n names, sorted
    open: ndarray  # [D, n] float64, USD, total-return adjusted
    high: ndarray  # [D, n]
    low: ndarray  # [D, n]
    close: ndarray  # [D, n]
    volume: ndarray  # [D, n] float64, in shares of the data file, not in lots


@dataclass(frozen=True)
class Span:
    """Days from `first` to `last`, both included, as indices of Market.dates."""

    first: int
    last: int


Spans = dict[str, Span]  # disjoint, in ascending order: "train", perhaps "valid", and "test"


def days_per_year(dates: ndarray) -> int:
    """Return the number of days with bars per year; TRADING_DAYS if it is within 10 % of that."""
    days = (dates[-1] - dates[0]).astype(int)
    per_year = round((len(dates) - 1) / days * 365.25)
    return TRADING_DAYS if abs(per_year / TRADING_DAYS - 1) < 0.1 else per_year


def split_spans(dates: ndarray, config: DataConfig, *, first_tradable: int) -> Spans:
    """Return the training, validation and test spans.

    A configured date that is not a tradable day is moved to the nearest tradable day within its
    span. Without configured dates, training starts at `first_tradable`, the test span ends on the
    last day, and each span starts on the day after the previous span. If neither the end of a span
    nor the start of the next is given, the two spans divide their days in proportion to
    SPLIT_FRACTIONS. If no validation date is given, and training and test leave too few days for
    validation, there is no span "valid".

    Raises: ValueError: a span is too short, outside the data, or overlaps the previous span.
    """
    days: dict[str, int] = {}
    for name in SPAN_DATES:
        if text := getattr(config, name):
            is_end = name.endswith("_end")
            side: Any = "right" if is_end else "left"
            next_day = int(np.searchsorted(dates, np.datetime64(text, "D"), side))
            days[name] = max(first_tradable, next_day - is_end)
    first = days.get("train_start", first_tradable)
    last = days.get("test_end", len(dates) - 1)
    # Without an end date, a span ends on the day before the next start date; -1: no date is given.
    train_end = days.get("train_end", days.get("valid_start", 0) - 1)
    valid_end = days.get("valid_end", days.get("test_start", 0) - 1)
    train, valid, test = SPLIT_FRACTIONS
    if train_end < 0:
        # the days to divide end on the day `end`; their fractions add up to `total`
        end, total = (last, 1.0) if valid_end < 0 else (valid_end, train + valid)
        train_end = _end_of_share(first, end, train / total)
    valid_start = days.get("valid_start", train_end + 1)
    if valid_end < 0:
        valid_end = _end_of_share(valid_start, last, valid / (valid + test))
    test_start = days.get("test_start", valid_end + 1)
    spans: Spans = {}
    end_before = -1
    for name, start, end in (
        ("train", first, train_end),
        ("valid", valid_start, valid_end),
        ("test", test_start, last),
    ):
        num_days = end - start + 1
        if num_days >= MIN_SPAN_DAYS and start > end_before:
            spans[name] = Span(start, end)
            end_before = end
        elif name != "valid" or config.valid_start or config.valid_end:
            raise ValueError(
                f"the {name} span has {num_days} trading days; it needs {MIN_SPAN_DAYS}, all after "
                f"the previous span and after the indicators' {first_tradable}-day warm-up: change "
                f"--{name}_start, --{name}_end or the dates next to them, or use a longer history"
            )
    return spans


def _end_of_share(first: int, last: int, share: float) -> int:
    """Return the last day of a span that starts on the day `first`.

    The span has the fraction `share` of the days from `first` to `last`.
    """
    return first + round((last - first + 1) * share) - 1


def load_market(path: str | Path, *, missing: str = "error") -> Market:
    """Load, check and adjust the daily bars of a CSV or CSV.gz file.

    The rows of the file may be in any order. Open, high, low and close are multiplied by adj_close
    / close, and for a ticker that ever cost less than 1 USD also by a lot size. With
    missing="drop", days on which any ticker has no bar are dropped, unless they are more than 5 %
    of all days.

    Raises: ValueError: the file cannot be used. If rows are bad, the message has the ticker and
        date of the first bad row and the number of bad rows.
    """
    path = Path(path).expanduser()
    try:
        bars = _complete(_parse(_read(path)), missing, path.name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    dates = np.unique(bars["date"]).astype("datetime64[D]")
    open_, high, low, close, adjusted, volume = (
        bars[name].to_numpy().reshape(len(dates), -1) for name in NUMBERS
    )
    factor = adjusted / close
    # The size of a lot is the smallest power of 2 for which a lot costs 1 USD or more on every day,
    # unless such a lot would cost more than MAX_LOT_USD on some day.
    doublings = np.ceil(-np.log2((low * factor).min(0)))
    max_doublings = np.floor(np.log2(MAX_LOT_USD / (high * factor).max(0)))
    lots = 2.0 ** np.minimum(doublings, max_doublings).clip(0)
    factor = factor * lots
    tickers = tuple(bars["tic"].unique())
    if lots.max() > 1:
        sizes = dict(zip(tickers, lots.astype(int).tolist(), strict=True))
        _LOGGER.warning(f"{path.name}: prices below 1 USD: a share means a lot of shares: {sizes}")
    return Market(
        name=path.name,
        dates=dates,
        tickers=tickers,
        open=open_ * factor,
        high=high * factor,
        low=low * factor,
        close=adjusted * lots,
        volume=volume,
    )


def _read(path: Path) -> pd.DataFrame:
    """Return the rows of a CSV file; all cells are text."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe or device may never end
            raise ValueError("it is not a regular file")
        frame = pd.read_csv(path, dtype=str, encoding="utf-8-sig", keep_default_na=False)
    except (OSError, EOFError, ValueError, zlib.error) as error:  # parser errors are ValueErrors
        raise ValueError(
            f"cannot be read as CSV ({one_line(error, named=False)}): check the path, download it "
            "again, or use --data simulated"
        ) from None
    absent = [name for name in COLUMNS if name not in frame.columns]
    if frame.empty or absent:
        raise ValueError(
            f"the file has {len(frame)} rows below its header line, which lacks {absent} and has "
            f"{list(frame.columns[:12])}: rename or add these columns (lower case; tic: ticker; "
            "for prices that are adjusted already, adj_close = close)"
        )
    return frame[COLUMNS].fillna("")


def _parse(text: pd.DataFrame) -> pd.DataFrame:
    """Convert text to dates and numbers; refuse impossible bars.

    A cell without a finite number becomes NaN and is treated as missing.
    """
    bars = text.copy()
    bars["date"] = pd.to_datetime(text["date"], format="%Y-%m-%d", errors="coerce")
    undated = ~(bars["date"].dt.year > 0)  # also refuses year 0
    _refuse(text, undated, "the date is not YYYY-MM-DD", "write it without time and time zone")
    numbers = text[NUMBERS].apply(pd.to_numeric, errors="coerce")
    bars[NUMBERS] = numbers.astype(np.float64).replace([np.inf, -np.inf], np.nan)
    impossible = (bars[PRICES] <= 0).any(axis=1) | (bars["volume"] < 0)
    for name in ("open", "close"):
        impossible |= bars[name] < bars["low"] * (1 - ROUNDING)
        impossible |= bars[name] > bars["high"] * (1 + ROUNDING)
    _refuse(text, bars.duplicated(["date", "tic"]), "this ticker and date have more than one row")
    problem = "a price is <= 0, open or close is not between low and high, or volume is < 0"
    _refuse(text, impossible, problem)
    return bars


def _refuse(
    bars: pd.DataFrame, bad: pd.Series, problem: str, fix: str = "correct the file"
) -> None:
    """Raise an error if any row is bad; name the first bad row's ticker and date."""
    if bad.any():
        row = bars[bad].sort_values(["date", "tic"]).iloc[0]
        values = ", ".join(f"{name} {row[name]}" for name in NUMBERS)
        date = row["date"]
        date = date if isinstance(date, str) else date.date()
        raise ValueError(
            f"{row['tic']!r} on {date}: {problem} ({values}), {bad.sum()} rows of this kind: {fix}"
        )


def _complete(bars: pd.DataFrame, missing: str, name: str) -> pd.DataFrame:
    """Sort the bars; refuse long gaps; refuse or drop days with missing bars."""
    keys = ["date", "tic"]
    every_bar = pd.MultiIndex.from_product([sorted(set(bars[key])) for key in keys], names=keys)
    bars = bars.set_index(keys).reindex(every_bar).reset_index()
    blank = bars[NUMBERS].isna().any(axis=1)
    dropped, num_days = bars["date"][blank].unique(), bars["date"].nunique()
    if missing == "error" or len(dropped) > MAX_DROPPED_SHARE * num_days:
        problem = f"the bar is missing or incomplete, as on {len(dropped)} of {num_days} days"
        fix = "add the bars, remove the ticker, or use --data_missing drop, which drops at most "
        _refuse(bars, blank, problem, f"{fix}{MAX_DROPPED_SHARE:.0%} of the days")
    if len(dropped):
        _LOGGER.warning(
            f"{name}: dropped {len(dropped)} of {num_days} days on which a ticker has no complete "
            f"bar; the first is {dropped[0]:%Y-%m-%d}"
        )
        bars = bars[~bars["date"].isin(dropped)]
    after_gap = bars["date"].diff().dt.days > MAX_GAP_DAYS
    _refuse(bars, after_gap, f"follows a gap of more than {MAX_GAP_DAYS} days", "fill the gap")
    return bars


def price_notes(market: Market, config: TradingConfig) -> list[str]:
    """Return one line for each unusual property of a market that can distort results."""
    names = np.array(market.tickers)
    notes = []
    year = days_per_year(market.dates)
    if year != TRADING_DAYS:
        notes.append(f"annual figures use the {year} days per year of this file")
    # An agent can buy a share only if the share costs at most the largest order. The equal-weight
    # portfolio can buy a share only if the share costs at most 1/n of the cash.
    fraction = min(1.0 / len(names), config.max_order if config.order_unit == "value" else 1.0)
    limit_usd = config.initial_cash_usd * fraction
    costly = (market.close > limit_usd).mean(0) > 0.5
    if costly.any():
        notes.append(
            f"on most days one share costs more than {limit_usd:g} USD, the largest order or equal "
            f"weight's part of the cash, so it is hardly ever bought: {', '.join(names[costly])}; "
            "raise --initial_cash_usd or --max_order"
        )
    # Fees are rounded to multiples of 2**-20 USD, which is a large error if a price is very low.
    coarse = market.low.min(0) < COARSE_USD
    if coarse.any():
        notes.append(
            f"prices have too wide a range: where they are lowest, fees are rounded by more than "
            f"1 %: {', '.join(names[coarse])}; drop these tickers or those days"
        )
    # open and close of the first day, of the second day, and so on: [2 D, n]
    prices = np.stack([market.open, market.close], 1).reshape(-1, len(names))
    factors = np.exp(np.diff(np.log(prices), axis=0))
    moves = np.argwhere(np.abs(np.log(factors)) > np.log(MAX_FACTOR))
    if len(moves):
        step, stock = moves[0]
        notes.append(
            f"{len(moves)} jumps of a price by more than a factor of {MAX_FACTOR}, the first on "
            f"{market.dates[(step + 1) // 2]}: {names[stock]} times {factors[step, stock]:.3g}; "
            "correct wrong bars, and let adj_close contain every split"
        )
    return notes
