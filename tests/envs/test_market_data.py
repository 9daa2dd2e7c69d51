"""Daily bars: what is loaded, what is refused and why, and how days are split into spans."""

import gzip
import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from envs.trading.market_data import MarketDataError, load_market, split_spans
from envs.trading_config import DataConfig

REAL_FILE = Path(__file__).parents[2] / "../shared/data/dow30_daily.csv.gz"
TICKERS = ("AAA", "BBB", "NA")  # NA is a real ticker, not a blank
DAYS = pd.bdate_range("2020-01-01", periods=60)


def good_bars() -> pd.DataFrame:
    """60 weekdays x 3 tickers, by date; ticker k closes day t at 10 * (k + 1) + t / 10."""
    rows = []
    for t, day in enumerate(DAYS):
        for k, ticker in enumerate(TICKERS):
            close = 10.0 * (k + 1) + t / 10
            bar = (close - 0.1, close + 0.5, close - 0.5, close, close / 2, 1000 + t)
            rows.append((f"{day:%Y-%m-%d}", ticker, *bar))
    names = ["date", "tic", "open", "high", "low", "close", "adj_close", "volume"]
    return pd.DataFrame(rows, columns=names)


def write(frame: pd.DataFrame, folder: Path, name: str = "bars.csv") -> Path:
    frame.to_csv(folder / name, index=False)
    return folder / name


def row_of(ticker: str, day: int) -> int:
    return day * len(TICKERS) + TICKERS.index(ticker)


def refusal(path: Path, **options) -> str:
    with pytest.raises(MarketDataError) as caught:
        load_market(path, **options)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"{path}: ")
    return message


def weekdays(first: str, last: str) -> np.ndarray:
    return pd.bdate_range(first, last).to_numpy().astype("datetime64[D]")


# ---- loading


def test_bars_are_aligned_by_date_and_ticker_and_adjusted(tmp_path):
    market = load_market(write(good_bars(), tmp_path))  # adj_close is half of close
    assert market.name == "bars.csv" and market.tickers == TICKERS
    np.testing.assert_array_equal(market.dates, DAYS.to_numpy().astype("datetime64[D]"))
    assert market.close.shape == (60, 3) and market.volume.dtype == np.float64
    assert market.volume[7].tolist() == [1007.0] * 3
    bar = [getattr(market, name)[20, 1] for name in ("open", "high", "low", "close")]
    assert bar == pytest.approx([10.95, 11.25, 10.75, 11.0])


def test_the_order_of_rows_and_columns_and_the_packing_do_not_matter(tmp_path):
    plain = load_market(write(good_bars(), tmp_path))
    more = good_bars().assign(note="x")
    more[sorted(more.columns)].to_csv(tmp_path / "more.csv", index=False, encoding="utf-8-sig")
    for path in (
        write(good_bars(), tmp_path, "bars.csv.gz"),
        write(good_bars().sort_values(["tic", "date"]), tmp_path, "by_ticker.csv"),
        tmp_path / "more.csv",
    ):
        other = load_market(path)
        assert other.tickers == plain.tickers
        for name in ("dates", "open", "high", "low", "close", "volume"):
            np.testing.assert_array_equal(getattr(other, name), getattr(plain, name))


# ---- refusing


