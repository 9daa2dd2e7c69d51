"""Daily bars: what is loaded, what is refused and why, and how days are split into spans."""

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from envs.trading.config import DataConfig
from envs.trading.market_data import MarketDataError, load_market, split_spans

REAL_FILE = Path(__file__).parents[2] / "../shared/data/dow30_daily.csv.gz"
TICKERS = ("AAA", "BBB", "NA")  # NA is a real ticker, not a blank
DAYS = pd.bdate_range("2020-01-01", periods=60)


def good_bars() -> pd.DataFrame:
    """Return 60 weekdays x 3 tickers, by date; ticker k closes day t at 10 * (k + 1) + t / 10."""
    rows = []
    for t, day in enumerate(DAYS):
        for k, ticker in enumerate(TICKERS):
            close = 10.0 * (k + 1) + t / 10
            bar = (close - 0.1, close + 0.5, close - 0.5, close, close / 2, 1000 + t)
            rows.append((f"{day:%Y-%m-%d}", ticker, *bar))
    names = ["date", "tic", "open", "high", "low", "close", "adj_close", "volume"]
    return pd.DataFrame(rows, columns=names).astype(object)


def at(ticker: str, day: int) -> int:
    return day * len(TICKERS) + TICKERS.index(ticker)


def changed(**cells) -> pd.DataFrame:
    """Return bars with other values in the columns of some rows."""
    frame = good_bars()
    for column, (rows, value) in cells.items():
        frame.loc[rows, column] = value
    return frame


def without(ticker: str, first: str, last: str, num_days: int = 60) -> pd.DataFrame:
    """Return bars that a ticker (or every one) lacks from one day to another."""
    days = pd.bdate_range("2020-01-01", periods=num_days)
    frame = pd.concat([good_bars()[:3].assign(date=f"{day:%Y-%m-%d}") for day in days])
    return frame[~(frame["tic"].str.match(ticker) & frame["date"].between(first, last))]


def write(frame: pd.DataFrame, folder: Path, name: str = "bars.csv") -> Path:
    frame.to_csv(folder / name, index=False)
    return folder / name


def refusal(path: Path, **options) -> str:
    with pytest.raises(MarketDataError) as caught:
        load_market(path, **options)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"{path}: ")
    return message


def test_bars_are_aligned_and_adjusted_in_any_order_of_rows_and_columns(tmp_path):
    more = good_bars().assign(note="x")
    more[sorted(more.columns)].to_csv(tmp_path / "more.csv", index=False, encoding="utf-8-sig")
    for path in (
        write(good_bars(), tmp_path),
        write(good_bars(), tmp_path, "bars.csv.gz"),
        write(good_bars().sort_values(["tic", "date"]), tmp_path, "by_ticker.csv"),
        tmp_path / "more.csv",
    ):
        market = load_market(path)
        assert market.name == path.name and market.tickers == TICKERS
        np.testing.assert_array_equal(market.dates, DAYS.to_numpy().astype("datetime64[D]"))
        assert market.close.shape == (60, 3) and market.volume.dtype == np.float64
        assert market.volume[7].tolist() == [1007.0] * 3
        bar = [getattr(market, name)[20, 1] for name in ("open", "high", "low", "close")]
        assert bar == pytest.approx([10.95, 11.25, 10.75, 11.0])  # adj_close is half of close


