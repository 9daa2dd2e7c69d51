"""Market data: bars adjusted for splits and dividends, aligned, split by date."""

import logging
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from envs.trading_config import SPAN_DATES, DataConfig

logger = logging.getLogger(__name__)
PRICES = ["open", "high", "low", "close", "adj_close"]
NUMBERS = [*PRICES, "volume"]
COLUMNS = ["date", "tic", *NUMBERS]
# not for `tic`: NA is a ticker
BLANKS = ("", " ", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")
ROUNDING = 1e-3  # relative; split-adjusted files round open, high, low and close separately
# the longest exchange holidays (Shanghai, new year) close 10 days in a row
MAX_MISSING_CALENDAR_DAYS = 10
MAX_DROPPED_SHARE = 0.05

MIN_SPAN_DAYS = 2  # one step needs a day to decide on and a day to fill
TRAIN_SHARE = 0.60
VALID_SHARE = 0.15
TEST_SHARE = 0.25


@dataclass(frozen=True)
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


class MarketDataError(ValueError):
    """Market data that cannot be used; one line says where, what, and how to fix it."""


def split_spans(dates: np.ndarray, config: DataConfig, *, first_tradable: int) -> Spans:
    """Return training, validation and test span as day indices.

    Given dates are kept, moved inward to trading days. Else training starts at `first_tradable`,
    the test ends on the last day, spans touch each other, and a border of which neither side is
    given divides its days in the ratio 60 : 15 : 25. Where training and test leave too few days for
    a validation span that no date asks for, valid is None.

    Raises: MarketDataError for dates outside the data or spans that are too short.
    """
    given = {
        name: _day_of(name, getattr(config, name), dates, first_tradable)
        for name in SPAN_DATES
        if getattr(config, name)
    }
    first = given.get("train_start", first_tradable)
    last = given.get("test_end", len(dates) - 1)
    # A span whose end is not given ends before the next one starts, or has its share of the days
    train_end = _end(given, "train_end", "valid_start")
    valid_end = _end(given, "valid_end", "test_start")
    if train_end is None:
        share = TRAIN_SHARE if valid_end is None else TRAIN_SHARE / (TRAIN_SHARE + VALID_SHARE)
        train_end = _end_of_share(first, last if valid_end is None else valid_end, share)
    valid_start = given.get("valid_start", train_end + 1)
    if valid_end is None:
        valid_end = _end_of_share(valid_start, last, VALID_SHARE / (VALID_SHARE + TEST_SHARE))
    test_start = given.get("test_start", valid_end + 1)
    valid = None
    if config.valid_start or config.valid_end or valid_end - valid_start + 1 >= MIN_SPAN_DAYS:
        valid = _checked_span("valid", valid_start, valid_end, dates)
    return Spans(
        train=_checked_span("train", first, train_end, dates),
        valid=valid,
        test=_checked_span("test", test_start, last, dates),
    )


def _day_of(name: str, text: str, dates: np.ndarray, first_tradable: int) -> int:
    """Return the index of a date, moved inward to a trading day."""
    day = np.datetime64(text, "D")
    if day < dates[first_tradable] or day > dates[-1]:
        raise MarketDataError(
            f"{name} {text} is outside the data, whose tradable days run from "
            f"{dates[first_tradable]} (every indicator warm) to {dates[-1]}: choose one of them"
        )
    if name.endswith("_start"):
        return int(np.searchsorted(dates, day, side="left"))
    return int(np.searchsorted(dates, day, side="right")) - 1


def _end(given: dict[str, int], end: str, next_start: str) -> int | None:
    return given.get(end, given[next_start] - 1 if next_start in given else None)


def _end_of_share(first: int, last: int, share: float) -> int:
    """Return the last day of the leading share of the days first .. last."""
    return first + round((last - first + 1) * share) - 1


def _checked_span(name: str, first: int, last: int, dates: np.ndarray) -> Span:
    num_days = max(0, last - first + 1)
    if num_days < MIN_SPAN_DAYS:
        near = dates[min(max(first, 0), len(dates) - 1)]
        raise MarketDataError(
            f"the {name} span has {num_days} trading days (near {near}), needs {MIN_SPAN_DAYS}: "
            f"move --{name}_start, --{name}_end or their neighbours, or bring more data"
        )
    return Span(first, last)


def load_market(path: str | Path, *, missing: str = "error") -> Market:
    """Load, validate, adjust and align a CSV or CSV.gz of daily bars.

    Open, high, low and close are multiplied by adj_close / close. Raises as `read_bars`.
    """
    path = Path(path).expanduser()
    bars = read_bars(path, missing=missing)
    table = bars.pivot(index="date", columns="tic", values=NUMBERS)
    values = {name: table[name].to_numpy(dtype=np.float64, copy=True) for name in NUMBERS}
    factor = values["adj_close"] / values["close"]
    open_, high, low = (values[name] * factor for name in ("open", "high", "low"))
    dates = table.index.to_numpy().astype("datetime64[D]")
    tickers = tuple(table["close"].columns)
    close, volume = values["adj_close"], values["volume"]
    return Market(path.name, dates, tickers, open_, high, low, close, volume)


def read_bars(path: Path, *, missing: str = "error") -> pd.DataFrame:
    """Read clean bars of a CSV or CSV.gz: every ticker has exactly one on every day.

    Rows may be sorted by date or stand ticker by ticker. With missing="drop" days without a clean
    bar of every ticker are dropped, 5 % of the days at most.

    Returns: columns COLUMNS; date datetime64, tic text, the others float64.
    Raises: MarketDataError: names the first offending ticker and date, and how many more.
    """
    try:
        bars = _parse(_read(path))
        _check_values(bars)
        bars = _complete(bars, missing, path.name)
        _check_calendar(bars)
    except MarketDataError as error:
        raise MarketDataError(f"{path}: {error}") from None
    return bars


def _read(path: Path) -> pd.DataFrame:
    """Return the file's rows, tickers and dates as text."""
    if not path.is_file():  # pandas would wait for a pipe
        raise MarketDataError(
            "no such file: give the path of a CSV or CSV.gz, or use --data simulated"
        )
    try:
        frame = pd.read_csv(
            path,
            dtype={"date": str, "tic": str},
            encoding="utf-8-sig",
            low_memory=False,
            keep_default_na=False,
            na_values={name: list(BLANKS) for name in COLUMNS if name != "tic"},
        )
    except (OSError, EOFError, ValueError, zlib.error) as error:  # parser errors are ValueErrors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise MarketDataError(
            f"cannot be read as CSV ({reason}): check or download the file again"
        ) from None
    absent = [name for name in COLUMNS if name not in frame.columns]
    if absent:
        found = ",".join(map(str, frame.columns[:12]))
        raise MarketDataError(
            f"no column {', '.join(absent)} in the header {found!r}: "
            f"it must have {','.join(COLUMNS)}"
        )
    if not isinstance(frame.index, pd.RangeIndex):
        raise MarketDataError(
            "its rows have more fields than its header: write one field per column"
        )
    if frame.empty:
        raise MarketDataError("no rows below the header: fill the file")
    return frame[COLUMNS]


