"""Market data: bars adjusted for splits and dividends, aligned, split by date."""

import contextlib
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path

import numpy as np

from envs.trading.daily_bars import NUMBERS, MarketDataError, read_bars

MIN_SPAN_DAYS = 2  # one step needs a day to decide on and a day to fill
TRAIN_SHARE, VALID_SHARE, TEST_SHARE = 0.60, 0.15, 0.25
SPAN_DATES = ("train_start", "train_end", "valid_start", "valid_end", "test_start", "test_end")


@dataclass(frozen=True, kw_only=True)
class Market:
    """Aligned daily bars of n tickers over D days, adjusted for splits and dividends."""

    name: str  # the file's name, or "SIMULATED world 7"
    dates: np.ndarray  # [D] datetime64[D], ascending
    tickers: tuple[str, ...]  # n, sorted
    open: np.ndarray  # [D, n] float64, USD, total-return adjusted
    high: np.ndarray  # [D, n]
    low: np.ndarray  # [D, n]
    close: np.ndarray  # [D, n]
    volume: np.ndarray  # [D, n] float64, shares
    simulated: bool = False

    def __post_init__(self) -> None:
        shape = (len(self.dates), len(self.tickers))
        for name in ("open", "high", "low", "close", "volume"):
            assert getattr(self, name).shape == shape, (
                f"{name}: {getattr(self, name).shape} instead of {shape}"
            )