HEADER, *ROWS = good_bars().to_csv(index=False).splitlines()
ALL = "\n".join([HEADER, *ROWS]).encode()
CONTENTS = {
    "empty": b"",
    "binary": b"\x00\xff\xfe\x81" * 50,
    "too many fields": "\n".join([HEADER, *(f"{row},7" for row in ROWS)]).encode(),
    "too few columns": ALL.replace(b"adj_close", b"x"),
    "no rows": HEADER.encode(),
    "cut.gz": gzip.compress(ALL)[:-200],
    "plain.gz": b"date,tic",
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_broken_file_is_one_line(tmp_path, name):
    path = tmp_path / f"bars.csv{'.gz' * name.endswith('.gz')}"
    path.write_bytes(CONTENTS[name])
    refusal(path)
    assert "no such file" in refusal(tmp_path) and "no such file" in refusal(tmp_path / "absent")


BAD_VALUES = [
    *(("date", text, ": the date") for text in ("01/02/2020", "2020-02-30", "0000-01-01", "")),
    ("tic", " ", "on 2020-01-09: blank ticker"),
    ("close", "abc", "BBB on 2020-01-09: close is not a number"),
    ("open", -1.0, "BBB on 2020-01-09: a price is not positive"),
    ("high", 15.0, "BBB on 2020-01-09: open or close is not between"),
    ("close", 21.5, "BBB on 2020-01-09: open or close is not between"),
    ("volume", -5, "BBB on 2020-01-09: open or close is not between"),
]


@pytest.mark.parametrize(("column", "value", "problem"), BAD_VALUES)
def test_a_bad_value_is_refused_with_ticker_and_date(tmp_path, column, value, problem):
    path = write(changed(**{column: (at("BBB", 6), value)}), tmp_path)
    for missing in ("error", "drop"):  # a wrong bar is never dropped silently
        message = refusal(path, missing=missing)
        assert problem in message and message.endswith(": correct the file")
        assert str(value) in message


HOLES = good_bars().drop(index=[at("BBB", 8), at("AAA", 20)])
ODD_ROWS = [
    (changed(low=([at("AAA", 30), at("BBB", 6)], -3.0)), "error", "BBB on 2020-01-09: .*1 more"),
    (pd.concat([good_bars(), good_bars().iloc[[179]]]), "error", "NA on 2020-03-24: a second row"),
    (good_bars()[::-1], "error", "comes after a later date"),
    (HOLES, "error", "BBB on 2020-01-13: no .*1 more.* --data_missing drop"),
    (changed(open=(26, ""), volume=(26, "null")), "error", "NA on 2020-01-13: no open, volume"),
    (without("BBB", "2020-01-01", "2020-01-06"), "drop", "4 of 60 days, .* BBB lacks most, 4"),
    (without("", "2020-02-03", "2020-02-12"), "error", "12 calendar days .*01-31 and 2020-02-13"),
    (without("AAA", "2020-03-02", "2020-03-13", 250), "drop", "16 calendar days"),
]


@pytest.mark.parametrize(("frame", "missing", "problem"), ODD_ROWS)
def test_rows_that_do_not_belong_together_are_refused(tmp_path, frame, missing, problem):
    path = write(frame, tmp_path)
    with pytest.raises(MarketDataError, match=problem):
        load_market(path, missing=missing)


def test_a_holiday_of_ten_days_is_no_gap(tmp_path):
    frame = without("", "2020-02-03", "2020-02-10")
    assert load_market(write(frame, tmp_path)).close.shape == (54, 3)


def test_dropping_removes_exactly_the_incomplete_days_and_logs_it(tmp_path, caplog):
    path = write(changed(high=(at("AAA", 20), np.nan)).drop(index=at("BBB", 8)), tmp_path)
    market = load_market(path, missing="drop")
    kept = [t for t in range(60) if t not in (8, 20)]
    np.testing.assert_array_equal(market.dates, DAYS[kept].to_numpy().astype("datetime64[D]"))
    np.testing.assert_allclose(market.close[:, 0], [(10 + t / 10) / 2 for t in kept])
    assert "2 of 60 days" in caplog.text and "2020-01-13" in caplog.text


DATES = pd.bdate_range("2020-01-01", "2020-12-31").to_numpy().astype("datetime64[D]")[:240]
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
        (  # days without trading move inward
            {
                "train_start": "2020-02-01",
                "train_end": "2020-05-31",
                "valid_start": "2020-06-06",
                "valid_end": "2020-07-19",
                "test_start": "2020-08-01",
                "test_end": "2020-11-01",
            },
            [(23, 107), (113, 142), (153, 217)],
        ),
    ],
)
def test_dates_are_kept_and_the_others_filled_so_that_spans_touch(given, expected):
    spans = split_spans(DATES, DataConfig(**given), first_tradable=0)
    assert [span and (span.first, span.last) for span in vars(spans).values()] == expected


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"train_start": "2020-01-02"}, "train_start .* from 2020-01-15 to 2020-12-01"),
        ({"test_end": "2021-01-01"}, "test_end .* from 2020-01-15 to 2020-12-01"),
        ({"valid_start": "2020-06-06", "valid_end": "2020-06-07"}, "the valid span has 0 "),
        ({"test_start": "2020-12-01"}, "the test span has 1 "),
        ({"test_start": "20160104"}, "test_start must be a date YYYY-MM-DD"),
        ({"test_start": "soon"}, "test_start must be a date YYYY-MM-DD"),
        ({"train_end": "2016-01-04", "test_start": "2016-01-04"}, "test_start must be after"),
        ({"valid_start": "2016-01-05", "valid_end": "2016-01-04"}, "valid_end must be no earlier"),
    ],
)
def test_spans_that_cannot_work_are_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        split_spans(DATES, DataConfig(**given), first_tradable=10)


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
