"""Daily bars: what is loaded, what is refused and in which words, and how days are split into spans."""

import gzip
import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from envs.trading.market_data import DataConfig, Market, MarketDataError, Span, load_market, split_spans

REAL_FILE = Path(__file__).parents[2] / "../shared/data/dow30_daily.csv.gz"
TICKERS = ("AAA", "BBB", "NA")  # NA is a real ticker, not a blank
DAYS = pd.bdate_range("2020-01-01", periods=60)


def good_bars() -> pd.DataFrame:
    """60 weekdays x 3 tickers, by date, then ticker; ticker k closes day t at 10 * (k + 1) + t / 10."""
    rows = []
    for t, day in enumerate(DAYS):
        for k, ticker in enumerate(TICKERS):
            close = 10.0 * (k + 1) + t / 10
            bar = (close - 0.1, close + 0.5, close - 0.5, close, close / 2, 1000 + t)
            rows.append((f"{day:%Y-%m-%d}", ticker, *bar))
    return pd.DataFrame(rows, columns=["date", "tic", "open", "high", "low", "close", "adj_close", "volume"])


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


def test_bars_are_aligned_by_date_and_ticker(tmp_path):
    market = load_market(write(good_bars(), tmp_path))
    assert market.name == "bars.csv" and not market.simulated
    assert market.tickers == TICKERS
    assert market.dates.dtype == np.dtype("datetime64[D]")
    np.testing.assert_array_equal(market.dates, DAYS.to_numpy().astype("datetime64[D]"))
    assert market.close.shape == (60, 3) and market.volume.dtype == np.float64
    assert market.volume[7].tolist() == [1007.0] * 3


def test_prices_are_adjusted_for_splits_and_dividends(tmp_path):
    market = load_market(write(good_bars(), tmp_path))  # adj_close is half of close
    day, ticker = 20, 1
    assert market.close[day, ticker] == pytest.approx(11.0)
    assert market.open[day, ticker] == pytest.approx(10.95)
    assert market.high[day, ticker] == pytest.approx(11.25)
    assert market.low[day, ticker] == pytest.approx(10.75)


def test_plain_gzipped_and_ticker_by_ticker_files_give_the_same_market(tmp_path):
    plain = load_market(write(good_bars(), tmp_path))
    zipped = load_market(write(good_bars(), tmp_path, "bars.csv.gz"))
    by_ticker = load_market(write(good_bars().sort_values(["tic", "date"]), tmp_path, "by_ticker.csv"))
    for other in (zipped, by_ticker):
        assert other.tickers == plain.tickers
        for name in ("dates", "open", "high", "low", "close", "volume"):
            np.testing.assert_array_equal(getattr(other, name), getattr(plain, name))


def test_extra_columns_a_byte_order_mark_and_column_order_do_not_matter(tmp_path):
    frame = good_bars().assign(note="x")
    path = tmp_path / "bars.csv"
    frame[sorted(frame.columns)].to_csv(path, index=False, encoding="utf-8-sig")
    assert load_market(path).close.shape == (60, 3)


def test_a_rounding_difference_between_close_and_high_is_accepted(tmp_path):
    frame = good_bars()
    frame.loc[5, "close"] = frame.loc[5, "high"] * 1.0005
    assert load_market(write(frame, tmp_path)).close.shape == (60, 3)


# ---- refusing


def test_a_missing_file_is_an_error(tmp_path):
    assert "no such file" in refusal(tmp_path / "absent.csv")
    assert "no such file" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\xff\xfe\x81" * 50, b'date,tic\n"2020', b"date,tic\n1,2,3\n4,5,6,7,8\n"],
    ids=["empty", "binary", "open quote", "ragged"],
)
def test_a_broken_file_is_one_clear_line(tmp_path, content):
    path = tmp_path / "bars.csv"
    path.write_bytes(content)
    refusal(path)


@pytest.mark.parametrize("damage", ["cut", "flipped", "not gzip"])
def test_a_damaged_gzip_is_one_clear_line(tmp_path, damage):
    packed = bytearray(gzip.compress(good_bars().to_csv(index=False).encode()))
    if damage == "flipped":
        packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / "bars.csv.gz"
    path.write_bytes({"cut": packed[:-200], "flipped": packed, "not gzip": b"date,tic"}[damage])
    assert "cannot be read as CSV" in refusal(path)


def test_missing_columns_are_named(tmp_path):
    message = refusal(write(good_bars().drop(columns=["adj_close", "volume"]), tmp_path))
    assert "no column adj_close, volume" in message


