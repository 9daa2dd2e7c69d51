"""The benchmark of throughput runs and prints what it promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_benchmark_prints_a_row_for_each_work_and_compares_with_the_last_run(tmp_path):
    flags = ["--turns", "1", "--threads", "1", "--work", "A", "--folder", tmp_path]
    command = [sys.executable, ROOT / "benchmarks" / "throughput.py", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for number in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
        machine, row, *lines = done.stdout.splitlines()
        row = json.loads(row)
        assert json.loads(machine)["torch"] and row["work"] == "A"
        assert 0.0 < row["part_of_product"][0] < 1.0
        written = sorted(tmp_path.glob("*.json"))
        assert len(written) == number + 1
    assert any(line.startswith("A: ") and written[0].name in line for line in lines)
