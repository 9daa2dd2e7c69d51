"""The benchmarks of scaling and of predictions run, in small, and print what they promise."""

import pytest
from train_runs import run_benchmark as run

TINY = [
    "--env", "Recall-v0", "--num_envs", "4", "--num_steps", "16", "--bptt_steps", "8",
    "--batch_size", "4",
]  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_scaling_measures_ranks_scalings_and_strategies_side_by_side():
    rows = run("scaling.py", *TINY, "--rounds", 1, "--iterations", 2)
    assert [(row["gpus"], row["scaling"], row["strategy"]) for row in rows] == [
        (1, "strong", "none"),
        (2, "strong", "ddp"),
        (2, "weak", "ddp"),
    ]
    assert rows[0]["speedup"] == 1.0 and all(row["steps_per_s"] > 0 for row in rows)
    # medians of each part
    assert all(sum(row["shares"].values()) == pytest.approx(1.0, abs=0.3) for row in rows)


def test_accuracy_compares_predicted_with_measured_throughput():
    sizes = ["--rounds", 2, "--iterations", 3]
    head, found = run("speedup_accuracy.py", "--jobs", "slow_env", "--scalings", "strong", *sizes)
    assert head["cores"] >= 1
    assert len(found["errors"]) == 2 and found["predicted"] > 0 and found["measured"] > 0
    assert found["median_error"] == pytest.approx(sum(found["errors"]) / 2, abs=1e-3)
    assert found["gradient_bytes"] > 10_000 and 0 < found["reduction_s"] < 5