def _date_field(what: str, default: str) -> str:
    help_text = f"{what}; a day without trading moves inward; empty: {default}"
    return field(default="", metadata={"help": help_text, "unit": "YYYY-MM-DD"})


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which market data to use, and its training, validation and test spans."""

    data: str = field(
        default="simulated",
        metadata={
            "help": "CSV or CSV.gz of daily bars (date,tic,open,high,low,close,adj_close,volume), or "
            "'simulated'",
            "unit": "path",
        },
    )
    data_missing: str = field(
        default="error",
        metadata={
            "help": "days on which a ticker has no bar or a blank one: refuse the file, or drop the day for "
            "all tickers (5 percent of the days at most)",
            "unit": "name",
            "choices": ("error", "drop"),
        },
    )
    train_start: str = _date_field("first training day", "the first day on which all indicators are warm")
    train_end: str = _date_field("last training day", "up to validation, or 60 percent of the days")
    valid_start: str = _date_field("first validation day", "right after training")
    valid_end: str = _date_field("last validation day", "up to the test, or 15 percent of the days")
    test_start: str = _date_field("first test day", "right after validation")
    test_end: str = _date_field("last test day", "the last day of the data")

    def __post_init__(self) -> None:
        if self.data_missing not in ("error", "drop"):
            raise ValueError(
                f"data_missing must be error or drop, got {self.data_missing!r}: choose one of them"
            )
        if self.data_missing == "drop" and self.data == "simulated":
            raise ValueError("data_missing drop has no effect on data simulated: leave it out or name a file")
        if not self.data:
            raise ValueError("data must be a file or 'simulated', got nothing: name one of them")
        given = [(name, self._checked_date(name)) for name in SPAN_DATES if getattr(self, name)]
        for (earlier, first), (later, second) in pairwise(given):
            same_span = earlier.split("_")[0] == later.split("_")[0]
            if first > second or (first == second and not same_span):
                raise ValueError(
                    f"{later} must be {'no earlier than' if same_span else 'after'} {earlier}, got {second} "
                    f"and {first}: the spans are train, valid, test in this order and may not overlap"
                )

    def _checked_date(self, name: str) -> date:
        text = getattr(self, name)
        day: date | None = None
        with contextlib.suppress(ValueError):
            day = date.fromisoformat(text)
        if day is None or day.isoformat() != text:
            raise ValueError(f"{name} must be a date YYYY-MM-DD, got {text!r}: write it like 2016-01-04")
        return day


@dataclass(frozen=True)
class Span:
    """Days from `first` to `last`, both inclusive, as indices into Market.dates."""

    first: int
    last: int


@dataclass(frozen=True)
class Spans:
    """Disjoint spans in ascending order; `valid` is None where it has no day."""

    train: Span
    valid: Span | None
    test: Span


def load_market(path: str | Path, *, missing: str = "error") -> Market:
    """Load, validate, adjust and align a CSV or CSV.gz of daily bars.

    Open, high, low and close are multiplied by adj_close / close.

    Raises: MarketDataError, one line, as daily_bars.read_bars.
    """
    path = Path(path).expanduser()
    bars = read_bars(path, missing=missing)
    tickers = tuple(sorted(bars["tic"].unique()))
    bars = bars.sort_values(["date", "tic"])
    table = {column: bars[column].to_numpy().reshape(-1, len(tickers)).copy() for column in NUMBERS}
    factor = table["adj_close"] / table["close"]
    return Market(
        name=path.name,
        dates=np.unique(bars["date"].to_numpy().astype("datetime64[D]")),
        tickers=tickers,
        open=table["open"] * factor,
        high=table["high"] * factor,
        low=table["low"] * factor,
        close=table["adj_close"],
        volume=table["volume"],
    )


def split_spans(dates: np.ndarray, config: DataConfig, *, first_tradable: int) -> Spans:
    """Training, validation and test span as day indices.

    Given dates are kept (moved inward to trading days); what is not given follows: training starts at
    `first_tradable`, the test ends on the last day, spans touch each other, and a border of which neither
    side is given divides its days in the ratio 60 : 15 : 25. Too few days between training and test for a
    validation span that no date asks for: valid is None.

    Raises: MarketDataError for dates outside the data or spans that are too short.
    """
    dates = np.asarray(dates, dtype="datetime64[D]")
    if first_tradable >= len(dates):
        raise MarketDataError(
            f"no tradable day: the indicators need {first_tradable} days and there are {len(dates)}"
        )
    days = {name: _day_of(name, dates, config, first_tradable) for name in SPAN_DATES}
    first = first_tradable if days["train_start"] is None else days["train_start"]
    last = len(dates) - 1 if days["test_end"] is None else days["test_end"]
    train_end, valid_start = _touching(days["train_end"], days["valid_start"])
    valid_end, test_start = _touching(days["valid_end"], days["test_start"])
    if train_end is None and valid_end is None:
        train_end = _end_of_share(first, last, TRAIN_SHARE)
    elif train_end is None and valid_end is not None:
        train_end = _end_of_share(first, valid_end, TRAIN_SHARE / (TRAIN_SHARE + VALID_SHARE))
    train_end, valid_start = _touching(train_end, valid_start)
    if valid_end is None and valid_start is not None:
        valid_end = _end_of_share(valid_start, last, VALID_SHARE / (VALID_SHARE + TEST_SHARE))
    valid_end, test_start = _touching(valid_end, test_start)
    assert train_end is not None and valid_start is not None
    assert valid_end is not None and test_start is not None
    valid = None
    if config.valid_start or config.valid_end or valid_end - valid_start + 1 >= MIN_SPAN_DAYS:
        valid = _checked_span("valid", valid_start, valid_end, dates)
    return Spans(
        train=_checked_span("train", first, train_end, dates),
        valid=valid,
        test=_checked_span("test", test_start, last, dates),
    )


def _day_of(name: str, dates: np.ndarray, config: DataConfig, first_tradable: int) -> int | None:
    """Index of a given date, moved inward to a trading day; None if not given."""
    text = getattr(config, name)
    if not text:
        return None
    day = np.datetime64(text, "D")
    if day < dates[first_tradable] or day > dates[-1]:
        raise MarketDataError(
            f"{name} {text} is outside the data, whose tradable days run from {dates[first_tradable]} (every "
            f"indicator warm) to {dates[-1]}: choose a date among them"
        )
    if name.endswith("_start"):
        return int(np.searchsorted(dates, day, side="left"))
    return int(np.searchsorted(dates, day, side="right")) - 1


def _touching(end: int | None, start: int | None) -> tuple[int | None, int | None]:
    """Both sides of a border between two spans; the one not given touches the other."""
    if end is None and start is not None:
        return start - 1, start
    if start is None and end is not None:
        return end, end + 1
    return end, start


def _end_of_share(first: int, last: int, share: float) -> int:
    """Last day of the leading share of the days first .. last."""
    return first + round((last - first + 1) * share) - 1


def _checked_span(name: str, first: int, last: int, dates: np.ndarray) -> Span:
    num_days = max(0, last - first + 1)
    if num_days < MIN_SPAN_DAYS:
        at = dates[min(max(first, 0), len(dates) - 1)]
        raise MarketDataError(
            f"the {name} span has {num_days} trading day{'s' * (num_days != 1)} (near {at}), needs at least "
            f"{MIN_SPAN_DAYS}: move --{name}_start, --{name}_end or their neighbours, or bring more data"
        )
    return Span(first, last)
