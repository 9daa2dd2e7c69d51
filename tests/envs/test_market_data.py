"""Daily bars: loading, reasons for refusal, and the split of days into spans."""

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from envs.trading.config import DataConfig
from envs.trading.market_data import MarketDataError, load_market, split_spans

REAL_FILE = Path(__file__).parents[2] / "../shared/data/dow30_daily.csv.gz"
TICKERS = ("AAA", "BBB", "NA")  # NA is a real ticker, not a missing value
DAYS = pd.bdate_range("2020-01-01", periods=60)


def good_bars(days=DAYS):
    """Return bars of 3 tickers, sorted by date.

    Ticker k closes day t at 10 * (k + 1) + t / 10.
    """
    rows = []
    for t, day in enumerate(days):
        for k, ticker in enumerate(TICKERS):
            close = 10.0 * (k + 1) + t / 10
            bar = (close - 0.1, close + 0.5, close - 0.5, close, close / 2, 1000 + t)
            rows.append((f"{day:%Y-%m-%d}", ticker, *bar))
    names = ["date", "tic", "open", "high", "low", "close", "adj_close", "volume"]
    return pd.DataFrame(rows, columns=names).astype(object)


def with_cell(row, column, value):
    frame = good_bars()
    frame.loc[row, column] = value
    return frame


def without(ticker, first, last, days=DAYS):
    """Return good bars, but none of `ticker` ("": of any) from `first` to `last`."""
    frame = good_bars(days)
    return frame[~(frame["tic"].str.match(ticker) & frame["date"].between(first, last))]


def loaded(frame, folder, missing="error", name="bars.csv"):
    frame.to_csv(folder / name, index=False)
    return load_market(folder / name, missing=missing)


def test_bars_are_aligned_and_adjusted_in_any_order_of_rows_and_columns(tmp_path):
    more = good_bars().assign(note="x")
    frames = {
        "bars.csv": good_bars(),
        "bars.csv.gz": good_bars()[::-1],
        "by_ticker.csv": good_bars().sort_values(["tic", "date"]),
        "more.csv": more[sorted(more.columns)],
    }
    for name, frame in frames.items():
        market = loaded(frame, tmp_path, name=name)
        assert market.name == name and market.tickers == TICKERS
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
    for bad in (path, tmp_path, tmp_path / "absent"):
        with pytest.raises(MarketDataError) as caught:
            load_market(bad)
        message = str(caught.value)
        assert "\n" not in message and message.startswith(f"{bad}: ")
        assert ("no such file" in message) == (bad != path)


BBB = 6 * len(TICKERS) + 1  # row of BBB on 2020-01-09
YEAR = pd.bdate_range("2020-01-01", periods=250)
REFUSED = [
    *(
        (with_cell(BBB, "date", day), "the date")
        for day in ("01/02/2020", "2020-02-30", "0000-01-01")
    ),
    (with_cell(BBB, "tic", ""), "'' on 2020-01-01: no complete bar"),
    (with_cell([BBB, 99], "open", -1.0), "'BBB' on 2020-01-09: .*open -1.0.* 2 rows"),
    (with_cell(BBB, "high", 15.0), "'BBB' on 2020-01-09: .*between low and high"),
    (with_cell(BBB, "close", 21.5), "'BBB' on 2020-01-09: .*between low and high"),
    (with_cell(BBB, "volume", -5), "'BBB' on 2020-01-09: .*volume"),
    (pd.concat([good_bars(), good_bars().iloc[[179]]]), "'NA' on 2020-03-24: a second row"),
    (without("", "2020-02-03", "2020-02-12"), "12 calendar days .*01-31 and 2020-02-13"),
    (without("BBB", "2020-01-01", "2020-01-06"), "'BBB' on 2020-01-01: .* 4 of 60 days"),
    (without("AAA", "2020-03-02", "2020-03-13", YEAR), "'AAA' on 2020-03-02: .*|16 calendar days"),
]


