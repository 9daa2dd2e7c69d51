"""Market data: bars adjusted for splits and dividends, aligned, split by date."""

import logging
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from envs.trading.config import SPAN_DATES, DataConfig
from rl_dist.errors import one_line

_LOGGER = logging.getLogger(__name__)
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
SHARES = (0.60, 0.15, 0.25)  # parts of the days: training, validation, test


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
    """Market data that cannot be used: the place, the problem and the fix."""


def split_spans(dates: np.ndarray, config: DataConfig, *, first_tradable: int) -> Spans:
    """Return training, validation and test span as day indices.

    Given dates are kept, moved inward to trading days. Else training starts at `first_tradable`,
    the test ends on the last day, spans touch each other, and a border of which neither side is
    given divides its days in the ratio 60 : 15 : 25. Where training and test leave too few days for
    a validation span that no date asks for, valid is None.

    Raises: MarketDataError for dates outside the data or spans that are too short.
    """
    days: dict[str, int] = {}
    for name in SPAN_DATES:
        if text := getattr(config, name):
            day = np.datetime64(text, "D")
            if not dates[first_tradable] <= day <= dates[-1]:
                raise MarketDataError(
                    f"{name} {text} is outside the days on which every indicator is warm, which "
                    f"run from {dates[first_tradable]} to {dates[-1]}: choose one of them"
                )
            is_end = name.endswith("_end")
            days[name] = (
                int(np.searchsorted(dates, day, side="right" if is_end else "left")) - is_end
            )
    first = days.setdefault("train_start", first_tradable)
    last = days.setdefault("test_end", len(dates) - 1)
    # a span without a given end stops before the next start; without that, SHARES decide
    for end, next_start in (("train_end", "valid_start"), ("valid_end", "test_start")):
        if next_start in days:
            days.setdefault(end, days[next_start] - 1)
    train, valid, test = SHARES
    if "train_end" not in days:
        share = train / (train + valid) if "valid_end" in days else train
        days["train_end"] = _end_of_share(first, days.get("valid_end", last), share)
    start = days.setdefault("valid_start", days["train_end"] + 1)
    if "valid_end" not in days:
        days["valid_end"] = _end_of_share(start, last, valid / (valid + test))
    days.setdefault("test_start", days["valid_end"] + 1)
    spans: dict[str, Span | None] = {}
    for name in ("train", "valid", "test"):
        span = Span(days[f"{name}_start"], days[f"{name}_end"])
        num_days = span.last - span.first + 1
        is_asked_for = name != "valid" or config.valid_start or config.valid_end
        if num_days < MIN_SPAN_DAYS and is_asked_for:
            near = dates[min(span.first, len(dates) - 1)]
            raise MarketDataError(
                f"the {name} span has {max(num_days, 0)} trading days (near {near}), needs "
                f"{MIN_SPAN_DAYS}: move --{name}_start, --{name}_end or their neighbours, or bring "
                "more data"
            )
        spans[name] = span if num_days >= MIN_SPAN_DAYS else None
    return Spans(**spans)  # type: ignore[arg-type]


def _end_of_share(first: int, last: int, share: float) -> int:
    """Return the last day of the leading share of the days first .. last."""
    return first + round((last - first + 1) * share) - 1


def load_market(path: str | Path, *, missing: str = "error") -> Market:
    """Load, validate, adjust and align a CSV or CSV.gz of daily bars.

    Rows may be sorted by date or stand ticker by ticker. Open, high, low and close are multiplied
    by adj_close / close. With missing="drop" days without a clean bar of every ticker are dropped,
    5 % of the days at most.

    Raises: MarketDataError: names the first offending ticker and date, and how many more.
    """
    path = Path(path).expanduser()
    try:
        bars = _parse(_read(path))
        _check_values(bars)
        table = bars.pivot(index="date", columns="tic", values=NUMBERS)
        table = _complete(table, missing, path.name)
    except MarketDataError as error:
        raise MarketDataError(f"{path}: {error}") from None
    values = {name: table[name].to_numpy(dtype=np.float64, copy=True) for name in NUMBERS}
    factor = values["adj_close"] / values["close"]
    return Market(
        name=path.name,
        dates=table.index.to_numpy().astype("datetime64[D]"),
        tickers=tuple(table["close"].columns),
        open=values["open"] * factor,
        high=values["high"] * factor,
        low=values["low"] * factor,
        close=values["adj_close"],
        volume=values["volume"],
    )


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
        reason = one_line(error, named=False)
        raise MarketDataError(
            f"cannot be read as CSV ({reason}): check or download the file again"
        ) from None
    if not {*COLUMNS} <= {*frame.columns} or not isinstance(frame.index, pd.RangeIndex):
        header = ",".join(map(str, frame.columns[:12]))
        raise MarketDataError(
            f"the header {header!r} must have {','.join(COLUMNS)}, and rows as many fields as it"
        )
    if frame.empty:
        raise MarketDataError("no rows below the header: fill the file")
    return frame[COLUMNS]


