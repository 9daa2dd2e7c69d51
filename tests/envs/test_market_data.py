"""Daily bars: loading, refused files, and the split of days into spans."""

import gzip
import os
import re

import numpy as np
import pandas as pd
import pytest
from train_runs import daily_bars

from envs.trading.config import DataConfig, TradingConfig
from envs.trading.features import market_tables
from envs.trading.market_data import (
    MAX_LOT_USD,
    PRICES,
    Span,
    days_per_year,
    load_market,
    price_notes,
    split_spans,
)


def bars_with(rows=(), column="tic", value=None):
    """Return bars of 3 tickers over 60 days, with `value` in some rows of one column.

    Row 3 * day + 1 is the bar of ticker T1 on that day.
    """
    bars = daily_bars(num_stocks=3, num_days=60).astype(object)
    # "NA" is a ticker here, not a missing value.
    bars["tic"] = bars["tic"].replace("T2", "NA")
    bars.loc[rows, column] = value
    return bars


def loaded(bars, folder, name="bars.csv", missing="error"):
    bars.to_csv(folder / name, index=False)
    return load_market(folder / name, missing=missing)


def test_bars_are_aligned_and_adjusted_in_any_order_of_rows_and_columns(tmp_path):
    bars = bars_with()
    more = bars.assign(note="x")[sorted([*bars, "note"])]
    for name, frame in {"a.csv": bars, "a.csv.gz": bars[::-1], "more.csv": more}.items():
        market = loaded(frame, tmp_path, name)
        assert market.name == name and market.tickers == ("NA", "T0", "T1")
        assert market.dates.astype(str).tolist() == sorted(set(bars["date"]))
        for column in ("open", "high", "low", "close", "volume"):
            table = bars.pivot(index="date", columns="tic", values=column).to_numpy(float)
            factor = 1.0 if column == "volume" else 0.9  # adj_close is 90 % of close
            np.testing.assert_allclose(getattr(market, column), factor * table)


@pytest.mark.parametrize("scale", [1e-9, 8e-6, 1e4])
def test_prices_and_fees_are_exact_at_any_magnitude(scale, tmp_path):
    bars = daily_bars(num_stocks=3, num_days=80)
    bars.loc[bars["tic"] == "T1", PRICES] *= scale
    market = loaded(bars, tmp_path)
    span, config = Span(60, 79), TradingConfig(execution="close", fee_bps=10)
    _, prices, _ = market_tables([market], span, config, span, 0.0)
    close, sell, buy = prices[:, :3].unbind(1)
    exact = bars.pivot(index="date", columns="tic", values="adj_close").to_numpy()[60:]
    np.testing.assert_allclose(close / close[0], exact / exact[0], rtol=1e-5)
    np.testing.assert_allclose((buy - sell) / 2 / close, 1e-3, rtol=1e-3)


def test_a_lot_of_a_price_that_multiplies_stays_affordable(tmp_path):
    bars = daily_bars(num_stocks=2, num_days=80)
    bars.loc[bars.index[100:], PRICES] *= 1e-5
    close = loaded(bars, tmp_path).close
    assert MAX_LOT_USD / 3 < close.max() <= MAX_LOT_USD


@pytest.mark.parametrize("week, year", [("1111100", 252), ("1111111", 365), ("1000000", 52)])
def test_a_year_has_as_many_days_as_the_calendar_of_the_file(week, year):
    assert days_per_year(np.busday_offset("2018-01-01", np.arange(90), "forward", week)) == year


@pytest.mark.parametrize(
    "first, last, factor, words",
    [
        ("2018-02-01", "2018-02-01", 100, "2018-02-01: T1"),
        ("2018-02-01", "9999", 0.5, "2018-02-01: T1"),
        ("2000", "9999", 1e5, "50000 USD.* T1;"),
    ],
)
def test_a_jump_and_a_price_above_every_order_are_named(first, last, factor, words, tmp_path):
    bars = daily_bars(num_stocks=3, num_days=80)
    assert price_notes(loaded(bars, tmp_path), TradingConfig()) == []
    bars.loc[(bars["tic"] == "T1") & bars["date"].between(first, last), PRICES] *= factor
    (note,) = price_notes(loaded(bars, tmp_path), TradingConfig())
    assert re.search(words, note)


def test_a_ticker_whose_lowest_prices_are_too_coarse_is_named(tmp_path):
    bars = daily_bars(num_stocks=2, num_days=80)
    rows = bars["tic"] == "T1"
    bars.loc[rows, PRICES] *= np.geomspace(1e-7, 1.0, rows.sum())[:, None]
    assert any(
        "fees are rounded" in note for note in price_notes(loaded(bars, tmp_path), TradingConfig())
    )


def test_missing_columns_are_named(tmp_path):
    bars = daily_bars().rename(columns={"tic": "Ticker", "low": "Low"})
    with pytest.raises(ValueError, match=r"lacks \['tic', 'low'\]"):
        loaded(bars, tmp_path)