@pytest.mark.parametrize("missing", ["error", "drop"])  # a wrong bar is never dropped silently
@pytest.mark.parametrize(("frame", "problem"), REFUSED, ids=[problem for _, problem in REFUSED])
def test_bars_that_cannot_be_are_refused_with_ticker_and_date(frame, problem, missing, tmp_path):
    with pytest.raises(MarketDataError, match=problem):
        loaded(frame, tmp_path, missing)


@pytest.mark.parametrize("text", ["", "null", "abc", "inf"])
def test_a_holiday_of_ten_days_is_no_gap_and_holes_are_dropped_on_demand(text, tmp_path, caplog):
    assert loaded(without("", "2020-02-03", "2020-02-10"), tmp_path).close.shape == (54, 3)
    frame = with_cell(20 * len(TICKERS), "high", text).drop(index=8 * len(TICKERS) + 1)
    with pytest.raises(MarketDataError, match="'BBB' on 2020-01-13: .* 2 rows.* --data_missing"):
        loaded(frame, tmp_path)
    market = loaded(frame, tmp_path, "drop")
    kept = [t for t in range(60) if t not in (8, 20)]
    np.testing.assert_array_equal(market.dates, DAYS[kept].to_numpy().astype("datetime64[D]"))
    np.testing.assert_allclose(market.close[:, 0], [(10 + t / 10) / 2 for t in kept])
    assert "2 of 60 days" in caplog.text and "2020-01-13" in caplog.text


DATES = pd.bdate_range("2020-01-01", "2020-12-31").to_numpy().astype("datetime64[D]")[:240]
A, B, C, D = (str(DATES[day]) for day in (100, 150, 199, 220))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [(0, 143), (144, 179), (180, 239)]),  # train 60 %, valid 15 %, test 25 %
        # 60 : 15 of the days before the test
        ({"test_start": B}, [(0, 119), (120, 149), (150, 239)]),
        # 15 : 25 of the days after training
        ({"train_end": C}, [(0, 199), (200, 214), (215, 239)]),
        (
            {"train_end": A, "valid_start": C, "test_start": D},
            [(0, 100), (199, 219), (220, 239)],
        ),
        ({"train_end": A, "test_start": str(DATES[102])}, [(0, 100), None, (102, 239)]),
        (  # dates without trading move to the next trading day inside the span
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
        ({"train_start": "2021-01-01"}, "the train span has 0 "),
        ({"train_end": "2020-01-02"}, "the train span has 1 "),
        ({"valid_start": "2020-06-06", "valid_end": "2020-06-07"}, "the valid span has 0 "),
        ({"test_start": "2020-12-01"}, "the test span has 1 "),
        ({"test_start": "20160104"}, "test_start must be a date YYYY-MM-DD"),
        ({"test_start": "2016-02-30"}, "test_start must be a date YYYY-MM-DD"),
        ({"train_end": A, "test_start": A}, "the test span has "),
        ({"valid_start": B, "valid_end": A}, "the valid span has "),
    ],
)
def test_spans_that_cannot_work_are_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        split_spans(DATES, DataConfig(**given), first_tradable=10)


@pytest.mark.skipif(not REAL_FILE.exists(), reason="needs shared/data/dow30_daily.csv.gz")
def test_buying_the_dow_equally_gives_the_known_figures():
    dow = load_market(REAL_FILE)
    assert (str(dow.dates[0]), str(dow.dates[-1])) == ("2008-06-02", "2020-07-07")
    config = DataConfig(train_end="2015-12-31", test_start="2016-01-04")
    spans = split_spans(dow.dates, config, first_tradable=60)
    assert dow.close.shape == (3046, 30) and spans.valid is None
    close = dow.close[spans.test.first : spans.test.last + 1]
    equity = (close / close[0]).mean(axis=1)
    returns = np.diff(equity) / equity[:-1]
    assert equity[-1] - 1 == pytest.approx(0.7007, abs=5e-5)
    assert returns.mean() / returns.std(ddof=1) * np.sqrt(252) == pytest.approx(0.695, abs=5e-4)
