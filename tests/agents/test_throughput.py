"""The benchmark of throughput runs and prints what it promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_benchmark_prints_a_line_for_each_figure():
    flags = ["--num_stocks", "2", "--num_envs", "2", "--windows", "1", "--update_epochs", "1"]
    command = [sys.executable, ROOT / "benchmarks" / "throughput.py", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    head, *figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert head["torch"] and [figure["figure"].split(",")[0] for figure in figures] == [
        "trading environment alone",
        "trading environment alone",
        "main job",
    ]
    assert all(figure["steps_per_s"]["median"] > 0 for figure in figures)