HEADER, *ROWS = good_bars().to_csv(index=False).splitlines()
CONTENTS = {
    "empty": (b"", "cannot be read as CSV"),
    "binary": (b"\x00\xff\xfe\x81" * 50, ""),
    "too many fields": ("\n".join([HEADER, *(r + ",7" for r in ROWS)]).encode(), "more fields"),
    "no rows": (HEADER.encode(), "no rows"),
    "cut.gz": (gzip.compress("\n".join([HEADER, *ROWS]).encode())[:-200], "cannot be read as CSV"),
    "plain.gz": (b"date,tic", "cannot be read as CSV"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_broken_file_is_one_clear_line(tmp_path, name):
    content, words = CONTENTS[name]
    path = tmp_path / ("bars.csv" + ".gz" * name.endswith(".gz"))
    path.write_bytes(content)
    assert words in refusal(path)


def test_missing_files_and_columns_are_named(tmp_path):
    assert "no such file" in refusal(tmp_path / "absent.csv")
    assert "no such file" in refusal(tmp_path)
    path = write(good_bars().drop(columns=["adj_close", "volume"]), tmp_path)
    assert "no column adj_close, volume" in refusal(path)


@pytest.mark.parametrize("text", ["01/02/2020", "2020-02-30", "0000-01-01", "-001-01-01", ""])
def test_a_date_that_is_none_is_named_with_its_ticker(tmp_path, text):
    frame = good_bars()
    frame.loc[row_of("BBB", 4), "date"] = text
    message = refusal(write(frame, tmp_path))
    assert "data row 14, ticker BBB" in message and "YYYY-MM-DD" in message


BAD_VALUES = [
    ("close", "abc", "close 'abc' is not a number"),
    ("open", -1.0, "open -1 is not positive"),
    ("high", 15.0, "high 15 is below low 20.1"),
    ("close", 21.5, "close 21.5 lies outside low 20.1 .. high 21.1"),
    ("volume", -5, "volume -5 is negative"),
]


@pytest.mark.parametrize(("column", "value", "words"), BAD_VALUES)
def test_a_bad_value_is_refused_with_ticker_and_date(tmp_path, column, value, words):
    frame = good_bars().astype({column: object})
    frame.loc[row_of("BBB", 6), column] = value
    path = write(frame, tmp_path)
    for missing in ("error", "drop"):  # a wrong bar is never dropped silently
        assert f"BBB on 2020-01-09: {words}: correct the file" in refusal(path, missing=missing)


def changed(**cells) -> pd.DataFrame:
    """Bars with other values in the columns of some rows."""
    frame = good_bars().astype(object)
    for column, (rows, value) in cells.items():
        frame.loc[rows, column] = value
    return frame


NEGATIVE = [row_of("AAA", 30), row_of("BBB", 6), row_of("NA", 50)]
ODD_ROWS = {
    "several": (changed(low=(NEGATIVE, -3.0)), "BBB on 2020-01-09: low -3 .* (and 2 more rows)"),
    "ticker": (changed(tic=(4, " ")), "on 2020-01-02: blank ticker"),
    "twice": (
        pd.concat([good_bars(), good_bars().iloc[[179]]]),
        "NA on 2020-03-24: a second row",
    ),
    "unsorted": (good_bars()[::-1], "comes after a later date"),
    "hole": (
        good_bars().drop(index=[row_of("BBB", 8), row_of("AAA", 20)]),
        "BBB on 2020-01-13: no bar, .* (and 1 more missing .* --data_missing drop",
    ),
    "blank": (changed(open=(26, ""), volume=(26, "null")), "NA on 2020-01-13: blank open, volume"),
}


@pytest.mark.parametrize("name", ODD_ROWS)
def test_rows_that_do_not_belong_together_are_refused(tmp_path, name):
    frame, words = ODD_ROWS[name]
    message = refusal(write(frame, tmp_path))
    assert all(part in message for part in words.split(" .* "))


def test_a_gap_in_the_whole_calendar_is_refused(tmp_path):
    frame = good_bars()
    gap = frame[~frame["date"].between("2020-02-03", "2020-02-12")]
    message = refusal(write(gap, tmp_path))
    assert "no bar for 12 calendar days between 2020-01-31 and 2020-02-13" in message
    holiday = frame[~frame["date"].between("2020-02-03", "2020-02-10")]  # ten days without a bar
    assert load_market(write(holiday, tmp_path)).close.shape == (54, 3)


# ---- dropping


def test_dropping_removes_exactly_the_incomplete_days_and_says_so(tmp_path, caplog):
    path = write(changed(high=(row_of("AAA", 20), np.nan)).drop(index=row_of("BBB", 8)), tmp_path)
    with caplog.at_level(logging.WARNING):
        market = load_market(path, missing="drop")
    kept = [t for t in range(60) if t not in (8, 20)]
    np.testing.assert_array_equal(market.dates, DAYS[kept].to_numpy().astype("datetime64[D]"))
    np.testing.assert_allclose(market.close[:, 0], [(10 + t / 10) / 2 for t in kept])
    assert "dropped 2 of 60 days" in caplog.text and "2020-01-13, 2020-01-29" in caplog.text
    assert "AAA, BBB" in caplog.text


def test_dropping_more_than_a_twentieth_of_the_days_or_leaving_a_gap_is_refused(tmp_path):
    frame = good_bars()
    young = frame[(frame["tic"] != "BBB") | (frame["date"] >= "2020-01-07")]  # its fifth day
    message = refusal(write(young, tmp_path), missing="drop")
    assert "remove 4 of 60 days, 6.7%" in message and "BBB lacks most, 4" in message
    days = pd.bdate_range("2020-01-01", periods=250)
    frame = pd.concat([good_bars()[:3].assign(date=f"{day:%Y-%m-%d}") for day in days])
    hole = (frame["tic"] == "AAA") & frame["date"].between("2020-03-02", "2020-03-13")
    message = refusal(write(frame[~hole], tmp_path), missing="drop")
    assert "no bar for 16 calendar days between 2020-02-28 and 2020-03-16" in message


# ---- spans

DATES = weekdays("2020-01-01", "2020-12-31")[:240]
A, B, C, D = (str(DATES[day]) for day in (100, 150, 199, 220))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [(0, 143), (144, 179), (180, 239)]),  # 60 : 15 : 25
        ({"valid_start": A, "test_start": B}, [(0, 99), (100, 149), (150, 239)]),
        ({"test_start": B}, [(0, 119), (120, 149), (150, 239)]),  # 60 : 15 before the test
        ({"train_end": C}, [(0, 199), (200, 214), (215, 239)]),  # 15 : 25 after training
        ({"test_end": C}, [(0, 119), (120, 149), (150, 199)]),
        (
            {"train_end": A, "valid_start": C, "test_start": D},
            [(0, 100), (199, 219), (220, 239)],
        ),
        ({"train_end": A, "test_start": str(DATES[102])}, [(0, 100), None, (102, 239)]),
    ],
)
def test_what_is_not_given_is_filled_so_that_spans_touch(given, expected):
    spans = split_spans(DATES, DataConfig(**given), first_tradable=0)
    found = [span and (span.first, span.last) for span in (spans.train, spans.valid, spans.test)]
    assert found == expected