def _parse(frame: pd.DataFrame) -> pd.DataFrame:
    """Turn dates into datetime64 and numbers into float64 (NaN where blank)."""
    dates = pd.to_datetime(frame["date"], format="%Y-%m-%d", errors="coerce")
    _refuse(frame, ~(dates.dt.year > 0), "the date is not YYYY-MM-DD")  # there is no year 0
    tickers = frame["tic"].fillna("").str.strip()
    _refuse(frame, tickers == "", "blank ticker")
    bars = frame.assign(date=dates, tic=tickers)
    for name in NUMBERS:
        values = pd.to_numeric(frame[name], errors="coerce").astype(np.float64)
        bad = (values.isna() & frame[name].notna()) | np.isinf(values)
        _refuse(frame, bad, f"{name} is not a number")
        bars[name] = values
    return bars


def _check_values(bars: pd.DataFrame) -> None:
    """Refuse duplicates, unsorted dates, bars without a price or against their range."""
    low = bars["low"]
    high = bars["high"]
    outside = (bars["volume"] < 0) | (high < low)
    for name in ("open", "close"):
        outside |= (bars[name] < low * (1 - ROUNDING)) | (bars[name] > high * (1 + ROUNDING))
    backwards = bars["date"] < bars.groupby("tic")["date"].shift()
    _refuse(bars, bars.duplicated(["date", "tic"]), "a second row for this ticker and date")
    _refuse(bars, backwards, "comes after a later date of this ticker")
    _refuse(bars, (bars[PRICES] <= 0).any(axis=1), "a price is not positive")
    _refuse(bars, outside, "open or close is not between low and high, or volume is negative")


def _refuse(bars: pd.DataFrame, bad: pd.Series, problem: str) -> None:
    """Raise for the first bad row by date and ticker."""
    if bad.any():
        row = bars[bad].sort_values(["date", "tic"], kind="stable").iloc[0]
        values = ", ".join(f"{name} {row[name]}" for name in NUMBERS)
        raise MarketDataError(
            f"{row['tic']} on {str(row['date'])[:10]}: {problem} ({values})"
            f"{_and_more(int(bad.sum()) - 1)}: correct the file"
        )


def _complete(table: pd.DataFrame, missing: str, name: str) -> pd.DataFrame:
    """Return the days on which every ticker has a bar; refuse or drop the others.

    Refuses a gap between consecutive dates that no exchange holiday explains.
    """
    holes = table.isna().T.groupby("tic").any().T  # [days, tickers]
    incomplete = holes.any(axis=1)
    if incomplete.any():
        by_ticker = holes.sum()
        day = holes.index[incomplete][0]
        ticker = holes.columns[holes.loc[day]][0]
        if missing == "error":
            blank = [number for number in NUMBERS if pd.isna(table.loc[day, (number, ticker)])]
            raise MarketDataError(
                f"{ticker} on {day:%Y-%m-%d}: no {', '.join(blank)}, though other tickers have a "
                f"bar{_and_more(int(by_ticker.sum()) - 1)}: "
                "fill it in, remove the ticker, or use --data_missing drop"
            )
        if incomplete.mean() > MAX_DROPPED_SHARE:
            raise MarketDataError(
                f"dropping would remove {incomplete.sum()} of {len(table)} days, more than "
                f"{MAX_DROPPED_SHARE:.0%}; {by_ticker.idxmax()} lacks most, {by_ticker.max()}: "
                "remove it or cut the dates"
            )
        _LOGGER.warning(
            f"{name}: dropped {incomplete.sum()} of {len(table)} days on which not every ticker "
            f"has a clean bar, the first on {day:%Y-%m-%d}, for {ticker}"
        )
        table = table[~incomplete]
    dates = table.index.to_numpy().astype("datetime64[D]")
    missing_days = np.diff(dates).astype(int) - 1
    gaps = np.flatnonzero(missing_days > MAX_MISSING_CALENDAR_DAYS)
    if len(gaps):
        before, after = dates[gaps[0]], dates[gaps[0] + 1]
        raise MarketDataError(
            f"no bar for {missing_days[gaps[0]]} calendar days between {before} and {after}"
            f"{_and_more(len(gaps) - 1)}: fill the gap or cut the file there"
        )
    return table


def _and_more(count: int) -> str:
    return f" (and {count} more)" if count else ""
