"""Daily returns, weights and trades of an evaluation on markets, as a CSV file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from agents.evaluate.statistics import Record
from rl_dist.files import write_whole


def write_daily(
    path: Path,
    records: dict[str, Record],
    markets: Sequence[str],
    tickers: Sequence[str],
    dates: np.ndarray,  # [D + 1] of the values
) -> None:
    """Write one row per strategy, market and date, from the second date on.

    Columns: "strategy", "market" and "date"; "return", simple, from the close before to this one;
    and of policies for every ticker "weight:", the share of the portfolio's value in this stock at
    this close (the rest is cash), and "usd:", what was bought of it since the close before in USD,
    without fees, negative where sold.
    """
    index = pd.MultiIndex.from_product([markets, dates[1:]], names=["market", "date"])
    heads = [f"{kind}:{ticker}" for kind in ("weight", "usd") for ticker in tickers]
    tables = {}
    for name, record in records.items():
        columns = {"return": record.returns.ravel()}
        if record.stocks.size:
            rows = record.stocks.reshape(len(index), -1).T + 0.0  # no -0
            columns |= dict(zip(heads, rows, strict=True))
        tables[name] = pd.DataFrame(columns, index)
    text = pd.concat(tables, names=["strategy"]).to_csv(float_format="%.8g")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