TEXT = bars_with().to_csv(index=False).encode()
CONTENTS = {
    "empty": b"",
    "too many fields": TEXT.replace(b"\n", b",1\n").replace(b",1", b"", 1),
    "too few columns": TEXT.replace(b"adj_close", b"x"),
    "no rows": TEXT.splitlines()[0],
    "cut.gz": gzip.compress(TEXT)[:-200],
    "plain.gz": b"date,tic",
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_broken_file_is_one_line(tmp_path, name):
    path = tmp_path / f"bars.csv{'.gz' * name.endswith('.gz')}"
    path.write_bytes(CONTENTS[name])
    os.mkfifo(tmp_path / "pipe")  # a run of somebody else may name a pipe as its data file
    for bad in (path, tmp_path, tmp_path / "absent", tmp_path / "pipe"):
        with pytest.raises(ValueError, match=rf"^{bad}: .*$"):
            load_market(bad)


DAY = 3 * 6 + 1  # row of T1 on 2018-01-09
REFUSED = [
    *((bars_with(DAY, "date", day), day) for day in ("01/02/2018", "2018-02-30", "0000-01-01")),
    (bars_with(DAY, "date", "2018-01-09 00:00:00-05:00"), "on 2018-01-09 00:00:00-05:00: "),
    (bars_with(DAY, value=""), "'' on 2018-01-01"),
    (bars_with([DAY, 100], "open", -1.0), "'T1' on 2018-01-09: .*open -1.0.* 2 rows"),
    (bars_with(DAY, "high", 1.0), "'T1' on 2018-01-09: .*high 1.0"),
    (bars_with(DAY, "volume", -5), "'T1' on 2018-01-09: .*volume -5"),
    (bars_with([DAY], "date", "2018-01-08"), "'T1' on 2018-01-08: this ticker and date have"),
    (bars_with().drop(range(1, 13, 3)), "'T1' on 2018-01-01: .* 4 of 60 days"),
    (bars_with().drop(range(30, 51)), "'NA' on 2018-01-24: follows a gap of more than 11 days"),
]


# Wrong bars are refused even with --data_missing drop, which drops days with missing bars.
@pytest.mark.parametrize("missing", ["error", "drop"])
@pytest.mark.parametrize("bars, problem", REFUSED, ids=[problem for _, problem in REFUSED])
def test_impossible_bars_are_refused_with_ticker_and_date(bars, problem, missing, tmp_path):
    with pytest.raises(ValueError, match=problem):
        loaded(bars, tmp_path, missing=missing)


def test_days_without_bars_of_any_ticker_are_a_holiday_and_no_gap(tmp_path):
    # from 2018-01-15 to 2018-01-22
    assert len(loaded(bars_with().drop(range(30, 48)), tmp_path).dates) == 54


@pytest.mark.parametrize("text", ["", "null", "abc", "inf"])
def test_incomplete_days_are_named_and_dropped_on_request(text, tmp_path, caplog):
    bars = bars_with(60, "high", text).drop(DAY)
    with pytest.raises(ValueError, match="'T1' on 2018-01-09: .* 2 rows.* --data_missing"):
        loaded(bars, tmp_path)
    days = loaded(bars, tmp_path, missing="drop").dates.astype(str).tolist()
    assert set(bars["date"]) - set(days) == {"2018-01-09", "2018-01-29"} and len(days) == 58
    assert "2 of 60 days" in caplog.text and "2018-01-09" in caplog.text


DATES = pd.bdate_range("2020-01-01", "2020-12-31").to_numpy().astype("datetime64[D]")[:240]
A, B, C, D = (str(DATES[day]) for day in (100, 150, 199, 220))
WEEKENDS = {
    "train_start": "2020-02-01",
    "train_end": "2020-05-31",
    "valid_start": "2020-06-06",
    "valid_end": "2020-07-19",
    "test_start": "2020-08-01",
    "test_end": "2020-11-01",
}


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, [(0, 143), (144, 179), (180, 239)]),  # train 60 %, valid 15 %, test 25 %
        # days before the test span are split 60 : 15 into train and valid
        ({"test_start": B}, [(0, 119), (120, 149), (150, 239)]),
        # days after the train span are split 15 : 25 into valid and test
        ({"train_end": C}, [(0, 199), (200, 214), (215, 239)]),
        ({"train_end": A, "valid_start": C, "test_start": D}, [(0, 100), (199, 219), (220, 239)]),
        ({"train_end": A, "test_start": str(DATES[102])}, [(0, 100), None, (102, 239)]),
        (WEEKENDS, [(23, 107), (113, 142), (153, 217)]),  # a date on a weekend shortens its span
    ],
)
def test_given_dates_are_kept_and_the_others_are_filled_in_without_gaps(given, expected):
    spans = split_spans(DATES, DataConfig(**given), first_tradable=0)
    found = [spans.get(name) for name in ("train", "valid", "test")]
    assert [span and (span.first, span.last) for span in found] == expected


@pytest.mark.parametrize(
    "given, problem",
    [
        ({"train_start": "2021-01-01"}, "train span has -?[01] "),
        ({"train_end": "2020-01-02"}, "train span has 1 "),
        ({"valid_start": "2020-06-06", "valid_end": "2020-06-07"}, "valid span has 0 "),
        ({"test_start": "2016-02-30"}, "test_start must be a date YYYY-MM-DD"),
        ({"train_end": A, "test_start": A}, "test span"),  # the spans overlap by one day
    ],
)
def test_spans_that_cannot_work_are_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        split_spans(DATES, DataConfig(**given), first_tradable=10)