def _parse(frame: pd.DataFrame) -> pd.DataFrame:
    """Turn dates into datetime64 and numbers into float64 (NaN where blank)."""
    dates = pd.to_datetime(frame["date"], format="%Y-%m-%d", errors="coerce")
    bars = frame.assign(date=dates.where(dates.dt.year > 0))  # there is no year 0
    if bars["date"].isna().any():
        row = int(np.argmax(bars["date"].isna()))
        text, ticker = frame.loc[row, ["date", "tic"]]
        raise MarketDataError(
            f"data row {row + 1}, ticker {ticker}: {text!r} is not a date: write YYYY-MM-DD"
        )
    bars["tic"] = bars["tic"].fillna("").str.strip()
    _refuse(bars, bars["tic"] == "", "blank ticker")
    for name in NUMBERS:
        values = pd.to_numeric(frame[name], errors="coerce").astype(np.float64)
        bad = (values.isna() & frame[name].notna()) | np.isinf(values)
        _refuse(bars, bad, f"{name} '{{{name}}}' is not a number")
        bars[name] = values
    return bars


def _check_values(bars: pd.DataFrame) -> None:
    """Refuse duplicates, unsorted dates, bars without a price or against their range."""
    twice = bars.duplicated(["date", "tic"])
    _refuse(bars, twice, "a second row for this ticker and date", "remove the duplicate")
    backwards = bars["date"] < bars.groupby("tic")["date"].shift()
    _refuse(bars, backwards, "comes after a later date of this ticker", "sort the rows by date")
    for name in PRICES:
        _refuse(bars, bars[name] <= 0, f"{name} {{{name}:g}} is not positive")
    low, high = bars["low"], bars["high"]
    _refuse(bars, high < low, "high {high:g} is below low {low:g}")
    for name in ("open", "close"):
        outside = (bars[name] < low * (1 - ROUNDING)) | (bars[name] > high * (1 + ROUNDING))
        _refuse(bars, outside, f"{name} {{{name}:g}} lies outside low {{low:g}} .. high {{high:g}}")
    _refuse(bars, bars["volume"] < 0, "volume {volume:g} is negative")