def test_a_header_without_rows_is_refused(tmp_path):
    assert "no rows" in refusal(write(good_bars()[:0], tmp_path))


def test_rows_with_more_fields_than_the_header_are_refused(tmp_path):
    path = tmp_path / "bars.csv"
    header, *rows = good_bars().to_csv(index=False).splitlines()
    path.write_text("\n".join([header, *(row + ",7" for row in rows)]))
    assert "more fields than its header" in refusal(path)


@pytest.mark.parametrize("text", ["01/02/2020", "2020-02-30", "", "yesterday"])
def test_a_date_that_is_none_is_named_with_its_ticker(tmp_path, text):
    frame = good_bars()
    frame.loc[row_of("BBB", 4), "date"] = text
    message = refusal(write(frame, tmp_path))
    assert "data row 14, ticker BBB" in message and "YYYY-MM-DD" in message


BAD_VALUES = [
    ("close", "abc", "close 'abc' is not a number"),
    ("volume", "inf", "volume 'inf' is not a number"),
    ("open", -1.0, "open -1 is not positive"),
    ("adj_close", 0.0, "adj_close 0 is not positive"),
    ("close", 1e300, "close 1e+300 lies outside 1e-09 .. 1e+09"),
    ("adj_close", 1e-300, "adj_close 1e-300 lies outside 1e-09 .. 1e+09"),
    ("volume", 1e30, "volume 1e+30 is above 1e+18"),
    ("high", 15.0, "high 15 is below low 20.1"),
    ("close", 21.5, "close 21.5 lies outside low 20.1 .. high 21.1"),
    ("open", 19.0, "open 19 lies outside low 20.1 .. high 21.1"),
    ("volume", -5, "volume -5 is negative"),
]


@pytest.mark.parametrize(("column", "value", "words"), BAD_VALUES, ids=[words for *_, words in BAD_VALUES])
def test_a_bad_value_is_refused_with_ticker_and_date(tmp_path, column, value, words):
    frame = good_bars().astype({column: object})
    frame.loc[row_of("BBB", 6), column] = value
    path = write(frame, tmp_path)
    for missing in ("error", "drop"):  # a wrong bar is never dropped silently
        assert f"BBB on 2020-01-09: {words}: correct the file" in refusal(path, missing=missing)


def test_the_number_of_further_bad_rows_is_told(tmp_path):
    frame = good_bars()
    frame.loc[[row_of("AAA", 30), row_of("BBB", 6), row_of("NA", 50)], "low"] = -3.0
    assert "BBB on 2020-01-09: low -3 is not positive (and 2 more rows)" in refusal(write(frame, tmp_path))


def test_a_blank_ticker_is_refused(tmp_path):
    frame = good_bars()
    frame.loc[4, "tic"] = " "
    assert "on 2020-01-02: blank ticker" in refusal(write(frame, tmp_path))


def test_duplicates_are_refused(tmp_path):
    frame = good_bars()
    twice = pd.concat([frame, frame.iloc[[row_of("NA", 59)]]])
    assert "NA on 2020-03-24: a second row" in refusal(write(twice, tmp_path))


def test_unsorted_dates_are_refused(tmp_path):
    order = list(range(180))
    order[row_of("AAA", 10)], order[row_of("AAA", 11)] = row_of("AAA", 11), row_of("AAA", 10)
    message = refusal(write(good_bars().iloc[order], tmp_path))
    assert "AAA on 2020-01-15: comes after a later date" in message and "sort" in message


def test_a_hole_is_refused_with_ticker_date_and_cure(tmp_path):
    frame = good_bars().drop(index=[row_of("BBB", 8), row_of("AAA", 20)])
    message = refusal(write(frame, tmp_path))
    assert "BBB on 2020-01-13: no bar, though other tickers have one (and 1 more missing" in message
    assert "--data_missing drop" in message


@pytest.mark.parametrize("blank", ["", "NaN", "null"])
def test_blank_values_are_refused_with_ticker_date_and_columns(tmp_path, blank):
    frame = good_bars().astype({"open": object, "volume": object})
    frame.loc[row_of("NA", 8), ["open", "volume"]] = blank
    assert "NA on 2020-01-13: blank open, volume" in refusal(write(frame, tmp_path))


def test_a_gap_in_the_whole_calendar_is_refused(tmp_path):
    frame = good_bars()
    gap = frame[~frame["date"].between("2020-02-03", "2020-02-12")]
    message = refusal(write(gap, tmp_path))
    assert "no bar for 12 calendar days between 2020-01-31 and 2020-02-13" in message
    holiday = frame[~frame["date"].between("2020-02-03", "2020-02-10")]  # ten days without a bar
    assert load_market(write(holiday, tmp_path)).close.shape == (54, 3)


