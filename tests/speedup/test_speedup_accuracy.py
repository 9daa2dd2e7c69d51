"""The benchmark of predictions runs, in small, and prints its figures."""

import pytest
from train_runs import run_benchmark


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_accuracy_compares_predicted_with_measured_throughput():
    sizes = ["--rounds", 2, "--iterations", 3]
    flags = ["--jobs", "slow_env", "--scalings", "strong", *sizes]
    machine, row = run_benchmark("speedup_accuracy.py", *flags)
    assert machine["cores"] >= 1
    assert len(row["errors"]) == 2 and row["predicted"] > 0 and row["measured"] > 0
    assert row["median_error"] == pytest.approx(sum(row["errors"]) / 2, abs=1e-3)
    assert row["gradient_bytes"] > 10_000 and 0 < row["reduction_s"] < 5