def _refuse(bars: pd.DataFrame, bad: pd.Series, what: str, fix: str = "correct the file") -> None:
    """Raise for the first bad row by date and ticker; `what` is formatted with its fields."""
    if bad.any():
        row = bars[bad].sort_values(["date", "tic"], kind="stable").iloc[0]
        raise MarketDataError(
            f"{row['tic']} on {row['date']:%Y-%m-%d}: {what.format(**row)}"
            f"{_and_more(int(bad.sum()) - 1, 'row')}: {fix}"
        )


def _complete(bars: pd.DataFrame, missing: str, name: str) -> pd.DataFrame:
    """Return the bars of the days on which every ticker has one; refuse or drop the other days."""
    every = pd.MultiIndex.from_product([bars["date"].unique(), bars["tic"].unique()]).sort_values()
    blank = bars.set_index(["date", "tic"])[NUMBERS].reindex(every).isna()  # [days * tickers, 6]
    holes = blank.any(axis=1).unstack()  # [days, tickers]
    incomplete = holes.any(axis=1)
    if not incomplete.any():
        return bars
    tickers = holes.sum()
    if missing == "error":
        (day, ticker), fields = next(blank[blank.any(axis=1)].iterrows())
        what = "no bar" if fields.all() else "blank " + ", ".join(fields.index[fields])
        raise MarketDataError(
            f"{ticker} on {day:%Y-%m-%d}: {what}, though other tickers have one"
            f"{_and_more(int(tickers.sum()) - 1, 'missing or blank bar')}: "
            "fill it in, remove the ticker, or use --data_missing drop"
        )
    if incomplete.mean() > MAX_DROPPED_SHARE:
        raise MarketDataError(
            f"dropping would remove {incomplete.sum()} of {len(holes)} days, "
            f"{incomplete.mean():.1%} where at most {MAX_DROPPED_SHARE:.0%} is sane; "
            f"{tickers.idxmax()} lacks most, {tickers.max()}: remove it or cut the dates"
        )
    dropped = holes.index[incomplete]
    logger.warning(
        f"{name}: dropped {len(dropped)} of {len(holes)} days on which not every ticker has a "
        f"clean bar: days {_some(dropped.strftime('%Y-%m-%d'))}; tickers "
        f"{_some(tickers.index[tickers > 0])}"
    )
    return bars[~bars["date"].isin(dropped)]


def _check_calendar(bars: pd.DataFrame) -> None:
    """Refuse a gap between consecutive dates that no exchange holiday explains."""
    dates = np.unique(bars["date"].to_numpy().astype("datetime64[D]"))
    missing = np.diff(dates).astype(int) - 1
    gaps = np.flatnonzero(missing > MAX_MISSING_CALENDAR_DAYS)
    if len(gaps):
        before, after = dates[gaps[0]], dates[gaps[0] + 1]
        raise MarketDataError(
            f"all tickers: no bar for {missing[gaps[0]]} calendar days between {before} and {after}"
            f"{_and_more(len(gaps) - 1, 'gap')}: fill the gap or cut the file there"
        )


def _and_more(count: int, thing: str) -> str:
    return f" (and {count} more {thing}{'s' * (count > 1)})" if count else ""


def _some(words: pd.Index) -> str:
    return ", ".join(words[:5]) + ", ..." * (len(words) > 5)