# ---- dropping


def test_dropping_removes_exactly_the_incomplete_days_and_says_so(tmp_path, caplog):
    frame = good_bars()
    frame.loc[row_of("AAA", 20), "high"] = np.nan
    path = write(frame.drop(index=row_of("BBB", 8)), tmp_path)
    with caplog.at_level(logging.WARNING):
        market = load_market(path, missing="drop")
    kept = [t for t in range(60) if t not in (8, 20)]
    np.testing.assert_array_equal(market.dates, DAYS[kept].to_numpy().astype("datetime64[D]"))
    np.testing.assert_allclose(market.close[:, 0], [(10 + t / 10) / 2 for t in kept])
    assert "dropped 2 of 60 days" in caplog.text and "2020-01-13, 2020-01-29" in caplog.text
    assert "AAA, BBB" in caplog.text


def test_dropping_a_clean_file_changes_and_says_nothing(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        assert load_market(write(good_bars(), tmp_path), missing="drop").close.shape == (60, 3)
    assert not caplog.text


def test_dropping_more_than_a_twentieth_of_the_days_is_refused(tmp_path):
    frame = good_bars()
    young = frame[(frame["tic"] != "BBB") | (frame["date"] >= "2020-01-07")]  # lists on the fifth day
    message = refusal(write(young, tmp_path), missing="drop")
    assert "remove 4 of 60 days, 6.7%" in message
    assert "BBB lacks most: it has bars from 2020-01-07 to 2020-03-24" in message


def test_a_gap_made_by_dropping_is_refused(tmp_path):
    days = pd.bdate_range("2020-01-01", periods=250)
    frame = pd.concat([good_bars()[:3].assign(date=f"{day:%Y-%m-%d}") for day in days])
    hole = (frame["tic"] == "AAA") & frame["date"].between("2020-03-02", "2020-03-13")
    message = refusal(write(frame[~hole], tmp_path), missing="drop")
    assert "no bar for 16 calendar days between 2020-02-28 and 2020-03-16" in message


# ---- spans


def test_days_are_split_60_15_25_from_the_first_tradable_day():
    spans = split_spans(weekdays("2020-01-01", "2024-12-31")[:1060], DataConfig(), first_tradable=60)
    assert (spans.train, spans.valid, spans.test) == (Span(60, 659), Span(660, 809), Span(810, 1059))


def test_days_between_training_and_test_are_for_validation():
    dates = weekdays("2009-01-01", "2012-12-31")
    config = DataConfig(
        train_start="2010-01-04", train_end="2010-12-31", test_start="2012-01-02", test_end="2012-06-29"
    )
    spans = split_spans(dates, config, first_tradable=60)
    valid = spans.valid
    assert valid is not None
    named = [str(dates[day]) for span in (spans.train, valid, spans.test) for day in (span.first, span.last)]
    assert named == ["2010-01-04", "2010-12-31", "2011-01-03", "2011-12-30", "2012-01-02", "2012-06-29"]


@pytest.mark.parametrize("train_end", ["2011-12-30", "2011-12-29"])
def test_no_days_between_training_and_test_leave_no_validation(train_end):
    config = DataConfig(train_end=train_end, test_start="2012-01-02")  # one single day is too few as well
    spans = split_spans(weekdays("2009-01-01", "2012-12-31"), config, first_tradable=60)
    assert spans.valid is None
    assert spans.test.first - spans.train.last in (1, 2)


def test_days_without_trading_move_inward():
    dates = weekdays("2020-01-01", "2021-12-31")
    config = DataConfig(
        train_start="2020-02-01",
        train_end="2020-12-06",
        valid_start="2020-12-12",
        valid_end="2021-03-07",
        test_start="2021-04-03",
        test_end="2021-10-31",
    )
    spans = split_spans(dates, config, first_tradable=0)
    valid = spans.valid
    assert valid is not None
    named = [str(dates[day]) for span in (spans.train, valid, spans.test) for day in (span.first, span.last)]
    assert named == ["2020-02-03", "2020-12-04", "2020-12-14", "2021-03-05", "2021-04-05", "2021-10-29"]


def test_what_is_not_given_is_filled_so_that_spans_touch():
    dates = weekdays("2020-01-01", "2020-12-31")[:240]
    at = {name: str(dates[day]) for name, day in (("a", 100), ("b", 150), ("c", 199))}

    def spans(**given):
        found = split_spans(dates, DataConfig(**given), first_tradable=0)
        assert found.valid is not None
        return [(span.first, span.last) for span in (found.train, found.valid, found.test)]

    assert spans(train_end=at["a"], valid_end=at["b"]) == [(0, 100), (101, 150), (151, 239)]
    assert spans(valid_start=at["a"], test_start=at["b"]) == [(0, 99), (100, 149), (150, 239)]
    assert spans(test_start=at["b"]) == [(0, 119), (120, 149), (150, 239)]  # 60 : 15 before the test
    assert spans(train_end=at["c"]) == [(0, 199), (200, 214), (215, 239)]  # 15 : 25 after training
    assert spans(test_end=at["c"]) == [(0, 119), (120, 149), (150, 199)]  # 60 : 15 : 25
    assert spans(train_end=at["a"], valid_start=at["c"], test_start=str(dates[220])) == [
        (0, 100),
        (199, 219),
        (220, 239),
    ]


def test_dates_outside_the_data_name_its_tradable_days():
    dates = weekdays("2020-01-01", "2020-12-31")
    for given in ({"train_start": "2020-01-02"}, {"test_end": "2021-01-01"}, {"valid_end": "2019-05-05"}):
        with pytest.raises(MarketDataError, match=r"run from 2020-01-15 .* to 2020-12-31"):
            split_spans(dates, DataConfig(**given), first_tradable=10)


def test_spans_that_are_too_short_are_refused_by_name():
    dates = weekdays("2020-01-01", "2020-12-31")
    with pytest.raises(MarketDataError, match="the valid span has 0 trading days"):
        split_spans(dates, DataConfig(valid_start="2020-06-06", valid_end="2020-06-07"), first_tradable=0)
    with pytest.raises(MarketDataError, match="the train span has 1 trading day "):
        split_spans(dates, DataConfig(train_end="2020-01-15"), first_tradable=10)
    with pytest.raises(MarketDataError, match="the test span has 1 trading day "):
        split_spans(dates, DataConfig(test_start="2020-12-31"), first_tradable=10)
    with pytest.raises(MarketDataError, match="no tradable day: the indicators need 60 days"):
        split_spans(dates[:60], DataConfig(), first_tradable=60)


# ---- flags


def test_dates_that_are_none_or_out_of_order_are_refused():
    for text in ("2016-1-4", "20160104", "2016-02-30", "soon"):
        with pytest.raises(ValueError, match="test_start must be a date YYYY-MM-DD"):
            DataConfig(test_start=text)
    with pytest.raises(ValueError, match="test_start must be after train_end"):
        DataConfig(train_end="2016-01-04", test_start="2016-01-04")
    with pytest.raises(ValueError, match="valid_end must be no earlier than valid_start"):
        DataConfig(valid_start="2016-01-05", valid_end="2016-01-04")


def test_the_choice_for_missing_bars_is_checked():
    with pytest.raises(ValueError, match="data_missing must be error or drop, got 'fill'"):
        DataConfig(data="bars.csv", data_missing="fill")
    with pytest.raises(ValueError, match="no effect on data simulated"):
        DataConfig(data_missing="drop")
    assert DataConfig(data="bars.csv", data_missing="drop").data_missing == "drop"


# ---- the real prices


@pytest.fixture(scope="module")
def dow() -> Market:
    if not REAL_FILE.exists():
        pytest.skip("the Dow prices are not beside this checkout (shared/data/dow30_daily.csv.gz)")
    return load_market(REAL_FILE)


def test_the_dow_file_is_clean_and_complete(dow):
    assert dow.close.shape == (3970, 30)
    assert dow.tickers[0] == "AAPL" and dow.tickers[-1] == "XOM"
    assert (str(dow.dates[0]), str(dow.dates[-1])) == ("2008-06-02", "2024-03-08")
    assert (dow.low <= dow.high).all()


def test_buying_the_dow_equally_gives_the_known_figures(dow):
    config = DataConfig(
        data="dow",
        train_start="2009-01-02",
        train_end="2015-12-31",
        test_start="2016-01-04",
        test_end="2020-07-07",
    )
    spans = split_spans(dow.dates, config, first_tradable=60)
    assert spans.valid is None
    close = dow.close[spans.test.first : spans.test.last + 1]
    equity = (close / close[0]).mean(axis=1)
    returns = np.diff(equity) / equity[:-1]
    drawdown = 1 - equity / np.maximum.accumulate(equity)
    assert equity[-1] - 1 == pytest.approx(0.7007, abs=5e-5)
    assert returns.mean() / returns.std(ddof=1) * np.sqrt(252) == pytest.approx(0.695, abs=5e-4)
    assert drawdown.max() == pytest.approx(0.344, abs=5e-4)