def test_days_without_trading_move_inward():
    starts = {"train_start": "2020-02-01", "valid_start": "2020-06-06", "test_start": "2020-08-01"}
    ends = {"train_end": "2020-05-31", "valid_end": "2020-07-19", "test_end": "2020-11-01"}
    spans = split_spans(DATES, DataConfig(**starts, **ends), first_tradable=10)
    days = [
        str(DATES[day])[5:]
        for span in (spans.train, spans.valid, spans.test)
        for day in (span.first, span.last)
    ]
    assert days == ["02-03", "05-29", "06-08", "07-17", "08-03", "10-30"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train_start": "2020-01-02"}, "run from 2020-01-15 .* to 2020-12-01"),
        ({"test_end": "2021-01-01"}, "run from 2020-01-15 .* to 2020-12-01"),
        (
            {"valid_start": "2020-06-06", "valid_end": "2020-06-07"},
            "the valid span has 0 trading days",
        ),
        ({"test_start": "2020-12-01"}, "the test span has 1 trading day"),
    ],
)
def test_spans_outside_the_data_or_too_short_are_refused(given, words):
    with pytest.raises(MarketDataError, match=words):
        split_spans(DATES, DataConfig(**given), first_tradable=10)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"test_start": "20160104"}, "test_start must be a date YYYY-MM-DD"),
        ({"test_start": "soon"}, "test_start must be a date YYYY-MM-DD"),
        ({"train_end": "2016-01-04", "test_start": "2016-01-04"}, "must be after train_end"),
        (
            {"valid_start": "2016-01-05", "valid_end": "2016-01-04"},
            "valid_end must be no earlier than valid_start",
        ),
    ],
)
def test_flags_that_cannot_work_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        DataConfig(**given)


@pytest.mark.skipif(not REAL_FILE.exists(), reason="needs shared/data/dow30_daily.csv.gz")
def test_buying_the_dow_equally_gives_the_known_figures():
    dow = load_market(REAL_FILE)
    assert dow.close.shape == (3046, 30) and (dow.tickers[0], dow.tickers[-1]) == ("AAPL", "XOM")
    assert (str(dow.dates[0]), str(dow.dates[-1])) == ("2008-06-02", "2020-07-07")
    config = DataConfig(train_end="2015-12-31", test_start="2016-01-04")
    spans = split_spans(dow.dates, config, first_tradable=60)
    assert spans.valid is None
    close = dow.close[spans.test.first : spans.test.last + 1]
    equity = (close / close[0]).mean(axis=1)
    returns = np.diff(equity) / equity[:-1]
    drawdown = 1 - equity / np.maximum.accumulate(equity)
    assert equity[-1] - 1 == pytest.approx(0.7007, abs=5e-5)
    assert returns.mean() / returns.std(ddof=1) * np.sqrt(252) == pytest.approx(0.695, abs=5e-4)
    assert drawdown.max() == pytest.approx(0.344, abs=5e-4)
