"""Market data: bars adjusted for splits and dividends, aligned, split by date."""

import contextlib
import logging
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

logger = logging.getLogger(__name__)
PRICES = ("open", "high", "low", "close", "adj_close")
NUMBERS = (*PRICES, "volume")
COLUMNS = ("date", "tic", *NUMBERS)
BLANKS = ("", " ", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")  # not for `tic`: NA is a ticker
ROUNDING = 1e-3  # relative; split-adjusted files round open, high, low and close separately
MAX_MISSING_CALENDAR_DAYS = 10  # the longest exchange holidays (Shanghai, new year) close 10 days in a row
MAX_DROPPED_SHARE = 0.05
MIN_PRICE, MAX_PRICE, MAX_VOLUME = 1e-9, 1e9, 1e18  # beyond them figures overflow or come to nothing, silently

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


class MarketDataError(ValueError):
    """Market data that cannot be used; one line says where, what, and the cure."""


def read_bars(path: Path, *, missing: str = "error") -> pd.DataFrame:
    """Clean bars of a CSV or CSV.gz: every ticker has exactly one on every day.

    Rows may be sorted by date or stand ticker by ticker.

    Returns: columns COLUMNS; date datetime64, tic text, the others float64.
    Raises: MarketDataError: the file, the first offending ticker and date, how many more, and the cure.
        With missing="drop" days without a clean bar of every ticker are dropped, 5 % of the days at most.
    """
    assert missing in ("error", "drop"), missing
    try:
        bars = _parse(_read(path))
        _check_keys(bars)
        _check_values(bars)
        bars = _complete(bars, missing, path.name)
        _check_calendar(bars)
    except MarketDataError as error:
        raise MarketDataError(f"{path}: {error}") from None
    return bars


def _read(path: Path) -> pd.DataFrame:
    """The file's rows, tickers and dates as text."""
    try:
        is_file = path.is_file()
    except OSError as error:  # such as a name that is too long
        raise MarketDataError(f"cannot be read: {error.strerror}: give the path of a CSV or CSV.gz") from None
    if not is_file:
        raise MarketDataError("no such file: give the path of a CSV or CSV.gz, or use --data simulated")
    try:
        frame = pd.read_csv(
            path,
            dtype={"date": str, "tic": str},
            encoding="utf-8-sig",
            low_memory=False,
            keep_default_na=False,
            na_values={name: list(BLANKS) for name in COLUMNS if name != "tic"},
        )
    except (OSError, EOFError, ValueError, zlib.error) as error:  # pandas' parser errors are ValueErrors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise MarketDataError(f"cannot be read as CSV ({reason}): check or download the file again") from None
    absent = [name for name in COLUMNS if name not in frame.columns]
    if absent:
        found = ",".join(map(str, frame.columns[:12]))
        raise MarketDataError(
            f"no column {', '.join(absent)} in the header {found!r}: it must have {','.join(COLUMNS)}"
        )
    if not isinstance(frame.index, pd.RangeIndex):
        raise MarketDataError("its rows have more fields than its header: write one field per column")
    if frame.empty:
        raise MarketDataError("no rows below the header: fill the file")
    return frame[list(COLUMNS)]


def _parse(frame: pd.DataFrame) -> pd.DataFrame:
    """Dates as datetime64, numbers as float64 (NaN where blank)."""
    dates = pd.to_datetime(frame["date"], format="%Y-%m-%d", errors="coerce")
    bars = frame.assign(date=dates.where(dates.dt.year > 0))  # there is no year 0
    if bars["date"].isna().any():
        row = int(np.argmax(bars["date"].isna()))
        text = frame["date"].iloc[row]
        what = "blank date" if pd.isna(text) else f"date {text!r} is not a date"
        raise MarketDataError(
            f"data row {row + 1}, ticker {frame['tic'].iloc[row]}: {what}: write YYYY-MM-DD"
        )
    bars["tic"] = bars["tic"].fillna("").str.strip()
    _refuse(bars, bars["tic"] == "", "blank ticker", "name the ticker in column tic")
    for name in NUMBERS:
        values = pd.to_numeric(frame[name], errors="coerce").astype(np.float64)
        text = frame[name]
        bad = (values.isna() & text.notna()) | np.isinf(values)
        _refuse(bars, bad, f"{name} '{{{name}}}' is not a number", "correct the file")
        bars[name] = values
    return bars


def _check_keys(bars: pd.DataFrame) -> None:
    """One row per ticker and date, each ticker's dates ascending."""
    twice = bars.duplicated(["date", "tic"])
    _refuse(bars, twice, "a second row for this ticker and date", "remove the duplicate")
    backwards = bars["date"] < bars.groupby("tic")["date"].shift()
    _refuse(bars, backwards, "comes after a later date of this ticker", "sort the rows by date")


def _check_values(bars: pd.DataFrame) -> None:
    """Prices and volumes within bounds, low <= open, close <= high; blanks are judged elsewhere."""
    cure = "correct the file"
    for name in PRICES:
        _refuse(bars, bars[name] <= 0, f"{name} {{{name}:g}} is not positive", cure)
        outside = (bars[name] < MIN_PRICE) | (bars[name] > MAX_PRICE)
        _refuse(bars, outside, f"{name} {{{name}:g}} lies outside {MIN_PRICE:g} .. {MAX_PRICE:g}", cure)
    _refuse(bars, bars["high"] < bars["low"], "high {high:g} is below low {low:g}", cure)
    for name in ("open", "close"):
        outside = (bars[name] < bars["low"] * (1 - ROUNDING)) | (bars[name] > bars["high"] * (1 + ROUNDING))
        _refuse(bars, outside, f"{name} {{{name}:g}} lies outside low {{low:g}} .. high {{high:g}}", cure)
    _refuse(bars, bars["volume"] < 0, "volume {volume:g} is negative", cure)
    _refuse(bars, bars["volume"] > MAX_VOLUME, f"volume {{volume:g}} is above {MAX_VOLUME:g}", cure)


def _refuse(bars: pd.DataFrame, bad: pd.Series, what: str, cure: str) -> None:
    """Raise for the first bad row in order of date and ticker; `what` is formatted with that row's fields."""
    if not bad.any():
        return
    row = bars[bad].sort_values(["date", "tic"], kind="stable").iloc[0]
    more = _and_more(int(bad.sum()) - 1, "row")
    raise MarketDataError(f"{_place(row['tic'], row['date'])}: {what.format(**row)}{more}: {cure}")


def _complete(bars: pd.DataFrame, missing: str, name: str) -> pd.DataFrame:
    """The bars of the days on which every ticker has one; refuse or drop the other days."""
    present = bars.assign(clean=bars[list(NUMBERS)].notna().all(axis=1))
    clean = present.pivot(index="date", columns="tic", values="clean").eq(
        True
    )  # [days, tickers]; absent: False
    incomplete = ~clean.all(axis=1)
    if not incomplete.any():
        return bars
    if missing == "error":
        raise MarketDataError(_missing_message(bars, clean))
    if incomplete.mean() > MAX_DROPPED_SHARE:
        raise MarketDataError(_too_many_message(clean))
    days = clean.index[incomplete]
    tickers = clean.columns[~clean[incomplete].all(axis=0)]
    logger.warning(
        "%s: dropped %d of %d days on which not every ticker has a clean bar: days %s; tickers %s",
        name,
        len(days),
        len(clean),
        _some(f"{day:%Y-%m-%d}" for day in days),
        _some(tickers),
    )
    return bars[~bars["date"].isin(days)]


def _too_many_message(clean: pd.DataFrame) -> str:
    """Why dropping days will not do, and the ticker that costs most of them."""
    incomplete = ~clean.all(axis=1)
    worst = (~clean).sum().idxmax()
    own = clean.index[clean[worst]]
    has = f"has bars from {own[0]:%Y-%m-%d} to {own[-1]:%Y-%m-%d}" if len(own) else "has no clean bar"
    return (
        f"dropping would remove {incomplete.sum()} of {len(clean)} days, {incomplete.mean():.1%} where at "
        f"most {MAX_DROPPED_SHARE:.0%} is sane; {worst} lacks most: it {has}: remove it or cut the dates"
    )


def _missing_message(bars: pd.DataFrame, clean: pd.DataFrame) -> str:
    """What is wrong with the first missing or blank bar, and how many more there are."""
    day_indices, ticker_indices = np.nonzero(~clean.to_numpy())
    day, ticker = clean.index[day_indices[0]], clean.columns[ticker_indices[0]]
    row = bars[(bars["date"] == day) & (bars["tic"] == ticker)]
    if row.empty:
        what = "no bar, though other tickers have one"
    else:
        what = "blank " + ", ".join(name for name in NUMBERS if row[name].isna().item())
    more = _and_more(len(day_indices) - 1, "missing or blank bar")
    return f"{_place(ticker, day)}: {what}{more}: fill it in, remove the ticker, or use --data_missing drop"


def _check_calendar(bars: pd.DataFrame) -> None:
    """No gap between consecutive dates that no exchange holiday explains."""
    dates = np.unique(bars["date"].to_numpy().astype("datetime64[D]"))
    missing = np.diff(dates).astype(int) - 1
    gaps = np.flatnonzero(missing > MAX_MISSING_CALENDAR_DAYS)
    if len(gaps):
        before, after = dates[gaps[0]], dates[gaps[0] + 1]
        raise MarketDataError(
            f"all tickers: no bar for {missing[gaps[0]]} calendar days between {before} and {after}"
            f"{_and_more(len(gaps) - 1, 'gap')}: fill the gap or cut the file there"
        )


def _place(ticker: str, day: pd.Timestamp) -> str:
    return f"{ticker} on {day:%Y-%m-%d}"


def _and_more(count: int, thing: str) -> str:
    return f" (and {count} more {thing}{'s' * (count > 1)})" if count else ""


def _some(words: Iterable[str]) -> str:
    words = list(words)
    return ", ".join(words[:5]) + ", ..." * (len(words) > 5)
