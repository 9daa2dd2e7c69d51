"""The benchmarks of scaling and of predictions run, in small, and print what they promise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--env", "Recall-v0", "--num_envs", "4", "--num_steps", "16", "--bptt_steps", "8", "--batch_size", "4"]


def run(name, *flags):
    command = [sys.executable, ROOT / "benchmarks" / name, *map(str, flags)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_scaling_measures_ranks_scalings_and_strategies_side_by_side(tmp_path):
    rows = run("scaling.py", *TINY, "--rounds", 1, "--iterations", 3, "--out", tmp_path)
    assert [(row["gpus"], row["scaling"], row["machine"]) for row in rows] == [
        (1, "strong", "none"),
        (1, "strong", "ddp"),
        (2, "strong", "ddp"),
        (2, "weak", "ddp"),
    ]
    assert rows[0]["speedup"] == 1.0 and all(row["steps_per_s"] > 0 for row in rows)
    assert all(sum(row["shares"].values()) == pytest.approx(1.0, abs=0.3) for row in rows)  # medians of each part
    assert {path.name for path in tmp_path.iterdir()} == {
        "scaling_speedup.png", "scaling_efficiency.png", "scaling_time_split.png"
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_accuracy_compares_predicted_with_measured_throughput():
    head, found = run("speedup_accuracy.py", "--job", "slow_env", "--scaling", "strong", "--rounds", 2)
    assert head["cores"] >= 1
    assert len(found["errors"]) == 2 and found["predicted"] > 0 and found["measured"] > 0
    assert found["median_error"] == pytest.approx(sum(found["errors"]) / 2, abs=1e-3)
    assert found["gradient_bytes"] > 10_000 and 0 < found["reduction_s"] < 5
